"""A run of `splitkv bench attention` on small cases: rows as the contract names them, and what costs a speed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from splitkv.bench import attention, peers
from splitkv.bench.attention_cases import AttentionCase
from splitkv.bench.attention_data import CaseTensors
from splitkv.bench.contender import OURS, Contender
from splitkv.bench.roofline import Bandwidth
from splitkv.bench.timing import Call, Timing, TimingRejected

CASES = (
    AttentionCase("table", 1, 4, 2, 64, 1000, "f16"),
    AttentionCase("ragged", 3, 4, 2, 64, 300, "bf16", page_size=16, lens=(300, 5, 77)),
    AttentionCase("queries", 1, 4, 2, 64, 500, "f32", q_len=4),
    AttentionCase("table", 1, 4, 2, 64, 600, "fp8_e4m3"),
    AttentionCase("cost-length", 1, 4, 2, 64, 1000, "f16"),
)
SHAPE = ("batch", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "seq_len", "kv_dtype", "page_size", "q_len")
CONTRACT = {"case", *SHAPE, "floor_us", "us", "err"}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sweep of a gigabyte, little memory to fill, and few samples."""
    monkeypatch.setattr(attention, "read_bandwidth", lambda device: Bandwidth(1e12, "assumed", 1, 1))
    monkeypatch.setattr(attention, "memory_budget", lambda device: 8 << 20)
    monkeypatch.setattr(attention, "SAMPLE_S", {"cpu": 0.01})


def run(*contenders: Contender, cases: tuple[AttentionCase, ...] = CASES[:1], limit_s: float | None = None) -> Any:
    chosen = contenders or peers.choose_contenders("cpu")
    options = attention.AttentionOptions("cpu", cases, chosen, limit_s=limit_s)
    return attention.run_attention(options, {"commit": "unknown", "dirty": "unknown"}, command="test")


def peer(name: str, make: Callable[[CaseTensors], Call]) -> Contender:
    return Contender(name, "made by this test", lambda case: None, make, (), ("cpu",))


OURS_CONTENDER = peers.CONTENDERS[OURS]


def test_rows_have_the_fields_of_the_contract_and_every_case_passes() -> None:
    result = run(cases=CASES)
    assert [row["case"] for row in result["rows"]] == [case.name for case in CASES]
    for row in result["rows"]:
        assert set(row) >= CONTRACT and row["passed"] and row["us"][OURS] > 0, row["case"]
        assert row["err"][OURS] < 3e-3
        assert row["goal_us"] == pytest.approx(1.25 * row["floor_us"])  # 80 % of the bandwidth
    assert result["failed_rows"] == 0 and result["schema"] == "splitkv.attention.v1"
    assert result["rows"][1]["lens"] == [300, 5, 77]


def test_a_cpu_floor_is_timed_beside_the_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the bytes that are read, however wrong the bandwidth of the run is; a set holds a few keys more."""
    times = {attention.READS[0]: 50.0, attention.READS[1]: 40.0, OURS: 60.0}

    def measured(calls: dict[str, Call], *args: Any, **options: Any) -> dict[str, Timing]:
        for call in calls.values():
            call(0)
        return {name: Timing(times[name], times[name], times[name], 5, 1) for name in calls}

    monkeypatch.setattr(attention, "measure", measured)
    (row,) = run(OURS_CONTENDER)["rows"]
    assert row["floor_us"] == pytest.approx(40.0 * 1000 / 1024) and row["us"] == {OURS: 60.0}


def test_a_case_of_threads_runs_with_them_and_leaves_the_rest_alone() -> None:
    seen = []

    def make(tensors: CaseTensors) -> Call:
        ours = OURS_CONTENDER.make(tensors)

        def call(i: int) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return ours(i)

        return call

    before = torch.get_num_threads()
    case = replace(CASES[0], threads=3)
    result = run(replace(OURS_CONTENDER, make=make), cases=(case, CASES[0]))
    assert [row["threads"] for row in result["rows"]] == [3, before] and torch.get_num_threads() == before
    assert set(seen) == {3, before} and seen[0] == 3


def test_a_contender_that_cannot_is_named_with_its_reason() -> None:
    result = run(cases=CASES)
    reasons = [row["not_run"].get("sdpa") for row in result["rows"]]
    assert reasons[0] is None and "sdpa" in result["rows"][0]["us"]
    assert reasons[1] == "does not run rows of different lengths"
    assert reasons[2] is None
    assert reasons[3] == "does not read fp8"
    assert set(result["rows"][4]["us"]) == {OURS} and result["rows"][4]["not_run"] == {}  # a case of cost


def test_a_peer_that_raises_costs_only_itself() -> None:
    def fails(tensors: CaseTensors) -> Call:
        raise NotImplementedError("no such kernel\nfor this shape")

    result = run(OURS_CONTENDER, peer("broken", fails), peers.CONTENDERS["sdpa"])
    (row,) = result["rows"]
    assert row["not_run"] == {"broken": "NotImplementedError: no such kernel for this shape"}
    assert set(row["us"]) == {OURS, "sdpa"} and result["failed_rows"] == 0


@pytest.mark.parametrize("factor", [1.2, float("nan")])
def test_a_wrong_peer_has_an_error_and_no_speed(factor: float) -> None:
    def wrong(tensors: CaseTensors) -> Call:
        right = OURS_CONTENDER.make(tensors)
        return lambda i: right(i) * factor

    (row,) = run(OURS_CONTENDER, peer("wrong", wrong))["rows"]
    assert "wrong" in row["err"] and "wrong" not in row["us"]
    assert "against float64 is over" in row["not_run"]["wrong"]


def test_ours_wrong_is_a_failed_row() -> None:
    def wrong(tensors: CaseTensors) -> Call:
        right = OURS_CONTENDER.make(tensors)
        return lambda i: right(i) + 0.01

    result = run(replace(OURS_CONTENDER, make=wrong), peers.CONTENDERS["sdpa"])
    (row,) = result["rows"]
    assert result["failed_rows"] == 1 and not row["passed"] and OURS not in row["us"]
    assert "against float64 is over" in row["not_run"][OURS]


def test_ours_is_held_to_less_error_than_a_peer() -> None:
    """A bf16 error three times PyTorch's passes for a peer (four) and not for us (two)."""

    def rough(tensors: CaseTensors) -> Call:
        exact = tensors.exact()
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        noise *= 4 * 2.3e-3 * exact.norm() / noise.norm()
        out = (exact + noise).to(tensors.q.dtype)
        return lambda i: out

    case = AttentionCase("table", 1, 4, 2, 64, 1000, "bf16")
    (row,) = run(OURS_CONTENDER, peer("rough", rough), cases=(case,))["rows"]
    assert "rough" in row["us"]
    (row,) = run(replace(OURS_CONTENDER, make=rough), cases=(case,))["rows"]
    assert OURS not in row["us"]


