/* Attention of rows that decode: a few queries each, over cached keys and values.
 *
 * Invariant: a query's result doesn't depend, to the last bit, on the other rows and queries that
 * are computed with it, as long as they are finite.
 *
 * One layer's cache is rows x (keys of all shared heads, then their values) x capacity x width.
 * Queries and results are tokens x heads x width, `window` tokens to a row, `pitch` floats from one
 * token's queries to the next; a token attends up to its entry in `positions`. Head h attends to the
 * shared head h % shared. `scores` has room for `attend_windows_scratch` floats.
 */
#include <math.h>
#include <string.h>

#include "lanes.h"

/* SIDE queries are scored together. Each has PARTS partial sums, so that the order of additions
 * doesn't depend on the number of queries. */
enum { SIDE = 16, PARTS = 4, TALLEST = 8, WIDEST = 32, MAX_WIDTH = 256 };

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float sixteen __attribute__((vector_size(64), aligned(4), may_alias));

/* c[tall x vectors] = a b, where a's element (r, i) is at r * down + i * along */
typedef void product(const float *a, long down, long along, const float *b, long b_row, long depth, float *c, long c_row);

#define PRODUCT(name, vector, vectors, tall)                                                       \
    static void name(const float *a, long down, long along, const float *b, long b_row, long depth, \
                     float *c, long c_row)                                                         \
    {                                                                                              \
        enum { WIDTH = sizeof(vector) / sizeof(float) };                                           \
        vector sums[tall][vectors] = {0};                                                          \
        for (long i = 0; i < depth; i++)                                                           \
            for (int n = 0; n < vectors; n++) {                                                    \
                vector b_i = *(const vector *)(b + i * b_row + n * WIDTH);                        \
                for (int r = 0; r < tall; r++) sums[r][n] += a[r * down + i * along] * b_i;        \
            }                                                                                      \
        for (int r = 0; r < tall; r++)                                                             \
            for (int n = 0; n < vectors; n++) *(vector *)(c + r * c_row + n * WIDTH) = sums[r][n]; \
    }
