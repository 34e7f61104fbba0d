// What a block of the split kernel finds out before it reads keys: the lengths, and which units are its own.

// A warp's guess of the lengths, from before the kernel in front has ended, and what they say afterwards: in the stage of
// its ring that is filled last.
struct Guess {
    Len lens[GUESSED_ROWS], lens_now[GUESSED_ROWS];
    int starts[GUESSED_ROWS], starts_now[GUESSED_ROWS];

    // Nothing that may still be written may stay in the L1 cache.
    __device__ __forceinline__ Lengths take(const Params& p) {
        Lengths from(p), taken = from;
#pragma unroll 1
        for (int base = 0; base < p.batch; base += 32) {
            int row = base + (threadIdx.x & 31);
            if (from.lens && row < p.batch) lens[row] = __ldcg(from.lens + row);
            if (from.starts && row < p.batch) starts[row] = __ldcg(from.starts + row);
        }
        __syncwarp();
        if (from.lens) taken.lens = lens;
        if (from.starts) taken.starts = starts;
        return taken;
    }

    // Asks for what is true once the kernel in front has ended.
    __device__ __forceinline__ void ask(const Params& p) {
        Lengths from(p);
#pragma unroll 1
        for (int base = 0; base < p.batch; base += 32) {
            int row = base + (threadIdx.x & 31);
            if (from.lens && row < p.batch) copy_value(lens_now + row, from.lens + row);
            if (from.starts && row < p.batch) copy_value(starts_now + row, from.starts + row);
        }
        end_copies();
    }

    __device__ __forceinline__ bool right(const Params& p) const {
        bool same = true;
#pragma unroll 1
        for (int base = 0; base < p.batch; base += 32) {
            int row = min(base + (int)(threadIdx.x & 31), p.batch - 1);
            if (p.seq_lens) same &= lens[row] == lens_now[row];
            if (p.starts) same &= starts[row] == starts_now[row];
        }
        __syncwarp();  // before the stage is filled
        return __all_sync(~0u, same);
    }
};
static_assert(sizeof(Guess) <= STAGE_CHUNKS * sizeof(uint4), "a guess takes more than a stage");

#define FIRST_SHARE 0.7f  // of all work, for the blocks that start first

// A unit of a row, for the query vectors of one KV head (a block keeps to one head): one piece of a block's work.
struct Item {
    int row, slot, hi, n_begin, n_end;
    Cut cut;

    __device__ __forceinline__ void enter_row(const Params& p, int run_keys, int unit) {
        Row now;
        now.read_and_cut(p, Lengths(p), row, run_keys);
        enter(now, unit);
    }

    __device__ __forceinline__ void enter(const Row& now, int unit) {
        hi = now.hi;
        cut = now.cut;
        enter_unit(now.lo + unit * cut.run_len);
    }

    __device__ __forceinline__ void enter_unit(int begin) {
        n_begin = begin;
        n_end = begin + min(cut.run_len, hi - begin);
    }

    __device__ __forceinline__ int split_end(int begin) const { return begin + min(cut.split_len, n_end - begin); }

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

// What this block computes of its head: consecutive units of the batch. The blocks that the GPU holds at once have equal
// shares. Where rows differ more blocks follow, with smaller shares: they start where others end, and even out what those
// differ by.
struct Share {
    Item first;
    int end;  // the slot after its last unit's; first.slot or less if it has none

    __device__ __forceinline__ bool empty() const { return first.slot >= end; }

