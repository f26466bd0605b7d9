// Softplus and its gradient; the reference is in op.py.
#include "elements.cuh"

template <typename T> __global__ void softplus(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return (v > 0 ? v : Sum<T>(0)) + log1p(exp(v > 0 ? -v : v)); }, x);
}

template <typename T> __global__ void softplus_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return g / (Sum<T>(1) + exp(-v)); }, x, dy);
}
