"""Large tensors on a CPU come in huge pages, and are torch's where that cannot be."""

from __future__ import annotations

import copy
import errno
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from splitkv import ContiguousKVCache, PagedKVCache
from splitkv.bench import machine
from splitkv.bench.cases import random_values
from splitkv.bench.roofline import read_bandwidth
from splitkv.cache import allocation
from splitkv.cache.allocation import HUGE_PAGE_BYTES, empty
from splitkv.models.config import DecoderConfig
from splitkv.models.geometries import geometry_config
from splitkv.models.parts import empty_weight
from splitkv.models.state import DecodeState, LatentKVCache

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
LARGE = (3, 7, 300, 1024)  # 6.4 million elements: whole huge pages and a rest in every dtype
HAS_ADVICE = hasattr(mmap, "MADV_HUGEPAGE")
needs_advice = pytest.mark.skipif(not HAS_ADVICE, reason="this system has no MADV_HUGEPAGE")


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were mapped instead of left to torch, as the test goes on."""
    sizes: list[int] = []
    real = mmap.mmap

    def counting(fileno: int, length: int, **options: Any) -> mmap.mmap:
        sizes.append(length - HUGE_PAGE_BYTES)
        return real(fileno, length, **options)

    monkeypatch.setattr(allocation.mmap, "mmap", counting)
    return sizes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@needs_advice
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_tensor_starts_on_a_huge_page_and_is_like_torch_s(dtype: torch.dtype, mapped: list[int]) -> None:
    ours, torchs = empty(LARGE, dtype, "cpu"), torch.empty(LARGE, dtype=dtype)
    assert mapped == [ours.nbytes] and ours.data_ptr() % HUGE_PAGE_BYTES == 0
    for fact in ("shape", "dtype", "device", "requires_grad", "is_leaf", "nbytes"):
        assert getattr(ours, fact) == getattr(torchs, fact), fact
    assert ours.stride() == torchs.stride() and not ours._is_view()
    assert ours.untyped_storage().nbytes() == torchs.untyped_storage().nbytes()
    values = torch.randn(LARGE).to(dtype)
    ours.copy_(values)
    assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8))


@needs_advice
def test_from_one_huge_page_on(mapped: list[int]) -> None:
    empty((HUGE_PAGE_BYTES - 1,), torch.uint8, "cpu")
    assert mapped == []
    empty((HUGE_PAGE_BYTES,), torch.uint8, "cpu")
    assert mapped == [HUGE_PAGE_BYTES]


@pytest.mark.parametrize("shape", [(), (0,), (5, 0, 3), (4, 5)], ids=str)
def test_small_shapes_are_torch_s(shape: tuple[int, ...], mapped: list[int]) -> None:
    made = empty(shape, torch.float16, "cpu")
    assert (made.shape, made.stride(), mapped) == (shape, torch.empty(shape).stride(), [])


def test_other_devices_are_torch_s(mapped: list[int]) -> None:
    assert empty(LARGE, torch.float32, "meta").device.type == "meta"
    with FakeTensorMode():
        assert type(empty(LARGE, torch.float32, "cpu")) is not Tensor
    compiled = torch.compile(lambda x: empty(LARGE, torch.float32, "cpu").fill_(2) + x, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).max() == 3
    assert mapped == []


@needs_advice
def test_the_memory_lives_as_long_as_a_tensor_on_it() -> None:
    size = 64 << 20
    before = resident_bytes()
    tensor = empty((size,), torch.uint8, "cpu").fill_(7)
    view = tensor[size // 2 :].view(torch.float8_e5m2)
    assert resident_bytes() - before > size * 3 // 4
    del tensor
    assert view.view(torch.uint8).min() == 7 and resident_bytes() - before > size * 3 // 4
    del view
    assert resident_bytes() - before < size // 4


@pytest.mark.parametrize("copied", [copy.deepcopy, Tensor.clone, Tensor.share_memory_], ids=lambda call: call.__name__)
def test_tensors_can_be_copied_and_shared(copied: Callable[[Tensor], Tensor]) -> None:
    tensor = empty((HUGE_PAGE_BYTES // 4,), torch.float32, "cpu").fill_(3)
    other = copied(tensor)
    assert torch.equal(other, torch.full_like(other, 3)) and other.shape == tensor.shape


def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems other than Linux."""
    monkeypatch.delattr(allocation.mmap, "MADV_HUGEPAGE", raising=False)


