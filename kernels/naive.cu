// The naive kernel of each family, in float: a thread computes one element of the output straight from the formula in the
// reference. Nothing is shared between threads, so sums of a row or a channel belong to one thread. Compare each with the
// fast form of its family: `minidl kernels NAME` times both where there is a GPU. A thread past `count` has nothing to do.
#include "window.cuh"

#define ELEMENT(i, count)       \
    const long long i = first(); \
    if (i >= count) return

// ------------------------------------------------------------------------------------------------- element by element
__global__ void add(const float* x, const float* y, float* z, long long count) {
    ELEMENT(i, count);
    z[i] = x[i] + y[i];
}

__global__ void gelu(const float* x, float* y, long long count) {
    ELEMENT(i, count);
    y[i] = x[i] * (0.5f + 0.5f * erff(x[i] * 0.70710678f));
}

// ----------------------------------------------------------------------------------------------------------- products
// y (m, n) = a (m, k) b (k, n).
__global__ void matmul(const float* a, const float* b, float* y, int k, int n, long long count) {
    ELEMENT(i, count);
    const long long row = i / n, column = i % n;
    float sum = 0;
    for (int j = 0; j < k; j++) sum += a[row * k + j] * b[(long long)j * n + column];
    y[i] = sum;
}

// dw (out, in) = dy (rows, out)^T x (rows, in); the threads of dw's first column also sum db (out,).
__global__ void linear_weight_grad(const float* x, const float* dy, float* dw, float* db, int rows, int in, int out,
                                   long long count) {
    ELEMENT(i, count);
    const long long row = i / in, column = i % in;
    float sum = 0, plain = 0;
    for (long long r = 0; r < rows; r++) sum += dy[r * out + row] * x[r * in + column], plain += dy[r * out + row];
    dw[i] = sum;
    if (column == 0) db[row] = plain;
}

// ------------------------------------------------------------------------------------------------------- convolutions
// y (n, oh, ow, o), w (o, kh, kw, c / groups).
__global__ void conv2d(const float* x, const float* w, float* y, Window g, int o, int groups, long long count) {
    ELEMENT(i, count);
    const Place p = place(i, g.oh, g.ow, o);
    const int each = g.c / groups, begin = p.channel / (o / groups) * each;
    float sum = 0;
    for (int ky = 0; ky < g.kh; ky++)
        for (int kx = 0; kx < g.kw; kx++) {
            const int iy = p.y * g.sh - g.ph + ky * g.dh, ix = p.x * g.sw - g.pw + kx * g.dw;
            if (iy < 0 || iy >= g.h || ix < 0 || ix >= g.w) continue;
            const float* from = x + pixel(p.sample, iy, ix, g.h, g.w, g.c) + begin;
            const float* tap = w + pixel(p.channel, ky, kx, g.kh, g.kw, each);
            for (int c = 0; c < each; c++) sum += from[c] * tap[c];
        }
    y[i] = sum;
}

// dx (n, h, w, c): the outputs that saw a pixel through each tap.
__global__ void conv2d_input_grad(const float* dy, const float* w, float* dx, Window g, int o, int groups, long long count) {
    ELEMENT(i, count);
    const Place p = place(i, g.h, g.w, g.c);
    const int each = g.c / groups, outs = o / groups, begin = p.channel / each * outs;
    float sum = 0;
    for (int ky = 0; ky < g.kh; ky++)
        for (int kx = 0; kx < g.kw; kx++) {
            const int up = p.y + g.ph - ky * g.dh, left = p.x + g.pw - kx * g.dw;
            if (up < 0 || left < 0 || up % g.sh || left % g.sw || up / g.sh >= g.oh || left / g.sw >= g.ow) continue;
            const float* from = dy + pixel(p.sample, up / g.sh, left / g.sw, g.oh, g.ow, o) + begin;
            for (int k = 0; k < outs; k++) sum += from[k] * w[pixel(begin + k, ky, kx, g.kh, g.kw, each) + p.channel % each];
        }
    dx[i] = sum;
}

