// One tile of attention for one warp in true f32, by multiply-adds: what cuda_tile.cuh is on tensor cores.
//
// Lanes divide a key's columns: each has every K_LANES-th chunk of four, of all query vectors too. Its products of up to 32
// pairs of key and vector then add up across lanes by halves: at every step a lane keeps half of its sums and gives the
// other half away, so 32 sums take 31 shuffles and end one per lane.

#define LANES_OF(chunks) ((chunks) > 16 ? 32 : (chunks) > 8 ? 16 : (chunks) > 4 ? 8 : 4)
#define K_LANES LANES_OF(K_CHUNKS)
#define V_LANES LANES_OF(V_CHUNKS)
#define K_FOURS ((K_CHUNKS + K_LANES - 1) / K_LANES)  // chunks of a lane
#define V_FOURS ((V_CHUNKS + V_LANES - 1) / V_LANES)
#define K_GROUPS (32 / K_LANES)  // keys that a warp reads at once
#define V_GROUPS (32 / V_LANES)
#define LANE_KEYS (BK / K_GROUPS)
#define AT_ONCE (LANE_KEYS * ROWS <= 32 ? LANE_KEYS : 32 / ROWS)  // keys of a lane whose sums add up together
#define TURNS (LANE_KEYS / AT_ONCE)
#define PAIRS_AT_ONCE (AT_ONCE * ROWS)
#define LANE_SCORES (PAIRS_AT_ONCE > K_LANES ? PAIRS_AT_ONCE / K_LANES : 1)  // that a lane ends with, each turn
#define COPIES (PAIRS_AT_ONCE < K_LANES ? K_LANES / PAIRS_AT_ONCE : 1)        // lanes that end with the same
#define LANES_OF_KEY (ROWS / LANE_SCORES * COPIES)                            // lanes that have a key's scores
static_assert(LANE_SCORES <= ROWS, "a lane would have scores of two keys");

typedef float Scores[TURNS][LANE_SCORES];

// Which pair a lane's i-th score of a turn is of.
__device__ __forceinline__ int pair_of(int i) { return (threadIdx.x & 31) % K_LANES / COPIES * LANE_SCORES + i; }
__device__ __forceinline__ int vector_of(int i) { return pair_of(i) % ROWS; }
__device__ __forceinline__ int key_of(int turn, int i) {
    return (turn * AT_ONCE + pair_of(i) / ROWS) * K_GROUPS + (threadIdx.x & 31) / K_LANES;
}

// A lane's columns of the query vectors.
struct Queries {
    float4 words[ROWS][K_FOURS];

    __device__ __forceinline__ void fetch(const Params& p, const Item& item) {
#if OUT_TYPE == F32
        bool fours = (((i64)p.q >> 2 | p.q_stride_b | p.q_stride_i | p.q_stride_h) & 3) == 0;
        if (fours) read<true>(p, item);
        else
#endif
            read<false>(p, item);
    }

    template <bool IN_FOURS>
    __device__ __forceinline__ void read(const Params& p, const Item& item) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            Vector vector(p, r);
            const Out* from = (const Out*)p.q + item.row * p.q_stride_b + vector.query * p.q_stride_i
                              + vector.head * p.q_stride_h;
#pragma unroll
            for (int f = 0; f < K_FOURS; f++) {
                int chunk = (threadIdx.x & 31) % K_LANES + f * K_LANES;
                words[r][f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (!vector.valid || chunk >= K_CHUNKS) continue;
                const Out* four = from + 4 * chunk;
                if (IN_FOURS) words[r][f] = *(const float4*)four;
                else words[r][f] = make_float4(number(four[0]), number(four[1]), number(four[2]), number(four[3]));
            }
        }
    }

    static __device__ __forceinline__ float number(Out x) {
#if OUT_TYPE == F32
        return x;
#else
        return OUT_TYPE == BF16 ? bf16_to_float(x) : half_to_float(x);
#endif
    }

    __device__ __forceinline__ void put(Shared&) const {}
};

// a += x y, column by column.
__device__ __forceinline__ void multiply_add(float4& a, float x, const float4& y) {
    a.x = fmaf(x, y.x, a.x);
    a.y = fmaf(x, y.y, a.y);
    a.z = fmaf(x, y.z, a.z);
    a.w = fmaf(x, y.w, a.w);
}

// A warp's state in a split: a lane's columns of O for every vector (of the keys that its group of lanes reads), and for the
// vectors of its scores the maximum and its own sum.
struct Sums {
    float4 acc[ROWS][V_FOURS];
    float m[LANE_SCORES], l[LANE_SCORES];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int f = 0; f < V_FOURS; f++) acc[r][f] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < LANE_SCORES; i++) m[i] = MINUS_INF, l[i] = 0.0f;
    }

    // Maxima and whole sums, for the block; every lane gets its columns of O over all keys.
    __device__ __forceinline__ void end(float2 (&ml)[VECTORS]) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < LANE_SCORES; i++) {
            float sum = l[i];
#pragma unroll
            for (int step = LANES_OF_KEY; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane < LANES_OF_KEY) ml[vector_of(i)] = make_float2(m[i], sum);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int f = 0; f < V_FOURS; f++)
