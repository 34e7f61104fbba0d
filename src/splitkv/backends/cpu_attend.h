/* One tile for all KV heads of a task: its blocks of K and of V in the order of memory, each asked for while the one
 * before it is worked on. */
#ifndef SPLITKV_CPU_ATTEND_H
#define SPLITKV_CPU_ATTEND_H

#include "cpu_stream.h"
#include "cpu_tree.h"

#define MOST_HEADS 64           /* KV heads of a task */
#define BLOCK_BYTES (256 << 10) /* of K or V of all heads at a time, if a few keys are no more: see keys_per_block */

/* What all threads share. */
struct job {
    const struct call *call;
    const struct row *rows;
    struct reader k_reader, v_reader;
    enum product product;
    int64_t k_block, v_block; /* keys whose K, or V, is read in one go, in the order of memory */
    bool turned;              /* keys are scored in lanes */
    bool streams;             /* K and V are read as in cpu_stream.h, where all keys are present */
    int q_width;              /* floats that a query row fills (enum product) */
    float *q;                 /* [batch, query rows, q_width]: see load_query */
    int32_t *order;           /* [head_dim]: query_element of each place, found once */
    int64_t k_bytes, v_bytes; /* of a key's row of one KV head */
    int64_t group_rows;       /* query rows per KV head */
    int64_t heads;            /* KV heads per task, at most */
};

/* KV heads [first_head, first_head + heads) of one unit of a row. */
struct task {
    const struct row *row;
    int64_t unit, first_head, heads;
};

/* What a thread works in, for job.heads KV heads. */
struct scratch {
    float *scores; /* [query rows, TILE_KEYS] */
    float *factor; /* [query rows] */
    float *bias;   /* [group_rows, TILE_KEYS] */
    float *zeros;  /* stands in for the rows of absent keys */
    struct part parts[UNIT_LEVELS + 1];
};

/* Query row `r` of batch row `b`, as f32 or as pairs of bf16 in the order in which K's arrive. */
static void load_query(const struct job *job, int64_t b, int64_t r) {
    const struct call *const call = job->call;
    const enum dtype dtype = (enum dtype)call->q.dtype;
    const char *const from = at3(&call->q, b, r % call->q_len, r / call->q_len);
    const int64_t stride = call->q.stride[3];
    const int width = job->q_width;
    float *const q = job->q + (b * call->num_q_heads * call->q_len + r) * width;
    if (job->product == IN_PAIRS) {
        for (int s = 0; s < 2 * width; s++) memcpy((char *)q + 2 * s, from + job->order[s] * stride, 2);
    } else if (stride == item_bytes[dtype] && width % LANES == 0 && most_packed((enum dtype)call->k.dtype) == 1) {
        for (int s = 0; s < width; s += LANES) vstore(q + s, load_vector(from + s * stride, dtype));
    } else {
        for (int s = 0; s < width; s++) q[s] = load_number(from + job->order[s] * stride, dtype);
    }
}

/* The keys of a block as they are, or with `zeros` for those that are absent (in `rows`). */
static const char *const *resolve(const struct tile *tile, const char *const *keys, int count, int64_t *offset,
                                  const void *zeros, const char **rows) {
    if (!tile->absent) return keys;
    for (int j = 0; j < TILE_KEYS; j++) rows[j] = j < count && keys[j] ? keys[j] + *offset : zeros;
    *offset = 0;
    return rows;
}

/* Adds V where some query row may not see some key: one row at a time over the keys that weigh something, so
 * that a hidden NaN or Inf is not multiplied by 0. */
static void add_visible_values(const struct job *job, const char *const *v, int64_t offset, int count,
                               const float *weights, const float *factor, float *acc) {
    const int dim = (int)job->call->v_head_dim;
    for (int64_t r = 0; r < job->group_rows; r++, weights += TILE_KEYS, acc += dim) {
        const char *seen[TILE_KEYS];
        float seen_weights[TILE_KEYS];
        int n = 0;
        for (int j = 0; j < count; j++) {
            if (weights[j] == 0.0f) continue;
            seen_weights[n] = weights[j];
            seen[n++] = v[j];
        }
        values_of[job->call->v.dtype](&job->v_reader, 1, seen, offset, n, seen_weights, factor + r, NULL, acc,
                                      dim);
    }
}

