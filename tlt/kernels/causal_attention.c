/* Causal attention over sequences that lie one after the other, forward and backward, in float32.
 *
 * Invariant: a query meets the keys of its own sequence up to its own position and nothing else,
 * in the result as in the arithmetic: what the mask hides is hardly computed.
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

static shape shaped(const int64_t *bounds, long sequences, long heads, long shared, long width, float scale)
{
    long longest = 0;
    for (long i = 0; i < sequences; i++) longest = most(longest, bounds[i + 1] - bounds[i]);
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
        lanes line[VECTORS];
        for (int n = 0; n < VECTORS; n++) line[n] = *(const lanes *)(b + i * b_row + n * LANES);
        for (int r = 0; r < TALL; r++)
            for (int n = 0; n < VECTORS; n++) sums[r][n] += a[r * down + i * along] * line[n];
    }
    for (int r = 0; r < TALL; r++)
        for (int n = 0; n < VECTORS; n++) *(lanes *)(c + r * c_row + n * LANES) = sums[r][n];
}

/* Keys that a tile's rows from r on may see: those of its last row. */
static inline long seen_by(const shape *s, long first, long r, long last)
{
    return least((first + r + TALL - 1) / s->members + 1, last);
}

/* to[rows x stride] = rows x width times width x stride, only where the mask lets something through */
static void scores(const shape *s, const float *rows, const float *turned, long first, long count, long last, float *to)
{
    for (long r = 0; r < count; r += TALL)
        for (long t = 0, seen = seen_by(s, first, r, last); t < seen; t += WIDE)
            multiply(rows + r * s->wide, s->wide, 1, turned + t, s->stride, s->width, to + r * s->stride + t, s->stride, 0);
}

/* to[rows x wide] = rows x keys times keys x wide */
static void mix(const shape *s, const float *weights, const float *keyed, long first, long count, long last, float *to)
{
    for (long r = 0; r < count; r += TALL)
        for (long w = 0, seen = seen_by(s, first, r, last); w < s->wide; w += WIDE)
            multiply(weights + r * s->stride, s->stride, 1, keyed + w, s->wide, seen, to + r * s->wide + w, s->wide, 0);
}

/* to[keys x wide] += keys x rows times rows x wide; rows before a key's own see nothing of it */
static void collect(const shape *s, const float *weights, const float *rows, long first, long count, long last, float *to)
{
    for (long t = 0; t < last; t += TALL) {
        long skip = most(t * s->members - first, 0);
        for (long w = 0; w < s->wide; w += WIDE)
            multiply(weights + skip * s->stride + t, 1, s->stride, rows + skip * s->wide + w, s->wide, count - skip,
                     to + t * s->wide + w, s->wide, 1);
    }
}

/* row becomes exp(row - shift) up to `seen` and zero from there to `end`; returns the sum */
static float exponentiate(float *row, long seen, long end, float shift)
{
    lanes sums = {0};
    counts index;
    for (int n = 0; n < LANES; n++) index[n] = n;
    for (long t = 0; t < seen; t += LANES) {
        lanes e = exponential(*(const lanes *)(row + t) - shift);
        e = (lanes)((counts)e & (index < (int32_t)least(seen - t, LANES)));
        *(lanes *)(row + t) = e;
        sums += e;
    }
    for (long t = up(seen, LANES); t < end; t++) row[t] = 0;
    return total(sums);
}

static float largest(const float *row, long seen)
{
    float found = row[0];
    long t = 0;
    if (seen >= LANES) {
        lanes best = *(const lanes *)row;
        for (; t + LANES <= seen; t += LANES) {
            lanes x = *(const lanes *)(row + t);
            best = chosen(x > best, x, best);
        }
        for (int n = 0; n < LANES; n++) found = best[n] > found ? best[n] : found;
    }
    for (; t < seen; t++) found = row[t] > found ? row[t] : found;
    return found;
}

/* where row r of a key-value head lies in tokens x heads */
static inline long place(const shape *s, long head, long r)
{
    return r / s->members * s->heads + head * s->members + r % s->members;
}

static void load(const shape *s, const float *from, long head, long first, long count, float scale, float *to)
{
    for (long r = 0; r < count; r++) {
        const float *row = from + place(s, head, first + r) * s->width;
        for (long w = 0; w < s->width; w++) to[r * s->wide + w] = row[w] * scale;
    }
}

