/* One tile: the scores of its keys, their softmax weights, and the weighted sum of V, for the query rows that
 * share a KV head. */
#ifndef SPLITKV_CPU_TILE_H
#define SPLITKV_CPU_TILE_H

#include "cpu_rows.h"

#define TILE_KEYS 32 /* keys per step of the online softmax: part of what fixes the bytes of an answer */
#define SCORE_KEYS 4 /* keys whose dot products are summed side by side */
#define VALUE_VECS 4 /* vectors of V's columns that are summed side by side */

static const float LOG2_E = 1.44269504f;

/* ---- scores ------------------------------------------------------------------------------------------------ */

/* How q and K are multiplied: as f32, or as pairs of bf16 where q is bf16 and K is exact in bf16, which is twice
 * as fast and as exact. A query row fills one float per element, or one per pair. */
enum product { IN_F32, IN_PAIRS };

static enum product product_of(enum dtype q, enum dtype k, int64_t dim) {
    const bool whole = (k == BF16 && dim % (2 * LANES) == 0) || ((k == E4M3 || k == E5M2) && dim % (4 * LANES) == 0);
    return HAVE_PAIRS && q == BF16 && whole ? IN_PAIRS : IN_F32;
}

INLINE vec key_vector(const enum product product, const enum dtype dtype, const struct reader *reader,
                      struct packed packed, const int part) {
#if HAVE_PAIRS
    if (product == IN_PAIRS) return unpack_pairs(dtype, packed, part);
#endif
    (void)product;
    return in_register(unpack(dtype, reader, packed, part));
}

INLINE vec multiply_add(const enum product product, vec a, vec b, vec c) {
#if HAVE_PAIRS
    if (product == IN_PAIRS) return vdot_pairs(a, b, c);
#endif
    (void)product;
    return vfma(a, b, c);
}

/* Adds to sum[r][j] the products of `vecs` vectors of q_r and k_j, from float `at` of the query rows on. */
INLINE void score_step(const enum product product, const enum dtype dtype, const struct reader *reader,
                       const int rows, const int vecs, const float *q, int width, const char *const *k,
                       const char *const *ahead, int at, vec sum[REGISTER_ROWS][SCORE_KEYS]) {
    const int per_float = product == IN_PAIRS ? 2 : 1;
    const int first = at * per_float, count = vecs * LANES * per_float;
    struct packed packed[SCORE_KEYS];
    if (ahead && first * item_bytes[dtype] % LINE_BYTES == 0)
        UNROLL
        for (int j = 0; j < SCORE_KEYS; j++)
            ask_for(ahead[j] + (int64_t)first * item_bytes[dtype], count * item_bytes[dtype]);
    UNROLL
    for (int j = 0; j < SCORE_KEYS; j++) packed[j] = pack(dtype, reader, k[j], first, count);
    UNROLL
    for (int part = 0; part < vecs; part++) {
        vec key[SCORE_KEYS];
        UNROLL
        for (int j = 0; j < SCORE_KEYS; j++) key[j] = key_vector(product, dtype, reader, packed[j], part);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec query = in_register(vload(q + (int64_t)r * width + at + part * LANES));
            UNROLL
            for (int j = 0; j < SCORE_KEYS; j++) sum[r][j] = multiply_add(product, query, key[j], sum[r][j]);
        }
    }
}

/* scores[r][j] = q_r . k_j for `rows` query rows and SCORE_KEYS keys. Each sum runs over the dimensions in
 * order, lane by lane, and is the same however many rows are taken at once. */
INLINE void score_block(const enum product product, const enum dtype dtype, const struct reader *reader,
                        const int rows, const float *q, int width, const char *const *k, const char *const *ahead,
                        float *scores) {
    const int group = FP8_BY_BYTES && dtype == E4M3 ? (product == IN_PAIRS ? 2 : 4) : 1; /* decoded together */
    vec sum[REGISTER_ROWS][SCORE_KEYS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int j = 0; j < SCORE_KEYS; j++) sum[r][j] = vset1(0.0f);
    int at = 0;
    for (; at + group * LANES <= width; at += group * LANES)
        score_step(product, dtype, reader, rows, group, q, width, k, ahead, at, sum);
    if (group > 1)
        for (; at < width; at += LANES) score_step(product, dtype, reader, rows, 1, q, width, k, ahead, at, sum);
    UNROLL
    for (int r = 0; r < rows; r++) vsum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scores + r * TILE_KEYS);
}

