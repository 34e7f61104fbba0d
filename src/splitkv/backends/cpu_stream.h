/* K and V of f32 and bf16 as streams: one or two keys after another, and of each all KV heads of a task, which is the
 * order of memory.
 *
 * Keys that are taken four at a time (cpu_scores.h, cpu_tile.h) are four streams of addresses and one more that is
 * asked for; what a processor reads ahead by itself follows fewer. On a Zen 5 a loop of nothing but loads reads 51 GB/s
 * as one stream, 54 as two and 25 as three or four. Here there is one, asked for so little ahead that each line comes
 * into L1 once. It takes more instructions, which pays where a line holds few numbers. The bytes are the same. */
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
#define STREAM_WIDE_BYTES 512        /* a row of bf16 for STREAM_ROWS query rows: else instructions set the limit */
#define STREAM_KEYS 2                /* at a time, which halves the loads and stores of V's sums; of K in f32 one */

/* scores[r][j] = q_r . k_j for a few keys and the query rows of one KV head: sums as score_keys makes them. */
INLINE void stream_key(const enum product product, const enum dtype dtype, const struct reader *reader, const int rows,
                       const int keys, const float *q, int width, const char *const *k, int64_t offset,
                       struct share *share, float *scores) {
    const int vecs = LINE_BYTES / item_bytes[dtype] / LANES; /* of a line */
    vec sum[STREAM_KEYS][STREAM_ROWS];
    UNROLL
    for (int s = 0; s < STREAM_KEYS * STREAM_ROWS; s++) sum[s / STREAM_ROWS][s % STREAM_ROWS] = vset1(0.0f);
    for (int at = 0; at < width; at += LANES) {
        vec key[STREAM_KEYS];
        ask(share, keys * LINE_BYTES);
        UNROLL
        for (int j = 0; j < keys; j++)
            key[j] = key_vector(product, dtype, reader,
                                pack(dtype, reader, k[j] + offset, at * vecs, width * vecs, vecs), vecs, 0);
        UNROLL
        for (int r = 0; r < rows; r++)
            UNROLL
            for (int j = 0; j < keys; j++)
                sum[j][r] = multiply_add(product, vload(q + (int64_t)r * width + at), key[j], sum[j][r]);
    }
    UNROLL
    for (int j = 0; j < keys; j++) {
        float out[4];
        vsum4(sum[j][0], sum[j][1], sum[j][2], sum[j][3], out);
        UNROLL
        for (int r = 0; r < rows; r++) scores[r * TILE_KEYS + j] = out[r];
    }
}

/* The same for all heads. */
INLINE void key_heads(const enum product product, const enum dtype dtype, const struct reader *reader, const int rows,
                      const int keys, int64_t heads, const float *q, int width, const char *const *k,
                      struct ahead *ahead, float *scores) {
    const int64_t row_bytes = (int64_t)width / LANES * LINE_BYTES;
    struct share share = next_share(ahead, keys * heads * row_bytes);
    for (int64_t h = 0; h < heads; h++)
        stream_key(product, dtype, reader, rows, keys, q + h * rows * width, width, k, h * row_bytes, &share,
                   scores + h * rows * TILE_KEYS);
}

INLINE void stream_keys(const enum product product, const enum dtype dtype, const struct reader *reader, const int rows,
                        int64_t heads, const float *q, int width, const char *const *k, int count, struct ahead *ahead,
                        float *scores) {
    const int keys = dtype == F32 ? 1 : STREAM_KEYS;
    int j = 0;
    for (; j + keys <= count; j += keys)
        key_heads(product, dtype, reader, rows, keys, heads, q, width, k + j, ahead, scores + j);
    for (; j < count; j++) key_heads(product, dtype, reader, rows, 1, heads, q, width, k + j, ahead, scores + j);
}

