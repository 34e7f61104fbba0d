// What both kernels of backend "cuda" share: arguments, a row's bounds and units, joins, the finish.
//
// Compiled with -fmad=false: only the fmaf that are written fuse, so every variant rounds alike. Logits are in the log2
// domain. A part is (acc, m, l): the unnormalised output, the running maximum and the sum, all f32.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define MINUS_INF __int_as_float(0xff800000)
#define INT_MAX 0x7fffffff

// Mirrors cuda_launch.py's PARAMS, field by field: pointers (in the order of backends.TENSORS, then the second half of the
// workspace), 64-bit strides, 32-bit values. An absent tensor is null.
struct Params {
    const void *q, *k_cache, *v_cache;
    const void* seq_lens;
    const int* block_table;
    void* out;
    float *lse, *partial_out;
    const int* starts;
    const void* mask;
    const float *sinks, *k_scales, *v_scales;
    float* partial_ml;
    i64 q_stride_b, q_stride_i, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h;
    i64 table_stride, mask_stride_b, mask_stride_h, mask_stride_i, mask_stride_n;
    i64 out_stride_b, out_stride_i, out_stride_h, lse_stride_b, lse_stride_i, lse_stride_h;
    i64 k_scale_stride, v_scale_stride;
    int uniform_len, batch, capacity, num_pages, page_size, window;
    int num_kv_heads, group, q_len, rows_per_block, row_blocks;
    int target, min_len, quantum, target_units, max_run, blocks;
    float scale, v_scale, softcap;
};

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a / b of positive integers: the float's quotient, put right twice, is exact. A third of the code of the compiler's own.
__device__ __forceinline__ int divide(int a, int b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));
    int q = (int)((float)a * inverse), rest = a - q * b, more = (int)floorf((float)rest * inverse);
    q += more;
    rest -= more * b;
    return q + (rest >= b) - (rest < 0);
}

__device__ __forceinline__ int ceil_div(int a, int b) { return divide(a + b - 1, b); }

// Brings the arguments into the constant cache while the kernel before still runs: reads one of each 64 bytes. Always true.
__device__ __forceinline__ bool touch(const Params& p) {
    return ((i64)p.q | (i64)p.starts | p.q_stride_b | p.v_stride_t | p.out_stride_b | p.batch | p.target) > 0;
}

// policy.SplitRule.split, and plan.py's schedule: a unit is a run of 1, 4 or 16 splits.
struct Cut {
    int split_len, shift, units;

    __device__ __forceinline__ i64 run_len() const { return (i64)split_len << shift; }  // of all units but a row's last
};

__device__ __forceinline__ Cut cut_row(const Params& p, int span, int run_keys) {
    Cut cut;
    cut.split_len = max((ceil_div(span, p.target) + p.quantum - 1) & -p.quantum, p.min_len);
    cut.shift = 0;
    if (p.max_run > 1 && cut.split_len < run_keys) cut.shift = 2;
    if (p.max_run > 4 && (i64)cut.split_len * 4 < run_keys) cut.shift = 4;
    cut.units = max((ceil_div(span, cut.split_len) + (1 << cut.shift) - 1) >> cut.shift, 1);
    return cut;
}

// Keys of the block that has most, if every row has `span`.
__device__ __forceinline__ i64 busiest(const Params& p, int span, int run_keys) {
    Cut cut = cut_row(p, span, run_keys);
    return ceil_div(p.batch * cut.units, p.blocks) * min(cut.run_len(), (i64)span);
}

// [lo, hi): the keys that any query of a row may see.
__device__ __forceinline__ void row_bounds(const Params& p, int row, int& lo, int& hi) {
    i64 len = p.uniform_len;
#if WIDE_LENS
    if (p.seq_lens) len = ((const i64*)p.seq_lens)[row];
#else
    if (p.seq_lens) len = ((const int*)p.seq_lens)[row];
#endif
    hi = (int)min(max(len, (i64)0), (i64)p.capacity);
    lo = p.starts ? max(p.starts[row], 0) : 0;
    if (p.window > 0) lo = max(lo, hi - (p.q_len - 1) - p.window);
    lo = min(lo, hi);
}

// Work is counted in units and in costs: multiples of COST_KEYS keys, and one more for each unit's begin and end.
#define COST_KEYS 64
struct Work {
    int units, cost;
};

__device__ __forceinline__ int cost_of(i64 keys) { return (int)((keys + COST_KEYS - 1) / COST_KEYS) + 1; }

// 32 rows of the batch, one per lane, and the work before them.
struct Rows {
    int base, units, cost, unit_cost;  // units, cost: of this lane's row and of those before it in the 32
    Work before;

