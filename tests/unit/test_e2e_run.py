"""`splitkv bench e2e` from options to the result file's object, with a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from splitkv.bench import (
    e2e,
    e2e_llamacpp,
    e2e_peers,
    e2e_rows,
    e2e_source,
    e2e_timing,
    e2e_transformers,
    machine,
    record,
)
from splitkv.bench.e2e import E2eOptions, run_e2e
from splitkv.bench.e2e_source import open_source
from splitkv.bench.failures import DeviceBroken
from splitkv.bench.roofline import Bandwidth
from splitkv.bench.summary import OURS, UNSPLIT
from splitkv.models.config import DecoderConfig
from splitkv.models.decoder import Decoder
from splitkv.models.gguf_export import write_gguf

TINY = {
    "model_type": "qwen3_5_text", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 600,
}  # fmt: skip
BANDWIDTH = Bandwidth(1e9, "made up", 1 << 20, 1)
SOURCE = {"commit": record.UNKNOWN, "dirty": record.UNKNOWN, "commit_source": record.UNKNOWN}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up bandwidth, and times that another process on this machine cannot spoil."""
    monkeypatch.setattr(e2e, "read_bandwidth", lambda device: BANDWIDTH)
    monkeypatch.setattr(e2e_rows, "step_times", lambda loop, begin, *rest: [_stepped(loop, begin)] * 3)


def _stepped(loop: Any, begin: Any) -> float:
    begin()
    for _ in range(e2e_timing.run_length("cpu")):
        loop.step()
    return 2000.0


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY))
    return str(file)


def run(*names: str, **changes: Any) -> dict[str, Any]:
    """The whole of it; most tests ask for less."""
    given = {"depths": (24, 300), "kv_dtypes": ("f32", "f16"), "batches": (1, 2), "prefill": 24, **changes}
    return run_e2e(E2eOptions("cpu", names, **given), SOURCE, command="test")


def test_every_depth_dtype_and_batch_has_a_row_of_each_contender(tiny: str) -> None:
    result = run(tiny)
    keys = [(r["batch"], r["kv_dtype"], r["depth"], r["contender"]) for r in result["rows"]]
    assert keys == [(b, kv, d, c) for b in (1, 2) for kv in ("f32", "f16") for d in (24, 300) for c in (OURS, UNSPLIT)]
    assert result["failed_rows"] == 0 and result["not_measured"] == []
    for row in result["rows"]:
        assert row["passed"] and row["tokens_identical"] and row["repeats_tokens"] and row["logits_finite"]
        assert row["cache"] == ("prefilled" if row["depth"] == 24 else "filled") and row["distinct_tokens"] > 2
        assert (row["ms_per_token"], row["tokens_s"]) == (2.0, 500.0 * row["batch"])
    splits = {(r["contender"], r["depth"]): r["num_splits"] for r in result["rows"]}
    assert splits[UNSPLIT, 300] == 1 < splits[OURS, 300]
    assert json.loads(record.to_json(result))["schema"] == "splitkv.e2e.v1"


def test_the_floor_is_the_bytes_of_a_step_over_the_bandwidth(tiny: str) -> None:
    result = run(tiny, kv_dtypes=("f16",), batches=(2,), depths=(300,))
    row, facts = result["rows"][0], result["geometries"][tiny]
    attention, linear, batch, middle = 1, 3, 2, 300 + 5 // 2
    kv = attention * batch * middle * 2 * 2 * 16 * 2  # K and V, 2 heads of 16 in f16
    states = linear * batch * (2 * 16 * 16 * 4 + 4 * (2 * 2 * 16 + 2 * 16) * 4)  # memory, and 4 inputs of 96 channels
    assert row["bytes_per_step"]["kv_and_states"] == kv + 2 * states
    assert row["bytes_per_step"]["embedding_rows"] == batch * 64 * 4
    embedding = 500 * 64 * 4
    assert row["bytes_per_step"]["weights"] == facts["weights_bytes"] - embedding
    total = sum(row["bytes_per_step"].values())
    assert row["floor_ms"] == pytest.approx(total / 1e9 * 1e3)
    assert row["percent_of_floor"] == pytest.approx(100 * row["floor_ms"] / 2.0)


