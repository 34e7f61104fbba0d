"""The planted faults: for each case of docs/cases.md, the mistake that others made, in our kernels or our calls."""

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

TILE, SPLIT, MERGE, LAUNCH = "triton_tile.py", "triton_split.py", "triton_merge.py", "triton_launch.py"
CALL, CTILE, ROWS, TREE, KERNEL = "cpu_call.h", "cpu_tile.h", "cpu_rows.h", "cpu_tree.h", "cpu_kernel.c"
NO_FAULT = Fault()

# ---- where a key lies --------------------------------------------------------------------------------------

PAGE_OFFSETS_IN_32_BITS = Fault(  # 01
    c=(
        (
            CALL,
            "at3(&call->k, page, slot, 0)",
            "call->k.data + (int32_t)(page * call->k.stride[0] + slot * call->k.stride[1])",
        ),
    ),
    triton=((TILE, "block, slot = page.to(tl.int64), n % PAGE_SIZE", "block, slot = page, n % PAGE_SIZE"),),
)
PAGE_BASE_FROM_THE_TOKEN_STRIDE = Fault(  # 04
    c=((CALL, "at3(&call->k, page, slot, 0)", "at3(&call->k, 0, page * call->page_size + slot, 0)"),),
    triton=((LAUNCH, "k_stride_b=k_steps[0]", "k_stride_b=k_steps[1] * (problem.page_size or problem.capacity)"),),
)
HEADS_OF_A_PADDED_GROUP = Fault(  # 05: right where the ratio is a power of two
    c=(
        (
            KERNEL,
            "resolve(tile->v, tile->count, head * call->v.stride[2]",
            "int padded = 1;\n    while (padded < rows) padded *= 2;\n"
            "    resolve(tile->v, tile->count, head * rows / padded * call->v.stride[2]",
        ),
    ),
    triton=(
        (
            SPLIT,
            "n0, n_end, causal_end, row64, kv_head,",
            "n0, n_end, causal_end, row64, kv_head * ROWS_PER_BLOCK // BLOCK_M,",
        ),
    ),
)
KEYS_READ_FROM_ALIGNED_ADDRESSES = Fault(  # 12: 16-byte loads where only some tensors allow them
    c=((CALL, "at3(&call->k, page, slot, 0)", "(char *)((uintptr_t)at3(&call->k, page, slot, 0) & ~(uintptr_t)15)"),),
    triton=(
        (
            LAUNCH,
            "k_cache=k_cache,",
            "k_cache=k_cache.as_strided(k_cache.shape, k_cache.stride(), k_cache.storage_offset() // 8 * 8),",
        ),
        (LAUNCH, "k_stride_b=k_steps[0],", "k_stride_b=k_steps[0] // 8 * 8,"),
    ),
)
NEGATIVE_PAGE_IDS_USED = Fault(  # 15: only ids that are too large are caught
    c=((CALL, "page >= 0 && page < call->num_pages", "page < call->num_pages"),),
    triton=((TILE, "exists & (page >= 0) & (page < num_pages)", "exists & (page < num_pages)"),),
)
ONE_PAGE_PER_TILE = Fault(  # 23: right where a tile lies inside a page
    c=((CALL, "for (int j = 0; j < count; logical++, slot = 0)", "for (int j = 0; j < count; slot = 0)"),),
    triton=((TILE, "row * table_stride + n // PAGE_SIZE", "row * table_stride + (n0 + 0 * n) // PAGE_SIZE"),),
)
POSITIONS_IN_16_BITS = Fault(  # 30
    c=(
        (
            CALL,
            "int64_t logical = begin / call->page_size, slot = begin % call->page_size;",
            "const int64_t short_begin = (uint16_t)begin;\n"
            "    int64_t logical = short_begin / call->page_size, slot = short_begin % call->page_size;",
        ),
    ),
    triton=((TILE, "tl.zeros_like(n).to(tl.int64) + row, n\n", "tl.zeros_like(n).to(tl.int64) + row, n & 0xFFFF\n"),),
)

# ---- which keys count --------------------------------------------------------------------------------------

