"""A few hundred fuzz cases of a handful of shapes on every GPU backend, so that a run of 100,000 starts clean."""

from __future__ import annotations

from dataclasses import replace

import pytest

import splitkv
from splitkv.bench import record
from splitkv.bench.fuzz.checks import check
from splitkv.bench.fuzz.draw import draw_case
from splitkv.bench.fuzz.oracle import solve
from splitkv.bench.fuzz.run import fuzz_options, run_fuzz
from splitkv.bench.fuzz.tensors import make_values

GPU_BACKENDS = [name for name in splitkv.attention.LAUNCHERS if name != "cpu"]


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_few_hundred_cases(backend: str) -> None:
    options = fuzz_options(backend, cases=240, seed=1, jobs=1, shapes=8)
    result = run_fuzz(options, record.provenance(), command="test")
    assert result["failures"] == [] and result["not_run"] == 0
    assert result["computed"] + result["refused"] == 240 and result["computed"] > 0
    assert result["gpu"] and result["held_against_reference_attention"] > 0


def test_processes_share_the_gpu() -> None:
    options = fuzz_options("triton", cases=60, seed=1, jobs=2, shapes=3)
    result = run_fuzz(options, record.provenance(), command="test")
    assert result["passed"] and result["failures"] == []


def test_the_oracle_is_the_same_on_the_gpu() -> None:
    for index in range(20):
        case = draw_case(3, index)
        here, there = (solve(case, make_values(case), device) for device in ("cpu", "cuda"))
        assert (here.out - there.out).abs().max() <= 1e-12
        empty = here.lse.isinf()
        assert bool((there.lse.isinf() == empty).all())
        assert (here.lse - there.lse).masked_fill(empty, 0.0).abs().max() <= 1e-11


def test_large_cases_are_solved_on_the_gpu_and_pass() -> None:
    case = replace(draw_case(1, 0, 8), shared=False, absent=(), starts=None, twin=None, twin_rows=())
    batch, capacity = 2, max(case.base.page_size or 1, 1) * 4000
    case = replace(
        case, base=replace(case.base, batch=batch, capacity=min(capacity, 8192), lens="int32", page_size=None)
    )
    finding = check(replace(case, lengths=(case.base.capacity, 3000)), "triton", "cuda")
    assert finding.failures == []
