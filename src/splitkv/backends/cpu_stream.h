/* K and V of f32 as streams: one key after another, and of each all KV heads of a task, which is the order of memory.
 *
 * Keys that are taken four at a time (cpu_scores.h, cpu_tile.h) are four streams of addresses and one more that is
 * asked for; what a processor reads ahead by itself follows fewer. On a Zen 5 a loop of nothing but loads reads 51 GB/s
 * as one stream, 54 as two and 25 as three or four. Here there is one, asked for so little ahead that each line comes
 * into L1 once. It takes more instructions, which pays where a number is four bytes. The bytes are the same. */
#ifndef SPLITKV_CPU_STREAM_H
#define SPLITKV_CPU_STREAM_H

#include "cpu_tile.h"

#if LANES == 16
#define HAVE_STREAMS 1
#else
#define HAVE_STREAMS 0
#endif
#define STREAM_ROWS 4                /* most query rows per KV head: each is a store for every two lines of V */
#define STREAM_KEY_BYTES (1 << 10)   /* least of a key's rows: with few, each sum is waited for */
#define STREAM_SUMS_BYTES (24 << 10) /* most of all query rows' sums, which share L1 with as much of q: 32 are slower */
#define STREAM_LEAD_BYTES (8 << 10)  /* asked for before they are read: with less memory is late, more fills L1 */
#define STREAM_KEYS 2                /* of V at a time, which halves the loads and stores of the sums */

/* scores[r * TILE_KEYS] = q_r . k for the query rows of one KV head: sums as score_keys makes them. */
INLINE void stream_key(const int rows, const float *q, int dim, const char *k, struct share *share, float *scores) {
    vec sum[STREAM_ROWS];
    float out[4];
    UNROLL
    for (int r = 0; r < STREAM_ROWS; r++) sum[r] = vset1(0.0f);
    for (int at = 0; at < dim; at += LANES) {
        ask(share, LINE_BYTES);
        const vec key = in_register(vload((const float *)k + at));
        UNROLL
        for (int r = 0; r < rows; r++) sum[r] = vfma(vload(q + (int64_t)r * dim + at), key, sum[r]);
    }
    vsum4(sum[0], sum[1], sum[2], sum[3], out);
    UNROLL
    for (int r = 0; r < rows; r++) scores[r * TILE_KEYS] = out[r];
}

INLINE void stream_keys(const int rows, int64_t heads, const float *q, int dim, const char *const *k, int count,
                        struct ahead *ahead, float *scores) {
    const int64_t row_bytes = (int64_t)dim * sizeof(float);
    for (int j = 0; j < count; j++) {
        struct share share = next_share(ahead, heads * row_bytes);
        for (int64_t h = 0; h < heads; h++)
            stream_key(rows, q + h * rows * dim, dim, k[j] + h * row_bytes, &share, scores + h * rows * TILE_KEYS + j);
    }
}

/* acc[r] += weights[r][j] * v_j, key by key, for the query rows of one KV head. */
INLINE void stream_value(const int rows, const int keys, const char *const *v, int64_t offset, const float *weights,
                         struct share *share, float *acc, int dim) {
    vec weight[STREAM_ROWS * STREAM_KEYS], value[STREAM_KEYS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int j = 0; j < keys; j++) weight[r * keys + j] = in_register(vset1(weights[r * TILE_KEYS + j]));
    for (int at = 0; at < dim; at += LANES) {
        ask(share, keys * LINE_BYTES);
        UNROLL
        for (int j = 0; j < keys; j++) value[j] = in_register(vload((const float *)(v[j] + offset) + at));
        UNROLL
        for (int r = 0; r < rows; r++) {
            vec sum = vload(acc + (int64_t)r * dim + at);
            UNROLL
            for (int j = 0; j < keys; j++) sum = vfma(weight[r * keys + j], value[j], sum);
            vstore(acc + (int64_t)r * dim + at, sum);
        }
    }
}

INLINE void stream_values(const int rows, int64_t heads, const char *const *v, int count, const float *weights,
                          const float *factor, struct ahead *ahead, float *acc, int dim) {
    const int64_t row_bytes = (int64_t)dim * sizeof(float);
    for (int64_t r = 0; r < heads * rows; r++)
        for (int at = 0; at < dim; at += LANES)
            vstore(acc + r * dim + at, vload(acc + r * dim + at) * vset1(factor[r]));
    int j = 0;
    for (; j + STREAM_KEYS <= count; j += STREAM_KEYS) {
        struct share share = next_share(ahead, STREAM_KEYS * heads * row_bytes);
        for (int64_t h = 0; h < heads; h++)
            stream_value(rows, STREAM_KEYS, v + j, h * row_bytes, weights + h * rows * TILE_KEYS + j, &share,
                         acc + h * rows * dim, dim);
    }
    for (; j < count; j++) {
        struct share share = next_share(ahead, heads * row_bytes);
        for (int64_t h = 0; h < heads; h++)
            stream_value(rows, 1, v + j, h * row_bytes, weights + h * rows * TILE_KEYS + j, &share,
                         acc + h * rows * dim, dim);
    }
}

/* ---- one compiled copy per number of rows --------------------------------------------------------------------- */

#define FOR_STREAM_ROWS(rows, CASE) \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) }

/* All scores of a tile for `rows` query rows of each of `heads` KV heads. */
static void stream_scores(int rows, int64_t heads, const float *q, int dim, const char *const *k, int count,
                          struct ahead *ahead, float *scores) {
#define STREAM_CASE(n) \
    case n: stream_keys(n, heads, q, dim, k, count, ahead, scores); break;
    FOR_STREAM_ROWS(rows, STREAM_CASE)
#undef STREAM_CASE
}

/* acc = acc * factor + the weighted sum of a tile's V, for the same rows. */
static void stream_sums(int rows, int64_t heads, const char *const *v, int count, const float *weights,
                        const float *factor, struct ahead *ahead, float *acc, int dim) {
#define STREAM_CASE(n) \
    case n: stream_values(n, heads, v, count, weights, factor, ahead, acc, dim); break;
    FOR_STREAM_ROWS(rows, STREAM_CASE)
#undef STREAM_CASE
}
#endif