VALUES_PAST_THE_END_TIMES_0 = Fault(  # 02, 31: the whole tile of V is read, weights past the end are 0
    c=(
        (
            KERNEL,
            "    if (hides)\n",
            "    for (int j = tile->count; j < TILE_KEYS; j++) now[j] = now[j - 1] + call->v.stride[1];\n"
            "    if (hides)\n",
        ),
        (KERNEL, "rows, now, ahead, tile->count,", "rows, now, ahead, TILE_KEYS,"),
    ),
    triton=(
        (
            TILE,
            "n // PAGE_SIZE, mask=exists, other=-1)",
            "n // PAGE_SIZE, mask=n < tl.cdiv(n_end, PAGE_SIZE) * PAGE_SIZE, other=-1)",
        ),
        (
            TILE,
            "    v_mask = exists[:, None]\n",
            "    v_mask = ((page >= 0) & (page < num_pages) if PAGE_SIZE > 0 else n >= 0)[:, None]\n",
        ),
    ),
)
WINDOW_AS_A_DISTANCE = Fault(  # 08: one key too many
    c=(
        (
            CALL,
            "max64(row.start, first_query_end - call->window)",
            "max64(row.start, first_query_end - call->window - 1)",
        ),
        (CALL, "row->seq_len - call->window;", "row->seq_len - call->window - 1;"),
    ),
    triton=((TILE, "hi - (Q_LEN - 1) - window, 0)", "hi - (Q_LEN - 1) - window - 1, 0)"),),
)
WINDOW_LESS_ITS_OWN_KEY = Fault(  # 08: one key too few
    c=(
        (
            CALL,
            "max64(row.start, first_query_end - call->window)",
            "max64(row.start, first_query_end - call->window + 1)",
        ),
    ),
    triton=((TILE, "hi - (Q_LEN - 1) - window, 0)", "hi - (Q_LEN - 1) - window + 1, 0)"),),
)
PADDING_IN_THE_DENOMINATOR = Fault(  # 17
    c=((CTILE, "j < TILE_KEYS; j++) scores[j] = -INFINITY;", "j < TILE_KEYS; j++) scores[j] = 0.0f;"),),
    triton=((TILE, "s = tl.where(visible, s,", "s = tl.where(visible | (n >= n_end)[None, :], s,"),),
)
CAP_AFTER_THE_MASK = Fault(  # 18: hidden keys get -cap, a finite score
    c=(
        (
            CTILE,
            "vselect((ivec)(b == hidden), hidden,",
            "vselect((ivec)(b == hidden), softcap > 0.0f ? vset1(-softcap * LOG2_E) : hidden,",
        ),
        (KERNEL, "            hides |= fill_bias(", "            (void)fill_bias("),
    ),
    triton=(
        (TILE, "        s = softcap * tanh(s / softcap)\n", "        s = s\n"),
        (
            TILE,
            '    s = tl.where(visible, s, float("-inf"))\n',
            '    s = tl.where(visible, s, float("-inf"))\n'
            "    if HAS_SOFTCAP:\n        s = softcap * tanh(s / LOG2E / softcap) * LOG2E\n",
        ),
    ),
)
CAP_DROPPED = Fault(  # 18
    c=((KERNEL, "finish_logits(scale, (float)call->softcap,", "finish_logits(scale, 0.0f,"),),
    triton=((LAUNCH, "HAS_SOFTCAP=softcap > 0.0", "HAS_SOFTCAP=False"),),
)
EMPTY_ROWS_NOT_WRITTEN = Fault(  # 20
    c=((CALL, "max64(ceil_div(span, row->split_len * row->run), 1)", "ceil_div(span, row->split_len * row->run)"),),
    triton=((SPLIT, "num_units = tl.maximum(tl.cdiv(span, split_len), 1)", "num_units = tl.cdiv(span, split_len)"),),
)


def _lengths_from_the_table(arguments: dict[str, Any]) -> dict[str, Any]:
    table, lens = arguments["block_table"], arguments["seq_lens"]
    page_size = arguments["k_cache"].shape[1]
    last = torch.where(lens % page_size == 0, page_size, lens % page_size)
    return arguments | dict(seq_lens=((table.shape[1] - 1) * page_size + last).to(torch.int32))


LENGTHS_FROM_THE_TABLE = Fault(patch=lambda patch: change_launches(_lengths_from_the_table, patch))  # 26

# ---- scales, logarithms, sinks, dtypes ---------------------------------------------------------------------

