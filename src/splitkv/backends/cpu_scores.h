/* Scores of a tile's keys: their dot products with the query rows that share a KV head. */
#ifndef SPLITKV_CPU_SCORES_H
#define SPLITKV_CPU_SCORES_H

#include "cpu_ahead.h"

#define TILE_KEYS 64 /* most keys per step of the online softmax */

/* Most query rows that are taken at once, and how many sums of each are kept beside: one per key, or per vector of
 * V's columns. Each key is then read and decoded once for up to MOST_ROWS rows. */
#define MOST_ROWS (BLOCK_SUMS / 2)
INLINE int sums_beside(const int rows) { return rows * 4 <= BLOCK_SUMS ? 4 : 2; }

#if LANES == 16
#define HAVE_TURNED 1
#else
#define HAVE_TURNED 0
#endif
#define TURNED_DIM 64           /* largest head_dim at which K is turned into lanes */
#define TURNED_KEYS (2 * LANES) /* keys turned at a time: two vectors share what is loaded of the queries */

#if MOST_ROWS == 8
#define FOR_ROWS(rows, CASE) \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#else
#define FOR_ROWS(rows, CASE) \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) }
#endif

/* Of `left` query rows, those to take next: as many as may be, but blocks of about the same size. */
static int rows_at_once(int left) {
    const int blocks = (left + MOST_ROWS - 1) / MOST_ROWS;
    return (left + blocks - 1) / blocks;
}

/* ---- scores ------------------------------------------------------------------------------------------------ */

/* How q and K are multiplied: as f32, or as pairs of bf16 where q is bf16 and K is exact in bf16, which is as exact, and
 * twice as fast where HAVE_PAIRS. A query row fills one float per element, or one per pair. */
enum product { IN_F32, IN_PAIRS };

static enum product product_of(enum dtype q, enum dtype k, int64_t dim) {
    const bool whole = (k == BF16 && dim % (2 * LANES) == 0) || ((k == E4M3 || k == E5M2) && dim % (4 * LANES) == 0);
    return HAVE_PAIRS && q == BF16 && whole ? IN_PAIRS : IN_F32;
}

/* Bytes of a key that are turned at a time: as f32, or pairs of bf16 and fours of fp8 as they are stored. */
INLINE int turned_bytes(const enum dtype k) { return k == F16 ? 2 * LANES : 4 * LANES; }

/* Whether keys are turned into lanes (score_turned): where rows are short, as otherwise that costs more than it saves. */
static bool turns(enum dtype k, int64_t dim) {
    const bool decoded = (k != E4M3 && k != E5M2) || FP8_BY_BYTES;
    return HAVE_TURNED && decoded && dim <= TURNED_DIM && dim * item_bytes[k] % turned_bytes(k) == 0;
}

INLINE vec key_vector(const enum product product, const enum dtype dtype, const struct reader *reader,
                      struct packed packed, const int vecs, const int part) {
    if (product == IN_PAIRS) return unpack_pairs(dtype, packed, part);
    return in_register(unpack(dtype, reader, packed, vecs, part));
}

/* The element of a query row at place s of its floats; of two to a float the low half is at place 2 s. */
INLINE int query_element(enum product product, enum dtype k, int dim, bool turned, int s) {
    if (turned) return k == E4M3 || k == E5M2 ? s / 4 * 4 + s % 2 * 2 + s % 4 / 2 : s; /* see turned_lane */
    if (product == IN_PAIRS) s = s / 2 / LANES * 2 * LANES + s % 2 * LANES + s / 2 % LANES;
    return element_at(k, dim, s);
}

INLINE vec multiply_add(const enum product product, vec a, vec b, vec c) {
#if HAVE_PAIRS
    if (product == IN_PAIRS) return vdot_pairs(a, b, c);
#endif
    (void)product;
    return vfma(a, b, c);
}