static void store(const shape *s, const float *from, long head, long first, long count, float scale, float *to)
{
    for (long r = 0; r < count; r++) {
        float *row = to + place(s, head, first + r) * s->width;
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
static void turn(const shape *s, const float *from, long head, long tokens, float *to)
{
    for (long w = 0; w < s->width; w++)
        for (long t = 0; t < tokens; t++) to[w * s->stride + t] = from[(t * s->shared + head) * s->width + w];
}

static float *take(float **rest, long floats)
{
    float *taken = *rest;
    *rest += floats;
    return taken;
}

/* Returns 0, or 1 without memory. */
int attend(const float *q, const float *k, const float *v, float *out, float *lse, const int64_t *bounds,
           long sequences, long heads, long shared, long width, float scale)
{
    shape s = shaped(bounds, sequences, heads, shared, width, scale);
    long keyed = s.stride * s.wide, rows = ROWS * s.wide, square = ROWS * s.stride;
    /* zeros, so that what pads a tile is finite */
    float *memory = calloc(2 * keyed + 2 * rows + square, sizeof(float)), *rest = memory;
    if (!memory) return 1;
    float *keys = take(&rest, keyed), *values = take(&rest, keyed);
    float *queries = take(&rest, rows), *mixed = take(&rest, rows), *weights = take(&rest, square);
    for (long i = 0; i < sequences; i++) {
        long start = bounds[i], tokens = bounds[i + 1] - start;
        const float *q_i = q + start * heads * width, *k_i = k + start * shared * width, *v_i = v + start * shared * width;
        float *out_i = out + start * heads * width, *lse_i = lse + start * heads;
        for (long head = 0; head < shared; head++) {
            turn(&s, k_i, head, tokens, keys);
            load_keys(&s, v_i, head, tokens, values);
            for (long first = 0; first < tokens * s.members; first += ROWS) {
                long count = least(ROWS, tokens * s.members - first), last = (first + count - 1) / s.members + 1;
                load(&s, q_i, head, first, count, scale, queries);
                scores(&s, queries, keys, first, count, last, weights);
                for (long r = 0; r < count; r++) {
                    float *row = weights + r * s.stride;
                    long seen = (first + r) / s.members + 1;
                    float top = largest(row, seen), sum = exponentiate(row, seen, up(last, WIDE), top);
                    lse_i[place(&s, head, first + r)] = top + logf(sum);
                    for (long t = 0; t < seen; t++) row[t] /= sum;
                }
                mix(&s, weights, values, first, count, last, mixed);
                store(&s, mixed, head, first, count, 1, out_i);
            }
        }
    }
    free(memory);
    return 0;
}

/* The weights are computed again from lse, so that memory grows with the tokens and not their square. */
int attend_backward(const float *g, const float *q, const float *k, const float *v, const float *out,
                    const float *lse, float *dq, float *dk, float *dv, const int64_t *bounds, long sequences,
                    long heads, long shared, long width, float scale)
{
    shape s = shaped(bounds, sequences, heads, shared, width, scale);
    long keyed = s.stride * s.wide, rows = ROWS * s.wide, square = ROWS * s.stride;
    float *memory = calloc(5 * keyed + 3 * rows + 2 * square, sizeof(float)), *rest = memory;
    if (!memory) return 1;
    float *turned_keys = take(&rest, keyed), *turned_values = take(&rest, keyed), *keys = take(&rest, keyed);
    float *key_slopes = take(&rest, keyed), *value_slopes = take(&rest, keyed);
    float *queries = take(&rest, rows), *slopes = take(&rest, rows), *query_slopes = take(&rest, rows);
    float *weights = take(&rest, square), *drifts = take(&rest, square);
    for (long i = 0; i < sequences; i++) {
        long start = bounds[i], tokens = bounds[i + 1] - start, wide = start * heads * width, narrow = start * shared * width;
        for (long head = 0; head < shared; head++) {
            turn(&s, k + narrow, head, tokens, turned_keys);
            turn(&s, v + narrow, head, tokens, turned_values);
            load_keys(&s, k + narrow, head, tokens, keys);
            memset(key_slopes, 0, up(tokens, TALL) * s.wide * sizeof(float));
            memset(value_slopes, 0, up(tokens, TALL) * s.wide * sizeof(float));
            for (long first = 0; first < tokens * s.members; first += ROWS) {
                long count = least(ROWS, tokens * s.members - first), last = (first + count - 1) / s.members + 1;
                load(&s, q + wide, head, first, count, scale, queries);
                load(&s, g + wide, head, first, count, 1, slopes);
                scores(&s, queries, turned_keys, first, count, last, weights);
                scores(&s, slopes, turned_values, first, count, last, drifts);
                for (long r = 0; r < count; r++) {
                    long at = start * heads + place(&s, head, first + r), seen = (first + r) / s.members + 1;
                    float *row = weights + r * s.stride, *drift = drifts + r * s.stride, lean = 0;
                    for (long w = 0; w < width; w++) lean += g[at * width + w] * out[at * width + w];
                    exponentiate(row, seen, up(last, WIDE), lse[at]);
                    for (long t = 0; t < seen; t++) drift[t] = (drift[t] - lean) * row[t];
                    for (long t = seen; t < up(last, WIDE); t++) drift[t] = 0;
                }
                mix(&s, drifts, keys, first, count, last, query_slopes);
                store(&s, query_slopes, head, first, count, scale, dq + wide);
                collect(&s, weights, slopes, first, count, last, value_slopes);
                collect(&s, drifts, queries, first, count, last, key_slopes);
            }
            store_keys(&s, key_slopes, head, tokens, dk + narrow);
            store_keys(&s, value_slopes, head, tokens, dv + narrow);
        }
    }
    free(memory);
    return 0;
}
