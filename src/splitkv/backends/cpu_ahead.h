/* Asking for memory before it is read. */
#ifndef SPLITKV_CPU_AHEAD_H
#define SPLITKV_CPU_AHEAD_H

#include "cpu_rows.h"

/* Memory that will be read next, in the order of its addresses: runs of bytes, asked for a little at a time while the
 * arithmetic goes on. A burst would stall it, and the processor's own read-ahead follows ascending addresses only. */
#define MOST_RUNS 128
struct run {
    const char *at, *end;
};
struct ahead {
    struct run now, runs[MOST_RUNS];
    int next, count;
};

static void next_run(struct ahead *ahead) {
    ahead->now = ahead->next < ahead->count ? ahead->runs[ahead->next++] : (struct run){NULL, NULL};
}

/* Adds `bytes` bytes from `at` on; what is too many is left out, as asking is never a must. */
static void add_run(struct ahead *ahead, const char *at, int64_t bytes) {
    struct run *const last = ahead->runs + ahead->count - 1;
    if (ahead->count && last->end == at) last->end += bytes;
    else if (ahead->count < MOST_RUNS) ahead->runs[ahead->count++] = (struct run){at, at + bytes};
}

/* Into L1 on a Zen 5, and into L2 elsewhere: each is 1 to 8 % slower on the other (an Emerald Rapids). */
#if defined(AMD)
#define ASK_LOCALITY 3
#else
#define ASK_LOCALITY 2
#endif
INLINE void ask_line(const char *at) { __builtin_prefetch(at, 0, ASK_LOCALITY); }

/* Part of that memory: what a loop asks for, step by step. */
struct share {
    const char *at;
    bool moves; /* or it is one line, again and again */
};

/* The next `bytes` bytes. They are asked for at once where they are not one run. */
static struct share next_share(struct ahead *ahead, int64_t bytes) {
    if (!ahead) return (struct share){(const char *)&item_bytes, false};
    if (ahead->now.end - ahead->now.at >= bytes) {
        const struct share share = {ahead->now.at, true};
        ahead->now.at += bytes;
        return share;
    }
    for (int64_t asked = 0; asked < bytes && ahead->now.at < ahead->now.end; asked += LINE_BYTES) {
        ask_line(ahead->now.at);
        ahead->now.at += LINE_BYTES;
        if (ahead->now.at >= ahead->now.end) next_run(ahead);
    }
    return next_share(NULL, bytes);
}

INLINE void ask(struct share *share, const int bytes) {
    UNROLL
    for (int i = 0; i < bytes; i += LINE_BYTES) ask_line(share->at + i);
    if (share->moves) share->at += bytes;
}
#endif
