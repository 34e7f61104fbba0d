"""A few hundred fuzz cases of a handful of shapes on every GPU backend, so that a run of 100,000 starts clean."""

from __future__ import annotations

import pytest

import splitkv
from splitkv.bench import record
from splitkv.bench.fuzz.cases import Case, Geometry
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


def test_a_large_case_is_solved_on_the_gpu_and_passes() -> None:
    base = Geometry(2, 8192, 64, order="hnd", fill="bytes", own_workspace=True)
    twin = Geometry(5, 8000, order="interleaved", fill="inf")
    case = Case(
        5, "bf16", "bf16", 8, 4, 128, 128, 4, (8000, 3000), window=7000, sinks="mixed", starts=(0, 17), mask="f16",
        k_scale="head", v_scale="0-d", base=base, twin=twin, twin_rows=(1, 0, 0, 1, 1),
    )  # fmt: skip
    finding = check(case, "triton", "cuda", with_reference=True)
    assert finding.failures == [] and finding.twin_checked
