// What both kernels of backend "cuda" share: arguments, a row's bounds and units, joins, the finish.
//
// Compiled with -fmad=false: only the fmaf that are written fuse, so every variant rounds alike. Logits are in the log2
// domain. A part is (acc, m, l): the unnormalised output, the running maximum and the sum, all f32.

#if WIDE_LENS
typedef i64 Len;
#else
typedef int Len;
#endif

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
    int uniform_len, batch, capacity, num_pages, page_size, page_shift, window;
    int num_kv_heads, group, q_len, rows_per_block, row_blocks;
    int target, min_len, quantum, target_units, blocks;
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

__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// a / b of positive integers: the float's quotient, put right twice, is exact. A third of the code of the compiler's own.
__device__ __forceinline__ int divide(int a, int b) {
    float one_bth = inverse((float)b);
    int q = (int)((float)a * one_bth), rest = a - q * b, more = (int)floorf((float)rest * one_bth);
    q += more;
    rest -= more * b;
    return q + (rest >= b) - (rest < 0);
}

// The same for quotients below 2^20, which are at most one off before they are put right.
__device__ __forceinline__ int divide_few(int a, int b) {
    int q = (int)((float)a * inverse((float)b)), rest = a - q * b;
    return q + (rest >= b) - (rest < 0);
}

__device__ __forceinline__ int ceil_div(int a, int b) { return divide(a + b - 1, b); }

// The whole part of a / b, for a sum of keys.
__device__ __forceinline__ float quotient(float a, int b) {
    float q = floorf(a * inverse((float)b)), rest = fmaf(-q, (float)b, a);
    return rest < 0.0f ? q - 1.0f : rest >= (float)b ? q + 1.0f : q;
}

// Brings the arguments into the constant cache while the kernel before still runs: reads one of each 64 bytes. Always true.
__device__ __forceinline__ bool touch(const Params& p) {
    return ((i64)p.q | (i64)p.starts | p.q_stride_b | p.v_stride_t | p.out_stride_b | p.batch | p.target) > 0;
}

// policy.SplitRule.split, and plan.py's schedule: a unit is a run of 1, 4 or 16 splits.
struct Cut {
    int split_len, splits, units, run_len;  // run_len: keys of all units but a row's last

    __device__ __forceinline__ void make_splits(const Params& p, int span) {
        split_len = max((ceil_div(span, p.target) + p.quantum - 1) & -p.quantum, p.min_len);
        splits = ceil_div(span, split_len);
    }

    __device__ __forceinline__ void make_units(int span, int run_keys) {
        int shift = 0;
        if (MAX_RUN > 1 && split_len < run_keys) shift = 2;
        if (MAX_RUN > 4 && split_len <= (run_keys - 1) >> 2) shift = 4;
        units = max((splits + (1 << shift) - 1) >> shift, 1);
        run_len = units > 1 ? split_len << shift : span;
    }
};

// Work is counted in units and in costs: multiples of COST_KEYS keys, and one more for each unit's begin and end.
#define COST_KEYS 64
struct Work {
    int units, cost;
};

__device__ __forceinline__ int cost_of(int keys) { return (int)(((u32)keys + COST_KEYS - 1) / COST_KEYS) + 1; }

// Where the rows' lengths and starts are. Null: p.uniform_len, and no starts.
struct Lengths {
    const Len* lens;
    const int* starts;

    __device__ __forceinline__ explicit Lengths(const Params& p) : lens((const Len*)p.seq_lens), starts(p.starts) {}
};

// A row of the batch: [lo, hi), the keys that any of its queries may see, and what they are cut into.
struct Row {
    int lo, hi;
    Cut cut;

    __device__ __forceinline__ void read(const Params& p, const Lengths& from, int row) {
        Len len = from.lens ? from.lens[row] : p.uniform_len;
        hi = (int)min(max(len, (Len)0), (Len)p.capacity);
        lo = from.starts ? max(from.starts[row], 0) : 0;
        if (p.window > 0) lo = max(lo, hi - (p.q_len - 1) - p.window);
        lo = min(lo, hi);
    }

    __device__ __forceinline__ void read_and_cut(const Params& p, const Lengths& from, int row, int run_keys) {
        read(p, from, row);
        cut.make_splits(p, span());
        cut.make_units(span(), run_keys);
    }

    __device__ __forceinline__ int span() const { return hi - lo; }

    __device__ __forceinline__ Work work() const {
        int whole = cut.units - 1;
        return {cut.units, whole * cost_of(cut.run_len) + cost_of(span() - whole * cut.run_len)};
    }
};

// The load, read on the device: it reads the rows, `settle` decides.
struct Workload {
    Lengths from;
    Row row;      // of the first 32, one per lane; the last again where the batch has fewer
    float total;  // keys
    bool alike;   // all rows have as many keys
    int run_keys = 0;

