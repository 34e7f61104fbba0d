/* Decode attention on a CPU.
 *
 *   block  some keys' K or V of all heads of a task, read in the order of memory (cpu_attend.h)
 *   tile   TILE_KEYS keys of one split: scores (cpu_scores.h), online softmax, weighted sum of V (cpu_tile.h)
 *   split  a leaf of the row's merge tree; where it ends follows from the row alone (cpu_call.h)
 *   unit   an aligned run of 1, 4 or 16 splits of a row, joined by the thread that computed them
 *   merge  joins the units of a row along the upper levels of the same tree (cpu_tree.h)
 *
 * Which thread takes which unit, and how many KV heads at a time, never reaches a byte of the result.
 *
 * Query row number head * q_len + token is one query vector; those that share a KV head are neighbours. */
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
static int this_thread(void) { return omp_get_thread_num(); }
static int team_size(void) { return omp_get_num_threads(); }
#else
static int this_thread(void) { return 0; }
static int team_size(void) { return 1; }
#endif

#include "cpu_attend.h"
#include "cpu_product.h"

#define ALIGN_FLOATS 16 /* parts of scratch start on their own line */

enum status { OK = 0, NO_MEMORY = 1, PLAN_TOO_SMALL = 2 };

static struct part workspace_part(const struct call *call, int64_t unit, int64_t query_row) {
    const int64_t query_rows = call->num_q_heads * call->q_len, index = unit * query_rows + query_row;
    float *const stats = call->workspace + call->max_units * query_rows * call->v_head_dim;
    return (struct part){call->workspace + index * call->v_head_dim, stats + 2 * index};
}

/* Writes out and lse of `count` query rows from `first` on. The sink joins here, once. */
static void finish_rows(const struct job *job, int64_t b, int64_t first, int64_t count, struct part part) {
    const struct call *const call = job->call;
    const int dim = (int)call->v_head_dim;
    for (int64_t r = 0; r < count; r++, part.acc += dim, part.stats += 2) {
        const int64_t head = (first + r) / call->q_len, token = (first + r) % call->q_len;
        const bool empty = part.stats[1] == 0.0f;
        float maximum = part.stats[0], sum = part.stats[1], factor = 1.0f;
        if (call->sinks.data) {
            const float sink = load_number(at3(&call->sinks, head, 0, 0), F32) * LOG2_E;
            const float base = sink > maximum ? sink : maximum;
            factor = exp2_of(maximum - base);
            sum = fmaf(sum, factor, exp2_of(sink - base));
            maximum = base;
        }
        factor *= load_number(at3(&call->v_scale, (first + r) / job->group_rows, 0, 0), F32) / sum;
        char *const out = at3(&call->out, b, token, head);
        for (int s = 0; s < dim; s++)
            store_number(out + element_at((enum dtype)call->v.dtype, dim, s) * call->out.stride[3],
                         (enum dtype)call->out.dtype, empty ? 0.0f : part.acc[s] * factor);
        if (call->lse.data) {
            const double lse = empty ? -INFINITY : maximum * 0.69314718055994531 + log(sum);
            store_number(at3(&call->lse, b, token, head), F32, (float)lse);
        }
    }
}

/* The first key of a task. */
static int64_t task_begin(const struct task *task) {
    return task->row->begin + (task->unit - task->row->first_unit) * task->row->split_len * task->row->run;
}

