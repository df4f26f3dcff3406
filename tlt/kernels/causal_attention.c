/* Causal attention over sequences that lie one after the other, forward and backward, in float32.
 *
 * Invariant: a query attends to the keys of its own sequence up to its own position, to no others.
 * Most products that the mask would hide are not computed either.
 *
 * q, out, g and dq are tokens x heads x width; k, v, dk and dv tokens x shared x width; lse is
 * tokens x heads. Sequence i is the tokens from bounds[i] to bounds[i + 1]. The heads that share a
 * key-value head are rows of one product: row r is the query at r / members.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"

enum { ROWS = 64 };

typedef struct {
    long heads, shared, width;
    long members; /* heads to a key-value head */
    long wide;    /* width, in whole tiles */
    long stride;  /* the longest sequence, in whole tiles */
    float scale;
} shape;

static shape make_shape(const int64_t *bounds, long sequences, long heads, long shared, long width, float scale)
{
    long longest = 0;
    for (long i = 0; i < sequences; i++) longest = larger(longest, bounds[i + 1] - bounds[i]);
    return (shape){heads, shared, width, heads / shared, up(width, WIDE), up(longest, WIDE), scale};
}

/* c[TALL x WIDE] (+)= a b, where a's element (r, i) is at r * down + i * along */
static inline __attribute__((always_inline)) void multiply(
    const float *a, long down, long along, const float *b, long b_row, long depth, float *c, long c_row, int add)
{
    lanes sums[TALL][VECTORS];
    for (int r = 0; r < TALL; r++)
        for (int n = 0; n < VECTORS; n++)
            sums[r][n] = add ? *(const lanes *)(c + r * c_row + n * LANES) : (lanes){0};
    for (long i = 0; i < depth; i++) {
        lanes b_i[VECTORS];
        for (int n = 0; n < VECTORS; n++) b_i[n] = *(const lanes *)(b + i * b_row + n * LANES);
        for (int r = 0; r < TALL; r++)
            for (int n = 0; n < VECTORS; n++) sums[r][n] += a[r * down + i * along] * b_i[n];
    }
    for (int r = 0; r < TALL; r++)
        for (int n = 0; n < VECTORS; n++) *(lanes *)(c + r * c_row + n * LANES) = sums[r][n];
}

/* Count the keys to compute for the tile of rows from r on: those that its last row may see. */
static inline long visible_keys(const shape *s, long first, long r, long last)
{
    return smaller((first + r + TALL - 1) / s->members + 1, last);
}

/* to[rows x stride] = rows x width times width x stride, skipping tiles that the mask hides */
static void scores(const shape *s, const float *rows, const float *transposed, long first, long count, long last, float *to)
{
    for (long r = 0; r < count; r += TALL)
        for (long t = 0, visible = visible_keys(s, first, r, last); t < visible; t += WIDE)
            multiply(rows + r * s->wide, s->wide, 1, transposed + t, s->stride, s->width, to + r * s->stride + t, s->stride, 0);
}

/* to[rows x wide] = rows x keys times keys x wide */
static void mix(const shape *s, const float *weights, const float *keyed, long first, long count, long last, float *to)
{
    for (long r = 0; r < count; r += TALL)
        for (long w = 0, visible = visible_keys(s, first, r, last); w < s->wide; w += WIDE)
            multiply(weights + r * s->stride, s->stride, 1, keyed + w, s->wide, visible, to + r * s->wide + w, s->wide, 0);
}

/* to[keys x wide] += keys x rows times rows x wide; rows before a key's position don't see it */
static void collect(const shape *s, const float *weights, const float *rows, long first, long count, long last, float *to)
{
    for (long t = 0; t < last; t += TALL) {
        long skip = larger(t * s->members - first, 0);
        for (long w = 0; w < s->wide; w += WIDE)
            multiply(weights + skip * s->stride + t, 1, s->stride, rows + skip * s->wide + w, s->wide, count - skip,
                     to + t * s->wide + w, s->wide, 1);
    }
}

