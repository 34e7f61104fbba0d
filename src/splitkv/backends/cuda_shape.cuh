// Sizes that follow from the split kernel's compile-time values, its shared memory, and the instructions it is made of.

#define WARPS 4
#define GUESSES (__CUDA_ARCH__ == 900)  // whether it begins before the kernel in front has ended; on sm_100 it would spill
#define THREADS (32 * WARPS)
#define FP8 (KV_TYPE == E4M3 || KV_TYPE == E5M2)
#define KV_BYTES (FP8 ? 1 : KV_TYPE == F32 ? 4 : 2)
#define COMPUTE_BF16 (KV_TYPE == BF16)
#define VECTORS (8 * NT)
#define PAGES_AHEAD 2  // tiles of the block between a tile whose pages are read and one whose pages are asked for
#define PAGES_ASKED 4  // by as many lanes, each for its part of the tile
#define MT (BK / 16)
#define LANE_PAGES ((BK + 31) / 32)  // keys of a tile that a lane knows the pages of
#define K_CHUNKS (D * KV_BYTES / 16)  // chunks of 16 bytes in a row
#define V_CHUNKS (DV * KV_BYTES / 16)
#define PITCH(chunks) ((chunks) % 8 ? (chunks) | 1 : (chunks))
#define STAGE_CHUNKS (BK * (PITCH(K_CHUNKS) > PITCH(V_CHUNKS) ? PITCH(K_CHUNKS) : PITCH(V_CHUNKS)))
#define JOIN_PITCH (DV % 32 ? DV + 4 : DV)
#define JOIN_COLUMNS (STAGE_CHUNKS * 4 / JOIN_PITCH < ROWS ? STAGE_CHUNKS * 4 / JOIN_PITCH : ROWS)  // at once
#define THREADS_PER_VECTOR (THREADS / ROWS)
#define QUERY_STEPS ((NT * (D / 16) + WARPS - 1) / WARPS)
#define FOURS ((DV / 4 + THREADS_PER_VECTOR - 1) / THREADS_PER_VECTOR)  // of a part's elements that a thread keeps
#define PART (4 * FOURS)
#define GUESSED_ROWS (STAGE_CHUNKS / 2 < 128 ? STAGE_CHUNKS / 2 : 128)  // of a batch, at most, for an early start
#define KEPT_WORDS (PART >= 16 ? PART + 2 : 0)  // of a part, where registers are short

struct Shared {
    uint4 ring[WARPS][STAGES][STAGE_CHUNKS];
#if KV_TYPE == F32
    float p[WARPS][BK][ROWS];  // a tile's weights
#else
    uint2 q[NT][D / 16][32];  // as the products' right operand: by lane
#endif
    float2 ml[WARPS][VECTORS];
    u32 exists[WARPS][STAGES][LANE_PAGES];
    int free_stage[WARPS];
#if PAGED
    int pages_ahead[WARPS][STAGES][PAGES_ASKED];  // asked for early: they come with a stage; nobody reads them
#endif
#if KEPT_WORDS
    float kept[KEPT_WORDS][THREADS];
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "cuda_launch.py counts otherwise");

// Where row r's chunk c lies in a stage: eight rows' same chunk in different banks, by swapping chunks in whole eights, else
// by an odd pitch.
template <int CHUNKS>
__device__ __forceinline__ int chunk_at(int r, int c) {
    return PITCH(CHUNKS) % 8 ? r * PITCH(CHUNKS) + c : r * CHUNKS + (c & ~7 | (c ^ r) & 7);
}

// The same of row r `below`, where r is less than any power of two in `below`: constants apart from what a lane brings.
template <int CHUNKS>
__device__ __forceinline__ int chunk_below(int below, int r, int c) {
    int at = below * PITCH(CHUNKS);
    return PITCH(CHUNKS) % 8 ? at + chunk_at<CHUNKS>(r, c) : at + (r * CHUNKS + (c & ~7)) + ((c ^ r) & 7 ^ below & 7);
}

// Where an element of a column lies while warps join: fours stay together, and a warp's stores, of eight rows and every other
// column, meet 32 banks.
__device__ __forceinline__ int join_at(int column, int element) {
    int moved = DV % 32 ? 0 : (column & 6) << 2;
    return column * JOIN_PITCH + (element ^ moved);
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies since the last end are waited for together.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Up to 8 bytes, aligned as they are, on their way into shared memory.
template <typename T>
__device__ __forceinline__ void copy_value(T* to, const T* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(shared_address(to)), "l"(from), "n"(sizeof(T)) : "memory");
}

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
