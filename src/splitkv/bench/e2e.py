"""`splitkv bench e2e`: how long a whole decode step of a published model takes at each depth, beside its bytes' floor.

For each geometry: random weights, one prompt really prefilled, then for each KV dtype and batch a cache that is filled
once at the largest depth. Rows are set back to each depth by their lengths, deepest first, as a run overwrites the keys
behind its depth. A step is timed with attention split by policy `auto` and with one split, and both give their tokens.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import splitkv

from ..cache.memory import ModelGeometry
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from . import machine, record
from .e2e_llamacpp import KV_TYPES as KV_DTYPES
from .e2e_model import make_prompt, prompt_stops
from .e2e_peers import PEERS, PeerRun, run_peers
from .e2e_rows import CONTENDERS, REFERENCE, Combination, Model, reference_logits
from .e2e_source import Source, open_source
from .e2e_timing import METHOD, run_length
from .failures import DeviceBroken, require_working_device, short_reason
from .fitting import attention_workspace
from .progress import Progress
from .roofline import Bandwidth, read_bandwidth
from .summary import OURS

SCHEMA = "splitkv.e2e.v1"
ACTIVATIONS = {"cuda": "bf16", "cpu": "f32"}


@dataclass(frozen=True)
class E2eOptions:
    """What to run. prefill: longest depth that is really prefilled. limit_s: no row begins after this many seconds.
    peers: some of e2e_peers.PEERS, run at batch 1."""

    device: str
    geometries: tuple[str, ...]
    depths: tuple[int, ...]
    kv_dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    prefill: int
    seed: int = 0
    profile: bool = False
    limit_s: float | None = None
    peers: tuple[str, ...] = ()


def run_e2e(
    options: E2eOptions,
    source: Mapping[str, Any],
    *,
    command: str,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Run every geometry and return the result file's object; `failed_rows` counts rows that must not be believed.

    source: from `record.provenance`. What does not fit, is not built or failed is under `not_measured` with the reason.
    """
    start = time.monotonic()
    result = record.new_record(SCHEMA, command, source, options.device)
    neighbours = machine.Neighbours()
    progress(0, 1, "measuring the read bandwidth")
    bandwidth = read_bandwidth(options.device)
    run = _Run(options, bandwidth, start, progress)
    for name in options.geometries:
        try:
            run.guarded(partial(run.geometry, name), name)
        except DeviceBroken as error:
            run.failures += 1
            for left in options.geometries[options.geometries.index(name) :]:
                run.leave_out(left, str(error))
            break
    rows, parity, profiles = (sorted(found, key=run.order) for found in (run.rows, run.parity, run.profiles))
    return result | {
        "contenders": CONTENDERS | {name: PEERS[name] for name in options.peers},
        "seed": options.seed,
        "timing_method": METHOD[options.device],
        "read_bandwidth_tb_s": bandwidth.tb_s,
        "read_bandwidth_method": f"{bandwidth.variant}, {bandwidth.swept_bytes} bytes, median of {bandwidth.samples}",
        "other_processes_cores": neighbours.cores(),
        "wall_s": time.monotonic() - start,
        "failed_rows": sum(not row["passed"] for row in rows) + run.failures,
        "geometries": run.geometries,
        "not_measured": run.not_measured,
        "kv_parity": parity,
        "profiles": profiles,
        "rows": rows,
    }


def _release() -> None:
    """Hand memory back, so that free memory reads true."""
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # a broken device cannot; what broke it is being reported
            torch.cuda.empty_cache()


