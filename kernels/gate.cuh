// The gate of GELU's tanh form. Needs common.cuh.
#pragma once

// s = (1 + tanh(u)) / 2 for u = sqrt(2 / pi) (v + 0.044715 v^3), and v ds / dv.
template <typename S> struct Gate {
    S s, rise;
    __device__ __forceinline__ explicit Gate(S v) {
        S w = v < S(-20) ? S(-20) : v > S(20) ? S(20) : v;
        S a = S(-1.5957691216057308) * (w + S(0.044715) * w * w * w);
        S e = exp(sizeof(S) < 8 && a > S(87) ? S(87) : a);
        s = S(1) / (S(1) + e);
        rise = w * (s * (e * s) * S(1.5957691216057308) * (S(1) + S(0.134145) * w * w));
    }
};

// The slope of v s.
template <typename S> __device__ __forceinline__ S gelu_tanh_slope(S v) {
    Gate<S> gate(v);
    return v < S(-20) ? S(0) : gate.s + gate.rise;
}
