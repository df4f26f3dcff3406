/* What a decoder layer computes between its products, each part in one pass over the tokens.
 *
 * Invariant: a token's result doesn't depend on the other tokens.
 *
 * `pitch` is the floats from one token to the next.
 */
#include <math.h>
#include <string.h>

#include "lanes.h"

/* out = x over the root of |x|^2 + floor^2 */
void normalise(const float *x, float *out, long tokens, long width, float floor)
{
    for (long t = 0; t < tokens; t++, x += width, out += width) {
        lanes squares = {0};
        for (long i = 0; i < width; i += LANES) {
            lanes part = load_part(x + i, width - i);
            squares += part * part;
        }
        float length = sqrtf(total(squares) + floor * floor);
        for (long i = 0; i < width; i += LANES) store_part(load_part(x + i, width - i) / length, out + i, width - i);
    }
}

/* gate = silu(gate) * up, where up follows gate */
void gate(float *gate_up, long tokens, long width)
{
    for (long t = 0; t < tokens; t++, gate_up += 2 * width)
        for (long i = 0; i < width; i += LANES) {
            lanes x = load_part(gate_up + i, width - i);
            store_part(x * sigmoid(x) * load_part(gate_up + width + i, width - i), gate_up + i, width - i);
        }
}

/* Rotate the first `turned` heads of each token, whose pairs of numbers are complex, by its turns. */
void rotate(float *heads, long pitch, const float *turns, long tokens, long turned, long width)
{
    for (long t = 0; t < tokens; t++, heads += pitch, turns += width)
        for (long h = 0; h < turned; h++) {
            float *head = heads + h * width;
            for (long i = 0; i < width; i += 2) {
                float real = head[i], imaginary = head[i + 1];
                head[i] = real * turns[i] - imaginary * turns[i + 1];
                head[i + 1] = real * turns[i + 1] + imaginary * turns[i];
            }
        }
}

/* Copy each of a token's `count` entries of `width` floats to its row of the cache. */
void cache_entries(const float *entries, long pitch, long tokens, long count, long width, float *cache,
                   const int64_t *rows)
{
    for (long t = 0; t < tokens; t++, entries += pitch)
        for (long n = 0; n < count; n++)
            memcpy(cache + rows[t * count + n] * width, entries + n * width, width * sizeof(float));
}
