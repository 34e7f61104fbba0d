// Keys and values on their way into shared memory.

// Keys and values are read once, so they leave the L2 cache before queries, parts and all else.
__device__ __forceinline__ u64 leaving_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_chunk(uint4* to, const char* from, bool inside, bool exists, u64 policy) {
    if (!inside) return;
#if VECTOR
    asm volatile(
        "{\n.reg .pred absent;\nsetp.eq.u32 absent, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, absent, %3;\n}"
        :: "r"(shared_address(to)), "l"(from), "r"((u32)exists), "l"(policy) : "memory");
#else
    u32 words[4] = {0, 0, 0, 0};
    if (exists) {
#pragma unroll
        for (int e = 0; e < 16 / KV_BYTES; e++) {
            u32 bits = FP8 ? ((const u8*)from)[e] : KV_TYPE == F32 ? ((const u32*)from)[e] : ((const u16*)from)[e];
            words[e * KV_BYTES / 4] |= bits << (e * KV_BYTES % 4 * 8);
        }
    }
    *to = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// A warp's loads, stage after stage: K of a tile, then V of it, ahead of the products.
struct Loader {
    Item item;
    int end, run_keys, n, split_end, stage;
    const char *k_rows, *v_rows;
    int page[LANE_PAGES], slot[LANE_PAGES];  // of keys lane, lane + 32 of the tile that is next or on its way
    u64 policy;
    bool of_v, done;

    __device__ __forceinline__ void begin(const Params& p, const Share& share, int keys_per_run) {
        item = share.first;
        end = share.end;
        run_keys = keys_per_run;
        stage = 0;
        policy = leaving_first();
        of_v = false;
        done = share.empty();
        place(p);
    }

    // Where the item's first tile for this warp lies.
    __device__ __forceinline__ void place(const Params& p) {
        int kv_head = p.row_blocks > 1 ? divide_few(blockIdx.x, p.row_blocks) : blockIdx.x;
        k_rows = (const char*)p.k_cache + (kv_head * p.k_stride_h + (PAGED ? 0 : item.row * p.k_stride_b)) * KV_BYTES;
        v_rows = (const char*)p.v_cache + (kv_head * p.v_stride_h + (PAGED ? 0 : item.row * p.v_stride_b)) * KV_BYTES;
        enter_split(item.n_begin);
    }

    __device__ __forceinline__ void enter_split(int begin) {
        split_end = item.split_end(begin);
        n = begin + (threadIdx.x >> 5) * BK;
    }

    // Which of its row's pages a key is in.
    __device__ __forceinline__ static int page_number(const Params& p, int key) {
        return p.page_shift >= 0 ? key >> p.page_shift : divide(key, p.page_size);
    }

#if PAGED
    // Reads the next tile's pages, and asks for those of a later tile on their way into the L1 cache: the memory has a queue
    // of keys and values, and no warp may wait there for a page.
    __device__ __forceinline__ void find_pages(const Params& p, Shared& shared) {
        const int* table = p.block_table + item.row * p.table_stride;
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < LANE_PAGES; i++) {
            int key = n + 32 * i + lane, number = page_number(p, key);
            page[i] = key < split_end && lane < BK ? table[number] : -1;
            slot[i] = key - number * p.page_size;
        }
        int later = n + PAGES_AHEAD * WARPS * BK + lane * (BK / PAGES_ASKED);
        if (lane < PAGES_ASKED && later < item.hi)
            copy_value(&shared.pages_ahead[threadIdx.x >> 5][stage][lane], table + page_number(p, later));
    }
#endif

    // Asks for K of the first tile on its way into the L2 cache, where a write of the kernel in front still reaches it.
    __device__ __forceinline__ void ask_early(const Params& p) const {
#pragma unroll
        for (int i = 0; i < LANE_PAGES; i++) {
            int key = n + 32 * i + (threadIdx.x & 31);
            if (key >= split_end || (threadIdx.x & 31) >= BK) return;
            i64 at = key * p.k_stride_t;
            if (PAGED) {
                int number = page_number(p, key), page = __ldcg(p.block_table + item.row * p.table_stride + number);
                if (page < 0 || page >= p.num_pages) return;
                at = page * p.k_stride_b + (key - number * p.page_size) * p.k_stride_t;
            }
#pragma unroll
            for (int byte = 0; byte < D * KV_BYTES; byte += 128)
                asm volatile("prefetch.global.L2 [%0];" :: "l"(k_rows + at * KV_BYTES + byte) : "memory");
        }
    }

    // Finds the next tile that this warp has: in this split, the unit's next ones, or the next item.
    __device__ __forceinline__ void advance(const Params& p, Shared& shared) {
        while (!done && n >= split_end) {
            if (split_end < item.n_end) {
                enter_split(split_end);
            } else {
                done = !item.next(p, run_keys, end);
                if (!done) place(p);
            }
        }
#if PAGED
        if (!done) find_pages(p, shared);
#endif
    }

    // BK rows into a stage; keys that do not exist become zeros and are never read.
    template <int CHUNKS>
    __device__ __forceinline__ void load(const char* base, i64 stride_b, i64 stride_t, uint4* to) {
        int lane = threadIdx.x & 31;
        i64 rows[LANE_PAGES];  // where this lane's keys lie, if there are pages
#pragma unroll
        for (int i = 0; i < LANE_PAGES; i++)
            rows[i] = PAGED && page[i] < 0 ? -1 : (page[i] * stride_b + slot[i] * stride_t) * KV_BYTES;
        if constexpr (32 % CHUNKS == 0 || CHUNKS % 32 == 0) {
            const int rows_at_once = max(32 / CHUNKS, 1), turns_per_row = max(CHUNKS / 32, 1);
            int r = 32 % CHUNKS ? 0 : lane / CHUNKS, c = lane % CHUNKS, left = split_end - n - r;
            const char* from = base + (PAGED ? 0 : (n + r) * (stride_t * KV_BYTES)) + c * 16;
            i64 step = rows_at_once * stride_t * KV_BYTES;
#pragma unroll
            for (int i = 0; i < BK; i += rows_at_once) {
                i64 row = PAGED ? __shfl_sync(~0u, rows[i / 32], r + i) : i / rows_at_once * step;
#pragma unroll
                for (int turn = 0; turn < turns_per_row; turn++)
                    copy_chunk(to + chunk_below<CHUNKS>(i, r, c + 32 * turn), from + row + 512 * turn, true,
                               PAGED ? row >= 0 : i < left, policy);
            }
        } else {
            static_assert(LANE_PAGES == 1 || CHUNKS == 0, "rows of one copy would be of two halves of a tile");
#pragma unroll
            for (int i = 0; i < (BK * CHUNKS + 31) / 32; i++) {
                int at = i * 32 + lane, r = at / CHUNKS, c = at % CHUNKS;
                bool inside = BK * CHUNKS % 32 == 0 || r < BK;
                i64 row = PAGED ? __shfl_sync(~0u, rows[0], min(r, BK - 1)) : (n + r) * stride_t * KV_BYTES;
                bool exists = inside && (PAGED ? row >= 0 : n + r < split_end);
                copy_chunk(to + chunk_at<CHUNKS>(r, c), base + row + c * 16, inside, exists, policy);
            }
        }
    }

    __device__ __forceinline__ void issue(const Params& p, Shared& shared) {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        if (!PAGED && !of_v) advance(p, shared);
        if (!done) {
            uint4* to = shared.ring[warp][stage];
            if (PAGED && !of_v) {
#pragma unroll
                for (int i = 0; i < LANE_PAGES; i++) {
                    if (page[i] >= p.num_pages) page[i] = -1;
                    u32 exists = __ballot_sync(~0u, page[i] >= 0);
                    if (lane == 0) shared.exists[warp][stage][i] = exists;
                }
            }
            if (D == DV) {
                load<K_CHUNKS>(of_v ? v_rows : k_rows, of_v ? p.v_stride_b : p.k_stride_b,
                               of_v ? p.v_stride_t : p.k_stride_t, to);
            } else if (of_v) {
                load<V_CHUNKS>(v_rows, p.v_stride_b, p.v_stride_t, to);
            } else {
                load<K_CHUNKS>(k_rows, p.k_stride_b, p.k_stride_t, to);
            }
            if (of_v) {
                n += WARPS * BK;
                if (PAGED) advance(p, shared);  // so that its pages are there when its keys are asked for
            }
            of_v = !of_v;
        } else {
            let_next_kernel_start();  // the keys are all on their way
        }
        end_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Until nothing of this lane's is on its way.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Until the oldest stage on its way is there for the whole warp.
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
    __syncwarp();
}
