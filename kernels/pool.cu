// Maximum and average over windows; the reference beside each is in pool.py. One thread makes one element. Gradients
// are gathered: each element of dx looks at the windows that cover it, in their order, so that nothing is added twice
// or in another order.
#include "window.cuh"

// The taps of a window that lie inside an axis of `size` when its first tap is at `start`: from `low` up to `high`.
struct Taps {
    int low, high;
};
__device__ __forceinline__ Taps inside(int start, int taps, int size) {
    return {max(0, -start), min(taps, size - start)};
}

// The windows that cover place `at` of a padded axis: from `low` up to `high`.
__device__ __forceinline__ Taps covering(int at, int taps, int stride, int windows) {
    return {at < taps ? 0 : (at - taps) / stride + 1, min(windows, at / stride + 1)};
}

// One over the number of taps of a window that are in the image or its padding.
__device__ __forceinline__ double share(const Window& g, int oy, int ox) {
    return 1.0 / (min(g.kh, g.h + 2 * g.ph - oy * g.sh) * min(g.kw, g.w + 2 * g.pw - ox * g.sw));
}

template <typename T> __global__ void max_pool2d(const T* __restrict__ x, T* y, int* tap, Window g, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.oh, g.ow, g.c);
        int top = p.y * g.sh - g.ph, left = p.x * g.sw - g.pw;
        Taps rows = inside(top, g.kh, g.h), columns = inside(left, g.kw, g.w);
        Sum<T> best = -Sum<T>(1) / Sum<T>(0);
        int which = rows.low * g.kw + columns.low;
        for (int ky = rows.low; ky < rows.high; ky++)
            for (int kx = columns.low; kx < columns.high; kx++) {
                Sum<T> v = value(x[pixel(p.sample, top + ky, left + kx, g.h, g.w, g.c) + p.channel]);
                if (v > best || (v != v && best == best)) {  // the first NaN wins
                    best = v;
                    which = ky * g.kw + kx;
                }
            }
        y[i] = as<T>(best);
        tap[i] = which;
    }
}

template <typename T> __global__ void max_pool2d_grad(const int* __restrict__ tap, const T* __restrict__ dy, T* dx, Window g, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.h, g.w, g.c);
        int y = p.y + g.ph, x = p.x + g.pw;
        Taps rows = covering(y, g.kh, g.sh, g.oh), columns = covering(x, g.kw, g.sw, g.ow);
        Sum<T> sum = 0;
        for (int oy = rows.low; oy < rows.high; oy++)
            for (int ox = columns.low; ox < columns.high; ox++) {
                long long at = pixel(p.sample, oy, ox, g.oh, g.ow, g.c) + p.channel;
                if (tap[at] == (y - oy * g.sh) * g.kw + x - ox * g.sw) sum += value(dy[at]);
            }
        dx[i] = as<T>(sum);
    }
}

template <typename T> __global__ void avg_pool2d(const T* __restrict__ x, T* y, Window g, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.oh, g.ow, g.c);
        int top = p.y * g.sh - g.ph, left = p.x * g.sw - g.pw;
        Taps rows = inside(top, g.kh, g.h), columns = inside(left, g.kw, g.w);
        Sum<T> sum = 0;
        for (int ky = rows.low; ky < rows.high; ky++)
            for (int kx = columns.low; kx < columns.high; kx++)
                sum += value(x[pixel(p.sample, top + ky, left + kx, g.h, g.w, g.c) + p.channel]);
        y[i] = as<T>(sum * Sum<T>(share(g, p.y, p.x)));
    }
}

template <typename T> __global__ void avg_pool2d_grad(const T* __restrict__ dy, T* dx, Window g, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.h, g.w, g.c);
        Taps rows = covering(p.y + g.ph, g.kh, g.sh, g.oh), columns = covering(p.x + g.pw, g.kw, g.sw, g.ow);
        Sum<T> sum = 0;
        for (int oy = rows.low; oy < rows.high; oy++)
            for (int ox = columns.low; ox < columns.high; ox++)
                sum += value(dy[pixel(p.sample, oy, ox, g.oh, g.ow, g.c) + p.channel]) * Sum<T>(share(g, oy, ox));
        dx[i] = as<T>(sum);
    }
}