// dw (o, kh, kw, c / groups): all pixels of all samples, through one tap.
__global__ void conv2d_weight_grad(const float* x, const float* dy, float* dw, Window g, int o, int groups, long long count) {
    ELEMENT(i, count);
    const int each = g.c / groups;
    const Place tap = place(i, g.kh, g.kw, each);
    const int out = int(tap.sample), channel = out / (o / groups) * each + tap.channel;
    float sum = 0;
    for (int n = 0; n < g.n; n++)
        for (int y = 0; y < g.oh; y++)
            for (int z = 0; z < g.ow; z++) {
                const int iy = y * g.sh - g.ph + tap.y * g.dh, ix = z * g.sw - g.pw + tap.x * g.dw;
                if (iy < 0 || iy >= g.h || ix < 0 || ix >= g.w) continue;
                sum += x[pixel(n, iy, ix, g.h, g.w, g.c) + channel] * dy[pixel(n, y, z, g.oh, g.ow, o) + out];
            }
    dw[i] = sum;
}

// y (n, oh, ow, c), and the first tap that has the maximum.
__global__ void max_pool2d(const float* x, float* y, int* tap, Window g, long long count) {
    ELEMENT(i, count);
    const Place p = place(i, g.oh, g.ow, g.c);
    float best = 0;
    int where = -1;
    for (int k = 0; k < g.kh * g.kw; k++) {
        const int iy = p.y * g.sh - g.ph + k / g.kw, ix = p.x * g.sw - g.pw + k % g.kw;
        if (iy < 0 || iy >= g.h || ix < 0 || ix >= g.w) continue;
        const float v = x[pixel(p.sample, iy, ix, g.h, g.w, g.c) + p.channel];
        if (where < 0 || v > best || (v != v && best == best)) best = v, where = k;
    }
    y[i] = best, tap[i] = where;
}

// --------------------------------------------------------------------------------------------------------------- sums
// x (outer, n, inner), y (outer, inner).
__global__ void sum_(const float* x, float* y, int n, int inner, float factor, long long count) {
    ELEMENT(i, count);
    float sum = 0;
    for (int j = 0; j < n; j++) sum += x[(i / inner * n + j) * inner + i % inner];
    y[i] = sum * factor;
}

// ---------------------------------------------------------------------------------------- a thread for each row (n, d)
__global__ void softmax(const float* x, float* y, int d, long long rows) {
    ELEMENT(row, rows);
    x += row * d, y += row * d;
    float top = x[0], sum = 0;
    for (int j = 1; j < d; j++) top = x[j] > top ? x[j] : top;
    for (int j = 0; j < d; j++) sum += y[j] = expf(x[j] - top);
    for (int j = 0; j < d; j++) y[j] /= sum;
}

// After softmax: the mean loss, by one thread. The target is 1 - smoothing at the label plus smoothing / d everywhere.
__global__ void cross_entropy(const float* p, const long long* labels, float* loss, int d, float smoothing, long long ignore,
                              long long rows) {
    double sum = 0;
    long long counted = 0;
    for (long long row = 0; row < rows; row++) {
        if (labels[row] == ignore) continue;
        counted++;
        sum -= (1 - smoothing) * logf(p[row * d + labels[row]]);
        for (int j = 0; j < d; j++) sum -= smoothing / d * logf(p[row * d + j]);
    }
    *loss = float(sum / (counted ? counted : 1));
}

__global__ void cross_entropy_grad(const float* p, const long long* labels, const float* dy, float* dx, int d, float smoothing,
                                   long long ignore, long long rows) {
    ELEMENT(row, rows);
    long long counted = 0;
    for (long long r = 0; r < rows; r++) counted += labels[r] != ignore;
    const float factor = labels[row] == ignore ? 0 : *dy / counted;
    for (int j = 0; j < d; j++)
        dx[row * d + j] = (p[row * d + j] - smoothing / d - (j == labels[row] ? 1 - smoothing : 0)) * factor;
}

