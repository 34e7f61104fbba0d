"""Faults around the kernels: in plans, launches, checks, tools; see faults.py."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from planting import Fault, change_launches, change_plans

import splitkv
from splitkv import attention, checks, plan, policy
from splitkv.bench import cases, timing
from splitkv.checks import DecodeInputs
from splitkv.plan import DecodePlan


def _lengths_from_the_table(arguments: dict[str, Any]) -> dict[str, Any]:
    table, lens = arguments["block_table"], arguments["seq_lens"]
    if table is None:
        return arguments
    page_size = arguments["k_cache"].shape[1]
    last = torch.where(lens % page_size == 0, page_size, lens % page_size)
    return arguments | dict(seq_lens=((table.shape[1] - 1) * page_size + last).to(torch.int32))


LENGTHS_FROM_THE_TABLE = Fault(patch=lambda patch: change_launches(_lengths_from_the_table, patch))  # 26
SCALES_SWAPPED = Fault(  # 03
    patch=lambda patch: change_launches(lambda a: a | dict(k_scale=a["v_scale"], v_scale=a["k_scale"]), patch)
)


def _splits_from_the_batch(patch: pytest.MonkeyPatch) -> None:
    right = policy._RULES["auto"]

    def shared_out(chosen: Any, problem: Any, device: Any) -> policy.SplitRule:
        rule = right(chosen, replace(problem, batch=1), device)
        return replace(rule, min_len=rule.min_len * problem.batch)

    change_plans(patch, policy, "_RULES", policy._RULES | {"auto": shared_out})


SPLITS_FROM_THE_BATCH = Fault(patch=_splits_from_the_batch)  # 07
MERGES = {  # 24: of merge_states
    "parts of weight 0 are multiplied": ("torch.where((weights > 0).unsqueeze(-1), outs.to(lses.dtype), 0.0)", "outs"),
    "-inf less -inf": ("lses - torch.where(top == -torch.inf, 0.0, top)", "lses - top"),
    "no total is divided by": ("torch.where(total == 0, 1.0, total)", "total"),
}


def edit_merge_states(name: str, patch: pytest.MonkeyPatch) -> None:
    old, new = MERGES[name]
    text = inspect.getsource(attention.merge_states)
    if text.count(old) != 1:
        raise LookupError(f"merge_states: expected this text once: {old}")
    edited: dict[str, Any] = dict(vars(attention))
    exec(text.replace(old, new), edited)
    patch.setattr(splitkv, "merge_states", edited["merge_states"])


def _one_number_per_part_forgotten(patch: pytest.MonkeyPatch) -> None:
    def size(plan: DecodePlan) -> int:
        problem = plan.problem
        return plan.splits * plan.max_units * problem.num_q_heads * problem.q_len * (problem.v_head_dim + 1) * 4

    patch.setattr(DecodePlan, "workspace_bytes", property(size))


WORKSPACE_OF_ONE_NUMBER_LESS = Fault(patch=_one_number_per_part_forgotten)  # 32


def _growing_scratch(patch: pytest.MonkeyPatch) -> None:
    """One buffer for all objects, replaced when one needs more."""
    shared = [torch.empty(0, dtype=torch.uint8)]

    def get(self: splitkv.DecodeAttention, size: int) -> torch.Tensor:
        if shared[0].numel() < size:
            shared[0] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return shared[0].to(self.device)

    patch.setattr(splitkv.DecodeAttention, "workspace", property(lambda self: get(self, self.workspace_bytes)))
    patch.setattr(splitkv.DecodeAttention, "_scratch", get, raising=False)  # where captures would get their own


SCRATCH_THAT_GROWS = Fault(patch=_growing_scratch)  # 13


def _lengths_kept_from_the_capture(patch: pytest.MonkeyPatch) -> None:
    """A static buffer, filled at the first call with these tensors and never again."""
    right = DecodeInputs.launch_arguments
    buffers: dict[int, torch.Tensor] = {}

    def static(self: DecodeInputs) -> dict[str, Any]:
        lens = self.seq_lens
        if isinstance(lens, torch.Tensor):
            lens = buffers.setdefault(lens.data_ptr(), lens.clone())
        return right(self) | dict(seq_lens=lens)

    patch.setattr(DecodeInputs, "launch_arguments", static)


LENGTHS_OF_THE_CAPTURE = Fault(patch=_lengths_kept_from_the_capture)  # 28


def _ratio_rounded_down(patch: pytest.MonkeyPatch) -> None:
    """Query heads beyond the last whole group are forgotten, not refused."""
    right = checks._check_shapes

    def lenient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any) -> Any:
        kv_heads = k.shape[2]
        return right(q[..., : max(q.shape[-2] // kv_heads, 1) * kv_heads, :], k, v, table)

    patch.setattr(checks, "_check_shapes", lenient)


RATIO_ROUNDED_DOWN = Fault(patch=_ratio_rounded_down)  # 27


def _one_head_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "check_head_dims", lambda head_dim, v_head_dim: None)


HEAD_SIZES_NOT_CHECKED = Fault(patch=_one_head_size)  # 22
DEVICES_NOT_COMPARED = Fault(  # 09: only q, K and V are
    patch=lambda patch: patch.setattr(checks, "check_devices", partial(_some_devices, checks.check_devices))
)


def _some_devices(right: Any, tensors: dict[str, torch.Tensor]) -> None:
    right({name: tensor for name, tensor in tensors.items() if name in ("q", "k_cache", "v_cache")})


def _current_device(patch: pytest.MonkeyPatch) -> None:
    from splitkv.backends import triton_launch

    patch.setattr(triton_launch, "on_device", lambda tensor: contextlib.nullcontext())


LAUNCH_ON_THE_CURRENT_DEVICE = Fault(patch=_current_device)  # 09


def _tile(patch: pytest.MonkeyPatch, changed: Any) -> None:
    def wrong(right: Any) -> Any:
        def tile(problem: Any, *others: Any) -> Any:
            made = right(problem, *others)
            return replace(made, **changed(problem, made))

        return tile

    patch.setattr(plan, "cuda_tile", wrong(plan.cuda_tile))
    change_plans(patch, plan, "tile_config", wrong(plan.tile_config))


TILES_THAT_GROW = Fault(  # 22: shared memory that follows the context
    patch=lambda patch: _tile(patch, lambda problem, tile: dict(block_n=max(tile.block_n, problem.capacity // 256)))
)


def _smaller_for_many(problem: Any, tile: Any) -> dict[str, int]:
    return dict(block_n=tile.block_n // 2 if problem.batch * problem.num_kv_heads > 132 else tile.block_n)


VARIANT_FROM_THE_BATCH = Fault(patch=lambda patch: _tile(patch, _smaller_for_many))  # 23: once the batch fills a GPU


def append_by_an_operator(honest: bool) -> Callable[[torch.Tensor, torch.Tensor, int], None]:
    """An operator that writes a row of keys into a cache; unless honest, it declares that it writes nothing. 21"""
    name = f"splitkv_faults::append_{'honest' if honest else 'hidden'}"

    @torch.library.custom_op(name, mutates_args=("cache",) if honest else ())
    def append(cache: torch.Tensor, rows: torch.Tensor, position: int) -> None:
        cache[:, position] = rows

    append.register_fake(lambda cache, rows, position: None)
    return append


def _one_set(patch: pytest.MonkeyPatch) -> None:
    right = cases.Arena.sets
    patch.setattr(cases.Arena, "sets", lambda self, rung, rotation, major=False: right(self, rung, rotation, major)[:1])


ONE_SET_FOR_ALL = Fault(patch=_one_set)  # 11: every call reads the same keys
COLD_WHATEVER_IT_READS = Fault(patch=lambda patch: patch.setattr(timing, "COLD_MULTIPLE", 0))  # 11
HARNESS = {  # 29
    "bandwidth": Fault(patch=lambda patch: patch.setitem(timing.PEAK_SLACK, "cpu", 1e12)),
    "first sample": Fault(patch=lambda patch: patch.setattr(timing, "FIRST_SAMPLE_LIMIT", 1e12)),
    "spread": Fault(patch=lambda patch: patch.setitem(timing.SPREAD_LIMIT, "cuda", 1e12)),
    "warm-up": Fault(patch=lambda patch: patch.setattr(timing, "_cpu_sampler", _cold_sampler)),
}


def _cold_sampler(contenders: Any, sets: int) -> timing.Sampler:
    """The first call of all, which compiles, is a sample like any other."""

    def sample(budget_s: float) -> dict[str, tuple[list[float], int]]:
        taken: dict[str, tuple[list[float], int]] = {}
        for name, call in contenders.items():
            start = time.perf_counter()
            call(0)
            taken[name] = ([(time.perf_counter() - start) * 1e6] * 2, 1)
        return taken

    return sample


def write_wrongly(name: str, patch: pytest.MonkeyPatch) -> None:
    """16: append writes fp8 in the format that the platform prefers, or past its largest number."""
    from splitkv.backends import cpu_append

    writers = {
        "the other format": lambda x, scale, dtype: x.to(torch.float8_e5m2).view(dtype),
        "no saturation": lambda x, scale, dtype: x.where(x.abs() <= torch.finfo(dtype).max, torch.nan).to(dtype),
    }
    patch.setattr(cpu_append, "to_storage", writers[name])
