/* One tile: the softmax weights of its keys and the weighted sum of V, for the query rows that share a KV head. */
#ifndef SPLITKV_CPU_TILE_H
#define SPLITKV_CPU_TILE_H

#include "cpu_scores.h"

static const float LOG2_E = 1.44269504f;

/* ---- softmax ----------------------------------------------------------------------------------------------- */

/* In place: one row of dot products -> base-2 logits; returns their maxima, lane by lane. `scale` is softmax_scale
 * times the head's k_scale. `bias` (natural log, or null) is added after the cap; -inf in it hides the key whatever
 * its score is. The first `count` keys exist; the vector that ends with them is filled with -inf. */
INLINE vec row_logits(double scale, float softcap, const float *bias, int count, float *scores) {
    const vec factor = vset1((float)(softcap > 0.0f ? scale : scale * 1.4426950408889634)), log2_e = vset1(LOG2_E);
    const vec hidden = vset1(-INFINITY);
    vec top = hidden;
    for (int j = 0; j < count; j += LANES) {
        vec x = vload(scores + j) * factor;
        if (softcap > 0.0f) x = vsoftcap(x, softcap) * log2_e;
        if (bias) {
            const vec b = vload(bias + j);
            x = vselect((ivec)(b == hidden), hidden, vfma(b, log2_e, x));
        }
        if (count - j < LANES) x = vselect(first_lanes(count - j), x, hidden);
        vstore(scores + j, x);
        top = vmax(x, top);
    }
    return top;
}

/* In place: 2^(score - base); returns the sums, lane by lane. */
INLINE vec row_weights(float *scores, float base, int count) {
    vec sum = vset1(0.0f);
    for (int j = 0; j < count; j += LANES) {
        const vec weight = vexp2(vload(scores + j) - vset1(base));
        vstore(scores + j, weight);
        sum += weight;
    }
    return sum;
}

/* In place: dot products -> weights relative to each row's running maximum, for up to LANES rows. `bias` [rows,
 * TILE_KEYS], or null. stats holds {maximum, sum} per row; factor receives what brings earlier sums to the new maximum.
 * While no key has a finite logit the maximum counts as 0. Lanes are put together for four rows at a time, else that
 * would dominate. */
static void softmax_step(int rows, double scale, float softcap, const float *bias, int count, float *scores,
                         float *stats, float *factor) {
    float top[LANES + 4], base[LANES], sum[LANES + 4], change[LANES] = {0};
    vec v[4];
    for (int r = 0; r < rows; r += 4) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            const int at = (r + i < rows ? r + i : r) * TILE_KEYS;
            if (i == 0 || r + i < rows) v[i] = row_logits(scale, softcap, bias ? bias + at : NULL, count, scores + at);
            else v[i] = v[0];
        }
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
            v[i] = r + i < rows ? row_weights(scores + (r + i) * TILE_KEYS, base[r + i], count) : v[0];
        vsum4(v[0], v[1], v[2], v[3], sum + r);
    }
    for (int r = 0; r < rows; r++) {
        factor[r] = change[r];
        stats[2 * r + 1] = fmaf(stats[2 * r + 1], change[r], sum[r]);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------ */

/* Adds to sum[r * vecs + c] the weighted columns of `keys` neighbouring keys, in order. */
INLINE void value_step(const enum dtype dtype, const struct reader *reader, const int rows, const int vecs,
                       const int keys, const char *const *v, int64_t offset, int column, int dim,
                       const float *weights, struct share *share, vec *sum) {
    vec value[4];
    ask(share, keys * vecs * LANES * item_bytes[dtype]);
    columns(dtype, reader, keys, vecs, v, offset, column, dim, value);
    UNROLL
    for (int j = 0; j < keys; j++)
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec weight = vset1(weights[r * TILE_KEYS + j]);
            UNROLL
            for (int c = 0; c < vecs; c++)
                sum[r * vecs + c] = vfma(weight, value[j * vecs + c], sum[r * vecs + c]);
        }
}

