// Backend "cuda", first kernel: streams the cache once and leaves one part per unit of a row (plan.py), or the answer.
//
// Compile-time: D, DV (head sizes), NT (tiles of 8 query vectors), KV_TYPE, OUT_TYPE (the query's), BK (keys per tile), STAGES
// (of the ring), SHARED_BYTES, JOIN_COLUMNS, PAGED, VECTOR (whether rows load in 16-byte vectors), MAX_RUN
// (1, 4 or 16), CAUSAL (several queries a row), SOFTCAP, MASK (a type, or NONE).
//
// Four warps, each on its own: it brings tiles of BK keys into its own ring in shared memory with cp.async, several ahead,
// across splits and units, and never waits for another warp until a split ends. Keys stand in the rows of the tensor
// cores' products and query vectors in their eight columns, so nothing is padded at up to eight vectors:
// S^T = K Q^T, O^T = V^T P^T. A split's four parts join in shared memory.

#define WARPS 4
#define THREADS (32 * WARPS)
#define FP8 (KV_TYPE >= E4M3)
#define KV_BYTES (FP8 ? 1 : 2)
#define COMPUTE_BF16 (KV_TYPE == BF16)
#define VECTORS (8 * NT)
#define MT (BK / 16)
#define K_CHUNKS (D * KV_BYTES / 16)  // chunks of 16 bytes in a row
#define V_CHUNKS (DV * KV_BYTES / 16)
#define PITCH(chunks) ((chunks) % 8 ? (chunks) | 1 : (chunks))
#define STAGE_CHUNKS (BK * (PITCH(K_CHUNKS) > PITCH(V_CHUNKS) ? PITCH(K_CHUNKS) : PITCH(V_CHUNKS)))
#define JOIN_PITCH (DV + 4)
#define THREADS_PER_VECTOR (THREADS / VECTORS)
#define QUERY_STEPS ((NT * (D / 16) + WARPS - 1) / WARPS)
#define PART (DV / THREADS_PER_VECTOR)  // elements of a part that a thread keeps

struct Shared {
    uint4 ring[WARPS][STAGES][STAGE_CHUNKS];
    float join[WARPS * JOIN_COLUMNS * JOIN_PITCH];
    uint2 q[NT][D / 16][32];  // as the products' right operand: by lane
    float2 ml[WARPS][VECTORS];
    u32 exists[WARPS][STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cuda_launch.py counts otherwise");

// Where row r's chunk c lies in a stage: eight rows' same chunk in different banks, by swapping chunks in whole eights, else
// by an odd pitch.
template <int CHUNKS>
__device__ __forceinline__ int chunk_at(int r, int c) {
    return PITCH(CHUNKS) % 8 ? r * PITCH(CHUNKS) + c : r * CHUNKS + (c & ~7 | (c ^ r) & 7);
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const uint4* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(at)));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const uint4* at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(at)));
}

__device__ __forceinline__ u32 transpose_matrix(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if COMPUTE_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
#if COMPUTE_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}

__device__ __forceinline__ float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float unpack(u16 bits) { return COMPUTE_BF16 ? bf16_to_float(bits) : half_to_float(bits); }

// Two fp8 values to two f16: exact.
__device__ __forceinline__ u32 widen(u32 two) {
    u32 r = 0;
#if KV_TYPE == E4M3
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)two));
#elif KV_TYPE == E5M2
    r = __byte_perm(two, 0, 0x1404);  // e5m2 is f16's upper byte
#endif
    return r;
}

__device__ __forceinline__ float tanh_(float x) {
    float x2 = x * x, size = fabsf(x);
    float small = x * (1.0f + x2 * (-0.33333334f + x2 * (0.13333334f + x2 * (-0.053968254f + x2 * 0.021869488f))));
    float large = 1.0f - 2.0f / (exp2_(fminf(size, 15.0f) * (2.0f * LOG2E)) + 1.0f);
    return size < 0.25f ? small : x < 0 ? -large : large;
}