/* Replace row by exp(row - shift) up to `visible` and by zero from there to `end`; return the sum. */
static float exponentiate(float *row, long visible, long end, float shift)
{
    lanes sums = {0};
    counts index;
    for (int n = 0; n < LANES; n++) index[n] = n;
    for (long t = 0; t < visible; t += LANES) {
        lanes e = exponential(*(const lanes *)(row + t) - shift);
        e = (lanes)((counts)e & (index < (int32_t)smaller(visible - t, LANES)));
        *(lanes *)(row + t) = e;
        sums += e;
    }
    for (long t = up(visible, LANES); t < end; t++) row[t] = 0;
    return total(sums);
}

static float largest(const float *row, long visible)
{
    float top = row[0];
    long t = 0;
    if (visible >= LANES) {
        lanes best = *(const lanes *)row;
        for (; t + LANES <= visible; t += LANES) {
            lanes x = *(const lanes *)(row + t);
            best = choose(x > best, x, best);
        }
        for (int n = 0; n < LANES; n++) top = best[n] > top ? best[n] : top;
    }
    for (; t < visible; t++) top = row[t] > top ? row[t] : top;
    return top;
}

/* index in tokens x heads of a key-value head's row r */
static inline long row_index(const shape *s, long head, long r)
{
    return r / s->members * s->heads + head * s->members + r % s->members;
}

static void load(const shape *s, const float *from, long head, long first, long count, float scale, float *to)
{
    for (long r = 0; r < count; r++) {
        const float *row = from + row_index(s, head, first + r) * s->width;
        for (long w = 0; w < s->width; w++) to[r * s->wide + w] = row[w] * scale;
    }
}

static void store(const shape *s, const float *from, long head, long first, long count, float scale, float *to)
{
    for (long r = 0; r < count; r++) {
        float *row = to + row_index(s, head, first + r) * s->width;
        for (long w = 0; w < s->width; w++) row[w] = from[r * s->wide + w] * scale;
    }
}

static void load_keys(const shape *s, const float *from, long head, long tokens, float *to)
{
    for (long t = 0; t < tokens; t++)
        memcpy(to + t * s->wide, from + (t * s->shared + head) * s->width, s->width * sizeof(float));
}

static void store_keys(const shape *s, const float *from, long head, long tokens, float *to)
{
    for (long t = 0; t < tokens; t++)
        memcpy(to + (t * s->shared + head) * s->width, from + t * s->wide, s->width * sizeof(float));
}

/* transposed: width x stride */
static void transpose(const shape *s, const float *from, long head, long tokens, float *to)
{
    for (long w = 0; w < s->width; w++)
        for (long t = 0; t < tokens; t++) to[w * s->stride + t] = from[(t * s->shared + head) * s->width + w];
}

static float *allocate(float **rest, long floats)
{
    float *start = *rest;
    *rest += floats;
    return start;
}

/* Return 0, or 1 if there is no memory. */
int attend(const float *q, const float *k, const float *v, float *out, float *lse, const int64_t *bounds,
           long sequences, long heads, long shared, long width, float scale)
{
    shape s = make_shape(bounds, sequences, heads, shared, width, scale);
    long keyed = s.stride * s.wide, rows = ROWS * s.wide, square = ROWS * s.stride;
    /* zeros, so that the padding of a tile is finite */
    float *memory = calloc(2 * keyed + 2 * rows + square, sizeof(float)), *rest = memory;
    if (!memory) return 1;
    float *keys = allocate(&rest, keyed), *values = allocate(&rest, keyed);
    float *queries = allocate(&rest, rows), *mixed = allocate(&rest, rows), *weights = allocate(&rest, square);
    for (long i = 0; i < sequences; i++) {
        long start = bounds[i], tokens = bounds[i + 1] - start;
        const float *q_i = q + start * heads * width, *k_i = k + start * shared * width, *v_i = v + start * shared * width;
        float *out_i = out + start * heads * width, *lse_i = lse + start * heads;
        for (long head = 0; head < shared; head++) {
            transpose(&s, k_i, head, tokens, keys);
            load_keys(&s, v_i, head, tokens, values);
            for (long first = 0; first < tokens * s.members; first += ROWS) {
                long count = smaller(ROWS, tokens * s.members - first), last = (first + count - 1) / s.members + 1;
                load(&s, q_i, head, first, count, scale, queries);
                scores(&s, queries, keys, first, count, last, weights);
                for (long r = 0; r < count; r++) {
                    float *row = weights + r * s.stride;
                    long visible = (first + r) / s.members + 1;
                    float top = largest(row, visible), sum = exponentiate(row, visible, up(last, WIDE), top);
                    lse_i[row_index(&s, head, first + r)] = top + logf(sum);
                    for (long t = 0; t < visible; t++) row[t] /= sum;
                }
                mix(&s, weights, values, first, count, last, mixed);
                store(&s, mixed, head, first, count, 1, out_i);
            }
        }
    }
    free(memory);
    return 0;
}