#pragma unroll
                for (int step = V_LANES; step < 32; step *= 2) {
                    float4& a = acc[r][f];
                    a.x += __shfl_xor_sync(~0u, a.x, step);
                    a.y += __shfl_xor_sync(~0u, a.y, step);
                    a.z += __shfl_xor_sync(~0u, a.z, step);
                    a.w += __shfl_xor_sync(~0u, a.w, step);
                }
    }

    // The output of JOIN_COLUMNS query vectors, the first of them `column`.
    __device__ __forceinline__ void put(float* buffer, int column) const {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int mine = r - column;
            if (mine < 0 || mine >= JOIN_COLUMNS || lane >= V_LANES) continue;
#pragma unroll
            for (int f = 0; f < V_FOURS; f++) {
                int chunk = lane + f * V_LANES;
                if (chunk < V_CHUNKS) *(float4*)(buffer + join_at(mine, 4 * chunk)) = acc[r][f];
            }
        }
    }
};

// Sums over the lanes that share a key: of a lane's LEFT sums the first LANE_SCORES end whole, those of pair_of.
template <int STEP, int LEFT>
__device__ __forceinline__ void add_up(float (&sums)[PAIRS_AT_ONCE]) {
    const int half = LEFT > 1 ? LEFT / 2 : 1;
    bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int i = 0; i < half; i++) {
        float kept = sums[i], given = kept;
        if (LEFT > 1) kept = upper ? sums[i + half] : sums[i], given = upper ? sums[i] : sums[i + half];
        sums[i] = kept + __shfl_xor_sync(~0u, given, STEP);
    }
    if constexpr (STEP > 1) add_up<STEP / 2, half>(sums);
}

// S = Q K^T over one tile.
__device__ __forceinline__ void score(Scores& s, const uint4* k, const Shared&, const Queries& queries) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        float sums[PAIRS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < PAIRS_AT_ONCE; i++) sums[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int row = (turn * AT_ONCE + j) * K_GROUPS + lane / K_LANES;
#pragma unroll
            for (int f = 0; f < K_FOURS; f++) {
                int chunk = lane % K_LANES + f * K_LANES;
                if (K_CHUNKS % K_LANES && chunk >= K_CHUNKS) continue;
                float4 x = *(const float4*)(k + chunk_at<K_CHUNKS>(row, chunk));
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float4& q = queries.words[r][f];
                    float& sum = sums[j * ROWS + r];
                    sum = fmaf(x.w, q.w, fmaf(x.z, q.z, fmaf(x.y, q.y, fmaf(x.x, q.x, sum))));
                }
            }
        }
        add_up<K_LANES / 2, PAIRS_AT_ONCE>(sums);
#pragma unroll
        for (int i = 0; i < LANE_SCORES; i++) s[turn][i] = sums[i];
    }
}

// Logits of a tile.
__device__ __forceinline__ void mask_scores(const Params& p, const Item& item, float scale, int n, int split_end,
                                            const u32 (&exists)[LANE_PAGES], Scores& s) {
#pragma unroll
    for (int i = 0; i < LANE_SCORES; i++) {
        View view(p, item, split_end, vector_of(i));
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            int row = key_of(turn, i);
            s[turn][i] = view.logit(p, s[turn][i] * scale, n + row, !PAGED || exists[0] >> row & 1);
        }
    }
}

// Online softmax: s becomes p; the maximum, the sum and acc move to the new maximum.
__device__ __forceinline__ void soften(Sums& sums, Scores& s) {
    bool moved = false;
    float alpha[LANE_SCORES];
#pragma unroll
    for (int i = 0; i < LANE_SCORES; i++) {
        float top = sums.m[i];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) top = fmaxf(top, s[turn][i]);
#pragma unroll
        for (int step = LANES_OF_KEY; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        float base = top == MINUS_INF ? 0.0f : top, sum = 0.0f;
        moved |= top != sums.m[i];
        alpha[i] = exp2_(sums.m[i] - base);
        sums.m[i] = top;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) sum += s[turn][i] = exp2_(s[turn][i] - base);
        sums.l[i] = fmaf(sums.l[i], alpha[i], sum);
    }
    if (!__any_sync(~0u, moved)) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float weight = __shfl_sync(~0u, alpha[r % LANE_SCORES], r / LANE_SCORES * COPIES);
#pragma unroll
        for (int f = 0; f < V_FOURS; f++) {
            float4& a = sums.acc[r][f];
            a = make_float4(a.x * weight, a.y * weight, a.z * weight, a.w * weight);
        }
    }
}

// p of a tile, for all lanes.
struct Weights {
    float (*p)[ROWS];

    __device__ __forceinline__ explicit Weights(Shared& shared) : p(shared.p[threadIdx.x >> 5]) {}
    __device__ __forceinline__ void set(const Scores& s) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
            for (int i = 0; i < LANE_SCORES; i++) p[key_of(turn, i)][vector_of(i)] = s[turn][i];
        __syncwarp();
    }
};

// O += P V.
__device__ __forceinline__ void accumulate(Sums& sums, const uint4* v, const Weights& w) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < BK / V_GROUPS; j++) {
        int row = j * V_GROUPS + lane / V_LANES;
        float p[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) p[r] = w.p[row][r];
#pragma unroll
        for (int f = 0; f < V_FOURS; f++) {
            int chunk = lane % V_LANES + f * V_LANES;
            if (V_CHUNKS % V_LANES && chunk >= V_CHUNKS) continue;
            float4 x = *(const float4*)(v + chunk_at<V_CHUNKS>(row, chunk));
#pragma unroll
            for (int r = 0; r < ROWS; r++) multiply_add(sums.acc[r][f], p[r], x);
        }
    }
}