def test_kv_parity_grows_as_digits_are_dropped(tiny: str) -> None:
    result = run(tiny, kv_dtypes=("f32", "f16", "bf16", "fp8_e4m3"), batches=(2, 3), depths=(300,))
    errors = {entry["kv_dtype"]: entry["relative"] for entry in result["kv_parity"]}
    assert [entry["batch"] for entry in result["kv_parity"]] == [2, 2, 2]
    assert 0 < errors["f16"] < errors["bf16"] < errors["fp8_e4m3"] < 0.5 and errors["f16"] < 1e-3


def test_the_profile_is_of_the_least_and_the_greatest_depth(tiny: str) -> None:
    result = run(tiny, depths=(24, 100, 300), profile=True, kv_dtypes=("f16",), batches=(1,))
    assert [profile["depth"] for profile in result["profiles"]] == [24, 300]
    for profile in result["profiles"]:
        kernels = profile["kernels"]
        assert 0 < len(kernels) <= e2e_timing.TOP_KERNELS and profile["step_us"] == 2000
        assert [k["added_us"] for k in kernels] == sorted((k["added_us"] for k in kernels), reverse=True)
        total = profile["other_us"] + sum(kernel["added_us"] for kernel in kernels)
        assert total == pytest.approx(profile["busy_us"])
        assert {"splitkv::cpu_product", "splitkv::cpu_decode"} <= {kernel["name"] for kernel in kernels}


def test_the_same_seed_gives_the_same_logits_and_another_another(tiny: str) -> None:
    def errors(seed: int) -> list[float]:
        return [e["max_abs"] for e in run(tiny, kv_dtypes=("f16",), batches=(1,), seed=seed)["kv_parity"]]

    assert errors(1) == errors(1) != errors(2)


# ---- what is left out --------------------------------------------------------------------------------------


def test_a_context_that_the_model_was_not_made_for_is_left_out(tiny: str) -> None:
    result = run(tiny, depths=(300, 601), kv_dtypes=("f16",), batches=(1,))
    assert {row["depth"] for row in result["rows"]} == {300}
    (entry,) = result["not_measured"]
    assert (entry["depth"], entry["reason"]) == (601, "the model was made for 600 tokens")