/* Some neighbouring keys' K, or V: what is read in one go for all heads of a task. */
struct block {
    const char *const *keys;
    const struct view *view;
    int64_t row_bytes; /* of one head */
    int count;
    bool in_one_page;
};

static struct block block_of(const struct job *job, const struct tile *tile, bool of_v, int first) {
    const struct call *const call = job->call;
    const int64_t most = of_v ? job->v_block : job->k_block;
    return (struct block){
        .keys = (of_v ? tile->v : tile->k) + first,
        .view = of_v ? &call->v : &call->k,
        .row_bytes = of_v ? job->v_bytes : job->k_bytes,
        .count = (int)min64(most, tile->count - first),
        .in_one_page = tile->in_one_page && !tile->absent,
    };
}

static void add_block(struct ahead *ahead, const struct task *task, struct block block) {
    const int64_t stride = block.view->stride[2];
    const bool adjacent = stride == block.row_bytes; /* then one run of memory per key */
    if (adjacent && block.in_one_page && block.count > 0 && block.view->stride[1] == task->heads * stride) {
        add_run(ahead, block.keys[0] + task->first_head * stride, block.count * block.view->stride[1]);
        block.count = 0;
    }
    for (int64_t h = 0; h < (adjacent ? 1 : task->heads); h++)
        for (int j = 0; j < block.count; j++)
            if (block.keys[j])
                add_run(ahead, block.keys[j] + (task->first_head + h) * stride,
                        adjacent ? task->heads * block.row_bytes : block.row_bytes);
}

/* What will be read next, in the order of memory. */
static void look_ahead(struct ahead *ahead, const struct task *task, struct block block) {
    ahead->next = ahead->count = 0;
    add_block(ahead, task, block);
    next_run(ahead);
}

/* Keys of a stream that are asked for before the first is read. */
static int lead_keys(const struct job *job, const struct task *task, bool of_v) {
    const int64_t key_bytes = task->heads * (of_v ? job->v_bytes : job->k_bytes);
    return (int)max64(STREAM_LEAD_BYTES / key_bytes, 1);
}

/* What is asked for while a tile's K, or V, streams by: the rest of it, and the first keys of the stream after it. */
static void look_along(struct ahead *ahead, const struct job *job, const struct task *task, const struct tile *tile,
                       bool of_v, const struct task *following, const struct tile *next) {
    const int lead = lead_keys(job, task, of_v);
    struct block after = block_of(job, next, !of_v, 0);
    after.count = (int)min64(after.count, lead_keys(job, following, !of_v));
    ahead->next = ahead->count = 0;
    if (lead < tile->count) add_block(ahead, task, block_of(job, tile, of_v, lead));
    add_block(ahead, following, after);
    next_run(ahead);
}

/* scores[r][j] = q_r . k_j for all query rows of a task. */
static void score_tile(const struct job *job, const struct task *task, const struct scratch *scratch, const float *q,
                       const struct tile *tile) {
    const int rows = (int)job->group_rows;
    struct ahead ahead;
    const char *present[TILE_KEYS];
    if (job->streams && !tile->absent) {
        look_along(&ahead, job, task, tile, false, task, tile);
        stream_scores(&job->k_reader, rows, task->heads, q, job->q_width, tile->k, tile->count, &ahead,
                      scratch->scores);
        return;
    }
    for (int j = 0; j < tile->count; j += (int)job->k_block) {
        const struct block block = block_of(job, tile, false, j);
        const bool last = j + block.count == tile->count;
        look_ahead(&ahead, task, last ? block_of(job, tile, true, 0) : block_of(job, tile, false, j + block.count));
        for (int64_t h = 0; h < task->heads; h++) {
            int64_t offset = (task->first_head + h) * job->call->k.stride[2];
            const char *const *const keys = resolve(tile, block.keys, block.count, &offset, scratch->zeros, present);
            scores_of[job->turned][job->product][job->call->k.dtype](
                &job->k_reader, rows, q + h * rows * job->q_width, job->q_width, keys, offset, block.count, &ahead,
                scratch->scores + h * rows * TILE_KEYS + j);
        }
    }
}

