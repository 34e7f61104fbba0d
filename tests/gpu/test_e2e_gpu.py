"""`splitkv bench e2e` on a GPU: a small model's captured steps at two depths, and where their time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitkv.bench import record
from splitkv.bench.e2e import E2eOptions, run_e2e
from splitkv.bench.summary import OURS, UNSPLIT

CONFIG = {
    "model_type": "qwen3_5_text", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 262_144,
}  # fmt: skip
DEPTHS, KV_DTYPES, BATCHES = (300, 20_000), ("bf16", "fp8_e4m3"), (1, 3)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file: Path = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(CONFIG))
    options = E2eOptions("cuda", (str(file),), DEPTHS, KV_DTYPES, BATCHES, prefill=300, profile=True)
    return run_e2e(options, record.provenance(), command="test")


def test_every_row_is_timed_and_repeats_its_tokens(result: dict[str, Any]) -> None:
    assert result["not_measured"] == [] and result["failed_rows"] == 0
    found = {(r["depth"], r["kv_dtype"], r["batch"], r["contender"]) for r in result["rows"]}
    assert found == {(d, kv, b, c) for d in DEPTHS for kv in KV_DTYPES for b in BATCHES for c in (OURS, UNSPLIT)}
    for row in result["rows"]:
        assert 0 < row["ms_per_token"] < 50 and row["distinct_tokens"] > 3
        assert row["cache"] == ("prefilled" if row["depth"] == 300 else "filled")


def test_splitting_helps_a_long_row(result: dict[str, Any]) -> None:
    times = {r["contender"]: r["ms_per_token"] for r in result["rows"] if (r["depth"], r["batch"]) == (20_000, 1)}
    assert times[OURS] < times[UNSPLIT]


def test_the_profile_names_kernels_that_fill_the_step(result: dict[str, Any]) -> None:
    assert [profile["depth"] for profile in result["profiles"]] == [300, 20_000]
    for profile in result["profiles"]:
        total = profile["other_us"] + sum(kernel["added_us"] for kernel in profile["kernels"])
        assert total == pytest.approx(profile["busy_us"]) and 0 < profile["busy_us"] < 2 * profile["step_us"]
        assert not any(kernel["name"].startswith("cudaGraph") for kernel in profile["kernels"])


def test_kv_dtypes_move_the_logits_as_far_as_their_rounding(result: dict[str, Any]) -> None:
    errors = {(entry["depth"], entry["kv_dtype"]): entry["relative"] for entry in result["kv_parity"]}
    assert set(errors) == {(depth, kv_dtype) for depth in DEPTHS for kv_dtype in KV_DTYPES}
    assert 0 < errors[20_000, "bf16"] < 0.1 and errors[20_000, "fp8_e4m3"] < 0.3
