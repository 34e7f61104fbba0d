// Backend "cuda", second kernel: joins a row's parts along the tree of docs/one-answer.md.
//
// Compile-time: DV, OUT_TYPE, MAX_RUN, TOGETHER. A lane has two columns, a warp 64. Where query vectors are few (TOGETHER)
// sixteen warps share one, four parts each, and join in shared memory. Where they are many a warp does a vector alone. Same
// operands in the same order: same bytes.

#define COLUMNS 64
#define COLUMN_BLOCKS ((DV + COLUMNS - 1) / COLUMNS)
#define WARPS (TOGETHER ? 16 : 8)
#define BLOCKS_PER_SM (!TOGETHER && __CUDA_ARCH__ < 1000 ? 3 : 2)  // registers for three would spill on sm_100

struct Sum {
    float x, y, m, l;

    __device__ __forceinline__ void add(const Sum& later) {
        Join join(m, later.m);
        x = join(x, later.x);
        y = join(y, later.y);
        l = join(l, later.l);
        m = join.m;
    }
};

// One query vector's parts: part i of it at `out[i * step * DV]` and `ml[i * step]`.
struct Parts {
    const float* out;
    const float2* ml;
    int step, count;
    bool inside;  // whether this lane's columns exist

    __device__ __forceinline__ Sum load(int i) const {
        float2 part = ml[(i64)i * step], acc = make_float2(0.0f, 0.0f);
        if (inside) acc = *(const float2*)(out + (i64)(i * DV) * step);
        return {acc.x, acc.y, part.x, part.y};
    }

    // Parts [first, first + 4 * FOURS), of which the first exists, four by four: all are asked for before any is joined.
    template <int FOURS>
    __device__ __forceinline__ void join_fours(int first, Sum (&fours)[FOURS]) const {
        Sum sums[4 * FOURS];
#pragma unroll
        for (int i = 0; i < 4 * FOURS; i++)
            if (first + i < count) sums[i] = load(first + i);
#pragma unroll
        for (int four = 0; four < FOURS; four++) {
#pragma unroll
            for (int i = 1; i < 4; i++)
                if (first + 4 * four + i < count) sums[4 * four].add(sums[4 * four + i]);
            fours[four] = sums[4 * four];
        }
    }
};

// All parts, by one warp.
__device__ __forceinline__ Sum join_alone(const Parts& parts) {
    Sum root, sixtyfour, sixteen, fours[2];
#pragma unroll 1
    for (int first = 0; first < parts.count; first += 8) {
        parts.join_fours(first, fours);
        if (first % 16 == 0) sixteen = fours[0];
        else sixteen.add(fours[0]);
        if (first + 4 < parts.count) sixteen.add(fours[1]);
        bool end = first + 8 >= parts.count;
        if (first % 16 == 8 || end) {
            if (first % 64 < 16) sixtyfour = sixteen;
            else sixtyfour.add(sixteen);
        }
        if (first % 64 == 56 || end) {
            if (first < 64) root = sixtyfour;
            else root.add(sixtyfour);
        }
    }
    return root;
}

// All parts, by a block of sixteen warps; the first has the result.
__device__ __forceinline__ Sum join_together(const Parts& parts) {
    __shared__ Sum shared[2][16][32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Sum root;
    for (int base = 0; base < parts.count; base += 64) {
        int first = base + warp * 4;
        Sum sums[1] = {{0.0f, 0.0f, MINUS_INF, 0.0f}};
        if (first < parts.count) parts.join_fours(first, sums);
        Sum& sum = sums[0];
        if (parts.count > 4) {
            shared[0][warp][lane] = sum;
            __syncthreads();
            if (warp % 4 == 0) {
#pragma unroll
                for (int i = 1; i < 4; i++) sum.add(shared[0][warp + i][lane]);
                shared[1][warp][lane] = sum;
            }
            __syncthreads();
            if (warp == 0) {
#pragma unroll
                for (int i = 4; i < 16; i += 4) sum.add(shared[1][i][lane]);
            }
        }
        if (base == 0) root = sum;
        else root.add(sum);
    }
    return root;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) merge_kernel(const __grid_constant__ Params p) {
    let_next_kernel_start();  // it waits for this one's end before it does anything
    if (!touch(p)) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int heads = p.num_kv_heads * p.group, of_row = heads * p.q_len;
    int task = TOGETHER ? blockIdx.x : blockIdx.x * WARPS + warp;
    int vector = task / COLUMN_BLOCKS, dv = task % COLUMN_BLOCKS * COLUMNS + lane * 2;
    int row = divide_few(vector, of_row), head = vector - row * of_row, query = 0;
    if (p.q_len > 1) {
        int of_head = head;
        head = divide_few(of_head, p.q_len);
        query = of_head - head * p.q_len;
    }
    bool exists = row < p.batch;
    Finish finish(p, exists ? head : 0);
    u16* out = (u16*)p.out + row * p.out_stride_b + query * p.out_stride_i + head * p.out_stride_h + dv;
    float* lse = p.lse + row * p.lse_stride_b + query * p.lse_stride_i + head * p.lse_stride_h;
    int units = 0, first = 0;
    if (exists) {
        Load load(p);
        load.settle(p);
        units = load.row.cut.units;
        first = row * units;
        if (!load.alike) {
            Rows rows(p, load);
            while (row >= rows.base + 32) rows.load_next(p, load.run_keys);
            units = __shfl_sync(~0u, rows.own.units, row & 31);
            first = __shfl_sync(~0u, rows.before.units, row & 31);
        }
    }
    i64 at = (i64)first * of_row + head * p.q_len + query;
    Parts parts = {p.partial_out + at * DV + dv, (const float2*)p.partial_ml + at, of_row, units, dv < DV};
    wait_for_previous_kernel();  // also with nothing to do: the next kernel must not overtake the split kernel
    if (units <= 1) return;

    Sum sum = TOGETHER ? join_together(parts) : join_alone(parts);
    if (TOGETHER && warp || dv >= DV) return;
    finish.end(p, sum.m, sum.l);
    out[0] = to_16_bits(finish(sum.x));
    out[1] = to_16_bits(finish(sum.y));
    if (p.lse && dv == 0) *lse = finish.lse;
}