INLINE void score_rows(const enum product product, const enum dtype dtype, const struct reader *reader, int rows,
                       const float *q, int width, const char *const *k, const char *const *ahead, float *scores) {
    for (; rows >= REGISTER_ROWS; rows -= REGISTER_ROWS) {
        score_block(product, dtype, reader, REGISTER_ROWS, q, width, k, ahead, scores);
        q += (int64_t)REGISTER_ROWS * width;
        scores += REGISTER_ROWS * TILE_KEYS;
        ahead = NULL; /* asking once is enough */
    }
    if (rows == 1) score_block(product, dtype, reader, 1, q, width, k, ahead, scores);
#if REGISTER_ROWS > 2
    if (rows == 2) score_block(product, dtype, reader, 2, q, width, k, ahead, scores);
    if (rows == 3) score_block(product, dtype, reader, 3, q, width, k, ahead, scores);
#endif
}

/* ---- softmax ----------------------------------------------------------------------------------------------- */

/* In place: one row of dot products -> base-2 logits. `scale` is softmax_scale times the head's k_scale. `bias`
 * (natural log, or null) is added after the cap; -inf in it hides the key whatever its score is. The first
 * `count` keys exist. */
static void finish_logits(double scale, float softcap, const float *bias, int count, float *scores) {
    const vec factor = vset1((float)(softcap > 0.0f ? scale : scale * 1.4426950408889634)), log2_e = vset1(LOG2_E);
    const vec hidden = vset1(-INFINITY);
    for (int j = 0; j < count; j += LANES) {
        vec x = vload(scores + j) * factor;
        if (softcap > 0.0f) x = vsoftcap(x, softcap) * log2_e;
        if (bias) {
            const vec b = vload(bias + j);
            x = vselect((ivec)(b == hidden), hidden, vfma(b, log2_e, x));
        }
        vstore(scores + j, x);
    }
    for (int j = count; j < TILE_KEYS; j++) scores[j] = -INFINITY;
}

INLINE vec row_maximum(const float *scores) {
    vec top = vload(scores);
    UNROLL
    for (int j = LANES; j < TILE_KEYS; j += LANES) top = vmax(vload(scores + j), top);
    return top;
}

/* In place: 2^(score - base); returns the sums, lane by lane. */
INLINE vec row_weights(float *scores, float base) {
    vec sum = vset1(0.0f);
    UNROLL
    for (int j = 0; j < TILE_KEYS; j += LANES) {
        const vec weight = vexp2(vload(scores + j) - vset1(base));
        vstore(scores + j, weight);
        sum += weight;
    }
    return sum;
}

/* In place: base-2 logits -> weights relative to each row's running maximum, for up to LANES rows. stats holds
 * {maximum, sum} per row; factor receives what brings earlier sums to the new maximum. While no key has a finite
 * logit the maximum counts as 0. Lanes are put together for four rows at a time, else that would dominate. */
