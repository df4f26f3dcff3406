/* RMS norms and gates of a decoder layer, forward and backward in one pass each, in float32. */
#include <math.h>
#include <string.h>

#include "lanes.h"

/* y = x * inverse * w, where inverse is one over the root of the mean square */
void rms_norm(const float *x, const float *w, float *y, float *inverse, long rows, long width, float eps)
{
    for (long r = 0; r < rows; r++, x += width, y += width) {
        lanes squares = {0};
        for (long i = 0; i < width; i += LANES) {
            lanes part = load_part(x + i, width - i);
            squares += part * part;
        }
        inverse[r] = 1 / sqrtf(total(squares) / width + eps);
        for (long i = 0; i < width; i += LANES)
            store_part(load_part(x + i, width - i) * inverse[r] * load_part(w + i, width - i), y + i, width - i);
    }
}

/* dw is added to, so the caller sets it to zero */
void rms_norm_backward(const float *g, const float *x, const float *w, const float *inverse, float *dx, float *dw,
                       long rows, long width)
{
    for (long r = 0; r < rows; r++, g += width, x += width, dx += width) {
        lanes along = {0};
        for (long i = 0; i < width; i += LANES) {
            lanes slope = load_part(g + i, width - i), part = load_part(x + i, width - i);
            along += slope * load_part(w + i, width - i) * part;
            store_part(load_part(dw + i, width - i) + slope * part * inverse[r], dw + i, width - i);
        }
        float correction = total(along) * inverse[r] * inverse[r] / width;
        for (long i = 0; i < width; i += LANES) {
            lanes slope = load_part(g + i, width - i) * load_part(w + i, width - i);
            store_part((slope - load_part(x + i, width - i) * correction) * inverse[r], dx + i, width - i);
        }
    }
}

/* out = gate * sigmoid(gate) * up */
void gated(const float *gate, const float *up, float *out, long count)
{
    for (long i = 0; i < count; i += LANES) {
        lanes x = load_part(gate + i, count - i);
        store_part(x * sigmoid(x) * load_part(up + i, count - i), out + i, count - i);
    }
}

void gated_backward(const float *g, const float *gate, const float *up, float *dgate, float *dup, long count)
{
    for (long i = 0; i < count; i += LANES) {
        lanes slope = load_part(g + i, count - i), x = load_part(gate + i, count - i), s = sigmoid(x);
        store_part(slope * x * s, dup + i, count - i);
        store_part(slope * load_part(up + i, count - i) * s * (1 + x * (1 - s)), dgate + i, count - i);
    }
}
