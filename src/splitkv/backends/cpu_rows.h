/* Numbers as they are stored: reading rows of K and V as vectors of f32, and single numbers of anything else. */
#ifndef SPLITKV_CPU_ROWS_H
#define SPLITKV_CPU_ROWS_H

#include <stdbool.h>

#include "cpu_vec.h"

#define LINE_BYTES 64

#if LANES == 16 && defined(__AVX512VBMI__)
#define FP8_BY_BYTES 1 /* fp8 decoded 64 numbers at a time, by permuting bytes */
#else
#define FP8_BY_BYTES 0
#endif
/* Whether pairs of bf16 are multiplied and added by one instruction: a Zen 5 does two of them a cycle, as of f32; an
 * Emerald Rapids one every other cycle, and two of f32 a cycle. */
#if FP8_BY_BYTES && defined(__AVX512BF16__) && defined(AMD)
#define HAVE_PAIRS 1
#else
#define HAVE_PAIRS 0
#endif

/* Numbered as in cpu.py. */
enum dtype { F32, F16, BF16, E4M3, E5M2, BOOL, I32, I64 };
static const int item_bytes[] = {4, 2, 2, 1, 1, 1, 4, 8};

/* ---- single numbers ---------------------------------------------------------------------------------------- */

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float bf16_value(uint16_t code) { return float_of_bits((uint32_t)code << 16); }

/* Exact for every code, also where the processor flushes subnormals: the fields move into place and the exponent
 * is re-biased; a subnormal gets a leading one, which is subtracted again. */
INLINE float f16_value(uint16_t code) {
    const uint32_t magnitude = (uint32_t)(code & 0x7fff) << 13;
    const uint32_t subnormal = bits_of_float(float_of_bits(magnitude + (113u << 23)) - 0x1p-14f);
    const uint32_t rebiased = magnitude + (magnitude < 0x7c00u << 13 ? 112u << 23 : 224u << 23);
    return float_of_bits((magnitude < 0x0400u << 13 ? subnormal : rebiased) | (uint32_t)(code & 0x8000) << 16);
}

static float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

INLINE float e5m2_value(uint8_t code) { return f16_value((uint16_t)(code << 8)); }

INLINE float load_number(const char *p, enum dtype dtype) {
    uint16_t half;
    float value;
    if (dtype == F32) {
        memcpy(&value, p, sizeof value);
        return value;
    }
    memcpy(&half, p, sizeof half);
    return dtype == F16 ? f16_value(half) : bf16_value(half);
}

INLINE int64_t load_integer(const char *p, enum dtype dtype) {
    int32_t narrow;
    int64_t wide;
    if (dtype == I32) {
        memcpy(&narrow, p, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, p, sizeof wide);
    return wide;
}

/* Both round to nearest, ties to even; NaN stays NaN. */
INLINE uint16_t bf16_of_float(float x) {
    const uint32_t bits = bits_of_float(x);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t f16_of_float(float x) {
    const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff;
    uint32_t code;
    if (magnitude >= 0x47800000) { /* 65536 and more, Inf, NaN */
        code = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (magnitude < 0x38800000) { /* below 2^-14: adding 1/2 leaves the subnormal, rounded, in the low bits */
        code = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    } else {
        code = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    return (uint16_t)(code | (bits >> 16 & 0x8000));
}

INLINE void store_number(char *p, enum dtype dtype, float x) {
    if (dtype == F32) {
        memcpy(p, &x, sizeof x);
        return;
    }
    const uint16_t half = dtype == F16 ? f16_of_float(x) : bf16_of_float(x);
    memcpy(p, &half, sizeof half);
}

/* ---- rows of K and V --------------------------------------------------------------------------------------- */

/* How the rows of K, or of V, are read. fp8 goes through a table: the values, or where bytes can be permuted the
 * two high bytes of the 128 magnitudes' f32 (the two low ones are 0: both kinds of fp8 are exact in bf16). */
struct reader {
    enum dtype dtype;
    float table[256] __attribute__((aligned(LINE_BYTES)));
#if FP8_BY_BYTES
    uint8_t byte3[128], byte2[128];
#endif
};

static void init_reader(struct reader *reader, enum dtype dtype) {
    reader->dtype = dtype;
    if (dtype != E4M3 && dtype != E5M2) return;
    for (int code = 0; code < 256; code++)
        reader->table[code] = dtype == E4M3 ? e4m3_value((uint8_t)code) : e5m2_value((uint8_t)code);
#if FP8_BY_BYTES
    for (int code = 0; code < 128; code++) {
        reader->byte3[code] = (uint8_t)(bits_of_float(reader->table[code]) >> 24);
        reader->byte2[code] = (uint8_t)(bits_of_float(reader->table[code]) >> 16);
    }
#endif
}

INLINE vec vload_f16(const char *at) {
#if LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#elif LANES == 8 && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#else
    uint16_t code[LANES];
    float x[LANES];
    memcpy(code, at, sizeof code);
    for (int i = 0; i < LANES; i++) x[i] = f16_value(code[i]);
    return vload(x);
#endif
}

INLINE vec vload_bf16(const char *at) {
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)at)), 16);
#else
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    halves code;
    memcpy(&code, at, sizeof code);
    return (vec)(__builtin_convertvector(code, ivec) << 16);
#endif
}