/* Adds to sum[r * keys + j] the products of `vecs` vectors of q_r and k_j, from float `at` of the query rows on. */
INLINE void score_step(const enum product product, const enum dtype dtype, const struct reader *reader,
                       const int rows, const int keys, const int vecs, const float *q, int width,
                       const char *const *k, int64_t offset, int at, struct share *share, vec *sum) {
    const int per_float = product == IN_PAIRS ? 2 : 1;
    struct packed packed[4];
    ask(share, keys * vecs * LANES * per_float * item_bytes[dtype]);
    UNROLL
    for (int j = 0; j < keys; j++)
        packed[j] = pack(dtype, reader, k[j] + offset, at * per_float, width * per_float, vecs * per_float);
    UNROLL
    for (int part = 0; part < vecs; part++) {
        vec key[4];
        UNROLL
        for (int j = 0; j < keys; j++) key[j] = key_vector(product, dtype, reader, packed[j], vecs, part);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec query = in_register(vload(q + (int64_t)r * width + at + part * LANES));
            UNROLL
            for (int j = 0; j < keys; j++)
                sum[r * keys + j] = multiply_add(product, query, key[j], sum[r * keys + j]);
        }
    }
}

/* scores[r][j] = q_r . k_j for `rows` query rows and a few keys. Each sum runs over the dimensions in order, lane by
 * lane, and is the same however many rows and keys are taken at once. */
INLINE void score_keys(const enum product product, const enum dtype dtype, const struct reader *reader,
                       const int rows, const float *q, int width, const char *const *k, int64_t offset,
                       struct ahead *ahead, float *scores) {
    const int group = most_packed(dtype) / (product == IN_PAIRS ? 2 : 1); /* decoded together */
    const int keys = sums_beside(rows), sums = rows * keys;
    struct share share = next_share(ahead, (int64_t)keys * width * (product == IN_PAIRS ? 2 : 1) * item_bytes[dtype]);
    vec sum[BLOCK_SUMS];
    UNROLL
    for (int s = 0; s < sums; s++) sum[s] = vset1(0.0f);
    int at = 0;
    for (; at + group * LANES <= width; at += group * LANES)
        score_step(product, dtype, reader, rows, keys, group, q, width, k, offset, at, &share, sum);
    if (group > 2 && at + 2 * LANES <= width) {
        score_step(product, dtype, reader, rows, keys, 2, q, width, k, offset, at, &share, sum);
        at += 2 * LANES;
    }
    if (group > 1 && product == IN_F32)
        for (; at < width; at += LANES)
            score_step(product, dtype, reader, rows, keys, 1, q, width, k, offset, at, &share, sum);
    UNROLL
    for (int s = 0; s < sums; s += 4) {
        float out[4];
        const bool half = s + 2 == sums;
        vsum4(sum[s], sum[s + 1], half ? sum[s] : sum[s + 2], half ? sum[s + 1] : sum[s + 3], out);
        for (int i = 0; i < (half ? 2 : 4); i += keys)
            memcpy(scores + (s + i) / keys * TILE_KEYS, out + i, (size_t)keys * sizeof(float));
    }
}

/* All keys of a tile for one block of query rows. k may be read up to a multiple of four. */
INLINE void score_block(const enum product product, const enum dtype dtype, const struct reader *reader,
                        const int rows, const float *q, int width, const char *const *k, int64_t offset, int count,
                        struct ahead *ahead, float *scores) {
    for (int j = 0; j < count; j += sums_beside(rows))
        score_keys(product, dtype, reader, rows, q, width, k + j, offset, ahead, scores + j);
}

/* ---- a key per lane ------------------------------------------------------------------------------------------ */

/* Where a key's row is a few lines, putting the lanes of each sum together would cost more than the products. Here
 * 16 rows are turned into lanes first, once for all query rows. */