/* One task: to the output, or to the workspace. Meanwhile the first tile of `following` is asked for. */
static void attend_unit(const struct job *job, const struct task *task, const struct task *following,
                        struct scratch *scratch) {
    const struct call *const call = job->call;
    const struct row *const row = task->row;
    const int64_t heads = task->heads, first_head = task->first_head;
    const int64_t group = job->group_rows, rows = heads * group, first_row = first_head * group;
    const int64_t dim = call->v_head_dim, begin = task_begin(task);
    const int64_t end = min64(begin + row->split_len * row->run, row->end);
    const float *const q = job->q + (row->index * call->num_q_heads * call->q_len + first_row) * job->q_width;
    struct walk walk = {.open = {scratch->parts[1], scratch->parts[2]}, .levels = UNIT_LEVELS};
    struct part leaf = scratch->parts[0];
    struct tile tiles[2];
    int current = 0;

    int64_t at = begin, split_end = min64(begin + row->split_len, end);
    locate_tile(call, row->index, at, min64(TILE_KEYS, split_end - at), &tiles[current]);
    do { /* once even for a row without keys, whose output is due all the same */
        clear_part(leaf, rows, dim);
        while (at < split_end) {
            const struct tile *const tile = &tiles[current];
            struct tile *const next = &tiles[current ^= 1];
            const struct task *next_task = task;
            at += tile->count;
            if (at < end) {
                const int64_t next_end = at < split_end ? split_end : min64(split_end + row->split_len, end);
                locate_tile(call, row->index, at, min64(TILE_KEYS, next_end - at), next);
            } else if (following) {
                next_task = following;
                const int64_t first = task_begin(following), left = following->row->end - first;
                const int64_t count = min64(TILE_KEYS, min64(following->row->split_len, left));
                locate_tile(call, following->row->index, first, count, next);
            } else {
                next->count = 0;
            }
            attend_tile(job, task, scratch, q, tile, next_task, next, leaf);
        }
        leaf = walk_on(&walk, 0, leaf, rows, dim);
        split_end = min64(split_end + row->split_len, end);
    } while (at < end);

    const struct part whole = walk_up(&walk, rows, dim);
    if (row->units == 1) finish_rows(job, row->index, first_row, rows, whole);
    else copy_part(workspace_part(call, task->unit, first_row), whole, rows, dim);
}

/* Joins the units of a row for one KV head, in place in the workspace. */
static void merge_units(const struct job *job, const struct row *row, int64_t head) {
    const struct call *const call = job->call;
    const int64_t rows = job->group_rows, first_row = head * rows;
    struct walk walk = {.levels = MAX_LEVELS};
    for (int64_t unit = row->first_unit; unit < row->first_unit + row->units; unit++)
        walk_on(&walk, 0, workspace_part(call, unit, first_row), rows, call->v_head_dim);
    finish_rows(job, row->index, first_row, rows, walk_up(&walk, rows, call->v_head_dim));
}

/* The next `floats` of scratch at *used; only counts them where there is no memory yet. */
static float *carve(float *memory, int64_t *used, int64_t floats) {
    float *const start = memory ? memory + *used : NULL;
    *used += ceil_div(floats, ALIGN_FLOATS) * ALIGN_FLOATS;
    return start;
}

/* Lays a thread's scratch out from `memory` on; *floats becomes its size. */
static struct scratch lay_out(const struct job *job, float *memory, int64_t *floats) {
    const int64_t rows = job->heads * job->group_rows, v_dim = job->call->v_head_dim;
    struct scratch scratch;
    *floats = 0;
    scratch.scores = carve(memory, floats, rows * TILE_KEYS);
    scratch.factor = carve(memory, floats, rows);
    scratch.bias = carve(memory, floats, job->group_rows * TILE_KEYS);
    scratch.zeros = carve(memory, floats, max64(job->call->head_dim, v_dim));
    for (int i = 0; i <= UNIT_LEVELS; i++) {
        scratch.parts[i].acc = carve(memory, floats, rows * v_dim);
        scratch.parts[i].stats = carve(memory, floats, 2 * rows);
    }
    return scratch;
}

static bool fits_workspace(const struct call *call, const struct row *rows) {
    for (int64_t b = 0; b < call->batch; b++) {
        const bool fits = call->workspace && rows[b].first_unit + rows[b].units <= call->max_units;
        if (rows[b].units > 1 && !fits) return false;
    }
    return true;
}

