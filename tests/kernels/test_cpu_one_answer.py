"""One answer from the CPU backend: however keys are stored, rows arranged and work scheduled, `torch.equal`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_case import (
    BACKENDS,
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    NAN,
    assert_same,
    decode,
    launch,
    problem,
    random,
    use_backend,
)
from torch import Tensor

from splitkv.checks import check_inputs
from splitkv.plan import plan_decode
from splitkv.problem import DeviceSpec
from splitkv.reference import reference_attention


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_backend(request.param, monkeypatch)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---- one answer: storage -----------------------------------------------------------------------------------


def in_pages(x: Tensor, page_size: int, fill: float) -> tuple[Tensor, Tensor]:
    """(pages, block_table): the rows of x on shuffled pages, with unused pages, tails and columns filled."""
    batch, capacity = x.shape[:2]
    used = -(-capacity // page_size)
    table = torch.randperm(batch * used + 3, generator=torch.Generator().manual_seed(3))[: batch * used]
    table = table.view(batch, used).int()
    pages = torch.full((batch * used + 3, page_size, *x.shape[2:]), fill).to(x.dtype)
    padded = torch.full((batch, used * page_size, *x.shape[2:]), fill).to(x.dtype)
    padded.view(torch.uint8)[:, :capacity] = x.contiguous().view(torch.uint8)
    pages.view(torch.uint8)[table.long()] = padded.unflatten(1, (used, page_size)).view(torch.uint8)
    return pages, torch.cat([table, torch.full((batch, 2), 2**31 - 1, dtype=torch.int32)], dim=1)


@pytest.mark.parametrize("kv_dtype", [F32, BF16, E4M3], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64, 784])
def test_pages_do_not_show(backend: str, page_size: int, kv_dtype: torch.dtype) -> None:
    q, k, v, lens = problem((300, 0, 41, 16), kv_dtype=kv_dtype, q_len=2)
    plain = decode(q, k, v, lens)
    k_pages, table = in_pages(k, page_size, NAN)
    v_pages, _ = in_pages(v, page_size, NAN)
    assert_same(plain, decode(q, k_pages, v_pages, lens, block_table=table))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in other storage, NaN in every byte that is not theirs."""
    batch, capacity, heads, dim = x.shape

    def holes(*shape: int) -> Tensor:
        return torch.full(shape, NAN).to(x.dtype)

    if layout == "heads first":
        view = holes(batch, heads, capacity, dim).transpose(1, 2)
    elif layout == "k and v interleaved":
        view = holes(batch, 2, capacity, heads, dim)[:, 1]
    elif layout == "layers in one pool":
        view = holes(batch, 5, 2, capacity, heads, dim)[:, 3, 0]
    elif layout == "odd offsets and gaps":
        view = holes(batch, capacity, heads, dim + 3).flatten()[1:].as_strided(
            x.shape, (capacity * heads * (dim + 3), heads * (dim + 3), dim + 3, 1)
        ) if batch == 1 else holes(batch, capacity, heads, dim + 3)[..., 3:]  # fmt: skip
    view.view(torch.uint8).copy_(x.view(torch.uint8)) if x.element_size() == 1 else view.copy_(x)
    return view


@pytest.mark.parametrize("kv_dtype", [F32, F16, BF16, E4M3], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "k and v interleaved", "layers in one pool", "odd offsets and gaps"])
def test_strides_do_not_show(backend: str, layout: str, kv_dtype: torch.dtype) -> None:
    q, k, v, lens = problem((129, 5, 48), kv_dtype=kv_dtype)
    plain = decode(q, k, v, lens)
    assert_same(plain, decode(q, laid_out(k, layout), v, lens))
    assert_same(plain, decode(q, k, laid_out(v, layout), lens))
    spread = torch.full((3, 1, 4, 2, 64), NAN)
    spread[:, :, :, 0] = q
    assert_same(plain, decode(spread[:, :, :, 0], k, v, lens))