NO_K_SCALE_FOR_PAGES = Fault(  # 03: one path has it, its sibling does not
    c=(
        (
            KERNEL,
            "call->softmax_scale * load_number(at3(&call->k_scale, head, 0, 0), F32)",
            "call->softmax_scale * (call->block_table.data ? 1.0f : load_number(at3(&call->k_scale, head, 0, 0), F32))",
        ),
    ),
    triton=((SPLIT, "    if HAS_K_SCALES:\n", "    if HAS_K_SCALES and PAGE_SIZE == 0:\n"),),
)
SCALES_SWAPPED = Fault(  # 03
    patch=lambda patch: change_launches(lambda a: a | dict(k_scale=a["v_scale"], v_scale=a["k_scale"]), patch)
)
LSE_IN_BASE_2 = Fault(  # 06
    c=((KERNEL, "maximum * 0.69314718055994531 + log(sum)", "maximum + log2(sum)"),),
    triton=((TILE, "(m + tl.log2(l)) * LN2", "m + tl.log2(l)"),),
)
SINK_TWICE = Fault(  # 10: seeded by the first split, and again where the parts are joined
    c=(
        (
            KERNEL,
            "fmaf(sum, factor, exp2_of(sink - base))",
            "fmaf(sum, factor, (job->rows[b].units > 1 ? 2.0f : 1.0f) * exp2_of(sink - base))",
        ),
    ),
    triton=(
        (
            MERGE,
            "    result, result_lse = finish(",
            "    if HAS_SINKS:\n        root_l += tl.exp2(sink * 1.4426950408889634 - root_m)\n"
            "    result, result_lse = finish(",
        ),
    ),
)
SINK_OF_AN_EMPTY_ROW = Fault(  # 10: the sink makes an empty row look like one with keys
    c=(
        (
            KERNEL,
            "const bool empty = part.stats[1] == 0.0f;",
            "const bool empty = part.stats[1] == 0.0f && !call->sinks.data;",
        ),
    ),
    triton=(
        (
            TILE,
            "    lse = tl.where(empty,",
            "    if HAS_SINKS:\n        empty = empty & False\n    lse = tl.where(empty,",
        ),
    ),
)
E4M3_READ_AS_E5M2 = Fault(  # 16
    c=((ROWS, "dtype == E4M3 ? e4m3_value((uint8_t)code)", "dtype == BF16 ? e4m3_value((uint8_t)code)"),),
    triton=(
        (
            LAUNCH,
            "v_cache=v_cache,",
            "v_cache=v_cache.view(torch.float8_e5m2) if v_cache.element_size() == 1 else v_cache,",
        ),
    ),
)

# ---- splits, parts and their scratch -----------------------------------------------------------------------


def _splits_from_the_batch(patch: pytest.MonkeyPatch) -> None:
    right = policy._RULES["auto"]

    def shared_out(chosen: Any, problem: Any, device: Any) -> policy.SplitRule:
        rule = right(chosen, replace(problem, batch=1), device)
        return replace(rule, min_len=rule.min_len * problem.batch)

    change_plans(patch, policy, "_RULES", policy._RULES | {"auto": shared_out})


SPLITS_FROM_THE_BATCH = Fault(patch=_splits_from_the_batch)  # 07
PARTS_THAT_NOBODY_WROTE = Fault(  # 14: the merge reads as many parts as a row may have
    c=(
        (
            KERNEL,
            "unit < row->first_unit + row->units; unit++",
            "unit < min64(row->first_unit + row->units + 1, call->max_units); unit++",
        ),
    ),
    triton=(
        (
            MERGE,
            "        units = tl.cdiv(span, split_len)\n",
            "        units = tl.cdiv(span, split_len) * 0 + max_splits\n",
        ),
    ),
)
JOIN_OF_NOTHING_IS_NAN = Fault(  # 24: -inf - -inf
    c=((TREE, "maximum == -INFINITY ? 0.0f : maximum", "maximum"),),
    triton=((TILE, '    base = tl.where(m == float("-inf"), 0.0, m)\n    w_a', "    base = m\n    w_a"),),
)
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


