"""A context over two and three processes (gloo) gives one process's answer, on every rank the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from helpers import INF, assert_parity, int32, make_inputs
from ranks_cases import check, fixed_cases, random_case, run_rank
from torch import Tensor

from splitkv import DecodeProblem, UnsupportedError, reference_attention
from splitkv.ranks import RankAttention, part_of

RANKS = (2, 3)
RANDOM = 30


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folder of files by number of ranks."""
    folders = {}
    for ranks in RANKS:
        folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        cases = [*fixed_cases(ranks), *(random_case(ranks, seed) for seed in range(RANDOM))]
        torch.multiprocessing.spawn(run_rank, (ranks, str(folders[ranks]), "cpu", cases), nprocs=ranks)
    return folders


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("index", range(len(fixed_cases(2))), ids=[case.name for case in fixed_cases(2)])
def test_the_answer_is_one_process_s(index: int, ranks: int, results: dict[int, Path]) -> None:
    check(fixed_cases(ranks)[index], ranks, results[ranks])


@pytest.mark.parametrize("ranks", RANKS)
def test_random_parts_windows_and_queries(ranks: int, results: dict[int, Path]) -> None:
    for seed in range(RANDOM):
        check(random_case(ranks, seed), ranks, results[ranks])


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_disagree_are_all_told(ranks: int, results: dict[int, Path]) -> None:
    told = [json.loads((results[ranks] / f"faults.{rank}.json").read_text()) for rank in range(ranks)]
    same = "ValueError: problem: expected the same {} on every rank, got {} on rank 0 and {} on rank 1"
    for faults in told:
        assert faults["batch"] == same.format("batch", 2, 3)
        assert faults["heads"] == same.format("num_q_heads", 6, 8)
        assert faults["dtype"] == same.format("q_dtype", "f32", "bf16")
    elsewhere = "ValueError: problem: expected arguments that every rank accepts, got an error on rank 1"
    for rank, faults in enumerate(told):
        mine = rank == 1
        assert faults["type"] == ("TypeError: problem: expected a DecodeProblem, got NoneType" if mine else elsewhere)
        assert faults["capacity"].startswith("ValueError: problem: expected a capacity" if mine else elsewhere)


# ---- one rank, in this process -----------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def problem(q_len: int = 1) -> DecodeProblem:
    return DecodeProblem(2, 4, 2, 16, q_len=q_len, capacity=64, q_dtype="f32", kv_dtype="f32")


def call(q_len: int | None = None, **changes: Any) -> dict[str, Any]:
    q, k, v = make_inputs(2, 4, 2, 16, 64, q_len=q_len)
    return {"q": q, "k_cache": k, "v_cache": v, "seq_lens": int32([64, 9])} | changes


def test_a_mask_of_this_rank_s_keys(group: None) -> None:
    mask = torch.rand(2, 1, 1, 64) < 0.5
    out = RankAttention(problem(), device="cpu").run(**call(mask=mask))
    assert isinstance(out, Tensor)
    assert (out - reference_attention(**call(mask=mask))).abs().max() <= 1e-5


def test_hostile_lengths_are_those_of_one_process(group: None) -> None:
    """Over the capacity, negative, and 64 bits wide."""
    lens = torch.tensor([2**40, -5])
    got = RankAttention(problem(4), device="cpu").run(**call(4, seq_lens=lens, later_keys=0), return_lse=True)
    assert_parity(got, reference_attention(**call(4, seq_lens=int32([64, 0])), return_lse=True))
    assert (got[1][1] == -INF).all() and not got[0][1].any()


