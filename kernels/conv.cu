// Convolution lowered to products; see conv_cuda.py. Patches of an image are
// (groups, n, oh, ow, kh, kw, c / groups): for each group a matrix of pixels and what they see.
#include "window.cuh"

template <typename T> __global__ void im2col(const T* __restrict__ x, T* patches, Window g, int groups, long long count) {
    int each = g.c / groups;
    long long pixels = (long long)g.n * g.oh * g.ow;
    for (long long i = first(); i < count; i += step()) {
        Place tap = place(i, g.kh, g.kw, each);
        long long group = tap.sample / pixels;
        Place p = place(tap.sample % pixels, g.oh, g.ow, 1);
        int iy = p.y * g.sh - g.ph + tap.y * g.dh, ix = p.x * g.sw - g.pw + tap.x * g.dw;
        bool inside = iy >= 0 && iy < g.h && ix >= 0 && ix < g.w;
        patches[i] = inside ? x[pixel(p.sample, iy, ix, g.h, g.w, g.c) + group * each + tap.channel] : as<T>(Sum<T>(0));
    }
}

// The way back: each element of x is the sum of the patches' elements that saw it, in the order of the taps.
template <typename T> __global__ void col2im(const T* __restrict__ patches, T* x, Window g, int groups, long long count) {
    int each = g.c / groups;
    long long pixels = (long long)g.n * g.oh * g.ow;
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.h, g.w, g.c);
        int group = p.channel / each, channel = p.channel % each;
        Sum<T> sum = 0;
        for (int ky = 0; ky < g.kh; ky++) {
            int up = p.y + g.ph - ky * g.dh, oy = up / g.sh;
            if (up < 0 || up % g.sh != 0 || oy >= g.oh) continue;
            for (int kx = 0; kx < g.kw; kx++) {
                int left = p.x + g.pw - kx * g.dw, ox = left / g.sw;
                if (left < 0 || left % g.sw != 0 || ox >= g.ow) continue;
                long long row = group * pixels + pixel(p.sample, oy, ox, g.oh, g.ow, 1);
                sum += value(patches[pixel(row, ky, kx, g.kh, g.kw, each) + channel]);
            }
        }
        x[i] = as<T>(sum);
    }
}