__device__ __forceinline__ void copy_chunk(uint4* to, const char* from, bool inside, bool exists) {
    if (!inside) return;
#if VECTOR
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0) : "memory");
#else
    u32 words[4] = {0, 0, 0, 0};
    if (exists) {
#pragma unroll
        for (int e = 0; e < 16 / KV_BYTES; e++) {
            u32 bits = FP8 ? ((const u8*)from)[e] : ((const u16*)from)[e];
            words[e * KV_BYTES / 4] |= bits << (e * KV_BYTES % 4 * 8);
        }
    }
    *to = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// A unit of a row, for the query vectors of one KV head (a block keeps to one head): one piece of a block's work.
struct Item {
    int row, slot, units, split_len, hi, n_begin, n_end;

    __device__ __forceinline__ void find(const Params& p, Rows& rows, int index, int run_keys) {
        int unit = index, lo;
        slot = index;
        row = 0;
        if (p.batch > 1) {
            while (unit >= rows.end()) rows.load(p, rows.base + 32, rows.end(), run_keys);
            row = rows.base + __popc(__ballot_sync(~0u, rows.before + rows.through <= unit));
            unit -= rows.first_unit(row);
        }
        row_bounds(p, row, lo, hi);
        Cut cut = cut_row(p, hi - lo, run_keys);
        split_len = cut.split_len;
        units = cut.units;
        i64 begin = lo + (i64)unit * cut.run * split_len;
        n_begin = (int)begin;
        n_end = (int)min(begin + (i64)cut.run * split_len, (i64)hi);
    }
};

// A warp's loads, stage after stage: K of a tile, then V of it, ahead of the products.
struct Loader {
    Rows rows;
    Item item;
    int index, units, run_keys, n, split_end, stage;
    const char *k_rows, *v_rows;
    int page, slot, next_page;
    bool of_v, done;

    __device__ __forceinline__ void start(const Params& p) {
        int kv_head = p.row_blocks > 1 ? divide(blockIdx.x, p.row_blocks) : blockIdx.x;
        item.find(p, rows, index, run_keys);
        k_rows = (const char*)p.k_cache + (kv_head * p.k_stride_h + (PAGED ? 0 : item.row * p.k_stride_b)) * KV_BYTES;
        v_rows = (const char*)p.v_cache + (kv_head * p.v_stride_h + (PAGED ? 0 : item.row * p.v_stride_b)) * KV_BYTES;
        enter_split(p, item.n_begin);
    }

    __device__ __forceinline__ void enter_split(const Params& p, int begin) {
        split_end = (int)min((i64)begin + item.split_len, (i64)item.n_end);
        n = begin + (threadIdx.x >> 5) * BK;
        if (PAGED) next_page = read_page(p, n);
    }

    __device__ __forceinline__ int read_page(const Params& p, int tile) {
        int key = tile + (threadIdx.x & 31);
        bool valid = key < split_end && (threadIdx.x & 31) < BK;
        return valid ? p.block_table[item.row * p.table_stride + key / p.page_size] : -1;
    }

    // Finds the next tile that this warp has: in this split, the unit's next ones, or the next item.
    __device__ __forceinline__ void advance(const Params& p) {
        while (!done && n >= split_end) {
            if (split_end < item.n_end) {
                enter_split(p, split_end);
            } else {
                index += gridDim.y;
                done = index >= units;
                if (!done) start(p);
            }
        }
    }

    // BK rows into a stage; keys that do not exist become zeros and are never read.
    template <int CHUNKS>
    __device__ __forceinline__ void load(const char* base, i64 stride_b, i64 stride_t, uint4* to) {
        int lane = threadIdx.x & 31;
        if (!PAGED && 32 % CHUNKS == 0) {
            const int rows_at_once = 32 / CHUNKS;
            int r = lane / CHUNKS, c = lane % CHUNKS, left = split_end - n - r;
            const char* from = base + (n + r) * (stride_t * KV_BYTES) + c * 16;
            i64 step = rows_at_once * stride_t * KV_BYTES;
#pragma unroll
            for (int i = 0; i < BK; i += rows_at_once) {
                copy_chunk(to + chunk_at<CHUNKS>(r + i, c), from, true, i < left);
                from += step;
            }
            return;
        }
        i64 mine = PAGED && page < 0 ? -1 : (page * stride_b + slot * stride_t) * KV_BYTES;
#pragma unroll
        for (int i = 0; i < (BK * CHUNKS + 31) / 32; i++) {
            int at = i * 32 + lane, r = at / CHUNKS, c = at % CHUNKS;
            bool inside = BK * CHUNKS % 32 == 0 || r < BK;
            i64 offset = PAGED ? __shfl_sync(~0u, mine, min(r, BK - 1)) : (n + r) * stride_t * KV_BYTES;
            bool exists = inside && (PAGED ? offset >= 0 : n + r < split_end);
            copy_chunk(to + chunk_at<CHUNKS>(r, c), base + offset + c * 16, inside, exists);
        }
    }