@pytest.mark.parametrize("dtype, dims", [(F32, (80, 96)), (BF16, (160, 128)), (BF16, (256, 256))], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [None, 1, 7, 64])
def test_streams_do_not_show(page_size: int | None, group: int, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Keys that follow each other in memory are read as a stream (cpu_stream.h); heads first, in blocks."""
    q, k, v, lens = problem((331, 70, 5, 0), heads=(4 * group, 4), dims=dims, q_dtype=dtype, kv_dtype=dtype)
    options: list[dict[str, Any]] = [{}, {"window": 67}, {"starts": torch.tensor([3, 9, 0, 0], dtype=torch.int32)}]
    if page_size is None:
        mask = random(4, 4 * group, 1, k.shape[1], seed=5)
        mask[:, ::3, :, 40:50] = -math.inf
        options.append({"mask": mask})
    for option in options:
        blocks = decode(q, laid_out(k, "heads first"), laid_out(v, "heads first"), lens, policy="4", **option)
        if page_size is None:
            assert_same(blocks, decode(q, k, v, lens, policy="4", **option))
        else:
            k_pages, table = in_pages(k, page_size, NAN)
            v_pages, _ = in_pages(v, page_size, NAN)
            assert_same(blocks, decode(q, k_pages, v_pages, lens, policy="4", block_table=table, **option))


@pytest.mark.parametrize("kv_dtype", [F32, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("fill", [NAN, math.inf, 448.0], ids=str)
def test_what_lies_beyond_the_keys_does_not_show(backend: str, fill: float, kv_dtype: torch.dtype) -> None:
    lens, starts = torch.tensor([100, 0, 33]), torch.tensor([7, 0, 0], dtype=torch.int32)
    q, k, v, _ = problem((130, 130, 130), kv_dtype=kv_dtype, q_len=2)
    options: dict[str, Any] = dict(starts=starts, window=60)
    plain = decode(q, k, v, lens, **options)
    for k_fill, v_fill in ((fill, 0.0), (0.0, fill), (fill, fill)):
        poisoned = []
        for tensor, value in ((k, k_fill), (v, v_fill)):
            tensor = tensor.clone()
            bad = torch.full(tensor.shape[2:], value).to(kv_dtype)
            for row, length in enumerate(lens.tolist()):
                first = max(length - 1 - 60, int(starts[row]), 0)
                tensor[row, length:], tensor[row, :first] = bad, bad
            poisoned.append(tensor)
        assert_same(plain, decode(q, *poisoned, lens, **options))


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31)])
def test_pages_that_do_not_exist_are_absent(backend: str, bad: int) -> None:
    q, k, v, _ = problem((128, 128))
    k, v = k[:, :128].reshape(16, 16, 2, 64)[:8], v[:, :128].reshape(16, 16, 2, 64)[:8]
    table = torch.tensor([[5, bad, 2, 7], [1, 0, bad, bad]], dtype=torch.int32)
    lens = torch.tensor([60, 30])
    out, lse = decode(q, k, v, lens, block_table=table)
    seen = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    seen[0, ..., 16:32] = False
    expected = decode(q, k, v, lens, block_table=table.clamp(0, 7), mask=seen)
    assert_same((out, lse), expected)
    torch.testing.assert_close(out.double(), reference_attention(q, k, v, lens, block_table=table), atol=1e-5, rtol=0)


def test_offsets_past_four_gigabytes() -> None:
    """Untouched memory costs nothing, so the pool is far larger than what is written."""
    q, k, _, _ = problem((32,), dims=(128, 128), kv_dtype=BF16)
    pool = torch.empty(3 * 2**30, dtype=BF16).view(-1, 16, 2, 128)
    near, far = (
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([[len(pool) - 1, 2**20 // 2]], dtype=torch.int32),
    )
    for table in (near, far):
        pool[table[0].long()] = k[:, :32].reshape(2, 16, 2, 128)
    assert_same(*(decode(q, pool, pool, 32, block_table=table) for table in (near, far)))


# ---- one answer: rows and schedules ------------------------------------------------------------------------


def row_of(case: tuple[Tensor, ...], index: int, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = decode(*case, **options)
    return out[index], lse[index]


def test_other_rows_and_the_capacity_do_not_show() -> None:
    q, k, v, _ = problem((5000,) * 5, dims=(64, 32), kv_dtype=BF16, q_dtype=BF16)
    lens = torch.tensor([5000, 2011, 0, 1, 300])
    alone = row_of((q[1:2], k[1:2, :2011], v[1:2, :2011], lens[1:2]), 0)
    assert_same(alone, row_of((q, k, v, lens), 1))
    order = torch.tensor([4, 2, 1, 0, 3])
    assert_same(alone, row_of((q[order], k[order], v[order], lens[order]), 2))
    many = torch.ones(40, dtype=torch.long)
    assert_same(alone, row_of((q[many], k[many], v[many], lens[many]), 39))
    assert_same(alone, row_of((q[1:2], k[1:2], v[1:2], 2011), 0))


@pytest.mark.parametrize("policy", ["auto", "pinned(53)", "length(300,16)"])
def test_schedules_and_threads_do_not_show(policy: str, threads: None) -> None:
    case = problem((5000, 700, 0, 64), dims=(32, 48), q_len=2)
    plain = decode(*case, policy=policy)
    for schedule in ((1, 1), (4, 1), (16, 1), (16, 9), (16, 33)):
        assert_same(plain, decode(*case, policy=policy, schedule=schedule))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert_same(plain, decode(*case, policy=policy))


def test_runs_are_joined_like_single_splits(backend: str) -> None:
    """21 splits: units of 16 and 5, of 4 and 1, or of one each; the last node of each level is short."""
    case = problem((21 * 64 - 7,), dims=(16, 16))
    results = [decode(*case, policy="length(21,64)", schedule=(run, 1)) for run in (1, 4, 16)]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_calls_from_several_threads() -> None:
    cases = [problem((2000,), seed=seed) for seed in range(6)]
    expected = [decode(*case) for case in cases]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for one, other in zip(expected, pool.map(lambda case: decode(*case), cases), strict=True):
                assert_same(one, other)


def test_strided_outputs_and_no_lse(backend: str) -> None:
    q, k, v, lens = problem((200, 50), q_len=2, q_dtype=BF16, kv_dtype=BF16)
    out, lse = decode(q, k, v, lens)
    wide = torch.full((2, 2, 3, 4, 64), NAN, dtype=BF16)
    inputs = check_inputs(q, k, v, lens)
    launch(inputs, plan_decode(inputs.problem, DeviceSpec.cpu()), wide[:, :, 1], None)
    assert torch.equal(wide[:, :, 1], out) and wide[:, :, ::2].isnan().all()
    scattered = torch.full((4, 2, 2, 2), NAN)[..., 0].permute(1, 2, 0)
    launch(inputs, plan_decode(inputs.problem, DeviceSpec.cpu()), wide[:, :, 1], scattered)
    assert torch.equal(scattered, lse)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    q, k, v, lens = problem((3000,))
    inputs = check_inputs(q, k, v, lens)
    plan = replace(plan_decode(inputs.problem, DeviceSpec.cpu(), "8"), max_units=3, max_run=1)
    with pytest.raises(ValueError, match=r"workspace: .* 3 partial"):
        launch(inputs, plan, torch.empty(1, 1, 4, 64), None)


def test_one_openmp_in_the_process() -> None:
    """The kernel and torch share one pool of threads, or two pools would fight for the cores."""
    decode(*problem())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps here")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, E4M3), (F16, F16)], ids=str)
@pytest.mark.parametrize("heads, dims", [((8, 4), (256, 256)), ((14, 2), (64, 64)), ((20, 4), (128, 64))], ids=str)
def test_heads_that_share_a_task_do_not_show(heads: Any, dims: Any, dtypes: Any) -> None:
    """All KV heads of a row are read together, in blocks as large as their bytes ask for; each alone gives the same."""
    group = heads[0] // heads[1]
    q, k, v, lens = problem((331, 70), heads=heads, dims=dims, q_dtype=dtypes[0], kv_dtype=dtypes[1])
    out, lse = decode(q, k, v, lens, policy="4")
    for head in range(heads[1]):
        rows = slice(head * group, (head + 1) * group)
        alone = decode(q[:, :, rows], k[:, :, head : head + 1], v[:, :, head : head + 1], lens, policy="4")
        assert_same((out[:, :, rows], lse[:, :, rows]), alone)


def test_more_heads_than_a_task_takes() -> None:
    """And a mask that hides keys from some heads only, whose values are then added key by key."""
    q, k, v, lens = problem((150,), heads=(140, 70), dims=(16, 32))
    hidden = torch.ones(1, 140, 1, 153, dtype=torch.bool)
    hidden[:, 30:50, :, 40:60] = False
    expected, expected_lse = reference_attention(q, k, v, lens, mask=hidden, return_lse=True)
    v[:, 45, 15:25] = NAN
    out, lse = decode(q, k, v, lens, mask=hidden)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)
