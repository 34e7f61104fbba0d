"""A context over the GPUs of one host: parity, and graphs that hold the exchange. With one GPU, a group of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from helpers import assert_parity, int32, make_inputs
from ranks_cases import check, fixed_cases, run_rank

from splitkv import DecodeProblem, decode_attention
from splitkv.bench import record
from splitkv.bench.cases import rung_options
from splitkv.bench.ranks import run_ranks
from splitkv.ranks import RankAttention, part_of

HERE = torch.cuda.device_count()
RANKS = min(max(HERE, 1), 2)
CASES = (
    *("ragged", "an empty rank", "left padding", "a window over a bound", "four queries over a bound"),
    *("four queries with a window", "pages with queries and a window", "bf16", "fp8 with scales"),
)
"""Each compiles for seconds; tests/unit/test_ranks.py has the others."""
CAPACITY = 65_536

two_gpus = pytest.mark.skipif(HERE < 2, reason=f"expects 2 CUDA devices, got {HERE}")


@two_gpus
def test_the_answer_is_one_process_s(tmp_path: Path) -> None:
    half = torch.bfloat16
    cases = [case if case.kv_dtype or case.name == "ragged" else replace(case, dtype=half) for case in fixed_cases(2)]
    cases = [case for case in cases if case.name in CASES]
    torch.multiprocessing.spawn(run_rank, (2, str(tmp_path), "cuda", cases), nprocs=2)
    assert len(cases) == len(CASES)
    for case in cases:
        check(case, 2, tmp_path)


def graph_rank(rank: int, ranks: int, folder: str) -> None:
    """One rank: capture once, replay at other lengths, allocate nothing, wait for nothing."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        for q_len, window in ((None, None), (None, 5000), (4, 5000)):
            one_graph(rank, ranks, q_len, window)
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()


def one_graph(rank: int, ranks: int, q_len: int | None, window: int | None) -> None:
    q, k, v = make_inputs(2, 16, 4, 128, CAPACITY, q_len=q_len, dtype=torch.bfloat16, device="cuda")
    sinks = torch.linspace(-2.0, 9.0, 16, device="cuda")
    mine = part_of(CAPACITY, rank, ranks)
    keys, values = (cache[:, mine.start : mine.stop] for cache in (k, v))
    attention = RankAttention(DecodeProblem(2, 16, 4, 128, q_len=q_len or 1, capacity=len(mine)))
    lens, later = int32([0, 0], "cuda"), int32([0, 0], "cuda")
    out = torch.empty_like(q)

    def step(**options: Any) -> Any:
        return attention.run(q, keys, values, lens, later_keys=later, window=window, sinks=sinks, **options)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(out=out)
    for whole in ((64, 1), (CAPACITY, 33_000), (0, CAPACITY - 1), (32_769, 32_770)):
        lens.copy_(int32([min(max(n - mine.start, 0), len(mine)) for n in whole]))
        later.copy_(int32([max(n - mine.stop, 0) for n in whole]))
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager, lse = step(return_lse=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out, eager), f"{whole}: replay and eager differ"
        want = decode_attention(q, k, v, int32(whole, "cuda"), window=window, sinks=sinks, return_lse=True)
        assert_parity((out, lse), want)
        first = out.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, out), f"{whole}: rank {rank} has another answer than rank 0"
    torch.cuda.synchronize()


def test_a_graph_holds_the_exchange(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(graph_rank, (RANKS, str(tmp_path)), nprocs=RANKS)


def test_the_bench_runs() -> None:
    options = rung_options("cuda", "60000", "16/4", "bf16")
    result = run_ranks(options, RANKS, record.provenance(), command="test")
    (row,) = result["rows"]
    assert row["passed"] and set(row["us"]) == {"splitkv", "part", f"splitkv x{RANKS}"} and result["gpu"], row