    __device__ __forceinline__ void load(const Params& p, int first_row, Work work_before, int run_keys) {
        int lane = threadIdx.x & 31, row = first_row + lane;
        base = first_row;
        before = work_before;
        units = cost = unit_cost = 0;
        if (row < p.batch) {
            int lo, hi;
            row_bounds(p, row, lo, hi);
            Cut cut = cut_row(p, hi - lo, run_keys);
            units = cut.units;
            unit_cost = cost_of(cut.run_len());
            cost = (units - 1) * unit_cost + cost_of(hi - lo - (units - 1) * cut.run_len());
        }
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            int more_units = __shfl_up_sync(~0u, units, step), more_cost = __shfl_up_sync(~0u, cost, step);
            if (lane >= step) {
                units += more_units;
                cost += more_cost;
            }
        }
    }

    // The work through row base + lane.
    __device__ __forceinline__ Work through(int lane) const {
        return {before.units + __shfl_sync(~0u, units, lane), before.cost + __shfl_sync(~0u, cost, lane)};
    }
    __device__ __forceinline__ Work until(int row) const {
        Work work = through((row - base - 1) & 31);
        return row > base ? work : before;
    }
    __device__ __forceinline__ void load_next(const Params& p, int run_keys) { load(p, base + 32, through(31), run_keys); }
};

// The load, read on the device. run_keys: least keys per unit, so many that the whole batch makes about target_units units. But
// rows that are all alike take whole runs wherever smaller units would not even out the blocks' shares. even: the blocks
// that the GPU holds at once are enough, as rows are alike or work is too little to be worth more starts.
struct Load {
    int run_keys;
    bool even;

    __device__ __forceinline__ explicit Load(const Params& p) {
        run_keys = 0;
        even = true;
        if (MAX_RUN == 1) return;
        float total = 0.0f;
        int longest = 0, shortest = INT_MAX;
#pragma unroll 1
        for (int row = threadIdx.x & 31; row < p.batch; row += 32) {
            int lo, hi;
            row_bounds(p, row, lo, hi);
            total += (float)(hi - lo);
            longest = max(longest, hi - lo);
            shortest = min(shortest, hi - lo);
        }
#pragma unroll 1
        for (int step = 16; step; step /= 2) {
            total += __shfl_xor_sync(~0u, total, step);
            longest = max(longest, __shfl_xor_sync(~0u, longest, step));
            shortest = min(shortest, __shfl_xor_sync(~0u, shortest, step));
        }
        even = longest == shortest || total < (float)p.blocks * UNEVEN_KEYS;
        run_keys = max((int)fminf(__fdiv_rn(total, (float)p.target_units), 1e9f), LEAST_RUN_KEYS);
        if (longest == shortest && busiest(p, longest, INT_MAX) <= busiest(p, longest, 1)) run_keys = INT_MAX;
    }
};

// Weights of two parts when they join, and the joined maximum: a comes before b; an empty part changes no bit.
struct Join {
    float m, weight_a, weight_b;

    __device__ __forceinline__ Join(float m_a, float m_b) {
        m = fmaxf(m_a, m_b);
        float base = m == MINUS_INF ? 0.0f : m;
        weight_a = exp2_(m_a - base);
        weight_b = exp2_(m_b - base);
    }
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaf(b, weight_b, a * weight_a); }
};

// What turns a whole row's part into its answer: out = acc * weight / l * v_scale; the sink enters l here, once.
struct Finish {
    float weight, inverse, v_scale, lse;
    bool empty;

    __device__ __forceinline__ Finish(const Params& p, float m, float l, int head) {
        empty = l == 0.0f;
        weight = 1.0f;
        if (p.sinks) {
            float sink = p.sinks[head] * LOG2E, top = fmaxf(m, sink), base = top == MINUS_INF ? 0.0f : top;
            weight = exp2_(m - base);
            l = fmaf(l, weight, exp2_(sink - base));
            m = top;
        }
        lse = empty ? MINUS_INF : (m + log2_(l)) * LN2;
        inverse = empty ? 1.0f : __fdiv_rn(1.0f, l);
        v_scale = p.v_scales ? p.v_scales[divide(head, p.group) * p.v_scale_stride] : p.v_scale;
    }
    __device__ __forceinline__ float operator()(float acc) const {
        return empty ? 0.0f : acc * weight * inverse * v_scale + 0.0f;  // + 0: -0 and 0 are one answer
    }
};

__device__ __forceinline__ u16 to_16_bits(float x) {
    u16 bits;
#if OUT_TYPE == BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
    return bits;
}
