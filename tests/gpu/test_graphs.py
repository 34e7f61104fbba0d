"""CUDA graphs, streams, allocation, synchronisation: the launch rules of contract.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same, int32, make_inputs, page_order, to_pages

from splitkv import DecodeAttention, DecodeProblem, SplitPolicy, decode_attention
from splitkv.backends.cuda_build import load_kernel
from splitkv.backends.triton_split import split_kernel


def capture(call: Any) -> torch.cuda.CUDAGraph:
    """A graph of call(), warmed up on a side stream first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def kernels() -> int:
    """Kernels compiled so far in this process."""
    return len(split_kernel.device_caches[0][0]) + load_kernel.cache_info().currsize


@pytest.mark.parametrize("batch", [1, 3])
def test_captured_at_64_keys_replayed_at_any_length(batch: int) -> None:
    q, k, v = make_inputs(batch, 16, 4, 256, 262_144, dtype=torch.bfloat16, device="cuda")
    lens = int32([64] * batch, "cuda")
    attention = DecodeAttention(DecodeProblem(batch, 16, 4, 256, capacity=262_144))
    out = torch.empty_like(q)
    graph = capture(lambda: attention.run(q, k, v, lens, out=out))
    variants = kernels()
    for length in (1, 64, 65, 4096, 262_144, 0, 20_000):
        lens.fill_(length)
        out.fill_(torch.nan)
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
        eager = decode_attention(q, k, v, lens)
        assert torch.equal(out, eager), length
    assert kernels() == variants, "a length compiled another kernel"


def test_graphs_of_many_batches_share_a_process() -> None:
    """CASE-13: each with scratch from its own pool; later growth must not pull it away."""
    q, k, v = make_inputs(16, 16, 4, 128, 8192, dtype=torch.bfloat16, device="cuda")
    lens = int32([8192 - 500 * i for i in range(16)], "cuda")
    graphs = []
    for batch in (1, 2, 5, 16):
        out = torch.empty_like(q[:batch])
        graphs.append((capture(lambda b=batch, o=out: decode_attention(q[:b], k[:b], v[:b], lens[:b], out=o)), out))
    big = make_inputs(64, 16, 4, 128, 8192, dtype=torch.bfloat16, device="cuda")
    decode_attention(*big, 8192)
    torch.cuda.empty_cache()
    filler = torch.full((1 << 30,), torch.nan, device="cuda")
    for graph, out in [*graphs, *reversed(graphs)]:
        out.fill_(torch.nan)
        graph.replay()
        batch = out.shape[0]
        assert torch.equal(out, decode_attention(q[:batch], k[:batch], v[:batch], lens[:batch]))
    del filler


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_one_graph_serves_rows_that_come_and_go(layout: str) -> None:
    """CASE-28: sixty replays of one graph over changing lengths, each equal to a fresh call."""
    q, k, v = make_inputs(16, 8, 2, 64, 16_384, dtype=torch.bfloat16, device="cuda")
    table = None
    if layout == "paged":
        table, pages = page_order(16, 16_384, 256)
        k, v = (to_pages(cache, table, pages, 256) for cache in (k, v))
        table = table.cuda()
    lens = int32([0] * 16, "cuda")
    out = torch.empty_like(q)
    graph = capture(lambda: decode_attention(q, k, v, lens, block_table=table, out=out))
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        active = int(torch.randint(1, 17, (), generator=generator))
        new = torch.randint(0, 1 + min(16_384, 1 << (step % 15)), (16,), generator=generator, dtype=torch.int32)
        new[active:] = 0
        lens.copy_(new)
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, lens, block_table=table)), step


def test_a_run_allocates_nothing_and_waits_for_nothing() -> None:
    q, k, v = make_inputs(4, 16, 4, 256, 8192, dtype=torch.bfloat16, device="cuda")
    lens = int32([1, 500, 8192, 77], "cuda")
    attention = DecodeAttention(DecodeProblem(4, 16, 4, 256, capacity=8192))
    out = torch.empty_like(q)
    attention.run(q, k, v, lens, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.run(q, k, v, lens, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_call_returns_while_the_gpu_is_still_busy() -> None:
    q, k, v = make_inputs(1, 16, 4, 256, 4096, dtype=torch.bfloat16, device="cuda")
    lens = int32([4096], "cuda")
    want = decode_attention(q, k, v, lens)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    got = decode_attention(q, k, v, lens)
    assert not torch.cuda.current_stream().query(), "the call waited for the GPU"
    assert torch.equal(got, want)


def test_what_follows_a_long_row_of_one_split_waits_for_it() -> None:
    """The merge then has nothing to do and could end first; whatever reads out must still see the split kernel's."""
    q, k, v = make_inputs(1, 16, 4, 256, 65_536, dtype=torch.bfloat16, device="cuda")
    problem = DecodeProblem(1, 16, 4, 256, capacity=65_536)
    attention = DecodeAttention(problem, SplitPolicy.length(2, 32_768))
    assert attention.plan.splits
    lens, out, read = int32([32_768], "cuda"), torch.empty_like(q), torch.empty_like(q)
    want = decode_attention(q, k, v, lens, policy="off").clone()

    def steps() -> None:
        out.fill_(torch.nan)
        attention.run(q, k, v, lens, out=out)
        read.copy_(out)

    steps()
    assert torch.equal(read, want)
    graph = capture(steps)
    for _ in range(5):
        read.zero_()
        graph.replay()
        assert torch.equal(read, want)


def test_kernels_follow_the_callers_stream_and_order() -> None:
    """CASE-19: producer and consumer on a side stream, forty dependent steps in one graph and eagerly."""
    _, k, v = make_inputs(1, 16, 4, 256, 4096, dtype=torch.bfloat16, device="cuda")
    queries = torch.randn(40, 1, 16, 256, device="cuda").to(torch.bfloat16)
    lengths = [(i * 97) % 4096 + 1 for i in range(40)]
    want = [decode_attention(queries[i], k, v, lengths[i]) for i in range(40)]
    q, lens = torch.empty_like(queries[0]), int32([1], "cuda")
    outs, sums = torch.empty_like(queries), torch.zeros(40, device="cuda")
    attention = DecodeAttention(DecodeProblem(1, 16, 4, 256, capacity=4096))

    def steps() -> None:
        for i in range(40):
            lens.fill_(lengths[i])
            q.copy_(queries[i])
            attention.run(q, k, v, lens, out=outs[i])
            sums[i].copy_(outs[i].float().sum())

    def check() -> None:
        torch.cuda.synchronize()
        for i in range(40):
            assert torch.equal(outs[i], want[i]), i
            assert float(sums[i]) == float(want[i].float().sum()), i

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        steps()
    check()
    graph = capture(steps)
    for _ in range(20):
        outs.zero_()
        graph.replay()
        check()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:
    """CASE-09."""
    q, k, v = make_inputs(2, 16, 4, 128, 4096, dtype=torch.bfloat16, device="cuda:1")
    before = torch.cuda.memory_allocated(0)
    with torch.cuda.device(0):
        got = decode_attention(q, k, v, int32([4096, 7], "cuda:1"), return_lse=True)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        want = decode_attention(q, k, v, int32([4096, 7], "cuda:1"), return_lse=True)
    assert_same(got, want)  # type: ignore[arg-type]
    assert torch.cuda.memory_allocated(0) == before
    with pytest.raises(ValueError, match=r"q on cuda:1.*v_cache on cuda:0"):
        decode_attention(q, k, v.to("cuda:0"), 7)
