// Backend "cuda", first kernel: streams the cache once and leaves one part per unit of a row (plan.py), or the answer.
//
// Compile-time: D, DV (head sizes), NT (tiles of 8 query vectors), ROWS (query vectors that may exist: a power of two),
// KV_TYPE, OUT_TYPE (the query's), BK (keys per tile), STAGES (of the ring), SHARED_BYTES, PAGED, VECTOR (whether rows load in 16-byte
// vectors), MAX_RUN (1, 4 or 16), CAUSAL (several queries a row), SOFTCAP, MASK (a type, or NONE).
//
// Four warps, each on its own: it brings tiles of BK keys into its own ring in shared memory with cp.async, several ahead,
// across splits and units, and never waits for another warp until a split ends, where the four parts join in shared memory.
// What it does with a tile is in cuda_tile.cuh, or in f32 in cuda_tile_f32.cuh.

// A part as the block keeps it: of query vector threadIdx.x / THREADS_PER_VECTOR, every THREADS_PER_VECTOR-th four elements.
typedef PartOf<PART> Part;

// The first element of a thread's i-th four.
__device__ __forceinline__ int four_at(int i) {
    return 4 * (threadIdx.x % THREADS_PER_VECTOR + i * THREADS_PER_VECTOR);
}

__device__ __forceinline__ bool four_exists(int i) { return DV / 4 % THREADS_PER_VECTOR == 0 || four_at(i) < DV; }

// A part that lasts from split to split: in shared memory where registers are short.
struct Kept {
#if KEPT_WORDS && MAX_RUN > 1
    float* words;

    __device__ __forceinline__ explicit Kept(Shared& shared) : words(&shared.kept[0][threadIdx.x]) {}
    __device__ __forceinline__ Part get() const {
        Part part;
#pragma unroll
        for (int i = 0; i < PART; i++) part.acc[i] = words[i * THREADS];
        part.m = words[PART * THREADS];
        part.l = words[(PART + 1) * THREADS];
        return part;
    }
    __device__ __forceinline__ void set(const Part& part) {
#pragma unroll
        for (int i = 0; i < PART; i++) words[i * THREADS] = part.acc[i];
        words[PART * THREADS] = part.m;
        words[(PART + 1) * THREADS] = part.l;
    }
#else
    Part part;

    __device__ __forceinline__ explicit Kept(Shared&) {}
    __device__ __forceinline__ const Part& get() const { return part; }
    __device__ __forceinline__ void set(const Part& now) { part = now; }
#endif
    __device__ __forceinline__ void add(const Part& later) {
        Part sum = get();
        sum.add(later);
        set(sum);
    }
};

// A unit's splits that have ended, joined as far as the tree allows.
struct Run {
    Kept root;
#if MAX_RUN > 4
    Part four;
    int splits;
#endif

    __device__ __forceinline__ explicit Run(Shared& shared) : root(shared) {}
    __device__ __forceinline__ void clear() {
        Part none;
        none.clear();
        root.set(none);
#if MAX_RUN > 4
        four.clear();
        splits = 0;
#endif
    }
    __device__ __forceinline__ void add(const Part& part) {
#if MAX_RUN > 4
        four.add(part);
        if (++splits % 4 == 0) {
            root.add(four);
            four.clear();
        }
#elif MAX_RUN > 1
        root.add(part);
#else
        root.set(part);
#endif
    }
    __device__ __forceinline__ Part all() {
#if MAX_RUN > 4
        root.add(four);
#endif
        return root.get();
    }
};

// The four warps' parts of this thread's query vector, joined in the warps' order.
__device__ __forceinline__ void join_warps(const Shared& shared, int column, int vector, Part& part) {
    const float* from[WARPS];
    float2 ml[WARPS];
    float weight[WARPS];
    part.m = MINUS_INF;
    part.l = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        from[w] = (const float*)shared.ring[w][shared.free_stage[w]];
        ml[w] = shared.ml[w][vector];
        part.m = fmaxf(part.m, ml[w].x);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        weight[w] = exp2_(ml[w].x - (part.m == MINUS_INF ? 0.0f : part.m));
        part.l = fmaf(ml[w].y, weight[w], part.l);
    }
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        float* acc = part.acc + 4 * i;
        acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
        if (!four_exists(i)) continue;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float4 x = *(const float4*)(from[w] + join_at(column, four_at(i)));
            acc[0] = fmaf(x.x, weight[w], acc[0]);
            acc[1] = fmaf(x.y, weight[w], acc[1]);
            acc[2] = fmaf(x.z, weight[w], acc[2]);
            acc[3] = fmaf(x.w, weight[w], acc[3]);
        }
    }
}

