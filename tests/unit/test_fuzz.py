"""The fuzzer: cases follow from (seed, index), its float64 is the oracle's, and it finds what is planted."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import splitkv
from splitkv.bench import record
from splitkv.bench.fuzz import draw, run
from splitkv.bench.fuzz.cases import Case, Geometry
from splitkv.bench.fuzz.checks import check, finish, start
from splitkv.bench.fuzz.draw import draw_case
from splitkv.bench.fuzz.oracle import PLAIN_FACTOR, solve, unit_roundoff
from splitkv.bench.fuzz.run import FuzzOptions, fuzz_options, run_fuzz, run_task, shrunk
from splitkv.bench.fuzz.tensors import DTYPES, Call, layouts, make_values
from splitkv.reference import twin_attention

right = splitkv.decode_attention
CPU = fuzz_options("cpu", cases=60, seed=3, jobs=1)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [None, 7])
def test_a_case_follows_from_seed_and_index(pool: int | None) -> None:
    cases = [draw_case(5, index, pool) for index in range(40)]
    assert cases == [draw_case(5, index, pool) for index in range(40)]
    assert len(set(cases)) == 40 and draw_case(6, 0, pool) != cases[0]
    assert all(Case.from_json(case.to_json()) == case for case in cases)


def test_pooled_cases_do_not_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [draw_case(5, index, 30) for index in range(30)]
    for backend in ("triton", "cuda"):
        monkeypatch.setenv("SPLITKV_BACKEND", backend)
        draw._pooled.cache_clear()
        assert [draw_case(5, index, 30) for index in range(30)] == cases


def test_the_whole_argument_space_is_drawn() -> None:
    cases = [draw_case(0, index) for index in range(3000)]
    features = Counter(feature for case in cases for feature in case.features())
    assert min(features.values()) >= 20, features
    assert {(case.q_dtype, case.kv_dtype) for case in cases} == draw.DTYPES.keys()
    assert {case.queries for case in cases} >= {*range(1, 17)} and {case.q_len for case in cases} >= {0, 1}
    assert {case.base.page_size for case in cases} >= {None, 1, 16, 64, 128, 256, 528, 784, 1056}
    assert {case.group_size for case in cases} >= {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64}
    assert (576, 512) in {(case.head_dim, case.v_head_dim) for case in cases}
    assert {case.mask for case in cases} == {None, "bool", "f32", "f16", "bf16"}
    assert {case.k_scale for case in cases} == {None, "number", "0-d", "one", "head"}
    assert {page for case in cases for *_, page in case.absent} >= {-1, 2**30}
    assert max(case.longest for case in cases) > 3000 and any(case.base.capacity == 0 for case in cases)


def test_cases_of_one_pooled_shape_need_one_compilation() -> None:
    """A first and a second call each have one class of what Triton compiles for."""
    for member in range(4):
        cases = [draw_case(1, member + 9 * i, 9) for i in range(30)]
        assert len({(c.q_dtype, c.kv_dtype, c.head_dim, c.group_size, c.q_len, c.policy) for c in cases}) == 1
        alone = [c for c in cases if not c.shared]  # whose stride of 0 may be a class of its own
        assert len({draw._launch_class(c, c.base) for c in alone}) == 1
        twins = {draw._launch_class(c, c.twin) for c in alone if c.twin is not None}
        assert len(twins) <= 1 if draw._any_layout(cases[0]) else len(twins) >= 1
        assert len({c.lengths for c in cases}) > 10


# ---- buffers and oracle ------------------------------------------------------------------------------------


def test_outputs_and_scratch_lie_between_guards() -> None:
    case = Case(1, "f32", "f16", 2, 2, 32, 32, 0, (700,), policy="pinned(4)", base=Geometry(1, 700))
    started = start(case, "cpu", "cpu")
    assert started.base is not None and started.base.lse is not None
    call, arena = started.base.call, started.base.call.arena
    assert call.free == []  # out, lse and workspace were all asked for, and all come from the arena
    out, lse = call.view(arena, "out"), call.view(arena, "lse")
    assert torch.equal(out, started.base.out) and torch.equal(lse, started.base.lse)
    scratch = call.places["workspace"]
    assert not torch.equal(arena[scratch : scratch + 64], call.before[scratch : scratch + 64])
    spans = sorted((call.places[name], call.layouts[name].span_bytes) for name in call.layouts)
    assert all(a + size + 512 <= b for (a, size), (b, _) in pairwise(spans))


def test_everything_but_valid_keys_is_poison() -> None:
    case = Case(2, "f32", "f32", 2, 1, 16, 16, 0, (5, 0, 9), window=6, base=Geometry(3, 48, 16, "hnd", (16, 0, 16)))
    call = Call(case, make_values(case), case.base, (0, 1, 2), 0, "cpu")
    for name in ("k_cache", "v_cache"):
        pool = call.view(call.arena, name)
        assert int(pool.isfinite().all(-1).sum()) == 2 * (5 + 0 + 6)  # heads x keys that a window of 6 leaves
    table, pages = call.arguments["block_table"], call.arguments["k_cache"].shape[0]
    assert bool(((table[:, 1:] <= 0) | (table[:, 1:] >= pages)).all())


def test_the_oracle_is_reference_attention() -> None:
    for index in range(120):
        case = draw_case(11, index)
        finding = check(case, "cpu", "cpu", with_reference=True)
        assert finding.failures == [] and finding.refusal is None, case.to_json()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_bound_is_within_the_contract(dtype: str) -> None:
    """Twice the error of plain PyTorch in that dtype and one rounding, over some rows of ordinary attention."""
    geometry = Geometry(8, 600)
    case = Case(4, dtype, dtype, 2, 4, 64, 64, 0, (600, 500, 400, 300, 200, 100, 50, 20), base=geometry)
    values, truth = make_values(case), solve(case, make_values(case))
    for row, length in enumerate(case.lengths):
        q, k, v = values.q[row], values.k[row : row + 1, :length], values.v[row : row + 1, :length]
        q, k, v = q[None].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        plain = torch.softmax(q.unflatten(1, (2, 4)) @ k[:, :, None].transpose(-1, -2) * 64**-0.5, -1) @ v[:, :, None]
        exact = truth.out[row].reshape(plain.shape)
        rounding = (exact.to(DTYPES[dtype]).double() - exact).norm()
        assert truth.row_bound[row] <= PLAIN_FACTOR * (plain.double() - exact).norm() + rounding
        assert truth.row_bound[row] <= 4 * unit_roundoff(dtype) * exact.norm() + rounding


# ---- planted faults ----------------------------------------------------------------------------------------


def rescale_dropped(
    q: Any, out: Any = None, policy: Any = None, backend: Any = None, workspace: Any = None, **o: Any
) -> Any:
    for name in ("k_scale", "v_scale"):
        if isinstance(o.get(name), torch.Tensor) and o[name].numel() == 1:
            o[name] = o[name].reshape(())
    result = twin_attention(q, **o, split_len=64, drop_rescale=True)
    first, *rest = result if isinstance(result, tuple) else (result,)
    first = first.to(q.dtype)
    return (first, *rest) if rest else first


def wrong_stride(k_cache: Any, **o: Any) -> Any:
    """The block stride worked out from the others, as if K stood alone."""
    strides = (k_cache.shape[1] * k_cache.shape[2] * k_cache.shape[3], *k_cache.stride()[1:])
    if k_cache.stride(0) > strides[0]:
        k_cache = k_cache.as_strided(k_cache.shape, strides, k_cache.storage_offset())
    return right(k_cache=k_cache, **o)


def window_off_by_one(window: Any, **o: Any) -> Any:
    return right(window=window and window + 1, **o)


def scales_swapped(k_scale: Any = None, v_scale: Any = None, **o: Any) -> Any:
    return right(k_scale=v_scale, v_scale=k_scale, **o)


def page_unchecked(k_cache: Any, block_table: Any = None, **o: Any) -> Any:
    if block_table is not None:
        block_table = block_table.clamp(0, k_cache.shape[0] - 1)
    return right(k_cache=k_cache, block_table=block_table, **o)


def one_key_too_many(k_cache: Any, seq_lens: Any, block_table: Any = None, **o: Any) -> Any:
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    longer = min(seq_lens + 1, capacity) if isinstance(seq_lens, int) else (seq_lens.clamp(0, capacity - 1) + 1)
    return right(k_cache=k_cache, seq_lens=longer, block_table=block_table, **o)


def writes_past_out(**o: Any) -> Any:
    result = right(**o)
    out = result[0] if isinstance(result, tuple) else result
    last = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True))
    out.as_strided((1,), (1,), out.storage_offset() + last + 1).fill_(1.0)
    return result


def cleans_the_cache(v_cache: Any, **o: Any) -> Any:
    if v_cache.dtype.itemsize > 1:
        v_cache.nan_to_num_()
    return right(v_cache=v_cache, **o)


def sink_counted_twice(sinks: Any = None, **o: Any) -> Any:
    return right(sinks=sinks if sinks is None else sinks + math.log(2), **o)


def lse_in_base_two(**o: Any) -> Any:
    result = right(**o)
    return (result[0], result[1] / math.log(2)) if isinstance(result, tuple) else result


def starts_ignored(starts: Any = None, **o: Any) -> Any:
    return right(**o)


def splits_read_the_batch(q: Any, policy: str, **o: Any) -> Any:
    return right(q=q, policy=f"pinned({q.shape[0]})" if policy == "auto" else policy, **o)


def second_query_sees_too_much(q: Any, **o: Any) -> Any:
    result = right(q=q, **o)
    out = result[0] if isinstance(result, tuple) else result
    if q.ndim == 4 and q.shape[1] > 1:
        out[:, 0] = right(q=q[:, 1:], **{**o, "out": None, "return_lse": False, "workspace": None, "mask": None})[:, 0]
    return result


def legal_is_refused(**o: Any) -> Any:
    if o.get("softcap"):
        raise ValueError("softcap: expected none, got one")
    return right(**o)


FAULTS = {
    rescale_dropped: {"out"},
    wrong_stride: {"out"},
    window_off_by_one: {"out", "lse"},
    scales_swapped: {"out", "lse"},
    page_unchecked: {"out"},
    one_key_too_many: {"out", "lse"},
    writes_past_out: {"first call: guard"},
    cleans_the_cache: {"first call: inputs"},
    sink_counted_twice: {"lse"},
    lse_in_base_two: {"lse"},
    starts_ignored: {"out"},
    splits_read_the_batch: {"bytes"},
    second_query_sees_too_much: {"out"},
    legal_is_refused: {"first call: ValueError"},
}


def first_failing(cases: int = 400) -> tuple[Case, list[str]]:
    for index in range(cases):
        case = draw_case(2, index)
        failures = check(case, "cpu", "cpu").failures
        if failures:
            return case, failures
    pytest.fail(f"{cases} cases found nothing")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode_attention", fault)
    found: set[str] = set()
    for index in range(400):
        for text in check(draw_case(2, index), "cpu", "cpu").failures:
            found.add(":".join(text.split(":")[: 2 if " call:" in text else 1]))
        if FAULTS[fault] <= found:
            return
    pytest.fail(f"expected {FAULTS[fault]}, found {found}")


def test_a_failure_shrinks_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode_attention", window_off_by_one)
    case, failures = first_failing()
    small = shrunk(case, failures, CPU)
    assert check(small, "cpu", "cpu").failures
    assert small.base.batch == 1 and small.longest <= 4 and small.window and small.twin is None
    assert (small.num_q_heads, small.head_dim, small.q_len) == (1, 16, 0)
    assert (small.mask, small.sinks, small.softcap, small.k_scale) == (None, None, None, None)
    monkeypatch.undo()
    assert check(small, "cpu", "cpu").failures == []


def test_a_byte_fault_shrinks_with_its_second_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode_attention", splits_read_the_batch)
    case, failures = first_failing()
    small = shrunk(case, failures, CPU)
    assert small.twin is not None and small.twin.batch != small.base.batch
    assert any(text.startswith("bytes") for text in check(small, "cpu", "cpu").failures)


# ---- runs --------------------------------------------------------------------------------------------------


def result_of(options: FuzzOptions) -> dict[str, Any]:
    return run_fuzz(options, record.provenance(), command="test")


def test_a_run_counts_what_it_did() -> None:
    result = result_of(CPU)
    assert result["passed"] and result["failing"] == 0 and result["failures"] == []
    assert result["cases"] == result["computed"] == 60 == sum(row["cases"] for row in result["rows"])
    assert 40 <= result["second_layouts_equal"] <= 60 and result["refused"] == 0
    assert result["held_against_reference_attention"] == 2  # cases 0 and 50
    assert all(0 < row["worst_lse_over_bound"] <= 1 for row in result["rows"] if row["cases"] > 5)
    assert result["features"]["paged"] + result["features"]["contiguous"] == 60


def test_processes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TASK_CASES", 20)
    one, two = (result_of(replace(CPU, jobs=jobs)) for jobs in (1, 2))
    for name in ("cases", "computed", "features", "rows", "refusals", "passed"):
        assert one[name] == two[name], name


def test_refusals_are_counted_and_a_run_of_them_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(q: torch.Tensor, **_: Any) -> None:
        raise splitkv.UnsupportedError(f"q: supported q_len is 1 to 16, got {q.shape[0]} at {q.data_ptr():#x}")

    monkeypatch.setattr(splitkv, "decode_attention", refuse)
    result = result_of(replace(CPU, cases=10))
    assert result["refusals"] == {"q: supported q_len is N to N, got N at N": 10}
    assert (result["computed"], result["failing"], result["passed"]) == (0, 0, False)


def test_failures_come_with_a_command_and_a_smaller_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode_attention", sink_counted_twice)
    result = result_of(CPU)
    failure = result["failures"][0]
    assert not result["passed"] and result["failing"] >= 5
    index = failure["index"]
    assert failure["repro"] == f"splitkv bench fuzz --backend cpu --seed 3 --shapes 0 --only {index} --shrink"
    assert Case.from_json(failure["case"]) == draw_case(3, index)
    assert check(Case.from_json(failure["shrunk"]), "cpu", "cpu").failures


class DyingOptions(FuzzOptions):
    """A process that draws case 7 dies, as one does at a fault in native code."""

    def draw(self, index: int) -> Case:
        if index == 7 and run._current is not None:
            os._exit(1)
        return super().draw(index)


def test_a_process_that_dies_is_a_failure_with_its_case() -> None:
    options = DyingOptions("cpu", "cpu", cases=20, seed=3, jobs=2, shapes=0)
    result = result_of(options)
    assert not result["passed"] and result["not_run"] > 0
    assert 7 in [failure["index"] for failure in result["failures"]]


def test_an_error_of_the_gpu_ends_its_process_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_lost", [])

    def lost(started: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(run, "finish", lost)
    tally = run_task(CPU, math.inf, range(5))
    assert (tally.failing, tally.not_run, tally.cases) == (1, 4, 0)
    assert tally.failures[0]["failures"] == ["one of cases [0]: CUDA error: an illegal memory access was encountered"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backend": "tpu"}, "backend: expected one of auto, cpu, cuda, triton, rowwise, got 'tpu'"),
        ({"cases": 0}, "cases: expected at least 1, got 0"),
        ({"jobs": 0}, "jobs: expected at least 1, got 0"),
        ({"shapes": -1}, "shapes: expected at least 0, got -1"),
    ],
)
def test_bad_options_are_named(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fuzz_options(**asked)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seed":1}', '{"base":{"batch":1}}'])
def test_a_bad_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case: expected the JSON object"):
        Case.from_json(text)


def test_every_layout_holds_its_tensor() -> None:
    for index in range(200):
        case = draw_case(8, index)
        for name, layout in layouts(case, case.base).items():
            assert layout.span_bytes >= math.prod(layout.sizes) * layout.dtype.itemsize or 0 in layout.strides, name


def test_finish_is_safe_where_nothing_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitkv, "decode_attention", legal_is_refused)
    case = Case(1, "f32", "f32", 1, 1, 16, 16, 0, (3,), softcap=1.0, base=Geometry(1, 3))
    finding = finish(start(case, "cpu", "cpu"))
    assert finding.failures == ["first call: ValueError: softcap: expected none, got one"] and not finding.ratios


def test_after_the_limit_no_case_begins_and_the_run_has_not_passed() -> None:
    result = result_of(replace(CPU, cases=9, limit_s=1e-9))
    assert (result["cases"], result["not_run"], result["passed"]) == (0, 9, False)
    assert result_of(replace(CPU, cases=9, limit_s=600.0))["not_run"] == 0