def test_what_does_not_fit_is_left_out_with_the_sum_before_anything_is_made(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*arguments: Any) -> None:
        raise AssertionError("weights were made for a model that does not fit")

    monkeypatch.setattr(machine, "memory_bytes", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(e2e_source, "random_weights", nothing)
    result = run(tiny)
    assert result["rows"] == [] and result["failed_rows"] == 0 and len(result["not_measured"]) == 8
    assert all("refused, co_tenant" in entry["reason"] for entry in result["not_measured"])


def test_a_batch_that_fits_less_deep_is_measured_as_deep_as_it_fits(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = e2e.splitkv.plan_memory

    def short(model: Any, context: int, **options: Any) -> Any:
        return real(model, context, **{**options, "free_bytes": 0 if context * options["batch"] > 300 else 1 << 40})

    monkeypatch.setattr(e2e.splitkv, "plan_memory", lambda *a, **k: short(*a, **{**k, "total_bytes": 1 << 40}))
    result = run(tiny, kv_dtypes=("f16",))
    assert {(row["batch"], row["depth"]) for row in result["rows"]} == {(1, 24), (1, 300), (2, 24)}
    assert [(entry["batch"], entry["depth"]) for entry in result["not_measured"]] == [(2, 300)]


def test_what_the_decoder_cannot_build_is_not_measured_and_costs_nobody(tiny: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(TINY | {"hidden_act": "relu"}))
    result = run(str(other), tiny, depths=(24,), batches=(1,))
    assert {row["geometry"] for row in result["rows"]} == {tiny} and result["failed_rows"] == 0
    (entry,) = result["not_measured"]
    assert entry["geometry"] == str(other) and "hidden_act: expected 'silu', got 'relu'" in entry["reason"]


EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
LATENTS = EXPERTS | {
    "model_type": "deepseek_v2", "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize("changes", [EXPERTS, LATENTS, {"model_type": "gemma2", "sliding_window": 20}])
def test_other_families(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(TINY | changes))
    result = run(str(file), depths=(24,), kv_dtypes=("f32",))
    assert result["failed_rows"] == 0 and result["not_measured"] == [] and len(result["rows"]) == 4
    read = {row["batch"]: row["bytes_per_step"]["weights"] for row in result["rows"]}
    if "num_experts" in changes:  # of two rows more experts, and not all
        assert read[1] < read[2] < read[1] + 4 * 3 * 24 * 64 * 4 * 2
    else:
        assert read[1] == read[2]


def test_no_row_begins_after_the_limit(tiny: str) -> None:
    result = run(tiny, limit_s=0.0)
    assert result["rows"] == []
    assert {entry["reason"] for entry in result["not_measured"]} == {"the run had taken 0 s"}


def test_a_combination_that_fails_leaves_the_others(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = e2e_rows.fill

    def short_of_memory(state: Any, *rest: Any) -> None:
        if state.kv_dtype == "f16" and state.batch == 2:
            raise RuntimeError("out of\nmemory")
        real(state, *rest)

    monkeypatch.setattr(e2e_rows, "fill", short_of_memory)
    result = run(tiny)
    assert len(result["rows"]) == 12 and result["failed_rows"] == 1
    (entry,) = result["not_measured"]
    assert (entry["kv_dtype"], entry["batch"], entry["reason"]) == ("f16", 2, "RuntimeError: out of memory")


def test_a_broken_gpu_ends_the_run_with_the_rows_so_far(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = e2e_rows.Combination.measure

    def breaks(self: Any, depth: int, bandwidth: Bandwidth) -> Any:
        if self.where["batch"] == 2:
            raise DeviceBroken("the GPU stopped working after: illegal address")
        return real(self, depth, bandwidth)

    monkeypatch.setattr(e2e_rows.Combination, "measure", breaks)
    result = run(tiny, tiny + "-other")
    assert {row["batch"] for row in result["rows"]} == {1} and result["failed_rows"] == 1
    left = [(entry["geometry"], entry["reason"]) for entry in result["not_measured"]]
    assert left == [(name, "the GPU stopped working after: illegal address") for name in (tiny, tiny + "-other")]


def test_a_gpu_broken_by_a_failure_ends_the_run_too(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody but the outermost loop is left to hear of it."""

    def breaks(*arguments: Any) -> None:
        raise RuntimeError("illegal address")

    def broken(failure: Exception, device: str) -> None:
        raise DeviceBroken(f"the GPU stopped working after: {failure}")

    monkeypatch.setattr(e2e, "make_prompt", breaks)
    monkeypatch.setattr(e2e, "require_working_device", broken)
    result = run(tiny, tiny + "-other")
    assert result["rows"] == [] and result["failed_rows"] == 1
    reasons = {entry["geometry"]: entry["reason"] for entry in result["not_measured"]}
    assert reasons == dict.fromkeys((tiny, tiny + "-other"), "the GPU stopped working after: illegal address")


# ---- rows that must not be believed ------------------------------------------------------------------------


def test_a_row_faster_than_its_bytes_has_no_speed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cache_bytes", lambda device: 1)
    monkeypatch.setattr(e2e_rows, "step_times", lambda loop, begin, *rest: [_stepped(loop, begin) / 1e4] * 3)
    result = run(tiny, depths=(24,), kv_dtypes=("f16",), batches=(1,))
    assert result["failed_rows"] == 2
    for row in result["rows"]:
        assert (row["ms_per_token"], row["tokens_s"], row["percent_of_floor"], row["passed"]) == (
            None,
            None,
            None,
            False,
        )
        assert "more than the memory gives" in row["timing_rejected"]


def test_a_run_that_does_not_repeat_itself_fails(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def restless(loop: Any, begin: Any, *rest: Any) -> list[float]:
        loop.tokens.add_(1)
        return [2000.0] * 3

    monkeypatch.setattr(e2e_rows, "step_times", restless)
    result = run(tiny, depths=(24,), kv_dtypes=("f16",), batches=(1,))
    assert [(row["repeats_tokens"], row["passed"]) for row in result["rows"]] == [(False, False)] * 2


def test_other_tokens_without_splitting_fail_both_rows(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = e2e_rows.splitkv.DecodeAttention

    class Wrong(real):  # type: ignore[misc, valid-type]
        def run(self, q: Any, *rest: Any, **options: Any) -> Any:
            out = super().run(q, *rest, **options)
            return out.roll(1, -1) if self.plan.num_splits == 1 else out

    monkeypatch.setattr(e2e_rows.splitkv, "DecodeAttention", Wrong)
    result = run(tiny, depths=(300,), kv_dtypes=("f16",), batches=(1,))
    assert result["failed_rows"] == 2
    for row in result["rows"]:
        assert not row["tokens_identical"] and not row["passed"] and row["flips"][0]["explained"] is False


# ---- samples -----------------------------------------------------------------------------------------------


class Counted:
    """A loop that counts its steps."""

    def __init__(self) -> None:
        self.steps, self.begun = 0, 0
        self.decoder = type("Place", (), {"device": type("Device", (), {"type": "cpu"})})

    def step(self) -> None:
        self.steps += 1

    def begin(self) -> None:
        self.begun += 1


@pytest.mark.parametrize(("budget_s", "least", "samples"), [(10.0, 0, 3), (0.0, 2, 2), (0.0, 0, 0), (0.01, 0, 2)])
def test_as_many_samples_as_fit_the_budget(budget_s: float, least: int, samples: int) -> None:
    """A run of 5 steps of 1 ms each."""
    loop = Counted()
    found = e2e_timing.step_times(loop, loop.begin, budget_s, least, 1000.0)  # type: ignore[arg-type]
    assert (len(found), loop.begun, loop.steps) == (samples, samples, samples * e2e_timing.run_length("cpu"))


def test_a_kernel_adds_what_no_other_was_running_in() -> None:
    """b starts early and waits for a; c lies within b; a second step, then nothing."""
    spans = [("a", 0, 10), ("b", 4, 16), ("c", 12, 14), ("a", 20, 30), ("b", 24, 36), ("c", 32, 34)]
    found = e2e_timing.kernel_times([e2e_timing.Span(*span) for span in reversed(spans)], 2)
    assert found["kernels"] == [
        {"name": "a", "added_us": 10, "us": 10, "launches": 1},
        {"name": "b", "added_us": 6, "us": 12, "launches": 1},
        {"name": "c", "added_us": 0, "us": 2, "launches": 1},
    ]
    assert (found["busy_us"], found["other_us"], found["launches"]) == (16, 0, 3)


def test_peers_that_are_not_there_are_not_measured(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (e2e_llamacpp, e2e_transformers):
        monkeypatch.setattr(module, "installed", lambda name: False)
    result = run(tiny, depths=(24, 300), kv_dtypes=("f16",), batches=(1,), peers=("llama.cpp", "transformers"))
    assert result["failed_rows"] == 0 and {row["contender"] for row in result["rows"]} == {OURS, UNSPLIT}
    found = {(entry["contender"], entry["depth"]): entry["reason"] for entry in result["not_measured"]}
    assert found == {
        (name, depth): reason
        for name, reason in (("llama.cpp", e2e_llamacpp.ABSENT), ("transformers", e2e_transformers.ABSENT))
        for depth in (24, 300)
    }
    assert result["contenders"].keys() == {OURS, UNSPLIT, "llama.cpp", "transformers"}


def test_other_logits_fail_the_peers_rows(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"contender": "llama.cpp", "kv_dtype": "q8_0", "depth": 300, "ms_per_token": 4.0}
    times = {"version": "1", "system": "", "method": "", "rows": [row], "not_measured": []}
    monkeypatch.setattr(
        e2e_peers, "time_llamacpp", lambda *given: {**times, "rows": [dict(row)], "logits": torch.randn(5, 500)}
    )
    result = run(tiny, depths=(300,), kv_dtypes=("fp8_e4m3",), batches=(1,), peers=("llama.cpp",))
    theirs = result["rows"][-1]
    assert theirs["contender"] == "llama.cpp" and not theirs["passed"] and result["failed_rows"] == 1
    check = result["geometries"][tiny]["peers"]["llama.cpp"]["logits"]
    assert check["relative"] > 0.5 and not check["passed"]
    weights = result["geometries"][tiny]["weights_read_bytes"]
    states = 2 * 3 * (2 * 16 * 16 * 4 + 4 * 96 * 2)  # as the capacity check counts them: 4 inputs of 96 channels
    assert theirs["floor_ms"] == pytest.approx((weights + 300 * 2 * 2 * 16 * 34 / 32 + states) / 1e9 * 1e3, rel=1e-2)


def test_a_gguf_file_brings_its_own_weights(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "m.gguf"
    decoder = Decoder(DecoderConfig.from_config({**TINY, "linear_value_head_dim": 16}, "test"), torch.float32, "cpu")
    decoder.randomise(3)
    write_gguf(decoder, file)
    result = run(str(file), depths=(24,), kv_dtypes=("f16",), batches=(1,))
    assert result["failed_rows"] == 0 and len(result["rows"]) == 2
    assert result["geometries"][str(file)]["weights"] == "m.gguf in f32"
    loaded = open_source(str(file), "f32", 0).decoder("cpu", 0)
    assert torch.equal(loaded.embedding, decoder.embedding)
