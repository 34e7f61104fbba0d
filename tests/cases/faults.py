"""Faults in the kernels: the mistakes that others made, the case beside each, in copies of our sources.

faults_in_python.py has those that are made around the kernels.
"""

from __future__ import annotations

from planting import Fault

TILE, SPLIT, MERGE, LAUNCH = "triton_tile.py", "triton_split.py", "triton_merge.py", "triton_launch.py"
CALL, CTILE, ROWS, TREE, KERNEL = "cpu_call.h", "cpu_tile.h", "cpu_rows.h", "cpu_tree.h", "cpu_kernel.c"
ATTEND = "cpu_attend.h"

# ---- where a key lies ---------------------------------------------------------------------------------------

PAGE_OFFSETS_IN_32_BITS = Fault(  # 01
    c=(
        (
            CALL,
            "at3(&call->k, where, slot, 0)",
            "call->k.data + (int32_t)(where * call->k.stride[0] + slot * call->k.stride[1])",
        ),
    ),
    triton=((TILE, "block, slot = page.to(tl.int64), n % PAGE_SIZE", "block, slot = page, n % PAGE_SIZE"),),
)
PAGE_BASE_FROM_THE_TOKEN_STRIDE = Fault(  # 04
    c=((CALL, "at3(&call->k, where, slot, 0)", "at3(&call->k, 0, where * call->page_size + slot, 0)"),),
    triton=((LAUNCH, "k_stride_b=k_steps[0]", "k_stride_b=k_steps[1] * (problem.page_size or problem.capacity)"),),
)
HEADS_OF_A_PADDED_GROUP = Fault(  # 05: right where the ratio is a power of two
    c=(
        (
            ATTEND,
            "int64_t offset = (task->first_head + h) * call->v.stride[2];",
            "int padded = 1;\n            while (padded < rows) padded *= 2;\n"
            "            int64_t offset = (task->first_head + h) * rows / padded * call->v.stride[2];",
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
    c=((CALL, "at3(&call->k, where, slot, 0)", "(char *)((uintptr_t)at3(&call->k, where, slot, 0) & ~(uintptr_t)15)"),),
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

# ---- which keys count ---------------------------------------------------------------------------------------

VALUES_PAST_THE_END_TIMES_0 = Fault(  # 02, 31: the whole tile of V is read, weights past the end are 0
    c=(
        (
            ATTEND,
            "            values_of[call->v.dtype](&job->v_reader, rows, keys, offset, block.count,",
            "            const int whole = (block.count + LANES - 1) / LANES * LANES;\n"
            "            const char *past[TILE_KEYS];\n"
            "            for (int i = 0; i < whole; i++)\n"
            "                past[i] = i < block.count ? keys[i] : past[i - 1] + call->v.stride[1];\n"
            "            values_of[call->v.dtype](&job->v_reader, rows, past, offset, whole,",
        ),
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
    c=((CTILE, "first_lanes(count - j), x, hidden)", "first_lanes(count - j), x, vset1(0.0f))"),),
    triton=((TILE, "s = tl.where(visible, s,", "s = tl.where(visible | (n >= n_end)[None, :], s,"),),
)
CAP_AFTER_THE_MASK = Fault(  # 18: hidden keys get -cap, a finite score
    c=(
        (
            CTILE,
            "vselect((ivec)(b == hidden), hidden,",
            "vselect((ivec)(b == hidden), softcap > 0.0f ? vset1(-softcap * LOG2_E) : hidden,",
        ),
        (ATTEND, "        hides |= fill_bias(", "        (void)fill_bias("),
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
    c=((ATTEND, "scale, (float)call->softcap,", "scale, 0.0f,"),),
    triton=((LAUNCH, "HAS_SOFTCAP=softcap > 0.0", "HAS_SOFTCAP=False"),),
)
EMPTY_ROWS_NOT_WRITTEN = Fault(  # 20
    c=((CALL, "max64(ceil_div(span, row->split_len * row->run), 1)", "ceil_div(span, row->split_len * row->run)"),),
    triton=((SPLIT, "num_units = tl.maximum(tl.cdiv(span, split_len), 1)", "num_units = tl.cdiv(span, split_len)"),),
)

# ---- scales, logarithms, sinks, formats ---------------------------------------------------------------------

NO_K_SCALE_FOR_PAGES = Fault(  # 03: one path has it, its sibling does not
    c=(
        (
            ATTEND,
            "call->softmax_scale * load_number(at3(&call->k_scale, head, 0, 0), F32)",
            "call->softmax_scale * (call->block_table.data ? 1.0f : load_number(at3(&call->k_scale, head, 0, 0), F32))",
        ),
    ),
    triton=((LAUNCH, "HAS_K_SCALES=isinstance(", "HAS_K_SCALES=block_table is None and isinstance("),),
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

# ---- parts and their joins ----------------------------------------------------------------------------------

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