def test_a_rejected_timing_costs_only_its_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(contenders: dict[str, Call], *arguments: Any, **options: Any) -> dict[str, Timing]:
        if "sdpa" in contenders:
            raise TimingRejected("sdpa: too wide", {"sdpa": "too wide"})
        return {name: Timing(5.0, 4.9, 5.1, 10, 1) for name in contenders}

    monkeypatch.setattr(attention, "measure", measure)
    (row,) = run()["rows"]
    assert row["us"] == {OURS: 5.0} and row["not_run"]["sdpa"] == "timing rejected: too wide"


def test_a_row_says_how_many_distinct_bytes_its_sets_hold() -> None:
    """CASE-11: counted from the keys of every set, and never one set read again and again."""
    result = run(cases=CASES)
    for row, case in zip(result["rows"], CASES, strict=True):
        assert row["case"] == case.name and row["sets"] >= 2
        assert row["distinct_bytes"] == row["sets"] * case.set_keys * case.key_bytes


def test_after_the_time_limit_cases_are_skipped_and_named() -> None:
    result = run(cases=CASES, limit_s=0.0)
    assert result["rows"] == []
    assert {skip["case"] for skip in result["skipped"]} == {case.name for case in CASES}


def test_a_case_larger_than_the_memory_is_skipped_with_its_size() -> None:
    large = AttentionCase("table", 1, 4, 2, 64, 100_000, "f16")
    result = run(cases=(large, CASES[0]))
    assert [row["case"] for row in result["rows"]] == [CASES[0].name]
    assert result["skipped"][0]["reason"].startswith("one KV set takes 0.05 GB")


def test_a_case_that_raises_is_a_failure_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention._run_case

    def short_of_memory(tensors: CaseTensors, *arguments: Any) -> dict[str, Any]:
        if tensors.case.group == "ragged":
            raise RuntimeError("out of memory")
        return real(tensors, *arguments)

    monkeypatch.setattr(attention, "_run_case", short_of_memory)
    result = run(cases=CASES)
    assert len(result["rows"]) == len(CASES) - 1 and result["failed_rows"] == 1
    assert [skip["reason"] for skip in result["skipped"]] == ["RuntimeError: out of memory"]


def test_a_broken_gpu_ends_the_run_with_the_rows_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention._run_case

    def breaks_later(tensors: CaseTensors, *arguments: Any) -> dict[str, Any]:
        if tensors.case.group == "queries":
            raise attention.DeviceBroken("the GPU stopped working after: illegal address")
        return real(tensors, *arguments)

    monkeypatch.setattr(attention, "_run_case", breaks_later)
    result = run(cases=CASES)
    assert {row["group"] for row in result["rows"]} == {"table", "cost-length", "ragged"}
    assert {skip["group"] for skip in result["skipped"]} == {"queries", "table"}
    assert all("illegal address" in skip["reason"] for skip in result["skipped"])


def test_peers_that_are_not_installed_say_so() -> None:
    case = AttentionCase("table", 1, 4, 2, 64, 1000, "f16")
    for name, contender in peers.CONTENDERS.items():
        if name.startswith(("fa3", "flashinfer")):
            reason = contender.unable(case)
            assert reason is None or reason.endswith("is not installed"), name


def test_contenders_are_chosen_by_name_and_ours_always_runs() -> None:
    assert [contender.name for contender in peers.choose_contenders("cpu")] == [OURS, "sdpa", "llama.cpp"]
    assert [contender.name for contender in peers.choose_contenders("cuda", "flex")] == [OURS, "flex"]
    with pytest.raises(
        ValueError, match="with: expected some of splitkv, sdpa, llama.cpp, joined by commas, got 'flex'"
    ):
        peers.choose_contenders("cpu", "flex")
