// A product of a few rows with a weight matrix for a decode step, at the speed of the memory: out = x @ weight^T, with what
// stands before and after it in a decoder done on the way.
//
// Compile-time: TYPE (of x, weight and out: F16 or BF16), COLUMNS (a multiple of 8), ROWS (of x, up to 16), CHUNK, STAGES,
// SHARED_BYTES, NORM and NORM_F32 (its weights' type) or FACTOR (of the input), BIAS, ADD, PAIRED, OUT_F32 (of the output).
//
// Blocks stay, one per SM. A block takes groups of 8 outputs (PAIRED: of 8 gates and 8 ups). One thread has the bulk copy engine
// bring their weights, CHUNK columns of each row at a time, STAGES ahead; it begins before the kernel in front has ended, as
// weights are nobody's output. The other warps share a chunk's columns, and their sums meet once per group. Weights are the
// right operand of the tensor cores' products: a lane's 16 bytes are what two products take of a row, in an order of
// columns that x follows too. A row's result is the same whatever the number of rows, CHUNK and STAGES.

#define WARPS 8
#define THREADS (WARPS * 32)                                      // that multiply
#define OUTPUTS (PAIRED ? 2 : 1)                                  // weight rows per output
#define GROUP_ROWS (8 * OUTPUTS)                                  // weight rows per group
#define W_PITCH ((CHUNK * 2 + 127) / 128 * 128)                   // bytes between the rows of a stage
#define X_PITCH ((COLUMNS * 2 + 127) / 128 * 128 + 64)            // bytes between rows of x: two of them are in all banks
#define CHUNKS ((COLUMNS + CHUNK - 1) / CHUNK)
#define LAST (COLUMNS - (CHUNKS - 1) * CHUNK)                     // columns of the last chunk
#define WHOLE (CHUNK % (WARPS * 32) == 0 && LAST == CHUNK)        // every warp has columns in every step
#define VECTORS ((COLUMNS / 8 + THREADS - 1) / THREADS)           // of 8 columns, of a row of x, per thread

struct Params {
    const uint4* x;           // [ROWS, COLUMNS], rows x_step vectors apart
    const char* weight;       // [size, COLUMNS], PAIRED: [2 * size, COLUMNS]
    const u16* bias;          // [size]
    const uint4* factor;      // of NORM: its weights, [COLUMNS]; of FACTOR: [ROWS, COLUMNS]
    void* out;                // [ROWS, size]
    i64 x_step;
    int size;
    float eps;
};

__device__ __forceinline__ float low(u32 pair) {
#if TYPE == BF16
    return __uint_as_float(pair << 16);
#else
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(pair));
    return x;
#endif
}

__device__ __forceinline__ float high(u32 pair) {
#if TYPE == BF16
    return __uint_as_float(pair & 0xffff0000u);
#else
    return low(pair >> 16);
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
#if TYPE == BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

// The eight values of a vector.
struct Eight {
    float values[8];

    __device__ __forceinline__ explicit Eight(uint4 v) {
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = i % 2 ? high(pairs[i / 2]) : low(pairs[i / 2]);
    }
    __device__ __forceinline__ uint4 packed() const {
        return make_uint4(pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                          pack(values[6], values[7]));
    }
    __device__ __forceinline__ float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(values[i], values[i], sum);
        return sum;
    }
};

__device__ __forceinline__ void multiply(float* sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if TYPE == BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Shared {
    char stages[STAGES][GROUP_ROWS * W_PITCH];
    char x[ROWS * X_PITCH];
    float partial[2][WARPS][OUTPUTS][ROWS][8], squares[ROWS][WARPS];
    i64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cuda_product.py counts other bytes");

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(i64* barrier, int phase) {
    asm volatile(
        "{.reg .pred done;\n again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra again;}"
        :: "r"(address(barrier)), "r"(phase) : "memory");
}

__device__ __forceinline__ void arrive(i64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory"); }

// Which stage comes next, and whether its barriers are in an odd round.
struct Turn {
    int stage, phase;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// By one thread.
__device__ __forceinline__ void bring_weights(const Params& p, Shared& shared) {
    Turn turn = {0, 1};
#pragma unroll 1
    for (int group = blockIdx.x; group * 8 < p.size; group += gridDim.x) {
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            u32 bytes = (chunk + 1 < CHUNKS ? CHUNK : LAST) * 2, full = address(&shared.full[turn.stage]);
            wait(&shared.empty[turn.stage], turn.phase);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         :: "r"(full), "r"(bytes * GROUP_ROWS) : "memory");
#pragma unroll
            for (int r = 0; r < GROUP_ROWS; r++) {
                i64 row = min(group * 8 + r % 8, p.size - 1) + (i64)(r / 8) * p.size;
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             :: "r"(address(shared.stages[turn.stage] + r * W_PITCH)),
                                "l"(p.weight + (row * COLUMNS + chunk * CHUNK) * 2), "r"(bytes), "r"(full)
                             : "memory");
            }
            turn.next();
        }
    }
}

// What multiplies the normed x: nobody's output either.
struct Norm {
    uint4 weights[NORM ? VECTORS : 1][NORM_F32 ? 2 : 1];

    __device__ __forceinline__ explicit Norm(const Params& p) {
#pragma unroll
        for (int i = 0; NORM && i < VECTORS; i++) {
            int v = threadIdx.x + i * THREADS;
#pragma unroll
            for (int j = 0; j < (NORM_F32 ? 2 : 1); j++)
                if (v < COLUMNS / 8) weights[i][j] = p.factor[v * (NORM_F32 ? 2 : 1) + j];
        }
    }
    __device__ __forceinline__ uint4 apply(uint4 x, int i, float scale) const {
        Eight values(x);
#if NORM_F32
        const float* w = (const float*)weights[i];
#else
        Eight wide(weights[i][0]);
        const float* w = wide.values;
#endif
#pragma unroll
        for (int e = 0; e < 8; e++) values.values[e] *= scale * w[e];
        return values.packed();
    }
};

// x into shared memory, with its norm or factor.
__device__ __forceinline__ void stage_x(const Params& p, const Norm& norm, Shared& shared) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = 0.0f;
        uint4 x[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int v = threadIdx.x + i * THREADS;
            x[i] = v < COLUMNS / 8 ? p.x[r * p.x_step + v] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int v = threadIdx.x + i * THREADS;
            Eight values(x[i]);
            if (NORM) sum += values.squares();
            if (v >= COLUMNS / 8) continue;
            if (FACTOR) {
                Eight factor(p.factor[r * (COLUMNS / 8) + v]);
#pragma unroll
                for (int e = 0; e < 8; e++) values.values[e] *= factor.values[e];
                x[i] = values.packed();
            }
            *(uint4*)(shared.x + r * X_PITCH + v * 16) = x[i];
        }
        if (NORM) {
#pragma unroll
            for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) shared.squares[r][warp] = sum;
        }
    }
    meet();
    if (!NORM) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shared.squares[r][w];
        float scale = rsqrtf(sum / COLUMNS + p.eps);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int v = threadIdx.x + i * THREADS;
            uint4* place = (uint4*)(shared.x + r * X_PITCH + v * 16);
            if (v < COLUMNS / 8) *place = norm.apply(*place, i, scale);
        }
    }
    meet();
}