    __device__ __forceinline__ void issue(const Params& p, Shared& shared) {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        if (!of_v) advance(p);
        if (!done) {
            uint4* to = shared.ring[warp][stage];
            if (PAGED && !of_v) {
                page = next_page < p.num_pages ? next_page : -1;
                slot = n + lane - divide(n + lane, p.page_size) * p.page_size;
                u32 exists = __ballot_sync(~0u, page >= 0);
                if (lane == 0) shared.exists[warp][stage] = exists;
                next_page = read_page(p, n + WARPS * BK);
            }
            if (D == DV) {
                load<K_CHUNKS>(of_v ? v_rows : k_rows, of_v ? p.v_stride_b : p.k_stride_b,
                               of_v ? p.v_stride_t : p.k_stride_t, to);
            } else if (of_v) {
                load<V_CHUNKS>(v_rows, p.v_stride_b, p.v_stride_t, to);
            } else {
                load<K_CHUNKS>(k_rows, p.k_stride_b, p.k_stride_t, to);
            }
            if (of_v) n += WARPS * BK;
            of_v = !of_v;
        } else {
            let_next_kernel_start();  // the keys are all on their way
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Until the oldest stage on its way is there for the whole warp.
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
    __syncwarp();
}

// The query vector in a column of this block: vector r of a KV head is query r % q_len of head r / q_len of its group.
struct Vector {
    int head, query;
    bool valid;

    __device__ __forceinline__ Vector(const Params& p, int column) {
        int kv_head = blockIdx.x, r = column;
        if (p.row_blocks > 1) {
            kv_head = divide(blockIdx.x, p.row_blocks);
            r += (blockIdx.x - kv_head * p.row_blocks) * p.rows_per_block;
        }
        int of_group = r;
        query = 0;
#if CAUSAL
        of_group = divide(r, p.q_len);
        query = r - of_group * p.q_len;
#endif
        valid = column < p.rows_per_block && of_group < p.group;
        head = kv_head * p.group + of_group;
    }
};

// The query vectors as the products' right operand: column g, the elements that lane t of every four multiplies. Fetched before
// keys are asked for, or they would arrive behind them; a warp brings every fourth step, and `put` shares them.
struct Queries {
    u32 words[QUERY_STEPS][2];

    __device__ __forceinline__ void fetch(const Params& p, const Item& item) {
        int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < QUERY_STEPS; i++) {
            int at = i * WARPS + warp, nt = at / (D / 16), step = at % (D / 16);
            Vector vector(p, nt * 8 + g);
            const u16* from = (const u16*)p.q + item.row * p.q_stride_b + vector.query * p.q_stride_i
                              + vector.head * p.q_stride_h + step * 16;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int d = FP8 ? 4 * t + 2 * half : 2 * t + 8 * half;
                words[i][half] = vector.valid && nt < NT ? from[d] | (u32)from[d + 1] << 16 : 0;
            }
        }
    }

