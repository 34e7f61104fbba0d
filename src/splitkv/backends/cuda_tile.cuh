// One tile of attention for one warp on tensor cores, and the sums that it keeps in a split: all that decides the split
// kernel's bytes, but for the joins. cuda_tile_f32.cuh is the same by multiply-adds. Keys stand in the rows of the products
// and query vectors in their eight columns, so nothing is padded at up to eight vectors: S^T = K Q^T, O^T = V^T P^T.

// What a warp brings of the queries in its i-th turn: 16 elements of eight columns. The columns are known to the compiler
// where a turn of all warps keeps to them.
struct QueryStep {
    int nt, step;
    bool other_columns;  // than the turn before it

    __device__ __forceinline__ explicit QueryStep(int i) {
        const int steps = D / 16;
        int warp = threadIdx.x >> 5, at = i * WARPS + warp;
        nt = steps % WARPS ? at / steps : i * WARPS / steps;
        step = steps % WARPS ? at % steps : i * WARPS % steps + warp;
        other_columns = i == 0 || steps % WARPS || i * WARPS % steps == 0;
    }
};

// The query vectors as the products' right operand: column g, the elements that lane t of every four multiplies. Fetched before
// keys are asked for, or they would arrive behind them; a warp brings every fourth step, and `put` shares them.
struct Queries {
    u32 words[QUERY_STEPS][2];

    // Two elements a read, where those are aligned: words that need nothing more until `put` keep no key waiting.
    __device__ __forceinline__ void fetch(const Params& p, const Item& item) {
        bool odd = ((i64)p.q >> 1 | p.q_stride_b | p.q_stride_i | p.q_stride_h) & 1;
        if (odd) read<false>(p, item);
        else read<true>(p, item);
    }

    template <bool PAIRS>
    __device__ __forceinline__ void read(const Params& p, const Item& item) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const u16* from;
        bool valid;
#pragma unroll
        for (int i = 0; i < QUERY_STEPS; i++) {
            QueryStep of(i);
            if (of.other_columns) {
                Vector vector(p, of.nt * 8 + g);
                valid = vector.valid && of.nt < NT;
                from = (const u16*)p.q + item.row * p.q_stride_b + vector.query * p.q_stride_i
                       + vector.head * p.q_stride_h + (FP8 ? 4 : 2) * t;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 d = of.step * 16 + (FP8 ? 2 : 8) * half;
                words[i][half] = 0;
                if (!valid) continue;
                words[i][half] = PAIRS ? *(const u32*)(from + d) : from[d] | (u32)from[d + 1] << 16;
            }
        }
    }

    __device__ __forceinline__ void put(Shared& shared) const {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < QUERY_STEPS; i++) {
            QueryStep of(i);
            u32 x = words[i][0], y = words[i][1];
            if (OUT_TYPE == BF16 && !COMPUTE_BF16) {
                x = pack(bf16_to_float((u16)x), bf16_to_float((u16)(x >> 16)));
                y = pack(bf16_to_float((u16)y), bf16_to_float((u16)(y >> 16)));
            }
            if (of.nt < NT) shared.q[of.nt][of.step][lane] = make_uint2(x, y);
        }
        __syncthreads();
    }
};

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

    // Maxima and whole sums, for the block.
    __device__ __forceinline__ void end(float2 (&ml)[VECTORS]) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float sum = l[nt][j];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (g == 0) ml[nt * 8 + 2 * t + j] = make_float2(m[nt][j], sum);
            }
    }

    // The output of JOIN_COLUMNS query vectors, the first of them `column`.
    __device__ __forceinline__ void put(float* buffer, int column) const {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int mine = nt * 8 + 2 * t + j - column;
                if (mine >= 0 && mine < JOIN_COLUMNS) {
#pragma unroll
                    for (int mt = 0; mt < DV / 16; mt++) {
                        float x = acc[mt][nt][j], y = acc[mt][nt][2 + j];
                        if (FP8) {
                            *(float2*)(buffer + join_at(mine, mt * 16 + 2 * g)) = make_float2(x, y);
                        } else {
                            buffer[join_at(mine, mt * 16 + g)] = x;
                            buffer[join_at(mine, mt * 16 + g + 8)] = y;
                        }
                    }
                }
            }
        }
    }
};

typedef float Scores[MT][NT][4];

// S^T = K Q^T over one tile: rows are keys.
__device__ __forceinline__ void score(Scores& s, const uint4* k, const Shared& shared, const Queries&) {
    int lane = threadIdx.x & 31;
    Scores odd;  // where chains of dependent products are few, odd steps sum apart: half as long
    const bool apart = MT * NT <= 4;
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
        for (int nt = 0; nt < NT; nt++) b[nt] = shared.q[nt][step][lane];
        if (FP8) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {  // one chunk of 32 keys: rows 0-7, 8-15, 16-23, 24-31
                if (mt % 2 == 0) load_matrices(a, k + chunk_at<K_CHUNKS>(mt * 16 | lane, step));
                u32 x = a[(2 * mt) & 3], y = a[(2 * mt + 1) & 3];
                u32 a0 = widen(x), a2 = widen(x >> 16), a1 = widen(y), a3 = widen(y >> 16);
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                    multiply(apart && step & 1 ? odd[mt][nt] : s[mt][nt], a0, a1, a2, a3, b[nt].x, b[nt].y);
            }
        } else {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                load_matrices(a, k + chunk_at<K_CHUNKS>(mt * 16 | lane & 15, 2 * step | lane >> 4));
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
                    multiply(apart && step & 1 ? odd[mt][nt] : s[mt][nt], a[0], a[1], a[2], a[3], b[nt].x, b[nt].y);
            }
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4 && apart; i++) s[mt][nt][i] += odd[mt][nt][i];
}

// Logits of a tile.
__device__ __forceinline__ void mask_scores(const Params& p, const Item& item, float scale, int n, int split_end,
                                            const u32 (&exists)[LANE_PAGES], Scores& s) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            View view(p, item, split_end, nt * 8 + 2 * t + j);
#pragma unroll
            for (int i = j; i < 4 * MT; i += 2) {
                int row = i / 4 * 16 + g + (i >> 1 & 1) * 8;
                float& x = s[i / 4][nt][i % 4];
                x = view.logit(p, x * scale, n + row, !PAGED || exists[i / 8] >> (row & 31) & 1);
            }
        }
    }
}

// Online softmax: s becomes p; the maximum, the sum and acc move to the new maximum.
__device__ __forceinline__ void soften(Sums& sums, Scores& s) {
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

    __device__ __forceinline__ explicit Weights(Shared&) {}
    __device__ __forceinline__ void set(const Scores& p) {
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
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            u32 a0, a1, a2, a3;
            if (FP8) {
                if (mt % 2 == 0) load_matrices_transposed(a, v + chunk_at<V_CHUNKS>(mt * 16 | lane, step));
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