/* LANES numbers of a query, or of a mask. */
INLINE vec load_vector(const char *at, enum dtype dtype) {
    if (dtype == F32) return vload((const float *)at);
    return dtype == F16 ? vload_f16(at) : vload_bf16(at);
}

/* One of the two bf16 in each lane, as f32. */
INLINE vec half_of(vec pairs, const int high) {
    return (vec)(high ? (uvec)pairs & 0xffff0000u : (uvec)pairs << 16);
}

/* One, two or four vectors of stored numbers, part way to f32: what they share is done once (for fp8), the rest when
 * each is asked for. `dtype` is a constant wherever these are used; E4M3 stands for both kinds of fp8. */
struct packed {
    const char *at;
#if FP8_BY_BYTES
    __m512i byte2, byte3; /* of 64 numbers: the two high bytes of each one's f32 */
#endif
};

#if FP8_BY_BYTES
INLINE struct packed decode_fp8(const struct reader *reader, __m512i code) {
    struct packed packed = {.at = NULL};
    const __m512i magnitude3 = _mm512_permutex2var_epi8(_mm512_loadu_si512(reader->byte3), code,
                                                        _mm512_loadu_si512(reader->byte3 + 64));
    packed.byte2 = _mm512_permutex2var_epi8(_mm512_loadu_si512(reader->byte2), code,
                                            _mm512_loadu_si512(reader->byte2 + 64));
    packed.byte3 = _mm512_ternarylogic_epi32(magnitude3, code, _mm512_set1_epi8((char)0x80), 0xf8); /* a | (b & c) */
    return packed;
}

/* 32 elements of one or two rows of `dim`: in each quarter of a vector eight of the first row and eight of the second,
 * and those that one row's 64 would have there, where there are so many. */
INLINE __m512i half_columns(const int keys, const char *const *rows, int64_t offset, int first, int dim) {
    const int block = first / 64 * 64;
    const char *const one = rows[0] + offset, *const other = rows[keys - 1] + offset;
    if (block + 64 <= dim) {
        const __m512i even = _mm512_setr_epi64(0, 8, 2, 10, 4, 12, 6, 14), odd = _mm512_set1_epi64(first / 32 % 2);
        return _mm512_permutex2var_epi64(_mm512_loadu_si512(one + block), _mm512_add_epi64(even, odd),
                                         _mm512_loadu_si512(other + block));
    }
    return _mm512_permutex2var_epi64(_mm512_castsi256_si512(_mm256_loadu_si256((const void *)(one + first))),
                                     _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                                     _mm512_castsi256_si512(_mm256_loadu_si256((const void *)(other + first))));
}
#endif

/* `vecs` vectors of a row of `dim` elements from `first` on. */
INLINE struct packed pack(const enum dtype dtype, const struct reader *reader, const char *row, int first, int dim,
                          const int vecs) {
    const char *const at = row + (int64_t)first * item_bytes[dtype];
#if FP8_BY_BYTES
    if (dtype == E4M3) {
        if (vecs == 4) return decode_fp8(reader, _mm512_loadu_si512(at));
        if (vecs == 2) return decode_fp8(reader, half_columns(1, &row, 0, first, dim));
        return decode_fp8(reader, _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)at)));
    }