// Ends a split: the four warps' sums become one part. They meet in the stages of the rings that were read last and are not
// yet filled again, as many columns at a time as those hold.
__device__ __forceinline__ void close_split(const Params& p, Shared& shared, Sums& sums, int free_stage, Part& part) {
    int warp = threadIdx.x >> 5, vector = threadIdx.x / THREADS_PER_VECTOR;
    if ((threadIdx.x & 31) == 0) shared.free_stage[warp] = free_stage;
    sums.end(shared.ml[warp]);
#pragma unroll 1
    for (int column = 0; column < p.rows_per_block; column += JOIN_COLUMNS) {
        sums.put((float*)shared.ring[warp][free_stage], column);
        __syncthreads();
        int mine = vector - column;
        if (mine >= 0 && mine < JOIN_COLUMNS) join_warps(shared, mine, vector, part);
        __syncthreads();
    }
    sums.clear();
}

// The answer where the row is one unit, else the unit's part in the workspace.
__device__ __forceinline__ void store(const Params& p, const Item& item, const Part& part) {
    Vector vector(p, threadIdx.x / THREADS_PER_VECTOR);
    bool first = threadIdx.x % THREADS_PER_VECTOR == 0;
    if (!vector.valid) return;
    if (item.cut.units > 1) {
        i64 at = ((i64)item.slot * p.num_kv_heads * p.group + vector.head) * p.q_len + vector.query;
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            const float* acc = part.acc + 4 * i;
            float4* to = (float4*)(p.partial_out + at * DV + four_at(i));
            if (four_exists(i)) *to = make_float4(acc[0], acc[1], acc[2], acc[3]);
        }
        if (first) ((float2*)p.partial_ml)[at] = make_float2(part.m, part.l);
        return;
    }
    Finish finish(p, vector.head);
    finish.end(p, part.m, part.l);
    Out* out = (Out*)p.out + item.row * p.out_stride_b + vector.query * p.out_stride_i + vector.head * p.out_stride_h;
#pragma unroll
    for (int i = 0; i < PART; i++)
        if (four_exists(i / 4)) out[four_at(i / 4) + i % 4] = to_out(finish(part.acc[i]));
    if (p.lse && first)
        p.lse[item.row * p.lse_stride_b + vector.query * p.lse_stride_i + vector.head * p.lse_stride_h] = finish.lse;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) split_kernel(const __grid_constant__ Params p) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    int warp = threadIdx.x >> 5;
    if (!touch(p)) return;
    Guess& guess = *(Guess*)shared.ring[warp][STAGES - 1];
    bool guessed = GUESSES && p.batch <= GUESSED_ROWS && blockIdx.y < p.blocks;
    Share share;
    Loader loader;
    Queries queries;
    if (!guessed) wait_for_previous_kernel();
#pragma unroll 1
    for (;; guessed = false) {  // what the lengths say early is a guess: the kernel in front may still write them
        Workload load(p, guessed ? guess.take(p) : Lengths(p));
        share.first.slot = share.end = 0;
        if (blockIdx.y < p.blocks || !load.even(p)) {
            load.settle(p);
            share.find(p, load);
        }
        loader.begin(p, share, load.run_keys);
        if (guessed) {
            if (!share.empty()) loader.ask_early(p);
            wait_for_previous_kernel();
            guess.ask(p);
        }
        if (PAGED) loader.advance(p, shared);
        if (!share.empty()) queries.fetch(p, share.first);
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) loader.issue(p, shared);
        if (!guessed) break;
        wait_for_stage();
        if (guess.right(p)) break;
        wait_for_copies();
    }
    if (share.empty()) return;

    Item item = share.first;
    Sums sums;
    Weights weights(shared);
    Run run(shared);
    float scale = 1.0f;
    if (p.k_scales) scale = p.k_scales[divide_few(blockIdx.x, p.row_blocks) * p.k_scale_stride];
    scale *= p.scale;
    int stage = 0, row = -1, n, split_end;
    bool of_v = false, entered = false;
    sums.clear();
    for (;;) {
        if (!entered) {
            if (row != item.row) queries.put(shared);
            row = item.row;
            split_end = item.split_end(item.n_begin);
            n = item.n_begin + warp * BK;
            run.clear();
            entered = true;
        }
        if (!of_v && n >= split_end) {  // no tile of this split is left for this warp
            bool end = split_end >= item.n_end, more = false;
            Item next = item;
            if (end) {
                more = next.next(p, loader.run_keys, share.end);
                if (more && next.row != row) queries.fetch(p, next);
            }
            Part part;
            close_split(p, shared, sums, loader.stage, part);
            run.add(part);
            if (!end) {
                n = split_end + warp * BK;
                split_end = item.split_end(split_end);
                continue;
            }
            store(p, item, run.all());
            if (!more) break;
            item = next;
            entered = false;
            continue;
        }
        loader.issue(p, shared);
        wait_for_stage();
        if (!of_v) {
            Scores s;
            score(s, shared.ring[warp][stage], shared, queries);
            mask_scores(p, item, scale, n, split_end, shared.exists[warp][stage], s);
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
}
