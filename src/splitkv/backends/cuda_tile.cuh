// One tile of attention for one warp, and the sums that it keeps in a split: all that decides the split kernel's bytes,
// but for the joins.

// A warp's state in a split: O^T, and per lane for the columns nt * 8 + 2 t + {0, 1} the maximum and its own sum.
struct Sums {
    float acc[DV / 16][NT][4], m[NT][2], l[NT][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int mt = 0; mt < DV / 16; mt++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[mt][nt][i] = 0.0f;
            m[nt][0] = m[nt][1] = MINUS_INF;
            l[nt][0] = l[nt][1] = 0.0f;
        }
    }
};

// S^T = K Q^T over one tile: rows are keys.
__device__ __forceinline__ void score(float (&s)[MT][NT][4], const uint4* k, const uint2 (&q)[NT][D / 16][32]) {
    int lane = threadIdx.x & 31;
    float odd[MT][NT][4];  // odd steps sum apart: half the chain of dependent products
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[mt][nt][i] = odd[mt][nt][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        u32 a[4];
        uint2 b[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) b[nt] = q[nt][step][lane];
        if (FP8) {  // one chunk of 32 keys: rows 0-7, 8-15, 16-23, 24-31
            load_matrices(a, k + chunk_at<K_CHUNKS>(lane, step));
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                u32 x = a[(2 * mt) & 3], y = a[(2 * mt + 1) & 3];
                u32 a0 = widen(x), a2 = widen(x >> 16), a1 = widen(y), a3 = widen(y >> 16);
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                    multiply(step & 1 ? odd[mt][nt] : s[mt][nt], a0, a1, a2, a3, b[nt].x, b[nt].y);
            }
        } else {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                load_matrices(a, k + chunk_at<K_CHUNKS>(mt * 16 | lane & 15, 2 * step | lane >> 4));
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                    multiply(step & 1 ? odd[mt][nt] : s[mt][nt], a[0], a[1], a[2], a[3], b[nt].x, b[nt].y);
            }
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[mt][nt][i] += odd[mt][nt][i];
}

// Logits of a tile, scaled, capped and masked, in the log2 domain.
__device__ __forceinline__ void mask_scores(const Params& p, const Item& item, float scale, int n, int split_end,
                                            u32 exists, float (&s)[MT][NT][4]) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int first = 0, end = split_end;
#if CAUSAL || MASK != NONE
            Vector vector(p, nt * 8 + 2 * t + j);
#endif
#if CAUSAL
            end = item.hi - (p.q_len - 1) + vector.query;
            if (p.window > 0) first = end - p.window;
            end = min(end, split_end);
#endif
#if MASK != NONE
            i64 mask_row = item.row * p.mask_stride_b + vector.head * p.mask_stride_h + vector.query * p.mask_stride_i;
            if (!vector.valid) end = 0;
#endif
#pragma unroll
            for (int i = j; i < 4 * MT; i += 2) {
                int row = i / 4 * 16 + g + (i >> 1 & 1) * 8, key = n + row;
                float x = s[i / 4][nt][i % 4] * scale;
#if SOFTCAP
                x = p.softcap * tanh_(x / p.softcap);
#endif
                bool visible = key < end && key >= first && (!PAGED || exists >> row & 1);
#if MASK != NONE
                if (visible) {
                    i64 at = mask_row + key * p.mask_stride_n;
#if MASK == BOOL
                    visible = ((const u8*)p.mask)[at] != 0;
#elif MASK == F32
                    x += ((const float*)p.mask)[at];
#else
                    x += MASK == BF16 ? bf16_to_float(((const u16*)p.mask)[at]) : half_to_float(((const u16*)p.mask)[at]);
#endif
                }
#endif
                s[i / 4][nt][i % 4] = visible ? x * LOG2E : MINUS_INF;
            }
        }
    }
}

// Online softmax: s becomes p; the maximum, the sum and acc move to the new maximum.
__device__ __forceinline__ void soften(Sums& sums, float (&s)[MT][NT][4]) {
    bool moved = false;
    float alpha[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float top = sums.m[nt][j];
#pragma unroll
            for (int mt = 0; mt < MT; mt++) top = fmaxf(top, fmaxf(s[mt][nt][j], s[mt][nt][j + 2]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            float base = top == MINUS_INF ? 0.0f : top;
            moved |= top != sums.m[nt][j];
            alpha[nt][j] = exp2_(sums.m[nt][j] - base);
            sums.m[nt][j] = top;
            float sum = 0.0f;
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                s[mt][nt][j] = exp2_(s[mt][nt][j] - base);
                s[mt][nt][j + 2] = exp2_(s[mt][nt][j + 2] - base);
                sum += s[mt][nt][j] + s[mt][nt][j + 2];
            }
            sums.l[nt][j] = fmaf(sums.l[nt][j], alpha[nt][j], sum);
        }
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int mt = 0; mt < DV / 16; mt++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums.acc[mt][nt][i] *= alpha[nt][i & 1];
    }
}

// p as the right operand of V^T P^T. In 16 bits p is kept in two halves, so that it loses nothing, where the tensor cores have
// time to spare: up to eight query vectors. fp8 keys need no more than one f16.
#define TWO_HALVES (!FP8 && NT == 1)
struct Weights {
    u32 high[MT][NT][2], low[MT][NT][2];

    __device__ __forceinline__ void set(const float (&p)[MT][NT][4]) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float x = p[mt][nt][2 * i], y = p[mt][nt][2 * i + 1];
                    u32 rounded = pack(x, y);
                    high[mt][nt][i] = transpose_matrix(rounded);
                    if (TWO_HALVES)
                        low[mt][nt][i] = transpose_matrix(pack(x - unpack((u16)rounded), y - unpack((u16)(rounded >> 16))));
                }
    }
};

// O^T += V^T P^T: rows are V's columns; in fp8 rows g and g + 8 of a 16-column step are columns 2 g and 2 g + 1.
__device__ __forceinline__ void accumulate(Sums& sums, const uint4* v, const Weights& w) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 0; step < DV / 16; step++) {
        u32 a[4];
        if (FP8) load_matrices_transposed(a, v + chunk_at<V_CHUNKS>(lane, step));
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            u32 a0, a1, a2, a3;
            if (FP8) {
                u32 x = __byte_perm(a[(2 * mt) & 3], 0, 0x3120), y = __byte_perm(a[(2 * mt + 1) & 3], 0, 0x3120);
                a0 = widen(x), a1 = widen(x >> 16), a2 = widen(y), a3 = widen(y >> 16);
            } else {
                load_matrices_transposed(
                    a, v + chunk_at<V_CHUNKS>(mt * 16 | lane & 7 | (lane >> 4) * 8, 2 * step | lane >> 3 & 1));
                a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                multiply(sums.acc[step][nt], a0, a1, a2, a3, w.high[mt][nt][0], w.high[mt][nt][1]);
                if (TWO_HALVES) multiply(sums.acc[step][nt], a0, a1, a2, a3, w.low[mt][nt][0], w.low[mt][nt][1]);
            }
        }
    }
}