def refused_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a kernel built without huge pages, which answers EINVAL."""
    monkeypatch.setattr(allocation.mmap, "MADV_HUGEPAGE", 12345, raising=False)


def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(allocation.mmap, "mmap", refuse)


@pytest.mark.parametrize("lacking", [no_advice, refused_advice, no_mapping], ids=lambda lacking: lacking.__name__)
def test_without_huge_pages_torch_allocates(monkeypatch: pytest.MonkeyPatch, lacking: Callable[..., None]) -> None:
    lacking(monkeypatch)
    asked, torchs = [], torch.empty

    def counting(*shape: Any, **options: Any) -> Tensor:
        asked.append(shape[0])
        return torchs(*shape, **options)

    monkeypatch.setattr(torch, "empty", counting)
    made = empty((2, HUGE_PAGE_BYTES), torch.uint8, "cpu").fill_(1)
    assert asked[-1] == (2, HUGE_PAGE_BYTES) and int(made.sum()) == 2 * HUGE_PAGE_BYTES


@pytest.mark.parametrize("elements", [1 << 55, 1 << 62, 1 << 70], ids=["addresses", "bytes", "int64"])
def test_what_no_memory_holds_is_refused_as_by_torch(elements: int) -> None:
    errors = []
    for make in (lambda: empty((elements,), torch.float32, "cpu"), lambda: torch.empty((elements,))):
        with pytest.raises((RuntimeError, TypeError, OverflowError)) as caught:
            make()
        errors.append((caught.type, str(caught.value).splitlines()[0]))
    assert errors[0] == errors[1]


def contiguous() -> list[Tensor]:
    cache = ContiguousKVCache(1, 9000, 4, 128, dtype=torch.bfloat16, device="cpu")
    cache.grow(10_000)
    return [cache.k_cache, cache.v_cache]


def paged() -> list[Tensor]:
    cache = PagedKVCache(100, 100, 4, 128, max_batch=2, max_pages_per_row=50, layout="HND", device="cpu")
    return [cache.k_cache, cache.v_cache]


def weight() -> list[Tensor]:
    return [empty_weight(2048, 1024, dtype=torch.float32, device=torch.device("cpu"))]


def latents() -> list[Tensor]:
    return [LatentKVCache(1, 9000, 1, 576, v_head_dim=512, device="cpu").k_cache]


def delta_memory() -> list[Tensor]:
    config = DecoderConfig.from_config(geometry_config("qwen3.5-0.8b"), "qwen3.5-0.8b")
    state = DecodeState(config, 2, 16, "f32", torch.float32, "cpu")
    assert not any(memory.any() for memory in state.memory.values())
    return list(state.memory.values())


def bench_values() -> list[Tensor]:
    return [random_values(3 << 20, torch.float16, "cpu", "k 0")]


@needs_advice
@pytest.mark.parametrize(
    "make", [contiguous, paged, latents, weight, delta_memory, bench_values], ids=lambda make: make.__name__
)
def test_caches_and_weights_are_allocated_so(make: Callable[[], list[Tensor]], mapped: list[int]) -> None:
    for tensor in make():
        assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0 and tensor.nbytes in mapped


@needs_advice
def test_the_read_sweep_reads_the_same_kind_of_memory(mapped: list[int]) -> None:
    swept = read_bandwidth("cpu", 8 << 20).swept_bytes
    assert mapped == [swept]


def test_the_process_really_has_huge_pages() -> None:
    """Whole ones within the tensor, and no others: nothing beyond its end is taken."""
    before = machine.huge_page_bytes()
    if before is None or not machine.HUGE_PAGES.exists() or "[never]" in machine.HUGE_PAGES.read_text():
        pytest.skip("this system gives no huge pages, or does not say")
    size = 64 * HUGE_PAGE_BYTES
    tensor = empty((size + HUGE_PAGE_BYTES - 4096,), torch.uint8, "cpu").fill_(1)
    grown = (machine.huge_page_bytes() or 0) - before
    assert size // 2 < grown <= size
    assert int(tensor[-1]) == 1


@pytest.mark.parametrize(
    "setting, readings, expected",
    [
        ("always [madvise] never", (0, 16 << 20), "2 MiB (madvise)"),
        ("[always] madvise never", (5, 16 << 20), "2 MiB (always)"),
        ("always madvise [never]", (7, 7), f"{mmap.PAGESIZE >> 10} KiB (never)"),
        ("always [madvise] never", (0, 2 << 20), f"{mmap.PAGESIZE >> 10} KiB (madvise)"),
        ("always [madvise] never", (None, None), "unknown (madvise)"),
        (None, (0, 0), f"{mmap.PAGESIZE >> 10} KiB"),
    ],
)
def test_the_pages_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str | None, readings: tuple[int | None], expected: str
) -> None:
    if setting is not None:
        (tmp_path / "enabled").write_text(f"{setting}\n")
    left = list(readings)
    monkeypatch.setattr(machine, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(machine, "huge_page_bytes", lambda: left.pop(0))
    assert machine.memory_pages() == expected
    assert not left