/* Weights are computed again from lse, so memory is linear in the tokens, not quadratic. */
int attend_backward(const float *g, const float *q, const float *k, const float *v, const float *out,
                    const float *lse, float *dq, float *dk, float *dv, const int64_t *bounds, long sequences,
                    long heads, long shared, long width, float scale)
{
    shape s = make_shape(bounds, sequences, heads, shared, width, scale);
    long keyed = s.stride * s.wide, rows = ROWS * s.wide, square = ROWS * s.stride;
    float *memory = calloc(5 * keyed + 3 * rows + 2 * square, sizeof(float)), *rest = memory;
    if (!memory) return 1;
    float *transposed_keys = allocate(&rest, keyed), *transposed_values = allocate(&rest, keyed), *keys = allocate(&rest, keyed);
    float *key_slopes = allocate(&rest, keyed), *value_slopes = allocate(&rest, keyed);
    float *queries = allocate(&rest, rows), *slopes = allocate(&rest, rows), *query_slopes = allocate(&rest, rows);
    float *weights = allocate(&rest, square), *weight_slopes = allocate(&rest, square);
    for (long i = 0; i < sequences; i++) {
        long start = bounds[i], tokens = bounds[i + 1] - start, q_at = start * heads * width, k_at = start * shared * width;
        for (long head = 0; head < shared; head++) {
            transpose(&s, k + k_at, head, tokens, transposed_keys);
            transpose(&s, v + k_at, head, tokens, transposed_values);
            load_keys(&s, k + k_at, head, tokens, keys);
            memset(key_slopes, 0, up(tokens, TALL) * s.wide * sizeof(float));
            memset(value_slopes, 0, up(tokens, TALL) * s.wide * sizeof(float));
            for (long first = 0; first < tokens * s.members; first += ROWS) {
                long count = smaller(ROWS, tokens * s.members - first), last = (first + count - 1) / s.members + 1;
                load(&s, q + q_at, head, first, count, scale, queries);
                load(&s, g + q_at, head, first, count, 1, slopes);
                scores(&s, queries, transposed_keys, first, count, last, weights);
                scores(&s, slopes, transposed_values, first, count, last, weight_slopes);
                for (long r = 0; r < count; r++) {
                    long at = start * heads + row_index(&s, head, first + r), visible = (first + r) / s.members + 1;
                    float *row = weights + r * s.stride, *slope_row = weight_slopes + r * s.stride, mean_slope = 0;
                    for (long w = 0; w < width; w++) mean_slope += g[at * width + w] * out[at * width + w];
                    exponentiate(row, visible, up(last, WIDE), lse[at]);
                    for (long t = 0; t < visible; t++) slope_row[t] = (slope_row[t] - mean_slope) * row[t];
                    for (long t = visible; t < up(last, WIDE); t++) slope_row[t] = 0;
                }
                mix(&s, weight_slopes, keys, first, count, last, query_slopes);
                store(&s, query_slopes, head, first, count, scale, dq + q_at);
                collect(&s, weights, slopes, first, count, last, value_slopes);
                collect(&s, weight_slopes, queries, first, count, last, key_slopes);
            }
            store_keys(&s, key_slopes, head, tokens, dk + k_at);
            store_keys(&s, value_slopes, head, tokens, dv + k_at);
        }
    }
    free(memory);
    return 0;
}