/* Task `number` of a call with so many units; false if there is none. */
static bool find_task(const struct job *job, int64_t units, int64_t number, struct task *task) {
    const struct call *const call = job->call;
    const int64_t tasks_per_unit = ceil_div(call->num_kv_heads, job->heads);
    if (number >= units * tasks_per_unit) return false;
    task->unit = number / tasks_per_unit;
    task->first_head = number % tasks_per_unit * job->heads;
    task->heads = min64(job->heads, call->num_kv_heads - task->first_head);
    task->row = &job->rows[row_of_unit(job->rows, call->batch, task->unit)];
    return true;
}

/* A thread's share of the tasks: its own number first, then what nobody has `taken`. Each is taken while the one
 * before it is still to be done, so that its first keys can be asked for. */
static void do_tasks(const struct job *job, int64_t units, int64_t *taken, struct scratch *scratch) {
    struct task tasks[2];
    bool more = find_task(job, units, this_thread(), &tasks[0]);
    for (int i = 0; more; i ^= 1) {
        int64_t number;
#pragma omp atomic capture
        number = (*taken)++;
        more = find_task(job, units, team_size() + number, &tasks[i ^ 1]);
        attend_unit(job, &tasks[i], more ? &tasks[i ^ 1] : NULL, scratch);
    }
}

static void run_tasks(const struct job *job, int64_t units, float *memory, int64_t scratch_floats, int64_t threads) {
    const struct call *const call = job->call;
    (void)threads; /* where there is no OpenMP */
    const int64_t query_rows = call->num_q_heads * call->q_len;
    int64_t taken = 0;
#pragma omp parallel num_threads((int)threads)
    {
        int64_t floats;
        struct scratch scratch = lay_out(job, memory + this_thread() * scratch_floats, &floats);
        memset(scratch.zeros, 0, (size_t)max64(call->head_dim, call->v_head_dim) * sizeof(float));
#pragma omp for
        for (int64_t r = 0; r < call->batch * query_rows; r++) load_query(job, r / query_rows, r % query_rows);
        do_tasks(job, units, &taken, &scratch);
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < call->batch * call->num_kv_heads; task++) {
            const struct row *const row = &job->rows[task / call->num_kv_heads];
            if (row->units > 1) merge_units(job, row, task % call->num_kv_heads);
        }
    }
}

/* All KV heads of a unit are one task, unless there are fewer units than threads: they are neighbours in memory, and half
 * of each key is read at half the speed. */
static int64_t heads_per_task(const struct call *call, int64_t units) {
    const int64_t tasks_per_unit = ceil_div(call->num_threads, max64(units, 1));
    return min64(ceil_div(call->num_kv_heads, tasks_per_unit), MOST_HEADS);
}

/* Keys of a block. More bytes at a time are one long ascending read; fewer would stay in L1 from the asking to the use,
 * but the many short reads of that cost more (8 KiB against 128: 20 and 24 GB/s in f32 on a Zen 5 that reads 40). */
static int64_t keys_per_block(int64_t key_bytes, int64_t least) {
    return min64(max64(BLOCK_BYTES / key_bytes / least * least, least), TILE_KEYS);
}

/* Whether it pays to read K, or V, as a stream, which needs each key's rows of all heads in one run of memory. */
static bool makes_stream(const struct job *job, const struct view *view, int64_t dim) {
    const enum dtype dtype = (enum dtype)view->dtype;
    const int64_t row_bytes = dim * item_bytes[dtype], key_bytes = job->heads * row_bytes;
    const bool wide = row_bytes >= STREAM_WIDE_BYTES || job->group_rows < STREAM_ROWS;
    return (dtype == F32 || (dtype == BF16 && job->product == IN_PAIRS && wide)) && row_bytes % LINE_BYTES == 0 &&
           key_bytes >= STREAM_KEY_BYTES && view->stride[2] == row_bytes && view->stride[1] == key_bytes;
}

