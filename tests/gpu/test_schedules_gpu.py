"""Schedules on a GPU: none changes a byte, threads launch by themselves, and a run of `splitkv bench tune` holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import assert_same, int32, make_inputs

from splitkv import DecodeAttention, DecodeProblem, decode_attention
from splitkv.bench import record
from splitkv.bench.tune import TuneOptions, run_tune
from splitkv.bench.tune_ranges import RANGES, variations
from splitkv.tuning import DEFAULTS, Table

LENS = [8192, 1, 0, 300, 5000, 64, 4096, 2048, 777, 8191, 65, 129] * 4
CASES = {
    "cuda bf16": ("cuda", (32, 8), 128, torch.bfloat16, torch.bfloat16),
    "cuda fp8": ("cuda", (16, 4), 256, torch.bfloat16, torch.float8_e4m3fn),
    "cuda fp8, wide tiles": ("cuda", (32, 8), 128, torch.bfloat16, torch.float8_e4m3fn),
    "cuda f32": ("cuda", (24, 4), 128, torch.float32, torch.float32),
    "triton f32": ("triton", (16, 1), 128, torch.float32, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_no_schedule_changes_a_byte(name: str) -> None:
    backend, heads, head_dim, dtype, kv_dtype = CASES[name]
    q, k, v = make_inputs(len(LENS), *heads, head_dim, 8192, dtype=dtype, kv_dtype=kv_dtype, device="cuda")
    lens = int32(LENS, "cuda")
    names = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float8_e4m3fn: "fp8_e4m3"}
    problem = DecodeProblem(
        len(LENS), *heads, head_dim, capacity=8192, q_dtype=names[dtype], kv_dtype=names[kv_dtype]
    )  # fmt: skip
    schedules = [DEFAULTS[backend], *variations(DEFAULTS[backend], backend)]

    def run(schedule: Any) -> Any:
        attention = DecodeAttention(problem, device="cuda", schedule=schedule)
        assert attention.plan.backend == backend
        return attention.run(q, k, v, lens, return_lse=True)

    with ThreadPoolExecutor(8 if backend == "cuda" else 1) as pool:  # they compile side by side
        default, *others = pool.map(run, schedules)
    torch.cuda.synchronize()
    for schedule, other in zip(schedules[1:], others, strict=True):
        assert_same(other, default, str(schedule))


def test_threads_launch_by_themselves() -> None:
    """A thread that PyTorch has given no context yet, and many that share one prepared call and one stream."""
    q, k, v = make_inputs(8, 16, 4, 256, 4096, dtype=torch.bfloat16, device="cuda")
    wanted = [decode_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], 4000) for i in range(8)]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            got = decode_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], 4000)
            if not torch.equal(got, wanted[i]):  # type: ignore[arg-type]
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_first_launch_may_be_in_a_new_thread() -> None:
    q, k, v = make_inputs(1, 8, 4, 112, 512, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(decode_attention(q, k, v, 500)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], decode_attention(q, k, v, 500))  # type: ignore[arg-type]


def test_a_tuning_run_is_a_table() -> None:
    ranges = [entry for entry in RANGES if (entry.head_dim, entry.batch) == ((16, 64), (33, 65_535))]
    result = run_tune(TuneOptions("cuda", tuple(ranges)), record.provenance(), command="test")
    (row,) = result["rows"]
    assert row["failures"] == [] and result["failed_rows"] == 0
    (times,) = row["first_us"].values()
    assert times["default"] > 0 and len(times) > 4
    found = Table.parse("mine", result)
    assert len(found.entries) == len(result["entries"]) <= 1