// One output of a group, by one of the first ROWS * 8 threads: what joins the warps' sums is asked for before they meet.
struct Output {
    int r, n;
    i64 place;
    float before;
    bool mine;

    __device__ __forceinline__ Output(const Params& p, int group) {
        r = threadIdx.x / 8;
        n = threadIdx.x % 8;
        int output = group * 8 + n;
        mine = r < ROWS && output < p.size;
        place = (i64)r * p.size + output;
        before = 0.0f;
        if (mine && BIAS) before = low(p.bias[output]);
        if (mine && ADD) before += low(((const u16*)p.out)[place]);
    }
    __device__ __forceinline__ void finish(const Params& p, const float partial[WARPS][OUTPUTS][ROWS][8]) const {
        if (!mine) return;
        float result = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            result += partial[w][0][r][n];
            if (PAIRED) up += partial[w][OUTPUTS - 1][r][n];
        }
        if (PAIRED) result = result / (1.0f + __expf(-result)) * up;
        result += before;
        if (OUT_F32) ((float*)p.out)[place] = result;
        else ((u16*)p.out)[place] = (u16)pack(result, 0.0f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) product_kernel(const __grid_constant__ Params p) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(&shared.full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                         :: "r"(address(&shared.empty[i])), "n"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) bring_weights(p, shared);
        return;
    }
    Norm norm(p);
    wait_for_previous_kernel();
    let_next_kernel_start();
    stage_x(p, norm, shared);

    Turn turn = {0, 0};
    int buffer = 0, read = -1;  // read: the stage before
#pragma unroll 1
    for (int group = blockIdx.x; group * 8 < p.size; group += gridDim.x) {
        Output output(p, group);
        float sums[OUTPUTS][2][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            int first = warp * 32 + t * 8;  // of this lane's columns
            int columns = chunk + 1 < CHUNKS ? CHUNK : LAST;
            const char* x = shared.x + g * X_PITCH + (chunk * CHUNK + first) * 2;
            const char* weights = shared.stages[turn.stage] + g * W_PITCH + first * 2;
            wait(&shared.full[turn.stage], turn.phase);
            // Not sooner: loads from a stage are known to have ended only when its products have been issued, and new weights
            // would overtake them where another block's loads hold them up.
            if (lane == 0 && read >= 0) arrive(&shared.empty[read]);
            read = turn.stage;
#pragma unroll
            for (int at = 0; at < CHUNK; at += WARPS * 32) {
                bool inside = WHOLE || at + first < columns;
                uint4 none = make_uint4(0, 0, 0, 0), upper = none, lower = none;  // rows g and g + 8 of x
                if (inside && (ROWS >= 8 || g < ROWS)) upper = *(const uint4*)(x + at * 2);
                if (inside && ROWS > 8 && g + 8 < ROWS) lower = *(const uint4*)(x + at * 2 + 8 * X_PITCH);
#pragma unroll
                for (int of = 0; of < OUTPUTS; of++) {
                    uint4 w = inside ? *(const uint4*)(weights + of * 8 * W_PITCH + at * 2) : none;
                    multiply(sums[of][0], upper.x, lower.x, upper.y, lower.y, w.x, w.y);
                    multiply(sums[of][1], upper.z, lower.z, upper.w, lower.w, w.z, w.w);
                }
            }
            __syncwarp();
            turn.next();
        }
#pragma unroll
        for (int of = 0; of < OUTPUTS; of++)
#pragma unroll
            for (int i = 0; i < (ROWS > 8 ? 4 : 2); i++) {
                int r = g + i / 2 * 8;
                if (r < ROWS) shared.partial[buffer][warp][of][r][2 * t + i % 2] = sums[of][0][i] + sums[of][1][i];
            }
        meet();
        output.finish(p, shared.partial[buffer]);
        buffer ^= 1;
    }
}