#if HAVE_TURNED
/* out[c] = lane c of the 16 vectors of `in`. */
INLINE void turn(const __m512i *in, __m512i *out) {
    __m512i quarter[16]; /* [4 i + c]: in its quarter n, lane 4 n + c of vectors 4 i to 4 i + 3 */
    UNROLL
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(in[i], in[i + 1]), b = _mm512_unpackhi_epi32(in[i], in[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(in[i + 2], in[i + 3]), d = _mm512_unpackhi_epi32(in[i + 2], in[i + 3]);
        quarter[i] = _mm512_unpacklo_epi64(a, c);
        quarter[i + 1] = _mm512_unpackhi_epi64(a, c);
        quarter[i + 2] = _mm512_unpacklo_epi64(b, d);
        quarter[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    UNROLL
    for (int c = 0; c < 4; c++) {
        const __m512i a = _mm512_shuffle_i32x4(quarter[c], quarter[4 + c], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(quarter[c], quarter[4 + c], 0xee);
        const __m512i d = _mm512_shuffle_i32x4(quarter[8 + c], quarter[12 + c], 0x44);
        const __m512i e = _mm512_shuffle_i32x4(quarter[8 + c], quarter[12 + c], 0xee);
        out[c] = _mm512_shuffle_i32x4(a, d, 0x88);
        out[4 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
        out[8 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
        out[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
}

/* Lanes of K that make one step: 16 elements as f32, or 64 bytes as they are stored. */
INLINE __m512i key_lanes(const enum dtype dtype, const char *row, int step) {
    const char *const at = row + step * turned_bytes(dtype);
    return dtype == F16 ? (__m512i)vload_f16(at) : _mm512_loadu_si512(at);
}

/* What one vector of turned lanes holds, to be multiplied: its elements one after the other, but of four fp8 0 and 2 (or
 * both as a pair), then 1 and 3. */
INLINE void turned_lane(const enum product product, const enum dtype dtype, const struct reader *reader, __m512i lane,
                        vec *key) {
    vec pairs[2] = {(vec)lane, (vec)lane};
#if FP8_BY_BYTES
    if (dtype == E4M3) {
        const struct packed packed = decode_fp8(reader, lane);
        const __m512i low = _mm512_set1_epi32(0x00ff00ff);
        pairs[0] = (vec)_mm512_ternarylogic_epi32(low, packed.byte2, _mm512_slli_epi32(packed.byte3, 8), 0xca);
        pairs[1] = (vec)_mm512_ternarylogic_epi32(low, _mm512_srli_epi32(packed.byte2, 8), packed.byte3, 0xca);
    } /* 0xca: a ? b : c */
#endif
    (void)reader;
    if (product == IN_PAIRS || dtype == F32 || dtype == F16) {
        key[0] = in_register(pairs[0]);
        key[1] = in_register(pairs[1]);
        return;
    }
    UNROLL
    for (int i = 0; i < 4; i++) key[i] = in_register(half_of(pairs[i / 2], i % 2));
}

/* scores[r][j] = q_r . k_j for `rows` query rows and TURNED_KEYS keys: a step's products in the order of the query row,
 * then the steps' sums, which loses less than one long sum. */
INLINE void score_turned(const enum product product, const enum dtype dtype, const struct reader *reader,
                         const int rows, const float *q, int width, const char *const *k, int64_t offset,
                         struct ahead *ahead, float *scores) {
    /* vectors of products from one of lanes */
    const int decoded = (dtype == E4M3 ? 4 : dtype == BF16 ? 2 : 1) / (product == IN_PAIRS ? 2 : 1);
    const int step_bytes = 2 * turned_bytes(dtype);
    struct share share = next_share(ahead, (int64_t)width / decoded * step_bytes);
    vec sum[2][MOST_ROWS], total[2][MOST_ROWS];
    __m512i lanes[2][LANES];
    UNROLL
    for (int r = 0; r < rows; r++) total[0][r] = total[1][r] = vset1(0.0f);
    for (int at = 0; at < width; at += decoded * LANES) {
        UNROLL
        for (int r = 0; r < rows; r++) sum[0][r] = sum[1][r] = vset1(0.0f);
        for (int side = 0; side < 2; side++) {
            __m512i in[LANES];
            UNROLL
            for (int j = 0; j < LANES; j++)
                in[j] = key_lanes(dtype, k[side * LANES + j] + offset, at / (decoded * LANES));
            turn(in, lanes[side]);
        }
        const float *query = q + at;
        for (int c = 0; c < LANES; c++, query += decoded) {
            vec key[2][4];
            ask(&share, step_bytes);
            UNROLL
            for (int side = 0; side < 2; side++) turned_lane(product, dtype, reader, lanes[side][c], key[side]);
            UNROLL
            for (int i = 0; i < decoded; i++)
                UNROLL
                for (int r = 0; r < rows; r++) {
                    const vec one = vset1(query[(int64_t)r * width + i]);
                    sum[0][r] = multiply_add(product, one, key[0][i], sum[0][r]);
                    sum[1][r] = multiply_add(product, one, key[1][i], sum[1][r]);
                }
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            total[0][r] += sum[0][r];
            total[1][r] += sum[1][r];
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        vstore(scores + r * TILE_KEYS, total[0][r]);
        vstore(scores + r * TILE_KEYS + LANES, total[1][r]);
    }
}

/* As score_block; k may be read up to a multiple of TURNED_KEYS. */
INLINE void turned_block(const enum product product, const enum dtype dtype, const struct reader *reader,
                         const int rows, const float *q, int width, const char *const *k, int64_t offset, int count,
                         struct ahead *ahead, float *scores) {
    for (int j = 0; j < count; j += TURNED_KEYS)
        score_turned(product, dtype, reader, rows, q, width, k + j, offset, ahead, scores + j);
}
#endif

/* ---- one compiled copy per dtype, with one per number of rows ------------------------------------------------ */

typedef void scores_function(const struct reader *, int rows, const float *q, int width, const char *const *k,
                             int64_t offset, int count, struct ahead *, float *scores);

#define SCORES(name, block, product, dtype)                                                                    \
    static void name(const struct reader *reader, int rows, const float *q, int width, const char *const *k, \
                     int64_t offset, int count, struct ahead *ahead, float *scores) {                        \
        for (int n; rows > 0; rows -= n, q += (int64_t)n * width, scores += n * TILE_KEYS, ahead = NULL) {   \
            n = rows_at_once(rows);                                                                          \
            FOR_ROWS(n, block##_##product##_##dtype)                                                         \
        }                                                                                                    \
    }
#define SCORE_CASE(block, n, product, dtype) \
    case n: block(product, dtype, reader, n, q, width, k, offset, count, ahead, scores); break;
#define ALONG_IN_F32_F32(n) SCORE_CASE(score_block, n, IN_F32, F32)
#define ALONG_IN_F32_F16(n) SCORE_CASE(score_block, n, IN_F32, F16)
#define ALONG_IN_F32_BF16(n) SCORE_CASE(score_block, n, IN_F32, BF16)
#define ALONG_IN_F32_E4M3(n) SCORE_CASE(score_block, n, IN_F32, E4M3)
SCORES(scores_f32, ALONG, IN_F32, F32)
SCORES(scores_f16, ALONG, IN_F32, F16)
SCORES(scores_bf16, ALONG, IN_F32, BF16)
SCORES(scores_fp8, ALONG, IN_F32, E4M3)
#if HAVE_PAIRS
#define ALONG_IN_PAIRS_BF16(n) SCORE_CASE(score_block, n, IN_PAIRS, BF16)
#define ALONG_IN_PAIRS_E4M3(n) SCORE_CASE(score_block, n, IN_PAIRS, E4M3)
SCORES(scores_bf16_pairs, ALONG, IN_PAIRS, BF16)
SCORES(scores_fp8_pairs, ALONG, IN_PAIRS, E4M3)
#endif
#if HAVE_TURNED
#define TURNED_IN_F32_F32(n) SCORE_CASE(turned_block, n, IN_F32, F32)
#define TURNED_IN_F32_F16(n) SCORE_CASE(turned_block, n, IN_F32, F16)
#define TURNED_IN_F32_BF16(n) SCORE_CASE(turned_block, n, IN_F32, BF16)
SCORES(turned_f32, TURNED, IN_F32, F32)
SCORES(turned_f16, TURNED, IN_F32, F16)
SCORES(turned_bf16, TURNED, IN_F32, BF16)
#if FP8_BY_BYTES
#define TURNED_IN_F32_E4M3(n) SCORE_CASE(turned_block, n, IN_F32, E4M3)
SCORES(turned_fp8, TURNED, IN_F32, E4M3)
#else
#define turned_fp8 NULL
#endif
#endif
#if HAVE_TURNED && HAVE_PAIRS
#define TURNED_IN_PAIRS_BF16(n) SCORE_CASE(turned_block, n, IN_PAIRS, BF16)
#define TURNED_IN_PAIRS_E4M3(n) SCORE_CASE(turned_block, n, IN_PAIRS, E4M3)
SCORES(turned_bf16_pairs, TURNED, IN_PAIRS, BF16)
SCORES(turned_fp8_pairs, TURNED, IN_PAIRS, E4M3)
#endif

/* [turned][product][dtype of K] */
static scores_function *const scores_of[2][2][5] = {
    {
        {scores_f32, scores_f16, scores_bf16, scores_fp8, scores_fp8},
#if HAVE_PAIRS
        {NULL, NULL, scores_bf16_pairs, scores_fp8_pairs, scores_fp8_pairs},
#endif
    },
#if HAVE_TURNED
    {
        {turned_f32, turned_f16, turned_bf16, turned_fp8, turned_fp8},
#if HAVE_PAIRS
        {NULL, NULL, turned_bf16_pairs, turned_fp8_pairs, turned_fp8_pairs},
#endif
    },
#endif
};
#endif
