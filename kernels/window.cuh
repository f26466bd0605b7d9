// A window that moves over an image with channels last, as convolution and pooling share it.
#pragma once
#include "common.cuh"

// Images x (n, h, w, c) and y (n, oh, ow, ...); then (vertical, horizontal) taps, stride, padding, dilation.
struct Window {
    int n, h, w, c, oh, ow;
    int kh, kw, sh, sw, ph, pw, dh, dw;
};

// A flat index of an image (n, h, w, c), taken apart.
struct Place {
    long long sample;
    int y, x, channel;
};
__device__ __forceinline__ Place place(long long i, int h, int w, int c) {
    Place p;
    p.channel = int(i % c), i /= c;
    p.x = int(i % w), i /= w;
    p.y = int(i % h), p.sample = i / h;
    return p;
}

// The first element of the pixel (sample, y, x).
__device__ __forceinline__ long long pixel(long long sample, int y, int x, int h, int w, int c) {
    return ((sample * h + y) * w + x) * c;
}
