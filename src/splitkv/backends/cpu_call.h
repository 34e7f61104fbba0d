/* One call as cpu.py hands it over, and what follows from its integers: which keys a row attends to, how they are
 * cut into splits and units, and where each key lies. */
#ifndef SPLITKV_CPU_CALL_H
#define SPLITKV_CPU_CALL_H

#include "cpu_tile.h"

#define FAN_OUT 4     /* children of a node of the merge tree */
#define UNIT_LEVELS 2 /* levels that may be joined inside a unit */
#define MAX_RUN 16    /* so the most splits of a unit: FAN_OUT ^ UNIT_LEVELS */

/* A tensor: strides in bytes; data is null where the argument is absent. */
struct view {
    char *data;
    int64_t stride[4];
    int64_t dtype;
};

/* The same fields in the same order as cpu.py packs them. */
struct call {
    struct view q;                /* [batch, q_len, num_q_heads, head_dim] */
    struct view k, v;             /* [pages, keys of a page, num_kv_heads, dim]; contiguous: one page per row */
    struct view seq_lens;         /* [batch] */
    struct view block_table;      /* [batch, pages of a row] */
    struct view starts;           /* [batch] */
    struct view mask;             /* [batch, num_q_heads, q_len, capacity] */
    struct view sinks;            /* [num_q_heads] */
    struct view k_scale, v_scale; /* [num_kv_heads] */
    struct view out;              /* [batch, q_len, num_q_heads, v_head_dim] */
    struct view lse;              /* [batch, q_len, num_q_heads] */
    float *workspace;             /* partial sums [max_units, query rows, v_head_dim], then {maximum, sum} of each */
    int64_t batch, q_len, num_q_heads, num_kv_heads, head_dim, v_head_dim;
    int64_t capacity, page_size, num_pages, window;
    int64_t rule_target, rule_min_len, rule_quantum, max_run, target_units, max_units;
    int64_t num_threads;
    double softmax_scale, softcap;
};

/* The keys [begin, end) that a row of the batch attends to, and how they are cut. */
struct row {
    int64_t index, seq_len, start, begin, end;
    int64_t split_len, run;    /* keys per split, splits per unit */
    int64_t first_unit, units; /* units of all rows are numbered one row after the other */
};

/* Some neighbouring keys of a row. */
struct tile {
    const char *k[TILE_KEYS], *v[TILE_KEYS]; /* KV head 0 of each key; null where its page is absent */
    int64_t begin;
    int count;
    bool absent;      /* some key is */
    bool in_one_page; /* all keys are */
};

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The address of element [i, j, k] of a view of at least three dimensions; trailing zeros for fewer. */
INLINE char *at3(const struct view *view, int64_t i, int64_t j, int64_t k) {
    return view->data + i * view->stride[0] + j * view->stride[1] + k * view->stride[2];
}

static struct row row_of(const struct call *call, int64_t b) {
    struct row row = {.index = b};
    const int64_t length = load_integer(at3(&call->seq_lens, b, 0, 0), call->seq_lens.dtype);
    row.seq_len = min64(max64(length, 0), call->capacity);
    if (call->starts.data) row.start = max64(load_integer(at3(&call->starts, b, 0, 0), call->starts.dtype), 0);
    const int64_t first_query_end = row.seq_len - call->q_len + 1;
    row.begin = call->window ? max64(row.start, first_query_end - call->window) : row.start;
    row.end = max64(row.seq_len, row.begin);
    return row;
}

/* Fills rows[batch] and returns the number of units. A row's splits come from its own keys alone; how many of
 * them make a unit comes from the load. */
static int64_t cut_rows(const struct call *call, struct row *rows) {
    int64_t keys = 0, units = 0;
    for (int64_t b = 0; b < call->batch; b++) {
        rows[b] = row_of(call, b);
        keys += rows[b].end - rows[b].begin;
    }
    const int64_t run_keys = ceil_div(keys, call->target_units);
    for (int64_t b = 0; b < call->batch; b++) {
        struct row *row = &rows[b];
        const int64_t span = row->end - row->begin;
        const int64_t wanted = ceil_div(ceil_div(span, call->rule_target), call->rule_quantum) * call->rule_quantum;
        row->split_len = max64(call->rule_min_len, wanted);
        row->run = 1;
        while (row->run < call->max_run && row->split_len * row->run < run_keys) row->run *= FAN_OUT;
        row->first_unit = units;
        row->units = max64(ceil_div(span, row->split_len * row->run), 1);
        units += row->units;
    }
    return units;
}

static int64_t row_of_unit(const struct row *rows, int64_t batch, int64_t unit) {
    int64_t low = 0, high = batch;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (rows[middle].first_unit <= unit) low = middle;
        else high = middle;
    }
    return low;
}

/* Finds keys [begin, begin + count) of a row. A page id is read once per tile and used only if it is one. */
static void locate_tile(const struct call *call, int64_t b, int64_t begin, int64_t count, struct tile *tile) {
    const struct view *const table = &call->block_table;
    int64_t logical = begin / call->page_size, slot = begin % call->page_size;
    tile->begin = begin;
    tile->count = (int)count;
    tile->absent = false;
    for (int j = 0; j < count; logical++, slot = 0) {
        const int64_t page = table->data ? load_integer(at3(table, b, logical, 0), table->dtype) : b;
        const bool present = page >= 0 && page < call->num_pages;
        tile->absent |= !present;
        const int page_end = (int)min64(count, j + call->page_size - slot);
        const int64_t where = present ? page : 0;
        const char *k = at3(&call->k, where, slot, 0), *v = at3(&call->v, where, slot, 0);
        tile->in_one_page = j == 0 && page_end == count;
        for (; j < page_end; j++, k += call->k.stride[1], v += call->v.stride[1]) {
            tile->k[j] = present ? k : NULL;
            tile->v[j] = present ? v : NULL;
        }
    }
    for (int j = (int)count; j % TURNED_KEYS; j++) tile->k[j] = tile->k[j - 1]; /* scores are taken by the vector */
}

/* Whether some query row may not see some key of the tile, or sees it through a mask. */
static bool needs_bias(const struct call *call, const struct row *row, const struct tile *tile) {
    const int64_t first_end = row->seq_len - call->q_len + 1, last_begin = row->seq_len - call->window;
    return call->mask.data || tile->absent || tile->begin + tile->count > first_end ||
           (call->window && tile->begin < last_begin);
}

/* Natural-log bias of the tile's keys for one query row: the mask's, and -inf for keys out of its sight. Returns
 * whether there is a -inf. */
static bool fill_bias(const struct call *call, const struct row *row, int64_t head, int64_t token,
                      const struct tile *tile, float *bias) {
    const int64_t end = row->seq_len - call->q_len + 1 + token;
    const int64_t begin = call->window ? max64(row->start, end - call->window) : row->start;
    const struct view *const mask = &call->mask;
    bool hides = false;
    for (int j = 0; j < tile->count; j++) {
        const int64_t key = tile->begin + j;
        bias[j] = key < begin || key >= end || !tile->k[j] ? -INFINITY : 0.0f;
        if (mask->data && bias[j] == 0.0f) {
            const char *const p = at3(mask, row->index, head, token) + key * mask->stride[3];
            bias[j] = mask->dtype != BOOL ? load_number(p, mask->dtype) : *p ? 0.0f : -INFINITY;
        }
        hides |= bias[j] == -INFINITY;
    }
    return hides;
}
#endif
