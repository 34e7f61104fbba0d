"""`splitkv bench ranks`: one row's keys on one device, and spread over several: parity first, then time.

Every rank is a process with a device of its own (NCCL), or on a CPU a process with its share of the cores (gloo). All
hold the whole rows, so that each can check the answer, and attend to their part.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn

import splitkv

from ..ranks import RankAttention, part_of
from . import machine, parity, record, timing
from .cases import Arena, Rung, RungOptions, memory_budget
from .progress import Progress
from .roofline import read_bandwidth

SCHEMA = "splitkv.ranks.v1"
ONE, PART = "splitkv", "part"
SAMPLES = {"cuda": 25, "cpu": 9}
TIMEOUT = timedelta(minutes=10)
"""Most that a rank waits for the others, who may be timing one device meanwhile."""
_ALONE = f"{ONE} and {PART} as in splitkv rungs, on rank 0 while the others wait; over ranks: "
METHOD = {
    "cuda": f"{_ALONE}CUDA-graph replays of at least 20 calls, each after one that is not measured; of each sample the "
    "slowest rank's time; medians, p20 and p80",
    "cpu": f"{_ALONE}perf_counter round single calls after a barrier; of each sample the slowest rank's time; medians, "
    "p20 and p80",
}


@dataclass(frozen=True)
class Work:
    """What all ranks of one rung are told: plain numbers, decided once."""

    rung: Rung
    ranks: int
    rotation: timing.Rotation
    device: str
    seed: int
    bandwidth_bytes_s: float
    threads: int


def contender(ranks: int) -> str:
    """Our name over this many ranks."""
    return f"{ONE} x{ranks}"


def run_ranks(
    options: RungOptions,
    ranks: int,
    source: Mapping[str, Any],
    *,
    command: str,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Run every rung and return the result file's object; `failed_rungs` counts those without a speed.

    Raises RuntimeError with the message of a rank that failed.
    """
    device, rungs = options.device, list(options.rungs())
    result = record.new_record(SCHEMA, command, source, device)
    progress(0, len(rungs), "measuring the read bandwidth")
    bandwidth = read_bandwidth(device)
    if device == "cuda":
        torch.cuda.empty_cache()  # the processes to come need the memory
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    budget = memory_budget(device) // (ranks if device == "cpu" else 1)
    threads = max(machine.usable_cores() // ranks, 1)
    for done, rung in enumerate(rungs):
        progress(done, len(rungs), rung.case)
        rotation = timing.plan_rotation(rung.set_bytes, budget, ranks * machine.cache_bytes(device), device)
        if rotation is None:
            why = f"one KV set takes {rung.set_bytes / 1e9:.2f} GB and a rank may use {budget / 1e9:.2f} GB"
            skipped.append({"case": rung.case, "reason": why})
            continue
        work = Work(rung, ranks, rotation, device, options.seed, bandwidth.bytes_per_s, threads)
        rows.append(_spawn(work))
    return result | {
        "ranks": ranks,
        "backend": "nccl" if device == "cuda" else "gloo",
        "threads_per_rank": threads if device == "cpu" else None,
        "contenders": {
            ONE: "splitkv.DecodeAttention.run over all keys, one device",
            PART: "the same over the keys of rank 0",
            contender(ranks): "splitkv.ranks.RankAttention.run: the part, all_gather, merge",
        },
        "seed": options.seed,
        "timing_method": METHOD[device],
        "parity_rules": list(parity.RULES),
        "read_bandwidth_tb_s": bandwidth.tb_s,
        "read_bandwidth_method": f"{bandwidth.variant}, {bandwidth.swept_bytes} bytes, of one device",
        "failed_rungs": sum(not row["passed"] for row in rows),
        "skipped": skipped,
        "rows": rows,
    }


def _spawn(work: Work) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_run_rank, (work, folder), nprocs=work.ranks)
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise RuntimeError(str(error).strip()) from None
        row: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
        return row


# ---- one rank ----------------------------------------------------------------------------------------------