/* Scores -> weights, for the query rows of KV head `head`. Returns whether some row may not see some key. */
static bool weigh_tile(const struct job *job, const struct row *row, const struct scratch *scratch, int64_t head,
                       const struct tile *tile, float *scores, float *stats, float *factor) {
    const struct call *const call = job->call;
    const int rows = (int)job->group_rows;
    const double scale = call->softmax_scale * load_number(at3(&call->k_scale, head, 0, 0), F32);
    const bool biased = needs_bias(call, row, tile);
    bool hides = false;
    for (int r = 0; biased && r < rows; r++) {
        const int64_t query_row = head * rows + r;
        hides |= fill_bias(call, row, query_row / call->q_len, query_row % call->q_len, tile,
                           scratch->bias + r * TILE_KEYS);
    }
    for (int r = 0; r < rows; r += LANES)
        softmax_step((int)min64(LANES, rows - r), scale, (float)call->softcap,
                     biased ? scratch->bias + r * TILE_KEYS : NULL, tile->count, scores + r * TILE_KEYS,
                     stats + 2 * r, factor + r);
    return hides;
}

/* Takes one tile into `part` (the query rows of the task); `next` is the tile after it. */
static void attend_tile(const struct job *job, const struct task *task, const struct scratch *scratch, const float *q,
                        const struct tile *tile, const struct task *following, const struct tile *next,
                        struct part part) {
    const struct call *const call = job->call;
    const int rows = (int)job->group_rows, dim = (int)call->v_head_dim;
    struct ahead ahead;
    const char *present[TILE_KEYS];
    uint64_t done = 0; /* heads */

    score_tile(job, task, scratch, q, tile);
    for (int64_t h = 0; h < task->heads; h++) {
        float *const scores = scratch->scores + h * rows * TILE_KEYS, *const factor = scratch->factor + h * rows;
        const int64_t head = task->first_head + h;
        if (!weigh_tile(job, task->row, scratch, head, tile, scores, part.stats + 2 * h * rows, factor)) continue;
        int64_t offset = head * call->v.stride[2];
        const char *const *const keys = resolve(tile, tile->v, tile->count, &offset, scratch->zeros, present);
        add_visible_values(job, keys, offset, tile->count, scores, factor, part.acc + h * rows * dim);
        done |= 1ull << h;
    }
    if (job->streams && !tile->absent && !done) {
        look_along(&ahead, job, task, tile, true, following, next);
        stream_sums(&job->v_reader, rows, task->heads, tile->v, tile->count, scratch->scores, scratch->factor, &ahead,
                    part.acc, dim);
        return;
    }
    for (int j = 0; j < tile->count; j += (int)job->v_block) {
        const struct block block = block_of(job, tile, true, j);
        const bool last = j + block.count == tile->count;
        look_ahead(&ahead, last ? following : task,
                   last ? block_of(job, next, false, 0) : block_of(job, tile, true, j + block.count));
        for (int64_t h = 0; h < task->heads; h++) {
            if (done >> h & 1) continue;
            int64_t offset = (task->first_head + h) * call->v.stride[2];
            const char *const *const keys = resolve(tile, block.keys, block.count, &offset, scratch->zeros, present);
            values_of[call->v.dtype](&job->v_reader, rows, keys, offset, block.count,
                                     scratch->scores + h * rows * TILE_KEYS + j,
                                     j ? NULL : scratch->factor + h * rows, &ahead, part.acc + h * rows * dim, dim);
        }
    }
}
#endif
