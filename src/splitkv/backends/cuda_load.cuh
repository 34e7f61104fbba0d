// What the split kernel reads: which units a block takes, keys and values on their way into shared memory, the queries.

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

#define FIRST_SHARE 0.7f  // of all work, for the blocks that start first

// A unit of a row, for the query vectors of one KV head (a block keeps to one head): one piece of a block's work.
struct Item {
    int row, slot, hi, n_begin, n_end;
    Cut cut;

    __device__ __forceinline__ void enter_row(const Params& p, int run_keys, int unit) {
        int lo;
        row_bounds(p, row, lo, hi);
        cut = cut_row(p, hi - lo, run_keys);
        enter_unit(lo + unit * cut.run_len());
    }

    __device__ __forceinline__ void enter_unit(i64 begin) {
        n_begin = (int)min(begin, (i64)hi);
        n_end = (int)min(begin + cut.run_len(), (i64)hi);
    }

    __device__ __forceinline__ int split_end(int begin) const { return (int)min((i64)begin + cut.split_len, (i64)n_end); }

    // The batch's next unit, if that is before slot `end`.
    __device__ __forceinline__ bool next(const Params& p, int run_keys, int end) {
        if (++slot >= end) return false;
        if (n_end < hi) {
            enter_unit(n_end);
        } else {
            row++;
            enter_row(p, run_keys, 0);
        }
        return true;
    }
};

// What this block computes of its head: consecutive units of the batch. The blocks that the GPU holds at once have equal shares.
// Where rows differ more blocks follow, with smaller shares: they start where others end, and even out what those differ by.
struct Share {
    Item first;
    int end;  // the slot after its last unit's; first.slot if it has none

    __device__ __forceinline__ Share(const Params& p, const Load& load) {
        int unit = 0;
        first.row = 0;
        if (p.batch > 1) unit = locate(p, load);
        if (first.row < p.batch) first.enter_row(p, load.run_keys, unit);
        if (p.batch > 1) return;
        first.slot = divide(blockIdx.y * first.cut.units, p.blocks);  // one row's units are alike
        end = divide((blockIdx.y + 1) * first.cut.units, p.blocks);
        first.enter_unit(first.n_begin + first.slot * first.cut.run_len());
    }

    // Where a block's part of all the work begins, which is where that of the block before it ends.
    __device__ __forceinline__ int begin_of(const Params& p, const Load& load, int total, int block) {
        int blocks = load.even ? p.blocks : gridDim.y;
        if (block == blocks) return total;
        float part = __fdiv_rn((float)total, (float)p.blocks);
        if (blocks == p.blocks) return (int)(part * (float)block);
        int first = min(block, p.blocks);
        float later = __fdiv_rn((float)(block - first) * (float)p.blocks, (float)(blocks - p.blocks));
        return (int)(part * (FIRST_SHARE * (float)first + (1.0f - FIRST_SHARE) * later));
    }

    // Sets `end`, and of the first unit in this block's part of the work the row and the slot; returns its number in the row.
    __device__ __forceinline__ int locate(const Params& p, const Load& load) {
        Rows rows;
        int run_keys = load.run_keys, total = 0;
#pragma unroll 1
        for (int base = (p.batch - 1) & ~31; base >= 0; base -= 32) {  // ends at the first rows
            rows.load(p, base, {0, 0}, run_keys);
            total += rows.through(31).cost;
        }
        int row, unit, first_unit;
#pragma unroll 1
        for (int side = 0; side < 2; side++) {
            int position = begin_of(p, load, total, blockIdx.y + side);
            while (rows.base + 32 < p.batch && position >= rows.through(31).cost) rows.load_next(p, run_keys);
            row = rows.base + __popc(__ballot_sync(~0u, rows.before.cost + rows.cost <= position));
            Work before = rows.until(row);
            int units = rows.through((row - rows.base) & 31).units - before.units;
            int cost = __shfl_sync(~0u, rows.unit_cost, (row - rows.base) & 31);
            end = before.units;
            unit = 0;
            if (row < p.batch) {
                unit = min(ceil_div(position - before.cost, cost), units);
                end += unit;
            }
            if (row < p.batch && unit == units) {
                row++;
                unit = 0;
            }
            if (side == 0) first.row = row, first.slot = end, first_unit = unit;
        }
        return first_unit;
    }
};

// A warp's loads, stage after stage: K of a tile, then V of it, ahead of the products.
struct Loader {
    Item item;
    int end, run_keys, n, split_end, stage;
    const char *k_rows, *v_rows;
    int page, slot, next_page;
    bool of_v, done;

    __device__ __forceinline__ void start(const Params& p) {
        int kv_head = p.row_blocks > 1 ? divide(blockIdx.x, p.row_blocks) : blockIdx.x;
        k_rows = (const char*)p.k_cache + (kv_head * p.k_stride_h + (PAGED ? 0 : item.row * p.k_stride_b)) * KV_BYTES;
        v_rows = (const char*)p.v_cache + (kv_head * p.v_stride_h + (PAGED ? 0 : item.row * p.v_stride_b)) * KV_BYTES;
        enter_split(p, item.n_begin);
    }

    __device__ __forceinline__ void enter_split(const Params& p, int begin) {
        split_end = item.split_end(begin);
        n = begin + (threadIdx.x >> 5) * BK;
        if (PAGED) next_page = read_page(p, n);
    }

    __device__ __forceinline__ int read_page(const Params& p, int tile) {
        int key = tile + (threadIdx.x & 31);
        bool valid = key < split_end && (threadIdx.x & 31) < BK;
        return valid ? p.block_table[item.row * p.table_stride + divide(key, p.page_size)] : -1;
    }

    // Finds the next tile that this warp has: in this split, the unit's next ones, or the next item.
    __device__ __forceinline__ void advance(const Params& p) {
        while (!done && n >= split_end) {
            if (split_end < item.n_end) {
                enter_split(p, split_end);
            } else {
                done = !item.next(p, run_keys, end);
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