def _run_rank(rank: int, work: Work, folder: str) -> None:
    """The body of one process; rank 0 leaves the row in the folder."""
    if work.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(work.threads)
    dist.init_process_group(
        "nccl" if work.device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=work.ranks, timeout=TIMEOUT,
    )  # fmt: skip
    try:
        row = _Rank(rank, work).row()
        if rank == 0:
            (Path(folder) / "row.json").write_text(json.dumps(row))
        _wait()
    finally:
        dist.destroy_process_group()


class _Rank:
    """The calls of one rank, each on set i of the rotation."""

    def __init__(self, rank: int, work: Work) -> None:
        self.rank, self.work, rung = rank, work, work.rung
        device = f"cuda:{rank}" if work.device == "cuda" else "cpu"
        arena = Arena(work.rotation.footprint_bytes, rung.kv_dtype, device, work.seed)
        self.q, self.sets = arena.query(rung), arena.sets(rung, work.rotation)
        self.part = part_of(rung.seq_len, rank, work.ranks)
        self.parts = [tuple(x[:, self.part.start : self.part.stop] for x in pair) for pair in self.sets]
        problem = replace(rung.problem, capacity=len(self.part))
        self.whole = splitkv.DecodeAttention(rung.problem, device=device)
        self.local = splitkv.DecodeAttention(problem, device=device)
        self.ranked = RankAttention(problem, device=device)
        self.lens, self.part_lens = (
            torch.full((1,), keys, dtype=torch.int32, device=device) for keys in (rung.seq_len, len(self.part))
        )
        self.outs = {name: torch.empty_like(self.q) for name in (ONE, PART, contender(work.ranks))}

    def on_one(self, i: int) -> Any:
        return self.whole.run(self.q, *self.sets[i], self.lens, out=self.outs[ONE])

    def on_part(self, i: int) -> Any:
        k, v = self.parts[i]
        return self.local.run(self.q, k, v, self.part_lens, out=self.outs[PART])

    def on_ranks(self, i: int) -> Any:
        k, v = self.parts[i]
        return self.ranked.run(self.q, k, v, self.part_lens, out=self.outs[contender(self.work.ranks)])

    def row(self) -> dict[str, Any]:
        """The row of the result file; the same on every rank but for what rank 0 alone measures."""
        work, rung = self.work, self.work.rung
        row: dict[str, Any] = {
            "case": rung.case,
            **{name: getattr(rung.problem, name) for name in ("batch", "num_q_heads", "num_kv_heads", "head_dim")},
            "v_head_dim": rung.problem.v_head_dim,
            "seq_len": rung.seq_len,
            "kv_dtype": rung.kv_dtype,
            "page_size": None,
            "q_len": 1,
            "ranks": work.ranks,
            "part_len": len(self.part),
            "kv_bytes": rung.set_bytes,
            "floor_us": rung.set_bytes / work.bandwidth_bytes_s * 1e6,
            "sets": work.rotation.sets,
            "cache": work.rotation.label,
            "timing_rejected": None,
        }
        failures = self._check_parity(row)
        timings: dict[str, timing.Timing] = {}
        if not failures:
            alone, rejected = self._time_alone()
            over_ranks, reason = self._time_ranks()
            row["timing_rejected"] = rejected or reason
            if over_ranks and alone and not row["timing_rejected"]:
                timings = alone | {contender(work.ranks): over_ranks}
        row |= {"parity_failures": failures, "passed": not failures and bool(timings)}
        row["us"] = {name: one.median_us for name, one in timings.items()}
        row["us_p20"] = {name: one.p20_us for name, one in timings.items()}
        row["us_p80"] = {name: one.p80_us for name, one in timings.items()}
        row["speedup"] = row["us"][ONE] / row["us"][contender(work.ranks)] if timings else None
        return row

    def _check_parity(self, row: dict[str, Any]) -> list[str]:
        """Why no speed may be told: judged on every rank, and the answer of all is that of the first that says no."""
        k, v = self.sets[0]
        ours, one = self.on_ranks(0).clone(), self.on_one(0).clone()
        attend = torch.nn.functional.scaled_dot_product_attention
        plain = attend(self.q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True).squeeze(2)
        exact = parity.float64_attention(self.q, k, v)
        ranked = contender(self.work.ranks)
        errors = {name: parity.error_of(out, exact) for name, out in ((ranked, ours), (ONE, one), ("sdpa", plain))}
        row["err"] = {name: error.relative for name, error in errors.items()}
        row["max_abs_err"] = {name: error.max_abs for name, error in errors.items()}
        row["rounding"] = parity.rounding_of(exact, ours.dtype)
        row["against_one"] = parity.difference_of(ours, one)
        kv_dtype = self.work.rung.kv_dtype
        failures = parity.judge(kv_dtype, errors[ranked], errors[ONE], errors["sdpa"], row["rounding"])
        first = ours.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, ours):
            failures.append(f"rank {self.rank} has another answer than rank 0")
        if not torch.equal(self.on_ranks(0), ours):
            failures.append("a second call on the same tensors gave other bytes")
        wrong = self._shared([float(bool(failures))])
        return failures or [f"rank {r} failed its checks" for r in range(self.work.ranks) if wrong[r, 0]]

    def _time_alone(self) -> tuple[dict[str, timing.Timing], str | None]:
        """One device's times over all keys and over a part's, on rank 0; nothing on the others, who wait."""
        found: dict[str, timing.Timing] = {}
        rejected = None
        if self.rank == 0:
            work = self.work
            bytes_read = {ONE: work.rung.set_bytes, PART: work.rung.set_bytes * len(self.part) // work.rung.seq_len}
            try:
                for name, call in ((ONE, self.on_one), (PART, self.on_part)):
                    found |= timing.measure(
                        {name: call}, work.rotation, device=work.device, kv_bytes=bytes_read[name],
                        bandwidth_bytes_s=work.bandwidth_bytes_s,
                    )  # fmt: skip
            except timing.TimingRejected as reason:
                rejected = str(reason)
        _wait()
        return found, rejected

    def _time_ranks(self) -> tuple[timing.Timing | None, str | None]:
        """Every rank takes the same number of samples, and each gets the same verdict from all of them."""
        work, reason = self.work, None
        sample, calls = self._graph_sampler() if work.device == "cuda" else self._clock_sampler()
        for _ in range(timing.ATTEMPTS):
            mine = [sample() / calls for _ in range(SAMPLES[work.device])]
            slowest = self._shared(mine).amax(0).tolist()
            part_bytes = work.rung.set_bytes // work.ranks
            reason = timing.rejection(slowest, part_bytes, work.bandwidth_bytes_s, work.device, work.rotation.cold)
            if reason is None:
                return timing.summarise(slowest, calls), None
        return None, f"{contender(work.ranks)}: {reason}"

    def _clock_sampler(self) -> tuple[Callable[[], float], int]:
        turn = 0

        def sample() -> float:
            nonlocal turn
            _wait()
            start = time.perf_counter()
            self.on_ranks(turn % len(self.sets))
            turn += 1
            return (time.perf_counter() - start) * 1e6

        sample()
        return sample, 1

    def _graph_sampler(self) -> tuple[Callable[[], float], int]:
        """Microseconds of one replay. The replay before it, unmeasured, brings the ranks into step."""
        sets = len(self.sets)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(3):
                self.on_ranks(i % sets)
        torch.cuda.current_stream().wait_stream(side)
        floor_us = self.work.rung.set_bytes / self.work.ranks / self.work.bandwidth_bytes_s * 1e6
        calls = timing.graph_calls(floor_us, sets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread may call CUDA meanwhile
            for n in range(calls):
                self.on_ranks(n % sets)
        graph.replay()

        def sample() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3

        return sample, calls

    def _shared(self, numbers: list[float]) -> Tensor:
        """[ranks, len(numbers)] float64 on the CPU: these numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.q.device)
        everyone = [torch.empty_like(mine) for _ in range(self.work.ranks)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).cpu()


def _wait() -> None:
    """Until all ranks are here, and their devices have nothing left to do."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
