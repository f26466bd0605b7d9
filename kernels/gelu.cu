// GELU; the reference is in gelu.py.
#include "elements.cuh"

// The normal distribution.
template <typename S> __device__ __forceinline__ S phi(S v) { return S(0.5) + S(0.5) * erf(v * S(0.70710678118654752)); }

template <typename T> __global__ void gelu(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return max(v, Sum<T>(-40)) * phi(v); }, x);  // FAR in gelu.py
}

template <typename T> __global__ void gelu_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        const Sum<T> w = max(min(v, Sum<T>(40)), Sum<T>(-40));
        const Sum<T> density = exp(w * w * Sum<T>(-0.5)) * Sum<T>(0.39894228040143268);
        return g * (phi(v) + w * density);
    }, x, dy);
}

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

template <typename T> __global__ void gelu_tanh(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return v < Sum<T>(-20) ? Sum<T>(0) : v * Gate<Sum<T>>(v).s; }, x);
}

template <typename T> __global__ void gelu_tanh_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        Gate<Sum<T>> gate(v);
        return g * (v < Sum<T>(-20) ? Sum<T>(0) : gate.s + gate.rise);
    }, x, dy);
}