#define PRODUCTS(name, vector, vectors)    \
    PRODUCT(name##_2, vector, vectors, 2)  \
    PRODUCT(name##_4, vector, vectors, 4)  \
    PRODUCT(name##_8, vector, vectors, 8)  \
    static product *const name[] = {name##_2, name##_4, name##_8};

PRODUCTS(by_4, four, 1)
PRODUCTS(by_8, eight, 1)
PRODUCTS(by_16, sixteen, 1)
PRODUCTS(by_32, sixteen, 2)

/* up to SIDE queries of one row and shared head */
typedef struct {
    const float *keys, *values;
    const float *next; /* keys of the next block, to be prefetched */
    long width;
    long queries;
    long side; /* queries, rounded up to a vector's size: the width of a row of scores */
    long tokens[SIDE], heads[SIDE]; /* by query */
    long ends[SIDE];                /* by query: how many keys it sees */
    long shortest, longest;         /* of `ends` */
} query_block;

/* transposed[width x side] = the queries, times scale */
static void transpose(const query_block *block, const float *queries, long pitch, float scale, float *transposed)
{
    memset(transposed, 0, sizeof(float) * block->side * block->width);
    for (long r = 0; r < block->queries; r++) {
        const float *query = queries + block->tokens[r] * pitch + block->heads[r] * block->width;
        for (long i = 0; i < block->width; i++) transposed[i * block->side + r] = query[i] * scale;
    }
}

/* scores[longest x side] = keys times transposed [width x side]; minus infinity behind a query's end */
static void score(const query_block *block, const float *transposed, float *scores)
{
    product *const *by = block->side == 4 ? by_4 : block->side == 8 ? by_8 : by_16;
    long side = block->side, width = block->width;
    /* scores of keys that aren't written yet are overwritten below */
    long last = larger(block->longest - TALLEST, 0);
    for (long t = 0; t < block->longest; t += TALLEST) {
        long from = smaller(t, last), at = from * width;
        for (long n = at; n < at + TALLEST * width; n += 16) {
            __builtin_prefetch(block->values + n, 0, 2);
            __builtin_prefetch(block->next + n, 0, 2);
        }
        by[2](block->keys + at, width, 1, transposed, side, width, scores + from * side, side);
    }
    for (long t = block->shortest; t < block->longest; t++)
        for (long r = 0; r < block->queries; r++)
            if (t >= block->ends[r]) scores[t * side + r] = -INFINITY;
}

/* Turn scores into weights that aren't normalised, and write each query's sum of them to `sums`. */
static void exponentiate(const query_block *block, float *scores, float *sums)
{
    long side = block->side, stride = PARTS * side, floats = block->longest * side, end = up(floats, stride);
    float tops[PARTS * SIDE], parts[PARTS * SIDE];
    for (long n = floats; n < end; n++) scores[n] = -INFINITY;
    for (long n = 0; n < stride; n += LANES) {
        lanes top = *(const lanes *)(scores + n);
        for (long m = n + stride; m < end; m += stride) {
            lanes x = *(const lanes *)(scores + m);
            top = choose(x > top, x, top);
        }
        *(lanes *)(tops + n) = top;
    }
    for (long r = 0; r < side; r++) {
        float top = tops[r];
        for (long p = 1; p < PARTS; p++) top = fmaxf(top, tops[p * side + r]);
        for (long p = 0; p < PARTS; p++) tops[p * side + r] = top;
    }
    for (long n = 0; n < stride; n += LANES) {
        lanes sum = {0}, top = *(const lanes *)(tops + n);
        for (long m = n; m < end; m += stride) {
            lanes x = *(const lanes *)(scores + m);
            lanes e = choose(x == -INFINITY, all(0), exponential(x - top));
            *(lanes *)(scores + m) = e;
            sum += e;
        }
        *(lanes *)(parts + n) = sum;
    }
    for (long r = 0; r < block->queries; r++)
        sums[r] = (parts[r] + parts[side + r]) + (parts[2 * side + r] + parts[3 * side + r]);
}

/* out = the values, weighted by the weights over their sums */
static void mix(const query_block *block, const float *weights, const float *sums, long heads, float *out)
{
    long width = block->width, wide = width % 32 == 0 ? 32 : width % 16 == 0 ? 16 : width % 8 == 0 ? 8 : 4;
    product *const *by = wide == 32 ? by_32 : wide == 16 ? by_16 : wide == 8 ? by_8 : by_4;
    float mixed[TALLEST * WIDEST];
    for (long w = 0; w < width; w += wide)
        for (long r = 0, remaining = block->queries, tall; remaining > 0; r += tall, remaining -= tall) {
            int size = remaining >= 8 ? 2 : remaining >= 4 ? 1 : 0;
            tall = 2 << size;
            by[size](weights + r, 1, block->side, block->values + w, width, block->longest, mixed, WIDEST);
            for (long n = 0; n < smaller(tall, remaining); n++) {
                float *to = out + (block->tokens[r + n] * heads + block->heads[r + n]) * width + w;
                for (long i = 0; i < wide; i++) to[i] = mixed[n * WIDEST + i] / sums[r + n];
            }
        }
}

long attend_windows_scratch(long capacity) { return up(capacity * SIDE, PARTS * SIDE); }

/* Return 0, or 1 if the width or the capacity isn't supported. */
int attend_windows(const float *queries, long pitch, const float *cache, const int64_t *positions, long rows, long window,
                   long heads, long shared, long width, long capacity, float scale, float *scores, float *out)
{
    if (width % 4 || width > MAX_WIDTH || capacity < TALLEST) return 1;
    long members = heads / shared, entries = capacity * width;
    float transposed[MAX_WIDTH * SIDE], sums[SIDE];
    for (long at = 0; at < rows * shared; at++) {
        long row = at / shared, head = at % shared;
        query_block block = {.keys = cache + (row * 2 * shared + head) * entries, .width = width};
        block.values = block.keys + shared * entries;
        block.next = head + 1 < shared ? block.keys + entries : block.values + entries;
        for (long first = 0; first < window * members; first += SIDE) {
            block.queries = smaller(SIDE, window * members - first);
            block.side = block.queries <= 4 ? 4 : block.queries <= 8 ? 8 : SIDE;
            block.shortest = capacity, block.longest = 0;
            for (long r = 0; r < block.queries; r++) {
                block.tokens[r] = row * window + (first + r) / members;
                block.heads[r] = (first + r) % members * shared + head;
                block.ends[r] = positions[block.tokens[r]] + 1;
                block.shortest = smaller(block.shortest, block.ends[r]);
                block.longest = larger(block.longest, block.ends[r]);
            }
            transpose(&block, queries, pitch, scale, transposed);
            score(&block, transposed, scores);
            exponentiate(&block, scores, sums);
            mix(&block, scores, sums, heads, out);
        }
    }
    return 0;
}
