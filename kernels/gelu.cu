// GELU; the reference is in gelu.py.
#include "elements.cuh"
#include "gate.cuh"

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

template <typename T> __global__ void gelu_tanh(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return v < Sum<T>(-20) ? Sum<T>(0) : v * Gate<Sum<T>>(v).s; }, x);
}

template <typename T> __global__ void gelu_tanh_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        return g * gelu_tanh_slope(v);
    }, x, dy);
}