    __device__ __forceinline__ void put(Shared& shared) const {
        int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
        for (int i = 0; i < QUERY_STEPS; i++) {
            int at = i * WARPS + warp;
            u32 x = words[i][0], y = words[i][1];
            if (OUT_TYPE == BF16 && !COMPUTE_BF16) {
                x = pack(bf16_to_float((u16)x), bf16_to_float((u16)(x >> 16)));
                y = pack(bf16_to_float((u16)y), bf16_to_float((u16)(y >> 16)));
            }
            if (at < NT * (D / 16)) shared.q[at / (D / 16)][at % (D / 16)][lane] = make_uint2(x, y);
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

// p as the right operand of V^T P^T. In 16 bits p is kept in two halves, so that it loses nothing: the tensor cores have
// time to spare. fp8 keys need no more than one f16.
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
                    if (!FP8)
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
                if (!FP8) multiply(sums.acc[step][nt], a0, a1, a2, a3, w.low[mt][nt][0], w.low[mt][nt][1]);
            }
        }
    }
}

// A part as the block keeps it: of query vector threadIdx.x / THREADS_PER_VECTOR, every THREADS_PER_VECTOR-th element.
struct Part {
    float acc[PART], m, l;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < PART; i++) acc[i] = 0.0f;
        m = MINUS_INF;
        l = 0.0f;
    }

    __device__ __forceinline__ void add(const Part& later) {
        Join join(m, later.m);
#pragma unroll
        for (int i = 0; i < PART; i++) acc[i] = join(acc[i], later.acc[i]);
        l = join(l, later.l);
        m = join.m;
    }
};

// The four warps' parts of one query vector, joined in the warps' order. `from`: the first warp's; `stride` to the next.
__device__ __forceinline__ void join_warps(const Shared& shared, const float* from, int stride, int vector, Part& part) {
    float2 ml[WARPS];
    float weight[WARPS];
    part.m = MINUS_INF;
    part.l = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        ml[w] = shared.ml[w][vector];
        part.m = fmaxf(part.m, ml[w].x);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        weight[w] = exp2_(ml[w].x - (part.m == MINUS_INF ? 0.0f : part.m));
        part.l = fmaf(ml[w].y, weight[w], part.l);
    }
#pragma unroll
    for (int i = 0; i < PART; i++) {
        part.acc[i] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            part.acc[i] = fmaf(from[w * stride + i * THREADS_PER_VECTOR], weight[w], part.acc[i]);
    }
}

// Ends a split: the four warps' sums become one part. JOIN_COLUMNS at a time have room beside the ring; the block's last
// split has the whole ring, as nothing is on its way any more.
__device__ __forceinline__ void close_split(const Params& p, Shared& shared, Sums& sums, Part& part, bool last) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int vector = threadIdx.x / THREADS_PER_VECTOR, first = threadIdx.x % THREADS_PER_VECTOR;
    int columns = last ? VECTORS : JOIN_COLUMNS, stride = columns * JOIN_PITCH;
    float* buffer = last ? (float*)shared.ring : shared.join;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float l = sums.l[nt][j];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) l += __shfl_xor_sync(~0u, l, step);
            if (g == 0) shared.ml[warp][nt * 8 + 2 * t + j] = make_float2(sums.m[nt][j], l);
        }
    if (last) __syncthreads();
#pragma unroll 1
    for (int column = 0; column < p.rows_per_block; column += columns) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int mine = nt * 8 + 2 * t + j - column;
                if (mine >= 0 && mine < columns) {
                    float* to = buffer + warp * stride + mine * JOIN_PITCH;
#pragma unroll
                    for (int mt = 0; mt < DV / 16; mt++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            to[mt * 16 + (FP8 ? 2 * g + i : g + i * 8)] = sums.acc[mt][nt][2 * i + j];
                }
            }
        }
        __syncthreads();
        int mine = vector - column;
        if (mine >= 0 && mine < columns) join_warps(shared, buffer + mine * JOIN_PITCH + first, stride, vector, part);
        __syncthreads();
    }
    sums.clear();
}