/* acc[r] += weights[r][j] * v_j, key by key, for the query rows of one KV head. */
INLINE void stream_value(const enum dtype dtype, const struct reader *reader, const int rows, const int keys,
                         const char *const *v, int64_t offset, const float *weights, struct share *share, float *acc,
                         int dim) {
    const int vecs = item_bytes[F32] / item_bytes[dtype]; /* of a line */
    vec weight[STREAM_ROWS][STREAM_KEYS], value[STREAM_KEYS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int j = 0; j < keys; j++) weight[r][j] = in_register(vset1(weights[r * TILE_KEYS + j]));
    for (int at = 0; at < dim; at += vecs * LANES) {
        ask(share, keys * LINE_BYTES);
        UNROLL
        for (int j = 0; j < keys; j++) {
            columns(dtype, reader, 1, vecs, v + j, offset, at, dim, value[j]);
            UNROLL
            for (int c = 0; c < vecs; c++) value[j][c] = in_register(value[j][c]);
        }
        UNROLL
        for (int r = 0; r < rows; r++)
            UNROLL
            for (int c = 0; c < vecs; c++) {
                float *const to = acc + (int64_t)r * dim + at + c * LANES;
                vec sum = vload(to);
                UNROLL
                for (int j = 0; j < keys; j++) sum = vfma(weight[r][j], value[j][c], sum);
                vstore(to, sum);
            }
    }
}

/* The same for all heads. */
INLINE void value_heads(const enum dtype dtype, const struct reader *reader, const int rows, const int keys,
                        int64_t heads, const char *const *v, const float *weights, struct ahead *ahead, float *acc,
                        int dim) {
    const int64_t row_bytes = (int64_t)dim * item_bytes[dtype];
    struct share share = next_share(ahead, keys * heads * row_bytes);
    for (int64_t h = 0; h < heads; h++)
        stream_value(dtype, reader, rows, keys, v, h * row_bytes, weights + h * rows * TILE_KEYS, &share,
                     acc + h * rows * dim, dim);
}

INLINE void stream_values(const enum dtype dtype, const struct reader *reader, const int rows, int64_t heads,
                          const char *const *v, int count, const float *weights, const float *factor,
                          struct ahead *ahead, float *acc, int dim) {
    for (int64_t r = 0; r < heads * rows; r++)
        for (int at = 0; at < dim; at += LANES)
            vstore(acc + r * dim + at, vload(acc + r * dim + at) * vset1(factor[r]));
    int j = 0;
    for (; j + STREAM_KEYS <= count; j += STREAM_KEYS)
        value_heads(dtype, reader, rows, STREAM_KEYS, heads, v + j, weights + j, ahead, acc, dim);
    for (; j < count; j++) value_heads(dtype, reader, rows, 1, heads, v + j, weights + j, ahead, acc, dim);
}

/* ---- one compiled copy per dtype, with one per number of rows ------------------------------------------------ */

#define FOR_STREAM_ROWS(rows, CASE) \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) }

/* All scores of a tile for `rows` query rows of each of `heads` KV heads. */
static void stream_scores(const struct reader *reader, int rows, int64_t heads, const float *q, int width,
                          const char *const *k, int count, struct ahead *ahead, float *scores) {
#define F32_CASE(n) \
    case n: stream_keys(IN_F32, F32, reader, n, heads, q, width, k, count, ahead, scores); break;
#define BF16_CASE(n) \
    case n: stream_keys(IN_PAIRS, BF16, reader, n, heads, q, width, k, count, ahead, scores); break;
    if (reader->dtype == F32) FOR_STREAM_ROWS(rows, F32_CASE)
#if HAVE_PAIRS
    else FOR_STREAM_ROWS(rows, BF16_CASE)
#endif
#undef F32_CASE
#undef BF16_CASE
}

/* acc = acc * factor + the weighted sum of a tile's V, for the same rows. */
static void stream_sums(const struct reader *reader, int rows, int64_t heads, const char *const *v, int count,
                        const float *weights, const float *factor, struct ahead *ahead, float *acc, int dim) {
#define F32_CASE(n) \
    case n: stream_values(F32, reader, n, heads, v, count, weights, factor, ahead, acc, dim); break;
#define BF16_CASE(n) \
    case n: stream_values(BF16, reader, n, heads, v, count, weights, factor, ahead, acc, dim); break;
    if (reader->dtype == F32) FOR_STREAM_ROWS(rows, F32_CASE)
    else FOR_STREAM_ROWS(rows, BF16_CASE)
#undef F32_CASE
#undef BF16_CASE
}
#endif
