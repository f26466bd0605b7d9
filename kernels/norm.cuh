// A channel's part of batch norm, and the activations that may follow it.
#pragma once
#include "columns.cuh"

enum { NONE, RELU, RELU6, HARDSWISH };  // as in channels.py

template <typename S> __device__ __forceinline__ S activated(S v, int act) {
    if (act == RELU) return !(v <= 0) ? v : S(0);  // NaN passes through
    if (act == RELU6) return v < 0 ? S(0) : v > 6 ? S(6) : v;
    if (act == HARDSWISH) {
        S gate = v + 3;
        return max(v, S(-3)) * ((gate < 0 ? S(0) : gate > 6 ? S(6) : gate) * S(1.0 / 6));
    }
    return v;
}

// dy times the slope of the activation at v. For relu and relu6 v may be the output, too.
template <typename S> __device__ __forceinline__ S sloped(S dy, S v, int act) {
    if (act == RELU) return v > 0 ? dy : S(0);
    if (act == RELU6) return v > 0 && v < 6 ? dy : S(0);
    if (act == HARDSWISH) return v > -3 && v < 3 ? dy * (v * S(1.0 / 3) + S(0.5)) : v < 0 ? S(0) : dy;
    return dy;
}

// Of a thread's channels: mean, weight / standard deviation, bias. The backward pass makes the same bits as the forward pass.
template <typename S> struct Channels {
    S mean[WIDE], scale[WIDE], bias[WIDE];
    __device__ __forceinline__ S operator()(int c, S x) const { return fma(x - mean[c], scale[c], bias[c]); }
};
template <typename S>
__device__ __forceinline__ Channels<S> channels_of(int count, const S* __restrict__ mean, const S* __restrict__ rstd,
                                                   const S* __restrict__ w, const S* __restrict__ b) {
    Channels<S> found;
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
        const long long j = column() + min(c, count - 1);
        found.mean[c] = mean[j], found.scale[c] = rstd[j] * w[j], found.bias[c] = b[j];
    }
    return found;
}
