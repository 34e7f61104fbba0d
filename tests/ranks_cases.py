"""A context over several ranks, as test data: cases, one rank's share of each, and the process that runs them.

Every rank makes the whole rows from the case's seed and keeps its own part, beside NaN. What it gets goes to a file
per case and rank, which the test compares with one process's answer and with float64.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers import assert_parity, int32, make_inputs, page_order, to_pages
from torch import Tensor

from splitkv import DecodeProblem, decode_attention, reference_attention
from splitkv.checks import DTYPE_NAMES
from splitkv.ranks import RankAttention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32


@dataclass(frozen=True)
class RankCase:
    """bounds: for each row the rank + 1 positions between which the ranks' parts lie; the last is the row's length."""

    name: str
    bounds: tuple[tuple[int, ...], ...]
    q_len: int | None = None
    window: int | None = None
    starts: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None
    scales: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    page_size: int | None = None
    uniform: bool = False
    policy: str = "auto"

    @property
    def lens(self) -> list[int]:
        return [row[-1] for row in self.bounds]

    def whole(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, K and V of whole rows, and the options of one decode_attention call over them."""
        seed = sum(map(ord, self.name))
        capacity = max(max(self.lens), 1)
        q, k, v = make_inputs(
            len(self.bounds), HEADS, KV_HEADS, HEAD_DIM, capacity, q_len=self.q_len, dtype=self.dtype,
            kv_dtype=self.kv_dtype, v_head_dim=48, seed=seed,
        )  # fmt: skip
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if self.sinks:
            options["sinks"] = torch.randn(HEADS, generator=torch.Generator().manual_seed(seed)) * 3
        if self.starts is not None:
            options["starts"] = int32(self.starts)
        if self.scales:
            options |= {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": 0.25}
        return q, k, v, options


@dataclass(frozen=True)
class Share:
    """What one rank passes: its cache, its numbers per row (on the device), and the problem."""

    problem: DecodeProblem
    caches: tuple[Tensor, Tensor]
    seq_lens: Tensor
    later_keys: Tensor
    options: dict[str, Any]


def share(case: RankCase, rank: int, device: str) -> tuple[Tensor, Share]:
    """(q, what this rank holds). Its cache has room for other numbers of keys than its neighbours'."""
    q, k, v, options = case.whole()
    capacity = max(row[rank + 1] - row[rank] for row in case.bounds) + 1 + rank
    if case.page_size:
        capacity = -(-capacity // case.page_size) * case.page_size
    caches = []
    for whole in (k, v):
        mine = torch.full((len(case.bounds), capacity, *whole.shape[2:]), torch.nan).to(whole.dtype)
        for row, bounds in enumerate(case.bounds):
            keys = whole[row, bounds[rank] : bounds[rank + 1]]
            mine[row, : len(keys)] = keys
        caches.append(mine)
    if case.page_size:
        table, pages = page_order(len(case.bounds), capacity, case.page_size, seed=rank)
        caches = [to_pages(cache, table, pages, case.page_size) for cache in caches]
        options["block_table"] = table.to(device)
    if case.starts is not None:
        options["starts"] = int32([s - row[rank] for s, row in zip(case.starts, case.bounds, strict=True)])
    problem = DecodeProblem(
        len(case.bounds), HEADS, KV_HEADS, HEAD_DIM, 48, case.q_len or 1, capacity, DTYPE_NAMES[q.dtype],
        DTYPE_NAMES[k.dtype], case.page_size,
    )  # fmt: skip
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    lens = int32([row[rank + 1] - row[rank] for row in case.bounds], device)
    later = int32([row[-1] - row[rank + 1] for row in case.bounds], device)
    return q.to(device), Share(problem, (caches[0].to(device), caches[1].to(device)), lens, later, options)


def fixed_cases(ranks: int) -> list[RankCase]:
    """What the contract names, each alone."""

    def cut(*lens: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(length * r // ranks for r in range(ranks + 1)) for length in lens)

    last, first = (0,) * ranks, (200,) * ranks
    ragged = ((0, *(7 * r for r in range(1, ranks)), 211), (0, *(200 + r for r in range(1, ranks)), 207))
    return [
        RankCase("even", cut(300, 301)),
        RankCase("ragged", (*ragged, (0,) * (ranks + 1)), sinks=True),
        RankCase("an empty rank", ((*last, 90), (0, *first))),
        RankCase("all rows empty", ((0,) * (ranks + 1),) * 2, sinks=True),
        RankCase("sinks", cut(150, 3), sinks=True, softcap=5.0),
        RankCase("left padding", cut(200, 200, 200), starts=(10, 150, 200), sinks=True),
        RankCase("a window inside the last rank", cut(200, 260), window=20, sinks=True),
        RankCase("a window over a bound", cut(200, 9), window=110),
        RankCase("a window wider than any rank", cut(200, 90), window=2**40),
        RankCase("a window with padding", cut(200, 90), window=70, starts=(150, 0)),
        RankCase("one query with its dimension", cut(100), q_len=1, sinks=True),
        RankCase("one length for all", cut(120, 120), uniform=True, window=50),
        RankCase("four queries", cut(150, 201), q_len=4, sinks=True),
        RankCase("four queries over a bound", ((0, *(148 + r for r in range(1, ranks)), 151),) * 2, q_len=4),
        RankCase("queries of a row shorter than they", ((0, *last[1:], 2), (0, *first[1:], 201)), q_len=4),
        RankCase("four queries with a window", cut(150, 90), q_len=4, window=70, sinks=True, softcap=9.0),
        RankCase("a window smaller than the queries", cut(150, 90), q_len=7, window=3, starts=(0, 80)),
        RankCase("a window that ends at a bound", ((0, *(100 + r for r in range(1, ranks)), 140),), q_len=4, window=38),
        RankCase("pages", cut(300, 33), page_size=16, sinks=True),
        RankCase("pages with queries and a window", cut(300, 33), page_size=16, q_len=3, window=150),
        RankCase("splits", cut(700, 90), policy="pinned(5)", q_len=2),
        RankCase("bf16", cut(300, 20), dtype=torch.bfloat16, sinks=True),
        RankCase("bf16 queries", cut(300, 20), dtype=torch.bfloat16, q_len=5, window=140),
        RankCase("fp8 with scales", cut(300, 20), dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, scales=True),
    ]


def random_case(ranks: int, seed: int) -> RankCase:
    """Anything in float32: parts of any size, rows shorter than their queries, windows that end anywhere."""
    rng = Random(f"{ranks}/{seed}")
    bounds = []
    for _ in range(rng.randint(1, 3)):
        length = rng.choice((rng.randint(0, 12), rng.randint(1, 200)))
        bounds.append((0, *sorted(rng.randint(0, length) for _ in range(ranks - 1)), length))
    longest = max(row[-1] for row in bounds)
    return RankCase(
        f"random {ranks}/{seed}",
        tuple(bounds),
        q_len=rng.choice((None, 1, 2, 4, 9, 16)),
        window=rng.choice((None, rng.randint(1, 9), rng.randint(1, longest + 5))),
        starts=tuple(rng.randint(-2, longest + 1) for _ in bounds) if rng.random() < 0.4 else None,
        sinks=rng.random() < 0.5,
        page_size=rng.choice((None, None, 1, 16)),
        policy=rng.choice(("auto", "pinned(3)")),
    )


def file_name(case: RankCase, rank: int) -> str:
    return f"{case.name.replace(' ', '-').replace('/', '-')}.{rank}.npz"


def answer(case: RankCase, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank."""
    q, mine = share(case, rank, device)
    attention = RankAttention(mine.problem, case.policy, device=device)
    assert attention.workspace_bytes >= attention.plan.workspace_bytes
    lens = int(mine.seq_lens[0]) if case.uniform else mine.seq_lens
    later = int(mine.later_keys[0]) if case.uniform else mine.later_keys
    beyond = {"later_keys": later} if case.window or (case.q_len or 1) > 1 else {}
    out, lse = attention.run(q, *mine.caches, lens, return_lse=True, **beyond, **mine.options)
    strided = torch.full((*out.shape[:-1], 64), torch.nan, dtype=out.dtype, device=device)[..., :48]
    again = attention.run(q, *mine.caches, lens, out=strided, **beyond, **mine.options)
    assert again is strided and torch.equal(strided, out), "a second call, into strided memory, gave other bytes"
    return out, lse


def faults(rank: int, device: str) -> dict[str, str]:
    """What each rank is told when the ranks disagree, by name of the disagreement."""
    fine = DecodeProblem(2, HEADS, KV_HEADS, HEAD_DIM, capacity=64 + rank, q_dtype="f32", kv_dtype="f32")
    odd: dict[str, Any] = {
        "batch": replace(fine, batch=3),
        "heads": replace(fine, num_q_heads=8),
        "dtype": replace(fine, q_dtype="bf16"),
        "type": None,
        "capacity": replace(fine, capacity=0),
    }
    told = {}
    for name, other in odd.items():
        try:
            RankAttention(other if rank == 1 else fine, device=device)
        except (TypeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    RankAttention(fine, device=device)  # the group still works, and capacities may differ
    return told


def run_rank(rank: int, ranks: int, folder: str, device_type: str, cases: list[RankCase]) -> None:
    """The body of one process."""
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if device_type == "cuda" else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        for case in cases:
            out, lse = (tensor.float().cpu().numpy() for tensor in answer(case, rank, device))
            np.savez(Path(folder) / file_name(case, rank), out=out, lse=lse)
        (Path(folder) / f"faults.{rank}.json").write_text(json.dumps(faults(rank, device)))
    finally:
        dist.destroy_process_group()


def check(case: RankCase, ranks: int, folder: Path) -> None:
    """Every rank's answer is the same, and it is that of float64 and of one process on the CPU."""
    q, k, v, options = case.whole()
    answers = []
    for rank in range(ranks):
        with np.load(folder / file_name(case, rank)) as file:
            answers.append((torch.from_numpy(file["out"]), torch.from_numpy(file["lse"])))
    out, lse = answers[0]
    for rank, other in enumerate(answers):
        assert torch.equal(other[0], out) and torch.equal(other[1], lse), f"rank {rank} has another answer than rank 0"
    lens = int32(case.lens)
    assert_parity((out.to(case.dtype), lse), reference_attention(q, k, v, lens, return_lse=True, **options))
    assert_parity((out.to(case.dtype), lse), decode_attention(q, k, v, lens, return_lse=True, **options))
