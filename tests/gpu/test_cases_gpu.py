"""The cases that need a GPU: real graphs and streams, two devices, memory past 2**31. tests/cases has all 32 of them,
and runs on this GPU too. Faults are planted where they cannot take the CUDA context down with them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import exact
from helpers import Guarded, assert_parity, assert_same, int32, make_inputs, page_order, to_pages
from test_graphs import capture
from torch import Tensor

from splitkv import DecodeAttention, DecodeProblem, SplitPolicy, decode_attention, merge_states
from splitkv.attention import plan_for

sys.path.append(str(Path(__file__).parents[1] / "cases"))

import faults
import faults_in_python as around
from planting import caught, replace_launcher

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GIB = 1 << 30


def run(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return decode_attention(*tensors, return_lse=True, **options)  # type: ignore[return-value]


def needs_memory(gib: float) -> None:
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


# ---- case 01: page offsets past 2**31 ----------------------------------------------------------------------


def check_page_offsets() -> None:
    """The same 16 tokens on page 5 and on both sides of 2**31; NaN on every other page; ours below the pool too."""
    shape, homes = (65_538, 2, 16, 8, 128), (5, 65_535, 65_536)
    memory = torch.full((2**31 + 65_538 * 2 * 16 * 8 * 128,), 0x7F, dtype=torch.uint8, device="cuda")
    pool = memory[2**31 :].view(E4M3).view(shape)
    tokens = torch.randn(2, 16, 8, 128, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(E4M3)
    for home in homes:
        pool[home].copy_(tokens)
    q = torch.randn(1, 32, 128, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(BF16)
    dense = run(q, tokens[:1], tokens[1:], 16)
    for home in homes:
        assert_same(run(q, pool[:, 0], pool[:, 1], 16, block_table=int32([[home]], "cuda")), dense, home)


def test_case_01_page_offsets_past_two_to_the_31() -> None:
    needs_memory(6)
    check_page_offsets()


def test_case_01_catches_page_offsets_in_32_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_memory(6)
    monkeypatch.setenv("SPLITKV_BACKEND", "triton")  # whose tile the planted kernel is launched with
    faults.PAGE_OFFSETS_IN_32_BITS.plant("triton", monkeypatch, tmp_path)
    with caught():
        check_page_offsets()


# ---- case 09: another device -------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_case_09_everything_on_cuda_1_while_cuda_0_is_current() -> None:
    """First call, cached call, merge, a prepared object, a graph, a fresh thread; nothing reaches cuda:0."""
    torch.cuda.set_device(0)
    q, k, v = make_inputs(2, 16, 4, 128, 4096, dtype=BF16, device="cuda:1")
    lens = int32([4096, 7], "cuda:1")
    problem = DecodeProblem(2, 16, 4, 128, capacity=4096)
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0)
    first, cached = run(q, k, v, lens), run(q, k, v, lens)
    with torch.cuda.device(1):
        want = run(q, k, v, lens)
    assert_same(first, want)
    assert_same(cached, want)
    merged = merge_states(torch.stack([first[0], first[0]]), torch.stack([first[1], first[1]]))
    assert merged[0].device == q.device and (merged[0].float() - first[0].float()).abs().max() < 1e-2
    attention, out = DecodeAttention(problem, device="cuda:1"), torch.empty_like(q)
    assert attention.workspace.device == q.device
    attention.run(q, k, v, lens, out=out)
    assert torch.equal(out, want[0])
    with torch.cuda.device(1):
        graph = capture(lambda: attention.run(q, k, v, lens, out=out))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize(1)
    assert torch.equal(out, want[0])
    results: list[tuple[Tensor, Tensor]] = []
    thread = threading.Thread(target=lambda: results.append(run(q, k, v, lens)))
    thread.start()
    thread.join()
    assert_same(results[0], want)
    assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) == before


def test_case_09_mixed_devices_are_listed() -> None:
    q, k, v = make_inputs(1, 4, 2, 64, 64, dtype=BF16, device="cuda")
    for table in (torch.zeros(1, 1, dtype=torch.int32), int32([[0]], "cuda")):
        keys = k if table.is_cuda else k.view(1, 64, 2, 64)
        with pytest.raises(ValueError, match=r"q on cuda:0, k_cache on c.*block_table on c") as refusal:
            decode_attention(q, keys, v.cpu() if table.is_cuda else v, 64, block_table=table)
        assert "on cpu" in str(refusal.value)


# ---- case 13: captures keep their scratch ------------------------------------------------------------------


def check_scratch_of_captures(release: bool) -> None:
    """Small batches captured first; then growth, and new tensors wherever memory has become free, which must stay as
    they are. release: hand freed memory back to the driver first."""
    q, k, v = make_inputs(4, 8, 2, 64, 4096, dtype=BF16, device="cuda")
    lens = int32([4096, 900, 0, 77], "cuda")
    graphs, sizes = [], []
    for batch in (1, 2, 4):
        attention = DecodeAttention(DecodeProblem(batch, 8, 2, 64, capacity=4096))
        out = torch.empty_like(q[:batch])

        def call(b: int = batch, o: Tensor = out, a: DecodeAttention = attention) -> None:
            a.run(q[:b], k[:b], v[:b], lens[:b], out=o)

        call()
        graphs.append((capture(call), out, attention))
        sizes.append(attention.plan.workspace_bytes)
    big = DecodeAttention(DecodeProblem(64, 8, 2, 64, capacity=4096))
    big.run(*make_inputs(64, 8, 2, 64, 4096, dtype=BF16, device="cuda"), 4096)
    torch.cuda.synchronize()
    if release:
        torch.cuda.empty_cache()
    fillers = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes for _ in range(8)]
    for graph, out, _ in [*graphs, *reversed(graphs)]:
        out.fill_(torch.nan)
        graph.replay()
        batch = out.shape[0]
        assert torch.equal(out, decode_attention(q[:batch], k[:batch], v[:batch], lens[:batch])), batch
    assert all(bool((filler == 0xFF).all()) for filler in fillers), "a replay wrote into memory of others"


@pytest.mark.parametrize("release", [False, True])
def test_case_13_captures_keep_their_scratch(release: bool) -> None:
    check_scratch_of_captures(release)


def test_case_13_catches_scratch_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    around.SCRATCH_THAT_GROWS.plant("triton", monkeypatch)
    with caught():
        check_scratch_of_captures(release=False)


# ---- case 19: the caller's stream --------------------------------------------------------------------------


def check_the_callers_stream(backend: str = "auto") -> None:
    """On a side stream: wait 50 ms, write q, K and V, decode, merge, and overwrite q and K at once."""
    values = make_inputs(1, 16, 4, 128, 4096, dtype=BF16, device="cuda")
    lens = int32([4096], "cuda")
    problem = DecodeProblem(1, 16, 4, 128, capacity=4096)
    want = run(*values, lens, backend=backend)
    tensors = [torch.zeros_like(tensor) for tensor in values]
    plan = plan_for(problem, torch.device("cuda", 0), "auto", backend)
    workspace = torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8).cuda()
    out = torch.empty_like(values[0])

    def work() -> tuple[Tensor, Tensor]:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        part = run(*tensors, lens, out=out, workspace=workspace, backend=backend)
        merged = merge_states(
            torch.stack([part[0], part[0]]), torch.stack([part[1], torch.full_like(part[1], -torch.inf)])
        )
        tensors[0].zero_()
        tensors[1].zero_()
        return merged

    run(*tensors, lens, out=out, workspace=workspace, backend=backend)  # compiles
    workspace.fill_(0xFF)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        merged = work()
    torch.cuda.synchronize()
    assert torch.equal(merged[0], want[0]) and torch.equal(merged[1], want[1]), "not in the order of the stream"
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            merged = work()
    workspace.fill_(0xFF)
    merged[0].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(merged[0], want[0]) and torch.equal(merged[1], want[1]), "a launch is missing in the graph"


def test_case_19_launches_follow_the_callers_stream() -> None:
    check_the_callers_stream()


def test_case_19_catches_a_merge_on_the_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers import launcher

    from splitkv.backends import triton_launch

    right = triton_launch.merge_kernel

    class OnTheDefaultStream:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(**arguments: Any) -> None:
                with torch.cuda.stream(torch.cuda.default_stream()):
                    right[grid](**arguments)

            return launch

    replace_launcher(launcher, monkeypatch)
    monkeypatch.setattr(triton_launch, "merge_kernel", OnTheDefaultStream())
    with caught():
        check_the_callers_stream("triton")


# ---- cases 20, 28: one graph for rows that come and go -----------------------------------------------------


@pytest.mark.parametrize("order", ["empty first", "empty last"])
def test_case_20_captured_empty_replayed_full(order: str) -> None:
    q, k, v = make_inputs(4, 8, 2, 64, 4096, dtype=BF16, device="cuda")
    empty, full = int32([0] * 4, "cuda"), int32([7, 0, 4096, 300], "cuda")
    lens, out = (empty if order == "empty first" else full).clone(), torch.empty_like(q)
    graph = capture(lambda: decode_attention(q, k, v, lens, out=out))
    for new in (full, empty, full) if order == "empty first" else (empty, full, empty):
        lens.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, new.clone()))
        assert not out[new == 0].any()


def check_replays() -> None:
    """60 replays: rows 1..16, lengths that grow and shrink, tables that narrow with a page of NaN in stale columns."""
    q, k, v = make_inputs(16, 8, 2, 64, 16_384, dtype=BF16, device="cuda")
    full, num_pages = page_order(16, 16_384, 256)
    k, v = (to_pages(cache, full, num_pages, 256) for cache in (k, v))
    spare = min(set(range(num_pages)) - set(full.flatten().tolist()))
    lens, table, out = int32([0] * 16, "cuda"), full.cuda(), torch.empty_like(q)
    graph = capture(lambda: decode_attention(q, k, v, lens, block_table=table, out=out))
    generator, kept = torch.Generator().manual_seed(0), []
    for step in range(60):
        active = int(torch.randint(1, 17, (), generator=generator))
        new = torch.randint(0, 1 + min(16_384, 1 << (step % 15)), (16,), generator=generator, dtype=torch.int32)
        new[active:] = 0
        narrow = full.clone()
        for row, length in enumerate(new.tolist()):
            narrow[row, -(-length // 256) :] = spare
        kept.append((new.cuda(), narrow.cuda()))  # alive, so that no two calls share an address
        lens.copy_(kept[-1][0])
        table.copy_(kept[-1][1])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, kept[-1][0], block_table=kept[-1][1])), step


def test_case_28_replays_see_the_lengths_of_now() -> None:
    check_replays()


def test_case_28_catches_lengths_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers import launcher

    replace_launcher(launcher, monkeypatch)
    around.LENGTHS_OF_THE_CAPTURE.plant("triton", monkeypatch)
    with caught():
        check_replays()


# ---- case 21: no copy of the cache -------------------------------------------------------------------------


def test_case_21_a_compiled_step_does_not_copy_the_cache() -> None:
    """4 GiB of K and V, written in place and read in one compiled step: bytes as eagerly, and no room for a copy."""
    needs_memory(12)
    k = torch.zeros(4, 262_144, 4, 256, dtype=BF16, device="cuda")
    v = torch.zeros_like(k)
    q, new, _ = make_inputs(4, 8, 4, 256, 1, dtype=BF16, device="cuda")
    lens = int32([5, 1, 3, 8], "cuda")

    at = torch.tensor([7], device="cuda")

    def step(k: Tensor, v: Tensor, q: Tensor, new: Tensor, lens: Tensor) -> Tensor:
        k[:, at] = new
        v[:, at] = new
        return decode_attention(q, k, v, lens)  # type: ignore[return-value]

    compiled = torch.compile(step, fullgraph=True)
    compiled(k, v, q, new, lens)
    k[:, 7], v[:, 7] = 0, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = compiled(k, v, q, new, lens)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert torch.equal(k[:, 7:8], new) and torch.equal(v[:, 7:8], new)
    assert torch.equal(got, decode_attention(q, k, v, lens))


# ---- case 22: the longest contexts -------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [torch.float32, BF16, E4M3], ids=str)
def test_case_22_long_contexts_and_wide_windows_run(kv_dtype: torch.dtype) -> None:
    dtype = BF16 if kv_dtype == E4M3 else kv_dtype
    q, k, v = make_inputs(1, 4, 1, 256, 262_144, dtype=dtype, kv_dtype=kv_dtype, device="cuda")
    for length in (1, 13_000, 65_536, 262_144):
        assert_parity(run(q, k, v, length), exact(q, k, v, [length]), lse_tolerance=1e-4)
        start = max(length - 65_536, 0)
        want = exact(q, k[:, start:], v[:, start:], [length - start])
        assert_parity(run(q, k, v, length, window=65_536), want, lse_tolerance=1e-4)


# ---- case 25: wide reductions ------------------------------------------------------------------------------


def test_case_25_reductions_of_every_width() -> None:
    """The geometry that one Triton release compiled wrongly, at every number of parts."""
    q, k, v = make_inputs(1, 16, 2, 128, 20_548, dtype=BF16, device="cuda")
    want = exact(q, k, v, [20_548])
    for num_splits in (2, 4, 8, 16, 32, 64, 100, 128, 129, 256):
        assert_parity(run(q, k, v, 20_548, policy=SplitPolicy.pinned(num_splits)), want)


# ---- case 32: exactly the workspace ------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 256])
@pytest.mark.parametrize("geometry", [(24, 4, 256), (3, 1, 128)], ids=str)
def test_case_32_exactly_the_workspace(geometry: tuple[int, int, int], batch: int) -> None:
    """262,144 keys of capacity, one row that long: the plan's bytes between guard bands, and one less refused."""
    heads, kv_heads, dim = geometry
    q, _, _ = make_inputs(batch, heads, kv_heads, dim, 1, dtype=BF16, device="cuda")
    _, k, v = make_inputs(1, heads, kv_heads, dim, 262_144, dtype=BF16, device="cuda")
    k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    lens = int32([262_144] + [(i * 37) % 500 for i in range(1, batch)], "cuda")
    problem = DecodeProblem(batch, heads, kv_heads, dim, capacity=262_144)
    for policy in ("auto", SplitPolicy.pinned(64)):
        needed = DecodeAttention(problem, policy).plan.workspace_bytes
        scratch = Guarded((needed,), torch.uint8, "cuda")
        got = run(q, k, v, lens, policy=policy, workspace=scratch.tensor)
        assert scratch.intact(), policy
        assert_parity((got[0][:1], got[1][:1]), exact(q[:1], k[:1], v[:1], [262_144]), lse_tolerance=1e-4)
        ample = torch.zeros(needed + 4096, dtype=torch.uint8, device="cuda")
        assert_same(run(q, k, v, lens, policy=policy, workspace=ample), got)
        with pytest.raises(ValueError, match=rf"workspace: expected at least {needed} bytes, got {needed - 1}"):
            run(q, k, v, lens, policy=policy, workspace=scratch.tensor[:-1])