    __device__ __forceinline__ Workload(const Params& p, const Lengths& from) : from(from) {
        u32 low = 0, high = 0;  // a sum in halves: exact, and each fits
        int longest = 0, shortest = INT_MAX;
#pragma unroll 2  // so that two reads are on their way
        for (int base = (p.batch - 1) & ~31; base >= 0; base -= 32) {  // ends at the first rows
            int at = base + (threadIdx.x & 31);
            row.read(p, from, min(at, p.batch - 1));
            u32 keys = at < p.batch ? row.span() : 0;
            low += keys & 0xffff;
            high += keys >> 16;
            longest = max(longest, row.span());
            shortest = min(shortest, row.span());
        }
        alike = true;
        if (MAX_RUN > 1 || p.batch > 1)
            alike = __reduce_max_sync(~0u, longest) == __reduce_min_sync(~0u, shortest);
        if (MAX_RUN > 1) {
            low = __reduce_add_sync(~0u, low);
            high = __reduce_add_sync(~0u, high);
            total = fmaf((float)high, 65536.0f, (float)low);
        }
    }

    // Whether the blocks that the GPU holds at once are enough: rows are alike or work is too little to be worth more starts.
    __device__ __forceinline__ bool even(const Params& p) const {
        return MAX_RUN == 1 || alike || total < (float)p.blocks * UNEVEN_KEYS;
    }

    // Cuts the rows. run_keys: least keys per unit, so many that the whole batch makes about target_units units. But rows that
    // are all alike take whole runs wherever smaller units would not even out the blocks' shares.
    __device__ __forceinline__ void settle(const Params& p) {
        row.cut.make_splits(p, row.span());
        if (MAX_RUN > 1) {
            run_keys = max((int)fminf(quotient(total, p.target_units), 1e9f), LEAST_RUN_KEYS);
            if (alike) {  // even lanes try whole runs, odd ones single splits: keys of the block that has most
                Cut trial = row.cut;
                trial.make_units(row.span(), threadIdx.x & 1 ? 1 : INT_MAX);
                i64 keys = (i64)ceil_div(p.batch * trial.units, p.blocks) * trial.run_len;
                i64 other = __shfl_xor_sync(~0u, keys, 1);
                if (__ballot_sync(~0u, keys <= other) & 1) run_keys = INT_MAX;
            }
        }
        row.cut.make_units(row.span(), run_keys);
    }
};

// 32 rows of the batch, one per lane.
struct Rows {
    int base;
    Row row;
    Work own, before;  // of this lane's row, and of all rows before it

    __device__ __forceinline__ Rows(const Params& p, const Workload& load) : row(load.row) { add_up(p, 0, {0, 0}); }

    __device__ __forceinline__ void load_next(const Params& p, const Workload& load) {
        Work until = {__shfl_sync(~0u, before.units + own.units, 31), __shfl_sync(~0u, before.cost + own.cost, 31)};
        row.read_and_cut(p, load.from, min(base + 32 + (int)(threadIdx.x & 31), p.batch - 1), load.run_keys);
        add_up(p, base + 32, until);
    }

    __device__ __forceinline__ void add_up(const Params& p, int first_row, Work until) {
        int lane = threadIdx.x & 31;
        base = first_row;
        own = base + lane < p.batch ? row.work() : Work{0, 0};
        Work sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int units = __shfl_up_sync(~0u, sum.units, step), cost = __shfl_up_sync(~0u, sum.cost, step);
            if (lane >= step) sum = {sum.units + units, sum.cost + cost};
        }
        before = {until.units + sum.units - own.units, until.cost + sum.cost - own.cost};
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

// A part, or what a thread keeps of one: elements of the unnormalised output, the running maximum and the sum.
template <int ELEMENTS>
struct PartOf {
    float acc[ELEMENTS], m, l;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) acc[i] = 0.0f;
        m = MINUS_INF;
        l = 0.0f;
    }

    __device__ __forceinline__ void add(const PartOf& later) {
        Join join(m, later.m);
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) acc[i] = join(acc[i], later.acc[i]);
        l = join(l, later.l);
        m = join.m;
    }
};

// What turns a whole row's part into its answer: out = acc * weight / l * v_scale; the sink enters l here, once.
struct Finish {
    float sink, v_scale, weight, one_lth, lse;
    bool empty;

    // Reads what belongs to a query head.
    __device__ __forceinline__ Finish(const Params& p, int head) {
        sink = p.sinks ? p.sinks[head] * LOG2E : 0.0f;
        v_scale = p.v_scales ? p.v_scales[divide_few(head, p.group) * p.v_scale_stride] : p.v_scale;
    }

    __device__ __forceinline__ void end(const Params& p, float m, float l) {
        empty = l == 0.0f;
        weight = 1.0f;
        if (p.sinks) {
            float top = fmaxf(m, sink), base = top == MINUS_INF ? 0.0f : top;
            weight = exp2_(m - base);
            l = fmaf(l, weight, exp2_(sink - base));
            m = top;
        }
        lse = empty ? MINUS_INF : (m + log2_(l)) * LN2;
        one_lth = empty ? 1.0f : __fdiv_rn(1.0f, l);
    }
    __device__ __forceinline__ float operator()(float acc) const {
        return empty ? 0.0f : acc * weight * one_lth * v_scale + 0.0f;  // + 0: -0 and 0 are one answer
    }
};

#if OUT_TYPE == F32
typedef float Out;
__device__ __forceinline__ Out to_out(float x) { return x; }
#else
typedef u16 Out;
__device__ __forceinline__ Out to_out(float x) {
    u16 bits;
#if OUT_TYPE == BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
    return bits;
}
#endif
