"""Cases about launching, compiling, messages and measuring, which need no backend: 09, 11, 19, 21, 22, 23, 29."""

from __future__ import annotations

import ast
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import int32, make_inputs, page_order
from torch import Tensor

import splitkv
from splitkv import DecodeProblem, DeviceSpec, decode_attention, plan_decode
from splitkv.bench import cases, timing
from splitkv.tiles import power_of_two

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "splitkv"

# ---- case 09: devices --------------------------------------------------------------------------------------


def pretended_gpus(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """([the current device], every device that was made current), without a GPU."""
    current, entered = [0], []

    @contextlib.contextmanager
    def device(wanted: torch.device | int) -> Iterator[None]:
        before, current[0] = current[0], wanted if isinstance(wanted, int) else wanted.index
        entered.append(current[0])
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    return current, entered


def test_case_09_launches_go_to_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands round the launch of both launchers; tests/gpu has two real GPUs."""
    pytest.importorskip("triton")
    from splitkv.backends import rowwise, triton_launch

    current, entered = pretended_gpus(monkeypatch)
    for index in (0, 1, 3):
        tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        with triton_launch.on_device(tensor):  # type: ignore[arg-type]
            assert current[0] == index, f"launched on cuda:{current[0]}, tensors on cuda:{index}"
        assert current[0] == 0
    assert entered == [1, 3], "the current device was set although it was right"
    for module in (triton_launch, rowwise):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        launch = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "launch")
        inside = {id(n) for block in ast.walk(launch) if isinstance(block, ast.With)
                  and "on_device" in ast.dump(block.items[0]) for n in ast.walk(block)}  # fmt: skip
        launches = [n for n in ast.walk(launch) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
        assert launches and all(id(n) in inside for n in launches), module.__name__


def test_case_09_cuda_launches_go_to_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitkv.backends.cuda_launch import CudaLaunch

    current, entered = pretended_gpus(monkeypatch)
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(CudaLaunch, "_launch", lambda self, addresses, length: launched.append((current[0], length)))
    for index in (0, 1, 3):
        launch = object.__new__(CudaLaunch)
        launch._device = index
        launch((), 7)
        assert launched.pop() == (index, 7) and current[0] == 0
    assert entered == [1, 3], "the current device was set although it was right"


@pytest.mark.parametrize(
    "other", ["k_cache", "v_cache", "seq_lens", "block_table", "sinks", "starts", "mask", "k_scale"]
)
def test_case_09_mixed_devices_are_listed(other: str) -> None:
    """The meta device stands in for a second GPU: whichever tensor lies there, all are listed with their devices."""
    q, k, v = make_inputs(2, 2, 1, 16, 32)
    table, _ = page_order(2, 32, 16)
    arguments = dict(
        q=q, k_cache=k.view(4, 16, 1, 16), v_cache=v.view(4, 16, 1, 16), seq_lens=int32([3, 32]), block_table=table,
        sinks=torch.zeros(2), starts=int32([0, 1]), mask=torch.zeros(32), k_scale=torch.ones(1),
    )  # fmt: skip
    arguments[other] = arguments[other].to("meta")
    with pytest.raises(ValueError, match=rf"all on one device, got q on cpu, .*{other} on meta") as refusal:
        decode_attention(**arguments)  # type: ignore[arg-type]
    assert all(f"{name} on " in str(refusal.value) for name in arguments)


@pytest.mark.parametrize("name", ["out", "workspace"])
def test_case_09_results_on_another_device_are_refused(name: str) -> None:
    q, k, v = make_inputs(1, 2, 1, 16, 32)
    elsewhere = {"out": torch.empty_like(q, device="meta"), "workspace": torch.empty(1 << 16, device="meta")}[name]
    with pytest.raises(ValueError, match=rf"all on one device, got q on cpu, {name} on meta"):
        decode_attention(q, k, v, 32, policy="3", **{name: elsewhere})  # type: ignore[arg-type]


# ---- case 11: what a benchmark reads -----------------------------------------------------------------------


def distinct_bytes(sets: list[tuple[Tensor, Tensor]]) -> int:
    """Bytes of memory that these K and V cover, those in common counted once."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for pair in sets for t in pair)
    total, end = 0, 0
    for first, last in ranges:
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total


@pytest.mark.parametrize("head_major", [False, True])
def test_case_11_every_call_of_a_rotation_reads_other_bytes(head_major: bool) -> None:
    """What a result row calls distinct_bytes is what its calls touch, counted from addresses."""
    rung = cases.Rung(512, 4, 2, "f16", 64)
    rotation = timing.plan_rotation(rung.set_bytes, 16 * rung.set_bytes, rung.set_bytes, "cpu")
    assert rotation is not None and rotation.sets == 16
    arena = cases.Arena(rotation.footprint_bytes, "f16", "cpu", 0)
    touched = distinct_bytes(arena.sets(rung, rotation, head_major))
    assert touched == rotation.footprint_bytes == rotation.sets * 512 * 2 * 2 * 64 * 2


def test_case_11_what_a_cache_holds_is_labelled() -> None:
    """Less than four times the cache is cache-resident, whatever the number of sets."""
    for set_bytes, cache in ((1 << 20, 1 << 28), (1 << 28, 1 << 28), (1 << 20, 1 << 20)):
        rotation = timing.plan_rotation(set_bytes, 8 * set_bytes, cache, "cpu")
        assert rotation is not None
        assert rotation.label == ("cold" if rotation.footprint_bytes >= 4 * cache else "cache-resident")


RESULTS = sorted((ROOT / "results").rglob("rungs*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_case_11_result_files_say_what_was_read(path: Path) -> None:
    for row in json.loads(path.read_text())["rows"]:
        read = row["batch"] * row["seq_len"] * row["num_kv_heads"] * (row["head_dim"] + row["v_head_dim"])
        assert row["kv_bytes"] == read * {"f32": 4, "f16": 2, "bf16": 2}[row["kv_dtype"]], row["case"]
        assert row["distinct_bytes"] == row["sets"] * row["kv_bytes"] and row["sets"] >= 2, row["case"]
        assert row["cache"] in ("cold", "cache-resident") and "page_size" in row, row["case"]


# ---- case 19: streams --------------------------------------------------------------------------------------

NAMES_OF_STREAMS = {"stream", "Stream", "default_stream", "set_stream", "ExternalStream"}


def check_streams(folder: Path) -> None:
    """No code that launches names a stream, so every launch goes to the caller's; tests/gpu watches real ones."""
    files = sorted(folder.rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in NAMES_OF_STREAMS, f"{path.name}, line {node.lineno}: {node.attr}"
            if isinstance(node, ast.Call):
                assert not any(word.arg == "stream" for word in node.keywords), f"{path.name}, line {node.lineno}"


def test_case_19_no_launch_names_a_stream() -> None:
    for folder in (SRC / "backends", SRC / "cache"):
        check_streams(folder)


# ---- case 21: torch.compile --------------------------------------------------------------------------------

Append = Callable[[Tensor, Tensor, int], None]


def check_compiled_steps(append: Append) -> None:
    """Two layers over one pool, the second reading what the first wrote: compiled, cache and outputs are as eagerly."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1, 8, 1, 16, generator=generator)
    x = torch.randn(2, 1, 1, 16, generator=generator)

    def step(cache: Tensor, x: Tensor) -> Tensor:
        append(cache, x[0], 6)
        first = decode_attention(x[0], cache, cache, 7)
        append(cache, x[1] + first, 7)
        return decode_attention(x[1], cache, cache, 8)

    eager_cache, compiled_cache = pool.clone(), pool.clone()
    want = step(eager_cache, x)
    torch.compiler.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")(compiled_cache, x)
    assert torch.equal(compiled_cache, eager_cache), "the cache has other bytes than eagerly"
    assert torch.equal(got, want)
    if hasattr(append, "_opoverload"):
        try:
            torch.library.opcheck(append, (pool.clone(), x[0], 6), test_utils="test_schema")
        except torch.testing._internal.optests.generate_tests.OpCheckError as error:
            raise AssertionError(str(error)) from error


def test_case_21_compiled_steps_leave_the_cache_as_eager_ones_do() -> None:
    def append(cache: Tensor, rows: Tensor, position: int) -> None:
        cache[:, position] = rows

    check_compiled_steps(append)


def test_case_21_the_operator_writes_nothing_and_copies_no_cache() -> None:
    """Its schema marks no argument as written, and that is true: nothing but out and lse is allocated for it."""
    schema = torch.ops.splitkv.decode_attention.default._schema
    assert not schema.is_mutable and not any(argument.alias_info for argument in schema.arguments)
    q, k, v = make_inputs(1, 2, 1, 16, 4096)
    compiled = torch.compile(lambda *tensors: decode_attention(*tensors), fullgraph=True, backend="aot_eager")
    lens = int32([4096])
    for _ in range(2):  # compiled at the first, and at the second its scratch, which stays
        compiled(q, k, v, lens)
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled(q, k, v, lens)
    largest = max((event.self_cpu_memory_usage for event in profile.key_averages()), default=0)
    assert largest < k.numel() * 4 // 8, f"{largest} bytes allocated beside a cache of {k.numel() * 4}"


# ---- case 22: long contexts and messages -------------------------------------------------------------------

KIB = 1024


BACKEND_DTYPES = [
    *(("triton", kv_dtype) for kv_dtype in ("f32", "f16", "bf16", "fp8_e4m3")),
    *(("cuda", kv_dtype) for kv_dtype in ("f16", "bf16", "fp8_e4m3")),
]


@pytest.mark.parametrize(("backend", "kv_dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("name", ["rtx4090", "a100", "h200"])
def test_case_22_no_launch_grows_with_the_context(name: str, backend: str, kv_dtype: str) -> None:
    """Tiles in flight and threads are the same at 64 keys and at 262,144, and fit a block of 99, 163 or 227 KiB."""
    at_once = 1 if backend == "cuda" else 2  # its stages hold keys and values in turns
    device = DeviceSpec.named(name)
    q_dtype = "bf16" if kv_dtype.startswith("fp8") else kv_dtype
    tiles = set()
    for capacity in (64, 13_000, 65_536, 262_144):
        problem = DecodeProblem(1, 16, 4, 256, capacity=capacity, q_dtype=q_dtype, kv_dtype=kv_dtype)
        tile = plan_decode(problem, device, backend=backend).tile
        tiles.add(tile)
        in_flight = tile.num_stages * tile.block_n * at_once * power_of_two(256) * problem.kv_bytes_per_key // 512
        assert in_flight <= device.shared_memory_bytes, (capacity, tile)
    assert len(tiles) == 1


@pytest.mark.parametrize("window", [None, 65_536])
@pytest.mark.parametrize("dims", [(256, 256), (576, 512)], ids=str)
def test_case_22_the_longest_context_runs(dims: tuple[int, int], window: int | None) -> None:
    q, k, v = make_inputs(1, 1, 1, dims[0], 1, v_head_dim=dims[1], dtype=torch.float16)
    k, v = k.expand(1, 262_144, 1, dims[0]), v.expand(1, 262_144, 1, dims[1])  # one key, 262,144 times
    out, lse = decode_attention(q, k, v, 262_144, window=window, return_lse=True)
    one, one_lse = decode_attention(q, k, v, 1, return_lse=True)
    keys = torch.tensor(float(window or 262_144))
    assert (out - one).abs().max() < 1e-3 and (lse - one_lse - keys.log()).abs().max() < 1e-4


# ---- case 23: dispatch -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "kv_dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("policy", ["auto", "16", "pinned(64)"])
def test_case_23_the_variant_never_follows_batch_or_sms(policy: str, backend: str, kv_dtype: str) -> None:
    """Batches of 1 to 256 on GPUs of 1 to 1,000 SMs: tile, splits and vectors per block are those of one row."""
    variants = set()
    q_dtype = "bf16" if kv_dtype.startswith("fp8") else kv_dtype
    for sms in (1, 46, 132, 1000):
        device = DeviceSpec("some", sms, (9, 0), 227 * KIB, 1 << 25, 1e12)
        for batch in range(1, 257):
            problem = DecodeProblem(batch, 8, 2, 256, q_dtype=q_dtype, kv_dtype=kv_dtype, page_size=16)
            plan = plan_decode(problem, device, policy, backend)
            variants.add((plan.backend, plan.tile, plan.rule, plan.rows_per_block))
    assert len(variants) == 1


# ---- case 29: the harness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["bandwidth", "first sample", "spread", "warm-up"])
def test_case_29_the_harness_refuses(rule: str) -> None:
    rotation = timing.Rotation(3, 1 << 30, cold=True)

    def measured(call: timing.Call, bandwidth: float = 1e12) -> timing.Timing:
        options: dict[str, Any] = dict(device="cpu", kv_bytes=1000, bandwidth_bytes_s=bandwidth, budget_s=0.02)
        return timing.measure({"it": call}, rotation, **options)["it"]

    if rule == "bandwidth":  # no wait for the end of the work; a hot loop; bytes counted once per query head
        with pytest.raises(timing.TimingRejected, match="it: .*more than the memory gives"):
            measured(lambda i: None, bandwidth=1000.0)
        assert timing.rejection([100.0] * 5, 100_000, 1e9, "cpu", cold=True) is None
        assert timing.rejection([100.0] * 5, 4 * 100_000, 1e9, "cpu", cold=True)
    elif rule == "first sample":
        assert "paid for a warm-up" in str(timing.rejection([9e4, 100.0, 101.0, 99.0], 1000, 1e9, "cuda", cold=True))
    elif rule == "spread":
        samples = [100.0, 100.0, 190.0, 190.0, 190.0]
        assert "spans 47% of the median" in str(timing.rejection(samples, 1, 1e9, "cuda", cold=True))
    else:
        calls = []

        def compiles_first(i: int) -> None:
            calls.append(i)
            time.sleep(0.1 if len(calls) == 1 else 0.001)

        assert measured(compiles_first).p80_us < 50_000


def test_case_29_bytes_are_counted_per_kv_head() -> None:
    assert DecodeProblem(3, 64, 4, 256, capacity=1000).kv_bytes() == 3 * 1000 * 4 * (256 + 256) * 2
    assert splitkv.DecodeProblem(1, 8, 8, 64, 128, capacity=10, kv_dtype="fp8").kv_bytes() == 10 * 8 * (64 + 128)