// The answer where the row is one unit, else the unit's part in the workspace.
__device__ __forceinline__ void store(const Params& p, const Item& item, const Part& part) {
    Vector vector(p, threadIdx.x / THREADS_PER_VECTOR);
    int first = threadIdx.x % THREADS_PER_VECTOR;
    if (!vector.valid) return;
    if (item.units > 1) {
        i64 at = ((i64)item.slot * p.num_kv_heads * p.group + vector.head) * p.q_len + vector.query;
#pragma unroll
        for (int i = 0; i < PART; i++) p.partial_out[at * DV + first + i * THREADS_PER_VECTOR] = part.acc[i];
        if (first == 0) ((float2*)p.partial_ml)[at] = make_float2(part.m, part.l);
        return;
    }
    Finish finish(p, part.m, part.l, vector.head);
    u16* out = (u16*)p.out + item.row * p.out_stride_b + vector.query * p.out_stride_i + vector.head * p.out_stride_h;
#pragma unroll
    for (int i = 0; i < PART; i++) out[first + i * THREADS_PER_VECTOR] = to_16_bits(finish(part.acc[i]));
    if (p.lse && first == 0)
        p.lse[item.row * p.lse_stride_b + vector.query * p.lse_stride_i + vector.head * p.lse_stride_h] = finish.lse;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) split_kernel(const __grid_constant__ Params p) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    int warp = threadIdx.x >> 5;
    if (!touch(p)) return;
    wait_for_previous_kernel();

    int run_keys = MAX_RUN > 1 ? keys_per_run(p) : 0;
    Rows rows;
    int units = 0;
    for (int base = (p.batch - 1) & ~31; base >= 0; base -= 32) {  // ends at the first rows
        rows.load(p, base, 0, run_keys);
        units += rows.end();
    }
    if (blockIdx.y >= units) return;

    Loader loader;
    loader.rows = rows;
    loader.index = blockIdx.y;
    loader.units = units;
    loader.run_keys = run_keys;
    loader.stage = 0;
    loader.of_v = loader.done = false;
    loader.start(p);
    Item item = loader.item;
    Queries queries;
    queries.fetch(p, item);

    Sums sums;
    Weights weights;
    Part part;
#if MAX_RUN > 1
    Part four, sixteen;
    int splits;
#endif
    float scale = p.scale;
    if (p.k_scales) scale *= p.k_scales[divide(blockIdx.x, p.row_blocks) * p.k_scale_stride];
    int index = blockIdx.y, stage = 0, ahead = STAGES - 1, n, split_end;
    bool of_v = false, entered = false;
    sums.clear();
    for (;;) {
        if (ahead == 0 && !entered) {
            queries.put(shared);
            split_end = (int)min((i64)item.n_begin + item.split_len, (i64)item.n_end);
            n = item.n_begin + warp * BK;
#if MAX_RUN > 1
            four.clear();
            sixteen.clear();
            splits = 0;
#endif
            entered = true;
        }
        if (ahead == 0 && !of_v && n >= split_end) {  // no tile of this split is left for this warp
            bool end = split_end >= item.n_end, more = false;
            Item next = item;
            if (end) {
                index += gridDim.y;
                more = index < units;
                if (more) {
                    next.find(p, rows, index, run_keys);
                    queries.fetch(p, next);
                }
            }
            close_split(p, shared, sums, part, end && !more);
#if MAX_RUN > 1
            four.add(part);
            if (MAX_RUN > 4 && ++splits % 4 == 0) {
                sixteen.add(four);
                four.clear();
            }
#endif
            if (!end) {
                n = split_end + warp * BK;
                split_end = (int)min((i64)split_end + item.split_len, (i64)item.n_end);
                continue;
            }
#if MAX_RUN > 4
            sixteen.add(four);
            store(p, item, sixteen);
#elif MAX_RUN > 1
            store(p, item, four);
#else
            store(p, item, part);
#endif
            if (!more) break;
            item = next;
            entered = false;
            continue;
        }
        loader.issue(p, shared);
        if (ahead > 0) {  // fill the ring first
            ahead--;
            continue;
        }
        wait_for_stage();
        if (!of_v) {
            float s[MT][NT][4];
            score(s, shared.ring[warp][stage], shared.q);
            mask_scores(p, item, scale, n, split_end, PAGED ? shared.exists[warp][stage] : 0, s);
            soften(sums, s);
            weights.set(s);
        } else {
            accumulate(sums, shared.ring[warp][stage], weights);
            n += WARPS * BK;
        }
        __syncwarp();  // before the stage is filled again
        of_v = !of_v;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    let_next_kernel_start();
}