class _Run:
    """The rows so far, and the loops over geometries, KV dtypes, batches and depths."""

    def __init__(self, options: E2eOptions, bandwidth: Bandwidth, start: float, progress: Progress) -> None:
        self.options, self.bandwidth, self.start, self._progress = options, bandwidth, start, progress
        self.activations = ACTIVATIONS[options.device]
        self.rows: list[dict[str, Any]] = []
        self.not_measured: list[dict[str, Any]] = []
        self.parity: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []
        self.geometries: dict[str, dict[str, Any]] = {}
        self.failures = 0

    # ---- bookkeeping ---------------------------------------------------------------------------------------

    def combinations(self) -> Iterator[tuple[str, int]]:
        """(KV dtype, batch), small batches first: they matter most and fit best."""
        for batch in sorted(self.options.batches):
            for kv_dtype in self.options.kv_dtypes:
                yield kv_dtype, batch

    def order(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        """Where a row stands in the result."""
        options, names = self.options, [*CONTENDERS, *PEERS]
        kv_dtypes = [*options.kv_dtypes, *KV_DTYPES]  # a peer may have one of its own
        place = options.geometries.index(row["geometry"]), row["batch"], kv_dtypes.index(row["kv_dtype"])
        return *place, row["depth"], names.index(row.get("contender", OURS))

    def report(self, text: str) -> None:
        options = self.options
        each = len(options.depths) * len(options.batches) * len(options.kv_dtypes)
        self._progress(len(self.rows) // len(CONTENDERS), each * len(options.geometries), text)

    def leave_out(self, name: str, reason: str, **where: Any) -> None:
        """where: depth, kv_dtype, batch, or none of them for a whole geometry."""
        self.not_measured.append({"geometry": name, **where, "reason": reason})

    def guarded(self, work: Callable[[], None], name: str, **where: Any) -> None:
        """work(), whose failure (too little memory, a plan refused) must not cost the others. Raises DeviceBroken."""
        try:
            work()
        except DeviceBroken:
            raise
        except Exception as failure:
            require_working_device(failure, self.options.device)
            self.leave_out(name, short_reason(failure), **where)
            self.failures += 1
        finally:
            _release()

    def late(self) -> str | None:
        """Why nothing more may begin, or None."""
        limit = self.options.limit_s
        if limit is None or time.monotonic() - self.start <= limit:
            return None
        return f"the run had taken {limit:g} s"

    # ---- one geometry --------------------------------------------------------------------------------------

    def geometry(self, name: str) -> None:
        options, device = self.options, self.options.device
        try:
            source = open_source(name, self.activations, options.seed)
        except splitkv.UnsupportedError as error:
            self.leave_out(name, str(error))
            return
        config, geometry = source.config, source.geometry
        _release()
        depths = self._fitting(name, config, geometry)
        if not depths:
            return
        self.report(f"{name}: weights")
        start = time.perf_counter()
        decoder = source.decoder(device, options.seed)
        self.report(f"{name}: prefill")
        reached = {depth for found in depths.values() for depth in found}
        prompt = make_prompt(decoder, prompt_stops(reached, options.prefill), options.seed)
        self.geometries[name] = {
            "parameters": geometry.parameters,
            "weights": source.weights,
            "weights_bytes": geometry.weights_bytes,
            "weights_read_bytes": decoder.bytes_per_step(),
            "layers": len(config.layer_types),
            "attention_layers": sum(kind != "linear_attention" for kind in config.layer_types),
            "kv_bytes_per_token": {kv: geometry.kv_bytes_per_token(kv) for kv in options.kv_dtypes},
            "max_context": geometry.max_context,
            "prefilled_tokens": prompt.tokens,
            "prefill_s": prompt.seconds,
            "setup_s": time.perf_counter() - start,
        }
        model = Model(name, self.activations, decoder, prompt, {})
        smallest = min(batch for _, batch in depths)
        self.guarded(partial(self._references, model, geometry, smallest, depths), name, kv_parity=REFERENCE)
        for (kv_dtype, batch), found in depths.items():
            where = {"kv_dtype": kv_dtype, "batch": batch}
            if reason := self.late():
                self.leave_out(name, reason, **where)
                continue
            self.guarded(partial(self._combination, model, kv_dtype, batch, found), name, **where)

        if options.peers:
            self._peers(name, source, decoder, tuple(sorted({depth for found in depths.values() for depth in found})))

    def _peers(self, name: str, source: Source, decoder: Decoder, depths: tuple[int, ...]) -> None:
        """Everything that --with names."""
        options = self.options
        if reason := self.late():
            self.leave_out(name, reason, contender=",".join(options.peers))
            return
        deadline = None if options.limit_s is None else self.start + options.limit_s
        run = PeerRun(
            name, source, decoder, depths, options.kv_dtypes, options.prefill, self.bandwidth.bytes_per_s, options.seed,
            deadline,
        )  # fmt: skip
        found = run_peers(options.peers, run, self._progress)
        self.rows += found["rows"]
        self.not_measured += found["not_measured"]
        self.geometries[name]["peers"] = found["about"]

    def _fitting(
        self, name: str, config: DecoderConfig, geometry: ModelGeometry
    ) -> dict[tuple[str, int], tuple[int, ...]]:
        """The depths, ascending, that fit the free memory in each combination; the others are left out with the sum."""
        found = {}
        for kv_dtype, batch in self.combinations():
            fitting = []
            for depth in sorted(set(self.options.depths)):
                reason = self._refusal(config, geometry, kv_dtype, batch, depth)
                if reason is None:
                    fitting.append(depth)
                else:
                    self.leave_out(name, reason, kv_dtype=kv_dtype, batch=batch, depth=depth)
            if fitting:
                found[kv_dtype, batch] = tuple(fitting)
        return found

    def _refusal(
        self, config: DecoderConfig, geometry: ModelGeometry, kv_dtype: str, batch: int, depth: int
    ) -> str | None:
        """Why this depth cannot be measured, before anything of it is allocated."""
        if config.max_context is not None and depth > config.max_context:
            return f"the model was made for {config.max_context} tokens"
        device = self.options.device
        free, total = machine.memory_bytes(device)
        prompt = geometry.kv_bytes(self.activations, self.options.prefill)
        prompt += (1 + len(self.options.depths)) * geometry.state_bytes
        plan = splitkv.plan_memory(
            geometry,
            depth,
            generated=run_length(device),
            free_bytes=free,
            total_bytes=total,
            kv_dtypes=(kv_dtype,),
            workspace_bytes=attention_workspace(geometry, batch) + prompt,
            batch=batch,
        )
        return None if plan.fits else plan.arithmetic

    def _references(
        self, model: Model, geometry: ModelGeometry, batch: int, depths: dict[tuple[str, int], tuple[int, ...]]
    ) -> None:
        """Fill model.references, at the depths where f32 keys and values fit."""
        wanted = sorted({depth for (_, rows), found in depths.items() if rows == batch for depth in found})
        config = model.decoder.config
        unweighted = replace(geometry, weights_bytes=0)  # those are allocated by now
        fitting = tuple(d for d in wanted if self._refusal(config, unweighted, REFERENCE, batch, d) is None)
        for depth in sorted(set(wanted) - set(fitting)):
            self.leave_out(model.name, "f32 keys and values do not fit", kv_parity=REFERENCE, depth=depth)
        if not fitting:
            return
        self.report(f"{model.name}: logits over f32 keys and values")
        model.references.update(reference_logits(model, batch, fitting, self.options.seed))

    def _combination(self, model: Model, kv_dtype: str, batch: int, depths: tuple[int, ...]) -> None:
        """Every depth of one KV dtype and batch, deepest first."""
        where = {"kv_dtype": kv_dtype, "batch": batch}
        label = f"{model.name}: {kv_dtype} KV, batch {batch}"
        self.report(f"{label}: capture")
        bench = Combination(model, kv_dtype, batch, max(depths), self.options.seed)
        for depth in reversed(depths):
            if reason := self.late():
                self.leave_out(model.name, reason, **where, depth=depth)
                continue
            self.report(f"{label}, depth {depth}")
            rows, parity = bench.measure(depth, self.bandwidth)
            self.rows += rows
            self.parity += parity
            seen = {(profile["geometry"], profile["depth"]) for profile in self.profiles}
            if self.options.profile and depth in (depths[0], depths[-1]) and (model.name, depth) not in seen:
                self.profiles.append(bench.profile(depth) | {"step_us": (rows[0]["ms_per_token"] or 0) * 1e3})