THE_FIRST_64_PARTS_AGAIN = Fault(  # 25: an address that loses its scalar base
    c=(
        (
            KERNEL,
            "workspace_part(call, unit, first_row), rows,",
            "workspace_part(call, row->first_unit + (unit - row->first_unit) % 64, first_row), rows,",
        ),
    ),
    triton=((MERGE, "at = (first + part).to(tl.int64)", "at = (first + part - base).to(tl.int64)"),),
)


def _one_number_per_part_forgotten(patch: pytest.MonkeyPatch) -> None:
    def size(plan: DecodePlan) -> int:
        problem = plan.problem
        return plan.splits * plan.max_units * problem.num_q_heads * problem.q_len * (problem.v_head_dim + 1) * 4

    patch.setattr(DecodePlan, "workspace_bytes", property(size))


WORKSPACE_OF_ONE_NUMBER_LESS = Fault(patch=_one_number_per_part_forgotten)  # 32


def _growing_scratch(patch: pytest.MonkeyPatch) -> None:
    """One buffer for all objects, replaced when one needs more."""
    shared = [torch.empty(0, dtype=torch.uint8)]

    def get(self: attention.DecodeAttention) -> torch.Tensor:
        if shared[0].numel() < self.plan.workspace_bytes:
            shared[0] = torch.empty(self.plan.workspace_bytes, dtype=torch.uint8, device=self.device)
        return shared[0].to(self.device)

    patch.setattr(attention.DecodeAttention, "workspace", property(get, lambda self, _: None), raising=False)


SCRATCH_THAT_GROWS = Fault(patch=_growing_scratch)  # 13


def _lengths_kept_from_the_capture(patch: pytest.MonkeyPatch) -> None:
    right = DecodeInputs.launch_arguments
    patch.setattr(
        DecodeInputs,
        "launch_arguments",
        lambda self: right(self) | dict(seq_lens=torch.as_tensor(self.seq_lens).clone()),
    )


LENGTHS_OF_THE_CAPTURE = Fault(patch=_lengths_kept_from_the_capture)  # 28

# ---- refusals ----------------------------------------------------------------------------------------------


def _ratio_rounded_down(patch: pytest.MonkeyPatch) -> None:
    """Query heads beyond the last whole group are forgotten, not refused."""
    right = checks._check_shapes

    def lenient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any) -> Any:
        kv_heads = k.shape[2]
        return right(q[..., : max(q.shape[-2] // kv_heads, 1) * kv_heads, :], k, v, table)

    patch.setattr(checks, "_check_shapes", lenient)


RATIO_ROUNDED_DOWN = Fault(patch=_ratio_rounded_down)  # 27


def _one_head_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checks, "_check_head_dims", lambda head_dim, v_head_dim: None)


HEAD_SIZES_NOT_CHECKED = Fault(patch=_one_head_size)  # 22
DEVICES_NOT_COMPARED = Fault(  # 09: only q, K and V are
    patch=lambda patch: patch.setattr(checks, "_check_devices", partial(_some_devices, checks._check_devices))
)


def _some_devices(right: Any, tensors: dict[str, torch.Tensor]) -> None:
    right({name: tensor for name, tensor in tensors.items() if name in ("q", "k_cache", "v_cache")})


def _current_device(patch: pytest.MonkeyPatch) -> None:
    from splitkv.backends import triton_launch

    patch.setattr(triton_launch, "on_device", lambda tensor: contextlib.nullcontext())


LAUNCH_ON_THE_CURRENT_DEVICE = Fault(patch=_current_device)  # 09


def _tile(patch: pytest.MonkeyPatch, changed: Any) -> None:
    right = plan.tile_config

    def tile(problem: Any, rows: int) -> Any:
        made = right(problem, rows)
        return replace(made, **changed(problem, made))

    change_plans(patch, plan, "tile_config", tile)


TILES_THAT_GROW = Fault(  # 22: shared memory that follows the context
    patch=lambda patch: _tile(patch, lambda problem, tile: dict(block_n=max(tile.block_n, problem.capacity // 256)))
)


def _smaller_for_many(problem: Any, tile: Any) -> dict[str, int]:
    return dict(block_n=tile.block_n // 2 if problem.batch * problem.num_kv_heads > 132 else tile.block_n)


VARIANT_FROM_THE_BATCH = Fault(patch=lambda patch: _tile(patch, _smaller_for_many))  # 23: once the batch fills a GPU

# ---- tools -------------------------------------------------------------------------------------------------


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