#endif
    (void)reader, (void)dim, (void)vecs;
    return (struct packed){.at = at};
}

/* Vector `part` of pairs of bf16, the low half first, of an even number of vectors that were packed. */
INLINE vec unpack_pairs(const enum dtype dtype, struct packed packed, const int part) {
#if FP8_BY_BYTES
    if (dtype == E4M3)
        return (vec)(part ? _mm512_unpackhi_epi8(packed.byte2, packed.byte3)
                          : _mm512_unpacklo_epi8(packed.byte2, packed.byte3));
#endif
    (void)dtype;
    return vload((const float *)packed.at + part * LANES);
}

/* Vector `part` of `vecs` that were packed, as f32, in the order of element_at: of pairs the low halves and then the high
 * ones, which is half the work of widening each. */
INLINE vec unpack(const enum dtype dtype, const struct reader *reader, struct packed packed, const int vecs,
                  const int part) {
    const char *const at = packed.at + (int64_t)part * LANES * item_bytes[dtype];
    if (dtype == F32) return vload((const float *)at);
    if (dtype == F16) return vload_f16(at);
    if (dtype == BF16) return vecs > 1 ? half_of(unpack_pairs(dtype, packed, part / 2), part % 2) : vload_bf16(at);
#if FP8_BY_BYTES
    (void)reader;
    if (vecs > 1) return half_of(unpack_pairs(dtype, packed, part / 2), part % 2);
    return (vec)(((uvec)packed.byte3 << 24) | ((uvec)packed.byte2 << 24 >> 8)); /* each in the low byte of its lane */
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = reader->table[(uint8_t)at[i]];
    return v;
#endif
}

/* The most vectors that are unpacked together: rows are taken by so many, what is left by two and by one. */
INLINE int most_packed(const enum dtype dtype) {
    return dtype == BF16 ? 2 : FP8_BY_BYTES && (dtype == E4M3 || dtype == E5M2) ? 4 : 1;
}

/* The element at place s of vectors that were packed `block` elements at a time: low halves, then high ones, of pairs that
 * lie side by side, or of fp8 as bytes are unpacked: eight elements of each quarter, and eight more or another row's. */
INLINE int element_of_block(const bool fp8, const int block, int s) {
    const int within = s % block, high = within / LANES % 2, pair = within % LANES;
    if (!fp8) return s - within + pair * 2 + high;
    return s - within + pair / 4 * (block / 4) + within / (2 * LANES) * 8 + pair % 4 * 2 + high;
}

/* The element of a row of `dim` at place s of its vectors (see `unpack`). */
INLINE int element_at(enum dtype dtype, int dim, int s) {
    const int most = most_packed(dtype);
    if (most == 4 && s < dim / (4 * LANES) * (4 * LANES)) return element_of_block(true, 4 * LANES, s);
    if (most > 1 && s < dim / (2 * LANES) * (2 * LANES)) return element_of_block(most == 4, 2 * LANES, s);
    return s;
}

#if HAVE_PAIRS
/* c + a0 * b0 + a1 * b1 where each lane of a and b is a pair. The products are exact in f32. */
INLINE vec vdot_pairs(vec a, vec b, vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#endif

/* ---- columns of V -------------------------------------------------------------------------------------------- */

/* Columns [column, column + vecs * LANES) of `keys` neighbouring keys as f32, in the order of element_at; of two keys
 * two vectors each. */
INLINE void columns(const enum dtype dtype, const struct reader *reader, const int keys, const int vecs,
                    const char *const *v, int64_t offset, int column, int dim, vec *value) {
    struct packed packed;
#if FP8_BY_BYTES
    if (keys == 2) packed = decode_fp8(reader, half_columns(2, v, offset, column, dim));
    else
#endif
        packed = pack(dtype, reader, v[0] + offset, column, dim, vecs);
    UNROLL
    for (int c = 0; c < keys * vecs; c++) value[c] = unpack(dtype, reader, packed, keys * vecs, c);
}
#endif