__global__ void layer_norm(const float* x, const float* w, const float* b, float* y, float* mean, float* scale, int d,
                           double eps, long long rows) {
    ELEMENT(row, rows);
    x += row * d, y += row * d;
    float m = 0, squares = 0;
    for (int j = 0; j < d; j++) m += x[j] / d;
    for (int j = 0; j < d; j++) squares += (x[j] - m) * (x[j] - m) / d;
    const float s = 1 / sqrtf(squares + float(eps));
    for (int j = 0; j < d; j++) y[j] = (x[j] - m) * s * w[j] + b[j];
    mean[row] = m, scale[row] = s;
}

__global__ void rms_norm(const float* x, const float* w, float* y, float* mean, float* scale, int d, double eps, long long rows) {
    ELEMENT(row, rows);
    x += row * d, y += row * d;
    float squares = 0;
    for (int j = 0; j < d; j++) squares += x[j] * x[j] / d;
    const float s = 1 / sqrtf(squares + float(eps));
    for (int j = 0; j < d; j++) y[j] = x[j] * s * w[j];
    mean[row] = 0, scale[row] = s;
}

// q (heads, t, d), k (heads, s, d), v (heads, s, e), p (heads, t, s): a thread for each query.
__global__ void attention(const float* q, const float* k, const float* v, float* y, float* p, int t, int s, int d, int e,
                          float scale, bool causal, int offset, long long queries) {
    ELEMENT(query, queries);
    const long long head = query / t, left = query % t + offset + 1, seen = causal && left < s ? (left < 0 ? 0 : left) : s;
    q += query * d, k += head * s * d, v += head * s * e, y += query * e, p += query * s;
    float top = 0, sum = 0;
    for (int j = 0; j < seen; j++) {
        float score = 0;
        for (int c = 0; c < d; c++) score += q[c] * scale * k[j * d + c];
        p[j] = score, top = j == 0 || score > top ? score : top;
    }
    for (int j = 0; j < s; j++) sum += p[j] = j < seen ? expf(p[j] - top) : 0;
    for (int c = 0; c < e; c++) y[c] = 0;
    for (int j = 0; j < seen; j++) {
        p[j] /= sum;
        for (int c = 0; c < e; c++) y[c] += p[j] * v[j * e + c];
    }
}

// -------------------------------------------------------------------------------- a thread for each channel of (rows, c)
__global__ void batch_norm(const float* x, const float* w, const float* b, const float* running_mean, const float* running_var,
                           const long long* tracked, float* y, float* mean, float* rstd, float* mean_after, float* var_after,
                           long long* tracked_after, int rows, double eps, float momentum, long long channels) {
    ELEMENT(c, channels);
    double m = 0, var = 0;
    for (long long r = 0; r < rows; r++) m += x[r * channels + c];
    m /= rows;
    for (long long r = 0; r < rows; r++) var += (x[r * channels + c] - m) * (x[r * channels + c] - m);
    const float s = float(1 / sqrt(var / rows + eps));
    for (long long r = 0; r < rows; r++) y[r * channels + c] = (x[r * channels + c] - float(m)) * s * w[c] + b[c];
    mean[c] = float(m), rstd[c] = s;
    mean_after[c] = running_mean[c] + momentum * (float(m) - running_mean[c]);
    var_after[c] = running_var[c] + momentum * (float(var / (rows - 1)) - running_var[c]);
    if (c == 0) *tracked_after = *tracked + 1;
}

__global__ void batch_norm_weight_grad(const float* x, const float* mean, const float* rstd, const float* dy, float* dw, float* db,
                                       int rows, long long channels) {
    ELEMENT(c, channels);
    double products = 0, sum = 0;
    for (long long r = 0; r < rows; r++) {
        products += dy[r * channels + c] * (x[r * channels + c] - mean[c]);
        sum += dy[r * channels + c];
    }
    dw[c] = float(products * rstd[c]), db[c] = float(sum);
}
