// Backend "cuda", second kernel: joins a row's parts along the tree of docs/one-answer.md.
//
// Compile-time: DV, OUT_TYPE, MAX_RUN, COLUMNS (64 or 128, of one query vector: a task), TEAM (1, 4, 8 or 16 warps share a
// task). A team's warps take four parts each and join in shared memory; a warp alone takes eight at a time, and seven
// others work beside it. Same operands in the same order: same bytes.

#define LANE_COLUMNS (COLUMNS / 32)
#define COLUMN_BLOCKS ((DV + COLUMNS - 1) / COLUMNS)
#define WARPS (TEAM == 1 ? 8 : TEAM)
#define BLOCKS_PER_SM (TEAM > 1 ? 32 / TEAM : 2)

typedef PartOf<LANE_COLUMNS> Sum;

// One query vector's parts: part i of it at `out[i * step * DV]` and `ml[i * step]`.
struct Parts {
    const float* out;
    const float2* ml;
    int step, count;
    bool inside;  // whether this lane's columns exist

    __device__ __forceinline__ Sum load(int i) const {
        Sum part;
        part.clear();
        const float* from = out + (i64)(i * DV) * step;
        if (inside && LANE_COLUMNS == 2) *(float2*)part.acc = *(const float2*)from;
        if (inside && LANE_COLUMNS == 4) *(float4*)part.acc = *(const float4*)from;
        float2 of_all = ml[(i64)i * step];
        part.m = of_all.x;
        part.l = of_all.y;
        return part;
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

// The upper levels: sixteens join into sixtyfours, and these into the root.
struct Upper {
    Sum root, sixtyfour;

    // The next sixteen parts' sum, from part `first` on; `end` of them all.
    __device__ __forceinline__ void add(const Sum& sixteen, int first, bool end) {
        if (first % 64 == 0) sixtyfour = sixteen;
        else sixtyfour.add(sixteen);
        if (first % 64 == 48 || end) {
            if (first < 64) root = sixtyfour;
            else root.add(sixtyfour);
        }
    }
};

// All parts, by one warp.
__device__ __forceinline__ Sum join_alone(const Parts& parts) {
    Upper upper;
    Sum sixteen, fours[2];
#pragma unroll 1
    for (int first = 0; first < parts.count; first += 8) {
        parts.join_fours(first, fours);
        if (first % 16 == 0) sixteen = fours[0];
        else sixteen.add(fours[0]);
        if (first + 4 < parts.count) sixteen.add(fours[1]);
        bool end = first + 8 >= parts.count;
        if (first % 16 == 8 || end) upper.add(sixteen, first & ~15, end);
    }
    return upper.root;
}

// All parts, by a block of TEAM warps; the first has the result.
__device__ __forceinline__ Sum join_together(const Parts& parts) {
    __shared__ Sum fours[TEAM][32], sixteens[TEAM / 4 + 1][32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Upper upper;
#pragma unroll 1
    for (int base = 0; base < parts.count; base += 4 * TEAM) {
        Sum sum[1];
        sum[0].clear();
        if (base + warp * 4 < parts.count) parts.join_fours(base + warp * 4, sum);
        if (parts.count <= 4) return sum[0];
        fours[warp][lane] = sum[0];
        __syncthreads();
        if (warp % 4 == 0) {
#pragma unroll
            for (int i = 1; i < 4; i++) sum[0].add(fours[warp + i][lane]);
            sixteens[warp / 4][lane] = sum[0];
        }
        __syncthreads();
        if (warp) continue;
#pragma unroll
        for (int i = 0; i < TEAM / 4; i++) {
            int first = base + 16 * i;
            if (first < parts.count) upper.add(sixteens[i][lane], first, first + 16 >= parts.count);
        }
    }
    return upper.root;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) merge_kernel(const __grid_constant__ Params p) {
    let_next_kernel_start();  // it waits for this one's end before it does anything
    if (!touch(p)) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int heads = p.num_kv_heads * p.group, of_row = heads * p.q_len;
    int task = TEAM == 1 ? blockIdx.x * WARPS + warp : blockIdx.x;
    int vector = task / COLUMN_BLOCKS, dv = task % COLUMN_BLOCKS * COLUMNS + lane * LANE_COLUMNS;
    int row = divide_few(vector, of_row), head = vector - row * of_row, query = 0;
    if (p.q_len > 1) {
        int of_head = head;
        head = divide_few(of_head, p.q_len);
        query = of_head - head * p.q_len;
    }
    bool exists = row < p.batch;
    Finish finish(p, exists ? head : 0);
    Out* out = (Out*)p.out + row * p.out_stride_b + query * p.out_stride_i + head * p.out_stride_h + dv;
    float* lse = p.lse + row * p.lse_stride_b + query * p.lse_stride_i + head * p.lse_stride_h;
    int units = 0, first = 0;
    if (exists) {
        Workload load(p, Lengths(p));
        load.settle(p);
        units = load.row.cut.units;
        first = row * units;
        if (!load.alike) {
            Rows rows(p, load);
            while (row >= rows.base + 32) rows.load_next(p, load);
            units = __shfl_sync(~0u, rows.own.units, row & 31);
            first = __shfl_sync(~0u, rows.before.units, row & 31);
        }
    }
    i64 at = (i64)first * of_row + head * p.q_len + query;
    Parts parts = {p.partial_out + at * DV + dv, (const float2*)p.partial_ml + at, of_row, units, dv < DV};
    if (units <= 1 && blockIdx.x) return;
    wait_for_previous_kernel();  // one block even with nothing to do: the next kernel must not overtake the split kernel
    if (units <= 1) return;

    Sum sum = TEAM == 1 ? join_alone(parts) : join_together(parts);
    if (TEAM > 1 && warp || dv >= DV) return;
    finish.end(p, sum.m, sum.l);
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) out[i] = to_out(finish(sum.acc[i]));
    if (p.lse && dv == 0) *lse = finish.lse;
}
