/* Vectors of f32 for whatever the compiler targets, and the few functions that attention needs on them.
 *
 * `vec` holds LANES floats (16 with AVX-512, 8 with AVX2, else 4); + - * / work on it as on a number. The build
 * forbids contraction, so a multiply-add is fused exactly where `vfma` says so and the bytes of a result do not
 * depend on the optimiser. */
#ifndef SPLITKV_CPU_VEC_H
#define SPLITKV_CPU_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define LANES 16
#define ISA "avx512"
#define BLOCK_SUMS 16 /* sums that stay in registers beside what they are made of: half the registers there are */
typedef __m512 vec;
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define ISA "avx2"
#define BLOCK_SUMS 8
typedef __m256 vec;
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define LANES 4
#define ISA "neon"
#define BLOCK_SUMS 16
typedef float vec __attribute__((vector_size(16)));
#else
#define LANES 4
#define ISA "generic"
#define BLOCK_SUMS 8
typedef float vec __attribute__((vector_size(16)));
#endif

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

INLINE vec vload(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void vstore(float *p, vec v) { memcpy(p, &v, sizeof v); }

INLINE vec vset1(float x) { return x - (vec){0}; }

/* v, loaded once: GCC would otherwise read it from memory again in each multiply-add that uses it, and the loads,
 * not the arithmetic, would set the pace (measured: 78 of 110 G multiply-adds a second). */
INLINE vec in_register(vec v) {
#if LANES == 16
    __asm__("" : "+v"(v));
#elif LANES == 8
    __asm__("" : "+x"(v));
#endif
    return v;
}

INLINE vec vfma(vec a, vec b, vec c) {
#if LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__) && defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Lane by lane: a where mask is all ones, b where it is zero. */
INLINE vec vselect(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* All ones in the first `count` lanes. */
INLINE ivec first_lanes(int count) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < (ivec){0} + count;
}

/* The larger of the two; b where a is NaN. */
INLINE vec vmax(vec a, vec b) {
#if LANES == 16
    return _mm512_max_ps(a, b);
#elif LANES == 8
    return _mm256_max_ps(a, b);
#else
    return vselect((ivec)(a > b), a, b);
#endif
}

/* ACROSS4 puts the lanes of each of the vectors a, b, c, d together and stores the four results in `out`: the
 * shuffles of one vector serve all four. The order is always the same. */
#if LANES == 16
#define ACROSS4(join, join256, join128)                                                      \
    const vec ab = join(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));                 \
    const vec cd = join(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));                 \
    const vec abcd = join(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)); \
    const __m256 half = join256(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1)); \
    _mm_storeu_ps(out, join128(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)))

INLINE void vsum4(vec a, vec b, vec c, vec d, float *out) { ACROSS4(_mm512_add_ps, _mm256_add_ps, _mm_add_ps); }
INLINE void vmax4(vec a, vec b, vec c, vec d, float *out) { ACROSS4(_mm512_max_ps, _mm256_max_ps, _mm_max_ps); }
#elif LANES == 8
#define ACROSS4(join, join128)                                                               \
    const vec ab = join(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));                 \
    const vec cd = join(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));                 \
    const vec abcd = join(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee)); \
    _mm_storeu_ps(out, join128(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)))

INLINE void vsum4(vec a, vec b, vec c, vec d, float *out) { ACROSS4(_mm256_add_ps, _mm_add_ps); }
INLINE void vmax4(vec a, vec b, vec c, vec d, float *out) { ACROSS4(_mm256_max_ps, _mm_max_ps); }
#else
#define ACROSS4(join)                                                                        \
    const vec v[4] = {a, b, c, d};                                                           \
    for (int i = 0; i < 4; i++) out[i] = join(join(v[i][0], v[i][2]), join(v[i][1], v[i][3]))

INLINE float add(float x, float y) { return x + y; }
INLINE float larger(float x, float y) { return x > y ? x : y; }
INLINE void vsum4(vec a, vec b, vec c, vec d, float *out) { ACROSS4(add); }
INLINE void vmax4(vec a, vec b, vec c, vec d, float *out) { ACROSS4(larger); }
#endif
#undef ACROSS4

/* 2^x for x <= 127: 1 at 0, 0 below -127 (so at -inf), NaN at NaN; relative error below 2e-7 from -126 up.
 * x = n + f with n whole and |f| <= 1/2; 2^f is a polynomial of least relative error; 2^n is an exponent. */
INLINE vec vexp2(vec x) {
    const vec round = vset1(12582912.0f); /* 1.5 * 2^23: adding it leaves no room for a fraction */
    x = vmax(vset1(-127.0f), x);
    const vec shifted = x + round;
    const vec f = x - (shifted - round);
    vec p = vset1(1.5353362e-4f);
    p = vfma(p, f, vset1(1.3398875e-3f));
    p = vfma(p, f, vset1(9.6184374e-3f));
    p = vfma(p, f, vset1(5.5503324e-2f));
    p = vfma(p, f, vset1(2.4022648e-1f));
    p = vfma(p, f, vset1(6.9314720e-1f));
    p = vfma(p, f, vset1(1.0f));
    /* n is in the low bits of `shifted`: in the exponent field, and biased, it is 2^n, or 0 for n = -127 */
    return p * (vec)(((uvec)shifted << 23) + (127u << 23));
}

INLINE float exp2_of(float x) { return vexp2(vset1(x))[0]; }

/* cap * tanh(x / cap). Near 0 a polynomial (Cephes' tanhf): 1 - 2 / (e^2y + 1) would lose small values' digits. */
INLINE vec vsoftcap(vec x, float cap) {
    const vec y = x / vset1(cap), magnitude = vmax(y, -y), square = y * y;
    vec p = vset1(-5.70498872745e-3f);
    p = vfma(p, square, vset1(2.06390887954e-2f));
    p = vfma(p, square, vset1(-5.37397155531e-2f));
    p = vfma(p, square, vset1(1.33314422036e-1f));
    p = vfma(p, square, vset1(-3.33332819422e-1f));
    const vec near = vfma(p * square, y, y);
    const vec exponent = magnitude * vset1(2.88539008f); /* 2 log2(e) */
    const vec bounded = vselect((ivec)(exponent > vset1(64.0f)), vset1(64.0f), exponent);
    const vec far = vset1(1.0f) - vset1(2.0f) / (vexp2(bounded) + vset1(1.0f));
    const vec signed_far = vselect((ivec)(y < vset1(0.0f)), -far, far);
    return vselect((ivec)(magnitude < vset1(0.625f)), near, signed_far) * vset1(cap);
}
#endif
