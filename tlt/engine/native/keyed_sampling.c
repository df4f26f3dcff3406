/* Keyed noise and exact samples, one pass over a vocabulary each.
 *
 * Invariant: what a row gets doesn't depend on the other rows.
 */
#include <math.h>
#include <string.h>

#include "lanes.h"

typedef uint64_t words __attribute__((vector_size(LANES * 8), aligned(8), may_alias));
typedef int64_t signed_words __attribute__((vector_size(LANES * 8)));

/* sums of more exponentials than these are kept in double */
enum { BLOCK = 64 * LANES };

/* the finaliser of SplitMix64 */
static inline words mixed(words x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Cephes' logf for normal numbers above zero, but for rounding. */
static inline lanes logarithm(lanes x)
{
    counts bits = (counts)x;
    counts exponent = (bits >> 23) - 126;
    lanes m = (lanes)((bits & 0x007fffff) | 0x3f000000);
    counts low = m < 0.707106781f;
    exponent += low;
    m = choose(low, m + m, m) - 1.0f;
    lanes e = __builtin_convertvector(exponent, lanes), z = m * m;
    lanes p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    lanes y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
    return m + y + e * 0.693359375f;
}

/* noise[rows x count] of each row's word and each token's */
void fill_gumbel_noise(const int64_t *row_words, const int64_t *token_words, long rows, long count, float *noise)
{
    for (long r = 0; r < rows; r++, noise += count)
        for (long t = 0; t < count; t += LANES) {
            long some = smaller(LANES, count - t);
            words w = {0};
            if (some == LANES) w = *(const words *)(token_words + t);
            else memcpy(&w, token_words + t, some * 8);
            signed_words drawn = (signed_words)mixed(w + (uint64_t)row_words[r]) & INT64_MAX;
            lanes u = __builtin_convertvector(drawn, lanes) * 0x1p-63f;
            u = choose(u < 0x1p-64f, all(0x1p-64f), choose(u > 1.0f - 0x1p-24f, all(1.0f - 0x1p-24f), u));
            /* -log1p(-u): the quotient takes away the error of rounding 1 - u */
            lanes rest = 1.0f - u, above = 1.0f - rest;
            lanes exact = choose(above == 0.0f, u, -logarithm(rest) * u / choose(above == 0.0f, all(1.0f), above));
            lanes found = -logarithm(exact);
            if (some == LANES) *(lanes *)(noise + t) = found;
            else memcpy(noise + t, &found, some * 4);
        }
}

static inline lanes scaled(const float *x, long some, float divisor)
{
    lanes found = all(-INFINITY);
    if (some >= LANES) found = *(const lanes *)x;
    else memcpy(&found, x, some * 4);
    return found / divisor;
}

/* Return the first token with the largest sum of logit and noise; write the largest logit, too. */
static long best_token(const float *logits, const float *noise, long count, float divisor, float *largest)
{
    lanes top = all(-INFINITY), best = top;
    counts which = {0}, index;
    for (int n = 0; n < LANES; n++) index[n] = n;
    for (long t = 0; t < count; t += LANES, index += LANES) {
        lanes x = scaled(logits + t, count - t, divisor), sum = x;
        if (noise) {
            lanes drawn = {0};
            if (count - t >= LANES) drawn = *(const lanes *)(noise + t);
            else memcpy(&drawn, noise + t, (count - t) * 4);
            sum += drawn;
        }
        counts better = sum > best;
        top = choose(x > top, x, top);
        best = choose(better, sum, best);
        which = (which & ~better) | (index & better);
    }
    int at = 0;
    *largest = top[0];
    for (int n = 1; n < LANES; n++) {
        if (top[n] > *largest) *largest = top[n];
        if (best[n] > best[at] || (best[n] == best[at] && which[n] < which[at])) at = n;
    }
    return which[at];
}

/* tokens[rows], and their log-probs unless these are null, by rows of logits and of noise or null;
 * every `window` rows share a divisor, if there are any. */
void draw_tokens(const float *logits, const float *noise, const float *divisors, long rows, long window, long count,
                 int64_t *tokens, float *logprobs)
{
    for (long r = 0; r < rows; r++, logits += count) {
        float largest, divisor = divisors ? divisors[r / window] : 1.0f;
        tokens[r] = best_token(logits, noise ? noise + r * count : 0, count, divisor, &largest);
        if (!logprobs) continue;
        double sum = 0;
        for (long first = 0; first < count; first += BLOCK) {
            lanes part = {0};
            for (long t = first; t < smaller(first + BLOCK, count); t += LANES) {
                lanes x = scaled(logits + t, count - t, divisor) - largest;
                part += choose(x == -INFINITY, all(0), exponential(x));
            }
            sum += total(part);
        }
        logprobs[r] = logits[tokens[r]] / divisor - largest - log(sum);
    }
}
