/* Parts of a softmax-weighted sum, and the fixed tree along which they are joined: node j of a level is the left
 * fold of nodes 4j .. 4j + 3 of the level below. */
#ifndef SPLITKV_CPU_TREE_H
#define SPLITKV_CPU_TREE_H

#include "cpu_call.h"

#define MAX_LEVELS 16 /* FAN_OUT ^ 16 leaves: more than a row can have */

/* Sums over some keys for some query rows: acc [rows, v_head_dim], and {maximum, sum of weights} of each row in
 * base 2. No key: {-inf, 0} and zeros. */
struct part {
    float *acc, *stats;
};

static void clear_part(struct part part, int64_t rows, int64_t dim) {
    memset(part.acc, 0, (size_t)(rows * dim) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        part.stats[2 * r] = -INFINITY;
        part.stats[2 * r + 1] = 0.0f;
    }
}

static void copy_part(struct part to, struct part from, int64_t rows, int64_t dim) {
    memcpy(to.acc, from.acc, (size_t)(rows * dim) * sizeof(float));
    memcpy(to.stats, from.stats, (size_t)(2 * rows) * sizeof(float));
}

/* a = a + b: both are brought to the larger maximum. */
static void join_parts(struct part a, struct part b, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        float *const sa = a.stats + 2 * r, *const sb = b.stats + 2 * r, *const acc = a.acc + r * dim;
        const float maximum = sb[0] > sa[0] ? sb[0] : sa[0];
        const float base = maximum == -INFINITY ? 0.0f : maximum; /* -inf - -inf would be NaN */
        const vec weight_a = vset1(exp2_of(sa[0] - base)), weight_b = vset1(exp2_of(sb[0] - base));
        for (int64_t d = 0; d < dim; d += LANES)
            vstore(acc + d, vfma(vload(b.acc + r * dim + d), weight_b, vload(acc + d) * weight_a));
        sa[0] = maximum;
        sa[1] = fmaf(sb[1], weight_b[0], sa[1] * weight_a[0]);
    }
}

/* A walk along the tree, leaves in order: open[l] is the fold of the first children[l] children of the node of
 * level l + 1 that is being made. */
struct walk {
    struct part open[MAX_LEVELS];
    int children[MAX_LEVELS];
    int levels; /* the top one takes any number of children */
};

/* Adds a node of `level`, and the nodes that it completes above. Returns a part whose memory is free again: the
 * node's own, or one that it took the place of. */
static struct part walk_on(struct walk *walk, int level, struct part node, int64_t rows, int64_t dim) {
    for (;; level++) {
        const struct part open = walk->open[level];
        if (walk->children[level]++ == 0) {
            walk->open[level] = node;
            node = open;
        } else {
            join_parts(open, node, rows, dim);
        }
        if (walk->children[level] < FAN_OUT || level == walk->levels - 1) return node;
        walk->children[level] = 0;
        const struct part complete = walk->open[level];
        walk->open[level] = node;
        node = complete;
    }
}

/* Closes what is open, from the lowest level up, and returns the root. */
static struct part walk_up(struct walk *walk, int64_t rows, int64_t dim) {
    for (int level = 0; level < walk->levels - 1; level++) {
        if (!walk->children[level]) continue;
        walk->children[level] = 0;
        walk_on(walk, level + 1, walk->open[level], rows, dim);
    }
    return walk->open[walk->levels - 1];
}
#endif
