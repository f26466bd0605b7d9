// GELU; the reference is in gelu.py.
#include "elements.cuh"

// The normal distribution.
template <typename S> __device__ __forceinline__ S phi(S v) { return S(0.5) + S(0.5) * erf(v * S(0.70710678118654752)); }

template <typename T> __global__ void gelu(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return v * phi(v); }, x);
}

template <typename T> __global__ void gelu_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        Sum<T> density = exp(v * v * Sum<T>(-0.5)) * Sum<T>(0.39894228040143268);
        return g * (phi(v) + v * density);
    }, x, dy);
}