static void softmax_step(int rows, float *scores, float *stats, float *factor) {
    float top[LANES], base[LANES], sum[LANES], change[LANES] = {0};
    vec v[4];
    for (int r = 0; r < rows; r += 4) {
        UNROLL
        for (int i = 0; i < 4; i++) v[i] = r + i < rows ? row_maximum(scores + (r + i) * TILE_KEYS) : v[0];
        vmax4(v[0], v[1], v[2], v[3], top + r);
    }
    for (int r = 0; r < rows; r++) {
        const float before = stats[2 * r];
        stats[2 * r] = top[r] > before ? top[r] : before;
        base[r] = stats[2 * r] == -INFINITY ? 0.0f : stats[2 * r];
        change[r] = before - base[r];
    }
    vstore(change, vexp2(vload(change)));
    for (int r = 0; r < rows; r += 4) {
        UNROLL
        for (int i = 0; i < 4; i++)
            v[i] = r + i < rows ? row_weights(scores + (r + i) * TILE_KEYS, base[r + i]) : v[0];
        vsum4(v[0], v[1], v[2], v[3], sum + r);
    }
    for (int r = 0; r < rows; r++) {
        factor[r] = change[r];
        stats[2 * r + 1] = fmaf(stats[2 * r + 1], change[r], sum[r]);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------ */

/* acc[r] = acc[r] * factor[r] + sum over `count` keys of weights[r][j] * v_j, for `rows` rows and `vecs` vectors
 * of columns. The keys are added in order, so the blocking does not show in the bytes. */
INLINE void value_block(const enum dtype dtype, const struct reader *reader, const int rows, const int vecs,
                        const char *const *v, const char *const *ahead, int count, const float *weights,
                        const float *factor, float *acc, int dim, int column) {
    vec sum[REGISTER_ROWS][VALUE_VECS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vecs; c++)
            sum[r][c] = vload(acc + (int64_t)r * dim + column + c * LANES) * vset1(factor[r]);
    for (int j = 0; j < count; j++) {
        if (ahead) ask_for(ahead[j] + (int64_t)column * item_bytes[dtype], vecs * LANES * item_bytes[dtype]);
        const struct packed packed = pack(dtype, reader, v[j], column, vecs * LANES);
        vec value[VALUE_VECS];
        UNROLL
        for (int c = 0; c < vecs; c++) value[c] = unpack(dtype, reader, packed, c);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec weight = vset1(weights[r * TILE_KEYS + j]);
            UNROLL
            for (int c = 0; c < vecs; c++) sum[r][c] = vfma(weight, value[c], sum[r][c]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vecs; c++) vstore(acc + (int64_t)r * dim + column + c * LANES, sum[r][c]);
}

INLINE void value_columns(const enum dtype dtype, const struct reader *reader, const int rows, const char *const *v,
                          const char *const *ahead, int count, const float *weights, const float *factor, float *acc,
                          int dim) {
    int column = 0;
    for (; column + VALUE_VECS * LANES <= dim; column += VALUE_VECS * LANES)
        value_block(dtype, reader, rows, VALUE_VECS, v, ahead, count, weights, factor, acc, dim, column);
    for (; column < dim; column += LANES)
        value_block(dtype, reader, rows, 1, v, ahead, count, weights, factor, acc, dim, column);
}

INLINE void value_rows(const enum dtype dtype, const struct reader *reader, int rows, const char *const *v,
                       const char *const *ahead, int count, const float *weights, const float *factor, float *acc,
                       int dim) {
    for (; rows >= REGISTER_ROWS; rows -= REGISTER_ROWS) {
        value_columns(dtype, reader, REGISTER_ROWS, v, ahead, count, weights, factor, acc, dim);
        weights += REGISTER_ROWS * TILE_KEYS;
        factor += REGISTER_ROWS;
        acc += (int64_t)REGISTER_ROWS * dim;
        ahead = NULL;
    }
    if (rows == 1) value_columns(dtype, reader, 1, v, ahead, count, weights, factor, acc, dim);
#if REGISTER_ROWS > 2
    if (rows == 2) value_columns(dtype, reader, 2, v, ahead, count, weights, factor, acc, dim);
    if (rows == 3) value_columns(dtype, reader, 3, v, ahead, count, weights, factor, acc, dim);
#endif
}

/* ---- one compiled copy per dtype --------------------------------------------------------------------------- */

typedef void scores_function(const struct reader *, int rows, const float *q, int width, const char *const *k,
                             const char *const *ahead, float *scores);
typedef void values_function(const struct reader *, int rows, const char *const *v, const char *const *ahead,
                             int count, const float *weights, const float *factor, float *acc, int dim);

#define SCORES(name, product, dtype)                                                                       \
    static void name(const struct reader *reader, int rows, const float *q, int width, const char *const *k, \
                     const char *const *ahead, float *scores) {                                            \
        score_rows(product, dtype, reader, rows, q, width, k, ahead, scores);                              \
    }
#define VALUES(name, dtype)                                                                                \
    static void name(const struct reader *reader, int rows, const char *const *v, const char *const *ahead, \
                     int count, const float *weights, const float *factor, float *acc, int dim) {          \
        value_rows(dtype, reader, rows, v, ahead, count, weights, factor, acc, dim);                       \
    }
SCORES(scores_f32, IN_F32, F32)
SCORES(scores_f16, IN_F32, F16)
SCORES(scores_bf16, IN_F32, BF16)
SCORES(scores_fp8, IN_F32, E4M3)
#if HAVE_PAIRS
SCORES(scores_bf16_pairs, IN_PAIRS, BF16)
SCORES(scores_fp8_pairs, IN_PAIRS, E4M3)
#endif
VALUES(values_f32, F32)
VALUES(values_f16, F16)
VALUES(values_bf16, BF16)
VALUES(values_fp8, E4M3)
#undef SCORES
#undef VALUES

static scores_function *const scores_of[2][5] = {
    {scores_f32, scores_f16, scores_bf16, scores_fp8, scores_fp8},
#if HAVE_PAIRS
    {NULL, NULL, scores_bf16_pairs, scores_fp8_pairs, scores_fp8_pairs},
#endif
};
static values_function *const values_of[5] = {values_f32, values_f16, values_bf16, values_fp8, values_fp8};
#endif
