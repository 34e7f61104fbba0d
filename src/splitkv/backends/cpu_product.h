/* Products of a few rows with a weight, row after row of it as it lies in memory: reading it is nearly all the work. */
#ifndef SPLITKV_CPU_PRODUCT_H
#define SPLITKV_CPU_PRODUCT_H

#include "cpu_rows.h"

#define PRODUCT_ROWS 4 /* most rows: see PRODUCT_ROWS of cpu_product.py */
#define PRODUCT_SUMS 4 /* of each output, of neighbouring vectors: so that several multiply-adds are under way */

/* x [rows, columns] @ weight [outs, columns]^T + bias [outs] -> out [rows, outs]. All of one dtype and contiguous, but for x,
 * which has a stride in bytes from row to row. */
struct product_call {
    const char *weight, *x, *bias;
    char *out;
    int64_t rows, columns, outs, x_stride, dtype, num_threads;
};

/* How x is kept while the weight is read: as f32, or bf16 as it came where pairs of them are multiplied and added at once. */
INLINE int kept_bytes(const enum dtype dtype) { return HAVE_PAIRS && dtype == BF16 ? 2 : 4; }

static void keep_x(const struct product_call *call, char *kept) {
    const enum dtype dtype = (enum dtype)call->dtype;
    for (int64_t r = 0; r < call->rows; r++) {
        const char *const from = call->x + r * call->x_stride;
        char *const to = kept + r * call->columns * kept_bytes(dtype);
        if (kept_bytes(dtype) == item_bytes[dtype]) memcpy(to, from, (size_t)(call->columns * item_bytes[dtype]));
        else
            for (int64_t c = 0; c < call->columns; c++)
                ((float *)to)[c] = load_number(from + c * item_bytes[dtype], dtype);
    }
}

/* sum + one vector of the weight times one of x. */
INLINE vec add_products(const enum dtype dtype, const char *weight, const char *x, vec sum) {
#if HAVE_PAIRS
    if (dtype == BF16) return vdot_pairs(vload((const float *)weight), vload((const float *)x), sum);
#endif
    return vfma(load_vector(weight, dtype), vload((const float *)x), sum);
}

/* One row of the weight with every row of x. A sum's order follows from `columns` alone. */
INLINE void product_of_row(const enum dtype dtype, const int rows, const char *weight, const char *x, int64_t columns,
                           float *out) {
    const int64_t size = item_bytes[dtype], kept = kept_bytes(dtype), step = LANES * 4 / kept, row = columns * kept;
    vec sum[PRODUCT_ROWS][PRODUCT_SUMS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int s = 0; s < PRODUCT_SUMS; s++) sum[r][s] = vset1(0.0f);
    int64_t c = 0;
    for (; c + PRODUCT_SUMS * step <= columns; c += PRODUCT_SUMS * step)
        UNROLL
        for (int s = 0; s < PRODUCT_SUMS; s++)
            UNROLL
            for (int r = 0; r < rows; r++)
                sum[r][s] = add_products(dtype, weight + (c + s * step) * size, x + r * row + (c + s * step) * kept,
                                         sum[r][s]);
    for (; c + step <= columns; c += step)
        UNROLL
        for (int r = 0; r < rows; r++)
            sum[r][0] = add_products(dtype, weight + c * size, x + r * row + c * kept, sum[r][0]);
    UNROLL
    for (int r = 0; r < rows; r++) {
        float part[4];
        vsum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], part);
        out[r] = (part[0] + part[1]) + (part[2] + part[3]);
        for (int64_t rest = c; rest < columns; rest++)
            out[r] = fmaf(load_number(weight + rest * size, dtype),
                          load_number(x + r * row + rest * kept, kept == 4 ? F32 : BF16), out[r]);
    }
}

/* Columns [begin, end) of out. */
INLINE void product_of_rows(const enum dtype dtype, const int rows, const struct product_call *call, const char *x,
                            int64_t begin, int64_t end) {
    const int64_t size = item_bytes[dtype];
    for (int64_t o = begin; o < end; o++) {
        float sums[PRODUCT_ROWS];
        product_of_row(dtype, rows, call->weight + o * call->columns * size, x, call->columns, sums);
        for (int r = 0; r < rows; r++) {
            if (call->bias) sums[r] += load_number(call->bias + o * size, dtype);
            store_number(call->out + (r * call->outs + o) * size, dtype, sums[r]);
        }
    }
}

typedef void product_function(const struct product_call *, const char *x, int64_t begin, int64_t end);

#define PRODUCT(dtype, rows)                                                                             \
    static void product_##dtype##_##rows(const struct product_call *call, const char *x, int64_t begin, \
                                         int64_t end) {                                                  \
        product_of_rows(dtype, rows, call, x, begin, end);                                               \
    }
#define PRODUCTS(dtype) PRODUCT(dtype, 1) PRODUCT(dtype, 2) PRODUCT(dtype, 3) PRODUCT(dtype, 4)
#define NAMES(dtype) {product_##dtype##_1, product_##dtype##_2, product_##dtype##_3, product_##dtype##_4}
PRODUCTS(F32)
PRODUCTS(F16)
PRODUCTS(BF16)
static product_function *const products[3][PRODUCT_ROWS] = {NAMES(F32), NAMES(F16), NAMES(BF16)};
#endif
