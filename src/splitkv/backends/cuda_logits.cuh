// What the columns of a tile's scores stand for, and what the scores become: scaled, capped and masked.

// The query vector in a column of this block: vector r of a KV head is query r % q_len of head r / q_len of its group.
struct Vector {
    int head, query;
    bool valid;

    __device__ __forceinline__ Vector(const Params& p, int column) {
        int kv_head = blockIdx.x, r = column;
        if (p.row_blocks > 1) {
            kv_head = divide_few(blockIdx.x, p.row_blocks);
            r += (blockIdx.x - kv_head * p.row_blocks) * p.rows_per_block;
        }
        int of_group = r;
        query = 0;
#if CAUSAL
        of_group = divide_few(r, p.q_len);
        query = r - of_group * p.q_len;
#endif
        valid = column < p.rows_per_block && of_group < p.group;
        head = kv_head * p.group + of_group;
    }
};

// What a query vector sees of a split, as a column of scores.
struct View {
    int first = 0, end;
    i64 mask_row;

    __device__ __forceinline__ View(const Params& p, const Item& item, int split_end, int column) : end(split_end) {
#if CAUSAL || MASK != NONE
        Vector vector(p, column);
#endif
#if CAUSAL
        end = item.hi - (p.q_len - 1) + vector.query;
        if (p.window > 0) first = end - p.window;
        end = min(end, split_end);
#endif
#if MASK != NONE
        mask_row = item.row * p.mask_stride_b + vector.head * p.mask_stride_h + vector.query * p.mask_stride_i;
        if (!vector.valid) end = 0;
#endif
    }

    // A score's logit, in the log2 domain.
    __device__ __forceinline__ float logit(const Params& p, float x, int key, bool exists) const {
#if SOFTCAP
        x = p.softcap * tanh_(x / p.softcap);
#endif
        bool visible = key < end && key >= first && exists;
#if MASK != NONE
        if (visible) {
            i64 at = mask_row + key * p.mask_stride_n;
#if MASK == BOOL
            visible = ((const u8*)p.mask)[at] != 0;
#elif MASK == F32
            x += ((const float*)p.mask)[at];
#else
            x += MASK == BF16 ? bf16_to_float(((const u16*)p.mask)[at]) : half_to_float(((const u16*)p.mask)[at]);
#endif
        }
#endif
        return visible ? x * LOG2E : MINUS_INF;
    }
};
