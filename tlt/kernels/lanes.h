/* Vectors as wide as the machine's registers, in GCC's and Clang's vector types. */
#pragma once
#include <stdint.h>
#include <string.h>

/* TALL x VECTORS sums hide a multiply-add's latency and fit the registers. TALL divides WIDE. */
#if defined(__AVX512F__)
enum { LANES = 16, TALL = 8 };
#elif defined(__AVX__)
enum { LANES = 8, TALL = 4 };
#else
enum { LANES = 4, TALL = 8 };
#endif
enum { VECTORS = 2, WIDE = LANES * VECTORS };

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t counts __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }
static inline long up(long n, long unit) { return (n + unit - 1) / unit * unit; }

static inline lanes all(float x) { return (lanes){0} + x; }

static inline lanes choose(counts which, lanes yes, lanes no)
{
    return (lanes)(((counts)yes & which) | ((counts)no & ~which));
}

static inline float total(lanes x)
{
    float sum = 0;
    for (int n = 0; n < LANES; n++) sum += x[n];
    return sum;
}

/* Cephes' expf for numbers up to zero, but for rounding; NaN stays NaN. */
static inline lanes exponential(lanes x)
{
    x = choose(x < -87.0f, all(-87.0f), x);
    /* adding and subtracting 1.5 * 2^23 rounds to an integer */
    lanes whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * (rest * rest) + rest + 1.0f;
    return p * (lanes)((__builtin_convertvector(whole, counts) + 127) << 23);
}

static inline lanes sigmoid(lanes x)
{
    counts positive = x > 0;
    lanes e = exponential(choose(positive, -x, x));
    return choose(positive, all(1), e) / (1 + e);
}

/* A row may end within a vector; memory behind its end isn't touched. */
static inline lanes load_part(const float *from, long remaining)
{
    if (remaining >= LANES) return *(const lanes *)from;
    lanes part = {0};
    memcpy(&part, from, remaining * sizeof(float));
    return part;
}

static inline void store_part(lanes x, float *to, long remaining)
{
    memcpy(to, &x, smaller(remaining, LANES) * sizeof(float));
}