def test_values_are_checked_without_false_alarms(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPLITKV_CHECK=1 reads what the parts of a call are given: all of it is in range where the caller's is."""
    monkeypatch.setenv("SPLITKV_CHECK", "1")
    for starts in ([63, 90], [0, 3]):
        options = call(4, later_keys=0, window=6, starts=int32(starts))
        want = reference_attention(**{n: x for n, x in options.items() if n != "later_keys"}, return_lse=True)
        assert_parity(RankAttention(problem(4), device="cpu").run(**options, return_lse=True), want)
    with pytest.raises(ValueError, match=r"seq_lens: expected 0..64 \(the capacity\), got 65 in row 0"):
        RankAttention(problem(), device="cpu").run(**call(seq_lens=int32([65, 1])))


@pytest.mark.parametrize(
    ("q_len", "changes", "error", "message"),
    [
        (None, {"window": 5}, ValueError, "later_keys: expected the number of each row's keys on later ranks"),
        (2, {}, ValueError, "later_keys: expected the number .* q_len > 1 need, got None"),
        (2, {"later_keys": 1.0}, TypeError, "later_keys: expected an int or a torch.Tensor, got float"),
        (2, {"later_keys": -1}, ValueError, "later_keys: expected at least 0, got -1"),
        (2, {"later_keys": torch.zeros(2)}, TypeError, "later_keys: expected dtype int32, int64, got torch.float32"),
        (2, {"later_keys": int32([1])}, ValueError, r"later_keys: expected shape \(2,\), one per batch, got \(1,\)"),
        (2, {"later_keys": int32([1, 1], "meta")}, ValueError, "later_keys: expected device cpu, got meta"),
        (2, {"later_keys": 0, "mask": torch.ones(64, dtype=torch.bool)}, UnsupportedError, "mask: .*q_len 1, got"),
        (None, {"q": torch.zeros(2, 8, 16)}, ValueError, "run: expected tensors of DecodeProblem.*, got .*heads=8"),
        (None, {"sinks": torch.zeros(3)}, ValueError, r"sinks: expected shape \(4,\), one per num_q_heads, got \(3,\)"),
        (None, {"window": -1}, ValueError, "window: expected at least 0, got -1"),
        (None, {"out": torch.zeros(2, 4, 32)}, ValueError, r"out: expected shape \(2, 4, 16\)"),
        (None, {"k_cache": None}, TypeError, "k_cache: expected a torch.Tensor, got NoneType"),
        (None, {"backend": "triton"}, ValueError, "backend: triton expects CUDA tensors, got cpu"),
        (None, {"workspace": None}, TypeError, "workspace"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_by_name(
    q_len: int | None, changes: dict[str, Any], error: type[Exception], message: str, group: None
) -> None:
    attention = RankAttention(problem(q_len or 1), device="cpu")
    with pytest.raises(error, match=message):
        attention.run(**call(q_len, **changes))


def test_without_a_process_group_the_step_before_is_named() -> None:
    with pytest.raises(ValueError, match=r"group: expected torch.distributed.init_process_group to be called before"):
        RankAttention(problem(), device="cpu")


def test_a_policy_that_is_none_is_refused(group: None) -> None:
    with pytest.raises(ValueError, match="policy: expected a SplitPolicy or one of"):
        RankAttention(problem(), "often", device="cpu")


# ---- parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 16, 1000])
@pytest.mark.parametrize("num_keys", [0, 1, 7, 4096, 262_143, 262_144])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_follow_each_other_and_cover_every_key(num_keys: int, ranks: int, multiple: int) -> None:
    parts = [part_of(num_keys, rank, ranks, multiple) for rank in range(ranks)]
    assert parts[0].start == 0 and parts[-1].stop == num_keys
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert all(part.start % multiple == 0 or part.start == num_keys for part in parts)
    assert max(map(len, parts)) - num_keys // ranks <= multiple


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 0, 1), "num_keys: expected at least 0, got -1"),
        ((1, 0, 0), "ranks: expected at least 1, got 0"),
        ((1, 2, 2), "rank: expected 0..1, got 2"),
        ((1, 0, 2, 0), "multiple: expected at least 1, got 0"),
    ],
)
def test_parts_of_nothing_are_refused(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part_of(*values)
