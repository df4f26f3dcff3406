/* Attention of rows that decode: a few queries each, over keys and values that lie in a cache.
 *
 * Invariant: a query's result is the same to the last bit whatever finite numbers are computed
 * beside it, be it other rows or more queries of its own row.
 *
 * One layer's cache is rows x (keys of all shared heads, then their values) x capacity x width.
 * Queries and results are tokens x heads x width, `window` tokens to a row, `pitch` floats from one
 * token's queries to the next; positions, one a token, say how far each sees. Head h looks at the
 * shared head h % shared. `scores` holds as many floats as `attend_windows_scratch` says.
 */
#include <math.h>
#include <string.h>

#include "lanes.h"

/* queries that are scored together lie side by side; four partial sums of each, as each must be
 * added up in the same order however many there are */
enum { SIDE = 16, PARTS = 4, TALLEST = 8, WIDEST = 32, MOST_WIDTH = 256 };

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
                vector line = *(const vector *)(b + i * b_row + n * WIDTH);                        \
                for (int r = 0; r < tall; r++) sums[r][n] += a[r * down + i * along] * line;       \
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

/* some queries of one row and shared head */
typedef struct {
    const float *keys, *values;
    const float *next; /* keys that are looked at afterwards, to be fetched meanwhile */
    long width;
    long queries;      /* SIDE at most */
    long side;         /* room for as many in a line of scores */
    long tokens[SIDE], heads[SIDE]; /* which each is */
    long ends[SIDE];   /* how many keys it sees, and the least and most of all */
    long least, most;
} look;

/* turned[width x side] = the queries, times scale */
static void turn(const look *l, const float *queries, long pitch, float scale, float *turned)
{
    memset(turned, 0, sizeof(float) * l->side * l->width);
    for (long r = 0; r < l->queries; r++) {
        const float *query = queries + l->tokens[r] * pitch + l->heads[r] * l->width;
        for (long i = 0; i < l->width; i++) turned[i * l->side + r] = query[i] * scale;
    }
}

/* scores[most x side] = keys times turned, which is width x side; minus infinity where one sees nothing */
static void score(const look *l, const float *turned, float *scores)
{
    product *const *by = l->side == 4 ? by_4 : l->side == 8 ? by_8 : by_16;
    long side = l->side, width = l->width;
    /* what comes of keys that nobody has written yet is overwritten below */
    long last = most(l->most - TALLEST, 0);
    for (long t = 0; t < l->most; t += TALLEST) {
        long from = least(t, last), at = from * width;
        for (long n = at; n < at + TALLEST * width; n += 16) {
            __builtin_prefetch(l->values + n, 0, 2);
            __builtin_prefetch(l->next + n, 0, 2);
        }
        by[2](l->keys + at, width, 1, turned, side, width, scores + from * side, side);
    }
    for (long t = l->least; t < l->most; t++)
        for (long r = 0; r < l->queries; r++)
            if (t >= l->ends[r]) scores[t * side + r] = -INFINITY;
}

/* scores become weights; their sums go to `sums`, by query */
static void soften(const look *l, float *scores, float *sums)
{
    long side = l->side, stride = PARTS * side, floats = l->most * side, end = up(floats, stride);
    float tops[PARTS * SIDE], parts[PARTS * SIDE];
    for (long n = floats; n < end; n++) scores[n] = -INFINITY;
    for (long n = 0; n < stride; n += LANES) {
        lanes top = *(const lanes *)(scores + n);
        for (long m = n + stride; m < end; m += stride) {
            lanes x = *(const lanes *)(scores + m);
            top = chosen(x > top, x, top);
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
            lanes e = chosen(x == -INFINITY, all(0), exponential(x - top));
            *(lanes *)(scores + m) = e;
            sum += e;
        }
        *(lanes *)(parts + n) = sum;
    }
    for (long r = 0; r < l->queries; r++)
        sums[r] = (parts[r] + parts[side + r]) + (parts[2 * side + r] + parts[3 * side + r]);
}

/* out = what the queries make of the values, by their weights over the sums of these */
static void mix(const look *l, const float *weights, const float *sums, long heads, float *out)
{
    long width = l->width, wide = width % 32 == 0 ? 32 : width % 16 == 0 ? 16 : width % 8 == 0 ? 8 : 4;
    product *const *by = wide == 32 ? by_32 : wide == 16 ? by_16 : wide == 8 ? by_8 : by_4;
    float mixed[TALLEST * WIDEST];
    for (long w = 0; w < width; w += wide)
        for (long r = 0, left = l->queries, tall; left > 0; r += tall, left -= tall) {
            int which = left >= 8 ? 2 : left >= 4 ? 1 : 0;
            tall = 2 << which;
            by[which](weights + r, 1, l->side, l->values + w, width, l->most, mixed, WIDEST);
            for (long n = 0; n < least(tall, left); n++) {
                float *to = out + (l->tokens[r + n] * heads + l->heads[r + n]) * width + w;
                for (long i = 0; i < wide; i++) to[i] = mixed[n * WIDEST + i] / sums[r + n];
            }
        }
}

long attend_windows_scratch(long capacity) { return up(capacity * SIDE, PARTS * SIDE); }

/* Returns 0, or 1 for a width or a capacity that it isn't made for. */
int attend_windows(const float *queries, long pitch, const float *cache, const int64_t *positions, long rows, long window,
                   long heads, long shared, long width, long capacity, float scale, float *scores, float *out)
{
    if (width % 4 || width > MOST_WIDTH || capacity < TALLEST) return 1;
    long members = heads / shared, entries = capacity * width;
    float turned[MOST_WIDTH * SIDE], sums[SIDE];
    for (long at = 0; at < rows * shared; at++) {
        long row = at / shared, head = at % shared;
        look l = {.keys = cache + (row * 2 * shared + head) * entries, .width = width};
        l.values = l.keys + shared * entries;
        l.next = head + 1 < shared ? l.keys + entries : l.values + entries;
        for (long first = 0; first < window * members; first += SIDE) {
            l.queries = least(SIDE, window * members - first);
            l.side = l.queries <= 4 ? 4 : l.queries <= 8 ? 8 : SIDE;
            l.least = capacity, l.most = 0;
            for (long r = 0; r < l.queries; r++) {
                l.tokens[r] = row * window + (first + r) / members;
                l.heads[r] = (first + r) % members * shared + head;
                l.ends[r] = positions[l.tokens[r]] + 1;
                l.least = least(l.least, l.ends[r]), l.most = most(l.most, l.ends[r]);
            }
            turn(&l, queries, pitch, scale, turned);
            score(&l, turned, scores);
            soften(&l, scores, sums);
            mix(&l, scores, sums, heads, out);
        }
    }
    return 0;
}