/* Whether K and V are read as in cpu_stream.h. */
static bool reads_streams(const struct job *job) {
    const struct call *const call = job->call;
    const int64_t sums = job->heads * job->group_rows * call->v_head_dim * (int64_t)sizeof(float);
    return HAVE_STREAMS && job->group_rows <= STREAM_ROWS && sums <= STREAM_SUMS_BYTES && !job->turned &&
           job->heads == call->num_kv_heads && makes_stream(job, &call->k, call->head_dim) &&
           makes_stream(job, &call->v, call->v_head_dim);
}

int splitkv_cpu_decode(const struct call *call) {
    struct row *const rows = malloc((size_t)max64(call->batch, 1) * sizeof *rows);
    if (!rows) return NO_MEMORY;
    struct job job = {.call = call, .rows = rows};
    const enum dtype k_dtype = (enum dtype)call->k.dtype, v_dtype = (enum dtype)call->v.dtype;
    init_reader(&job.k_reader, k_dtype);
    init_reader(&job.v_reader, v_dtype);
    job.product = product_of((enum dtype)call->q.dtype, k_dtype, call->head_dim);
    job.k_bytes = call->head_dim * item_bytes[k_dtype];
    job.v_bytes = call->v_head_dim * item_bytes[v_dtype];
    job.turned = turns(k_dtype, call->head_dim);
    job.q_width = (int)call->head_dim / (job.product == IN_PAIRS ? 2 : 1);
    job.group_rows = call->num_q_heads / call->num_kv_heads * call->q_len;

    const int64_t units = cut_rows(call, rows);
    job.heads = heads_per_task(call, units);
    job.streams = reads_streams(&job);
    job.k_block = job.streams ? TILE_KEYS : keys_per_block(job.heads * job.k_bytes, job.turned ? TURNED_KEYS : 4);
    job.v_block = job.streams ? TILE_KEYS : keys_per_block(job.heads * job.v_bytes, 8);
    const int64_t tasks = units * ceil_div(call->num_kv_heads, job.heads);
    const int64_t threads = max64(min64(call->num_threads, tasks), 1); /* one even for an empty batch */

    int64_t scratch_floats;
    lay_out(&job, NULL, &scratch_floats);
    const int64_t q_floats = call->batch * call->num_q_heads * call->q_len * job.q_width;
    const int64_t order_at = threads * scratch_floats + ceil_div(q_floats, ALIGN_FLOATS) * ALIGN_FLOATS;
    const int64_t floats = order_at + ceil_div(call->head_dim, ALIGN_FLOATS) * ALIGN_FLOATS; /* one int32 each */
    const bool fits = call->max_run <= MAX_RUN && fits_workspace(call, rows);
    float *const memory = fits ? aligned_alloc(LINE_BYTES, (size_t)floats * sizeof(float)) : NULL;
    if (memory) {
        job.q = memory + threads * scratch_floats;
        job.order = (int32_t *)(memory + order_at);
        for (int s = 0; s < call->head_dim; s++)
            job.order[s] = query_element(job.product, k_dtype, (int)call->head_dim, job.turned, s);
        run_tasks(&job, units, memory, scratch_floats, threads);
    }
    free(memory);
    free(rows);
    return memory ? OK : fits ? NO_MEMORY : PLAN_TOO_SMALL;
}

int splitkv_cpu_product(const struct product_call *call) {
    const int64_t bytes = call->rows * call->columns * (int64_t)sizeof(float);
    char *const x = aligned_alloc(LINE_BYTES, (size_t)(ceil_div(bytes, LINE_BYTES) * LINE_BYTES));
    if (!x) return NO_MEMORY;
    keep_x(call, x);
    product_function *const product = products[call->dtype][call->rows - 1];
#pragma omp parallel num_threads((int)call->num_threads)
    product(call, x, call->outs * this_thread() / team_size(), call->outs * (this_thread() + 1) / team_size());
    free(x);
    return OK;
}

/* What was compiled, for cpu.py: the instruction set, whether there are threads, and the size of a call. */
const char *splitkv_cpu_isa(void) { return ISA; }

int splitkv_cpu_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

int64_t splitkv_cpu_call_bytes(void) { return (int64_t)sizeof(struct call); }