    // Even lanes find where the share begins, odd ones where it ends: where that of the block after it begins.
    __device__ __forceinline__ void find(const Params& p, const Workload& load) {
        int block = blockIdx.y + (threadIdx.x & 1), unit;
        Row row = load.row;
        if (p.batch == 1) {  // one row's units are alike
            unit = block == p.blocks ? row.cut.units : (int)(row.cut.units * inverse(p.blocks) * block + 0.5f);
            first.row = 0;
            first.slot = unit;
        } else {
            unit = locate(p, load, block);
        }
        end = __shfl_sync(~0u, first.slot, 1);
        first.slot = __shfl_sync(~0u, first.slot, 0);
        if (empty()) return;
        if (p.batch > 1) {
            first.row = __shfl_sync(~0u, first.row, 0);
            if (p.batch <= 32) {
                row.lo = __shfl_sync(~0u, row.lo, first.row);
                row.hi = __shfl_sync(~0u, row.hi, first.row);
                row.cut.split_len = __shfl_sync(~0u, row.cut.split_len, first.row);
                row.cut.run_len = __shfl_sync(~0u, row.cut.run_len, first.row);
                row.cut.units = __shfl_sync(~0u, row.cut.units, first.row);
            } else {
                row.read_and_cut(p, load.from, first.row, load.run_keys);
            }
        }
        first.enter(row, __shfl_sync(~0u, unit, 0));
    }

    // How much of all the work comes before a block's.
    __device__ __forceinline__ int begin_of(const Params& p, const Workload& load, int total, int block) {
        int blocks = p.blocks;
        float shares = block;
        if (!load.even(p)) {
            blocks = gridDim.y;
            int first = min(block, p.blocks);
            float later = (float)(block - first) * (float)p.blocks * inverse((float)(blocks - p.blocks));
            shares = FIRST_SHARE * (float)first + (1.0f - FIRST_SHARE) * later;
        }
        return block == blocks ? total : (int)((float)total * inverse((float)p.blocks) * shares);
    }

    // Sets the row and the slot of the first unit in this block's part of the work; returns its number in the row.
    __device__ __forceinline__ int locate(const Params& p, const Workload& load, int block) {
        Work of_row = load.row.work(), before;
        int unit_cost = cost_of(load.row.cut.run_len), position;
        if (load.alike) {
            position = begin_of(p, load, p.batch * of_row.cost, block);
            first.row = min(divide_few(position, of_row.cost), p.batch - 1);
            before = {first.row * of_row.units, first.row * of_row.cost};
        } else {
            int total = 0;
#pragma unroll 1
            for (int base = 32; base < p.batch; base += 32) {
                int row = base + (threadIdx.x & 31);
                Row later;
                later.read_and_cut(p, load.from, min(row, p.batch - 1), load.run_keys);
                total += __reduce_add_sync(~0u, row < p.batch ? later.work().cost : 0);
            }
            Rows rows(p, load);
            total += __shfl_sync(~0u, rows.before.cost + rows.own.cost, 31);
            position = begin_of(p, load, total, block);
            first.row = -1;
#pragma unroll 1
            for (;;) {
                int through = rows.before.cost + rows.own.cost, begin = __shfl_sync(~0u, position, 0);
                int last = p.batch - 1 - rows.base, end = __shfl_sync(~0u, position, 1);
                int begin_row = __popc(__ballot_sync(~0u, through <= begin));
                int end_row = __popc(__ballot_sync(~0u, through <= end));
                int row = min(threadIdx.x & 1 ? end_row : begin_row, last);
                Work shifted = {__shfl_sync(~0u, rows.before.units, row), __shfl_sync(~0u, rows.before.cost, row)};
                Work own = {__shfl_sync(~0u, rows.own.units, row), __shfl_sync(~0u, rows.own.cost, row)};
                int cost = __shfl_sync(~0u, cost_of(rows.row.cut.run_len), row);
                if (first.row < 0 && row < 32) {
                    first.row = rows.base + row;
                    before = shifted;
                    of_row = own;
                    unit_cost = cost;
                }
                if (end_row < 32 || last < 32) break;
                rows.load_next(p, load);
            }
        }
        int rest = position - before.cost, unit = divide_few(rest + unit_cost - 1, unit_cost);
        if (rest >= of_row.cost) unit = of_row.units;
        first.slot = before.units + unit;
        if (unit == of_row.units) {
            first.row++;
            unit = 0;
        }
        return unit;
    }
};
