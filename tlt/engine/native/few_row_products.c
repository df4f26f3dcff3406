/* Products of a few rows with a large matrix, which is read from memory once.
 *
 * Invariant: a row's result doesn't depend, to the last bit, on the other rows.
 *
 * x is rows x inputs, matrix outputs x inputs, out rows x outputs; `x_row` and `out_row` are the
 * floats from one row to the next. Inputs are a multiple of LANES, outputs one of COLUMNS.
 */
#include "lanes.h"

/* A tile's sums hide a multiply-add's latency and fit the registers. */
#if defined(__AVX512F__)
enum { COLUMNS = 4, TALLEST = 6 };
#else
enum { COLUMNS = 4, TALLEST = 3 };
#endif

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

/* columns of the matrix's transpose, and what to fetch into the cache meanwhile */
typedef struct {
    const float *matrix;
    long inputs;
    const float *next; /* `fetched` columns of it */
    long fetched;
} block;

/* Add the lanes in an order that doesn't depend on the compiler. */
static inline float folded(lanes x)
{
    union {
        lanes whole;
        four parts[LANES / 4];
    } u = {x};
    four sum = u.parts[0];
    for (int p = 1; p < LANES / 4; p++) sum += u.parts[p];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline __attribute__((always_inline)) void multiply(
    const block *b, int tall, const float *x, long x_row, float *out, long out_row, int add)
{
    lanes sums[TALLEST][COLUMNS];
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = (lanes){0};
    for (long i = 0; i < b->inputs; i += LANES) {
        for (long n = 0; n < b->fetched; n++) __builtin_prefetch(b->next + n * b->inputs + i, 0, 2);
        lanes x_i[TALLEST];
        for (int r = 0; r < tall; r++) x_i[r] = *(const lanes *)(x + r * x_row + i);
        for (int c = 0; c < COLUMNS; c++) {
            lanes column = *(const lanes *)(b->matrix + c * b->inputs + i);
            for (int r = 0; r < tall; r++) sums[r][c] += x_i[r] * column;
        }
    }
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float sum = folded(sums[r][c]), *to = out + r * out_row + c;
            *to = add ? *to + sum : sum;
        }
}

typedef void tile(const block *b, const float *x, long x_row, float *out, long out_row, int add);

#define TILE(tall)                                                                                      \
    static void tile_##tall(const block *b, const float *x, long x_row, float *out, long out_row, int add) \
    {                                                                                                   \
        multiply(b, tall, x, x_row, out, out_row, add);                                                 \
    }
TILE(1)
TILE(2)
TILE(3)
#if defined(__AVX512F__)
TILE(4)
TILE(5)
TILE(6)
static tile *const tiles[] = {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};
#else
static tile *const tiles[] = {tile_1, tile_2, tile_3};
#endif

/* out = x times the transposed matrix, or that added to out; return 1 if the shape isn't supported. */
int multiply_few_rows(const float *x, long x_row, const float *matrix, long rows, long inputs, long outputs, float *out,
                      long out_row, int add)
{
    if (inputs % LANES || outputs % COLUMNS) return 1;
    long tiles_down = larger(up(rows, TALLEST) / TALLEST, 1), fetched = up(COLUMNS, tiles_down) / tiles_down;
    for (long o = 0; o < outputs; o += COLUMNS) {
        block b = {matrix + o * inputs, inputs, matrix + (o + COLUMNS) * inputs, 0};
        long unfetched = o + COLUMNS < outputs ? COLUMNS : 0;
        for (long r = 0; r < rows; r += TALLEST) {
            b.fetched = smaller(fetched, unfetched);
            tiles[smaller(TALLEST, rows - r) - 1](&b, x + r * x_row, x_row, out + r * out_row + o, out_row, add);
            b.next += b.fetched * inputs;
            unfetched -= b.fetched;
        }
    }
    return 0;
}