/* acc[r] = acc[r] * factor[r] (1 without factors) + sum over `count` keys of weights[r][j] * v_j, for `rows` rows and
 * `vecs` vectors of columns. The keys are added in order, so the blocking does not show in the bytes. */
INLINE void value_block(const enum dtype dtype, const struct reader *reader, const int rows, const int vecs,
                        const char *const *v, int64_t offset, int count, const float *weights, const float *factor,
                        struct ahead *ahead, float *acc, int dim, int column) {
    const int keys = FP8_BY_BYTES && dtype == E4M3 && vecs == 2 ? 2 : 1; /* decoded together */
    struct share share = next_share(ahead, (int64_t)count * vecs * LANES * item_bytes[dtype]);
    vec sum[BLOCK_SUMS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vecs; c++)
            sum[r * vecs + c] = vload(acc + (int64_t)r * dim + column + c * LANES) * vset1(factor ? factor[r] : 1.0f);
    int j = 0;
    for (; j + keys <= count; j += keys)
        value_step(dtype, reader, rows, vecs, keys, v + j, offset, column, dim, weights + j, &share, sum);
    if (j < count) value_step(dtype, reader, rows, vecs, 1, v + j, offset, column, dim, weights + j, &share, sum);
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < vecs; c++) vstore(acc + (int64_t)r * dim + column + c * LANES, sum[r * vecs + c]);
}

/* All columns for one block of query rows. */
INLINE void value_columns(const enum dtype dtype, const struct reader *reader, const int rows, const char *const *v,
                          int64_t offset, int count, const float *weights, const float *factor, struct ahead *ahead,
                          float *acc, int dim) {
    int column = 0;
    if (sums_beside(rows) == 4)
        for (; column + 4 * LANES <= dim; column += 4 * LANES)
            value_block(dtype, reader, rows, 4, v, offset, count, weights, factor, ahead, acc, dim, column);
    for (; column + 2 * LANES <= dim; column += 2 * LANES)
        value_block(dtype, reader, rows, 2, v, offset, count, weights, factor, ahead, acc, dim, column);
    if (column < dim) value_block(dtype, reader, rows, 1, v, offset, count, weights, factor, ahead, acc, dim, column);
}

/* ---- one compiled copy per dtype, with one per number of rows ------------------------------------------------ */

typedef void values_function(const struct reader *, int rows, const char *const *v, int64_t offset, int count,
                             const float *weights, const float *factor, struct ahead *, float *acc, int dim);

#define VALUES(name, dtype)                                                                                    \
    static void name(const struct reader *reader, int rows, const char *const *v, int64_t offset, int count,   \
                     const float *weights, const float *factor, struct ahead *ahead, float *acc, int dim) {    \
        for (int n; rows > 0; rows -= n, weights += n * TILE_KEYS, acc += (int64_t)n * dim, ahead = NULL) {    \
            n = rows_at_once(rows);                                                                            \
            FOR_ROWS(n, VALUE_CASE_##dtype)                                                                    \
            if (factor) factor += n;                                                                           \
        }                                                                                                      \
    }
#define VALUE_CASE(n, dtype) \
    case n: value_columns(dtype, reader, n, v, offset, count, weights, factor, ahead, acc, dim); break;
#define VALUE_CASE_F32(n) VALUE_CASE(n, F32)
#define VALUE_CASE_F16(n) VALUE_CASE(n, F16)
#define VALUE_CASE_BF16(n) VALUE_CASE(n, BF16)
#define VALUE_CASE_E4M3(n) VALUE_CASE(n, E4M3)

VALUES(values_f32, F32)
VALUES(values_f16, F16)
VALUES(values_bf16, BF16)
VALUES(values_fp8, E4M3)

static values_function *const values_of[5] = {values_f32, values_f16, values_bf16, values_fp8, values_fp8};
#endif
