"""`splitkv bench attention` on a GPU: small cases, with what PyTorch has beside ours, every one right and timed."""

from typing import Any

import pytest

from splitkv.bench import record
from splitkv.bench.attention import AttentionOptions, run_attention
from splitkv.bench.attention_cases import AttentionCase
from splitkv.bench.contender import OURS
from splitkv.bench.peers import choose_contenders

CASES = (
    AttentionCase("table", 1, 16, 4, 256, 4096, "bf16"),
    AttentionCase("ragged", 3, 16, 4, 256, 5000, "bf16", page_size=16, lens=(5000, 100, 1700)),
    AttentionCase("queries", 1, 16, 4, 256, 4096, "bf16", q_len=4),
    AttentionCase("table", 1, 16, 4, 256, 4096, "fp8_e4m3"),
    AttentionCase("cost-capacity", 1, 16, 4, 256, 4096, "bf16", capacity=65_536),
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    chosen = choose_contenders("cuda", "sdpa-flash,sdpa-cudnn")
    return run_attention(AttentionOptions("cuda", CASES, chosen), record.provenance(), command="test")


def test_every_row_is_right_and_timed_and_none_beats_its_floor(result: dict[str, Any]) -> None:
    assert result["skipped"] == [] and len(result["rows"]) == len(CASES)
    for row in result["rows"]:
        assert row["passed"], (row["case"], row["not_run"])
        assert row["err"][OURS] < 3e-3
        assert row["floor_us"] * 0.95 < row["us"][OURS] < 20 * row["goal_us"], row["case"]


def test_pytorch_runs_what_it_can(result: dict[str, Any]) -> None:
    first, ragged, _, fp8, _ = result["rows"]
    assert {"sdpa-flash", "sdpa-cudnn"} <= set(first["us"]), first["not_run"]
    assert set(ragged["us"]) == set(fp8["us"]) == {OURS}


def test_unused_capacity_is_free(result: dict[str, Any]) -> None:
    """The same 4,096 keys out of a cache of 65,536, replayed from its own graph."""
    exact, roomy = result["rows"][0], result["rows"][-1]
    assert abs(roomy["us"][OURS] - exact["us"][OURS]) < 3
