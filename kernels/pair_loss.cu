// Losses of a prediction and a target, element by element, and their gradients; the references are in pair_loss.py.
#include "elements.cuh"

template <typename T> __global__ void l1(const T* x, const T* t, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return fabs(p - q); }, x, t);
}

template <typename T> __global__ void l1_grad(const T* x, const T* t, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> p, Sum<T> q, Sum<T> g) {
        const Sum<T> d = p - q;
        return d != d ? d : Sum<T>((d > 0) - (d < 0)) * g;
    }, x, t, dy);
}

template <typename T> __global__ void smooth_l1(const T* x, const T* t, T* y, Strides s, double beta) {
    map(s, y, [=](Sum<T> p, Sum<T> q) {
        const Sum<T> d = fabs(p - q), b = Sum<T>(beta);
        return d < b ? d * d * Sum<T>(0.5 / beta) : d - Sum<T>(0.5) * b;
    }, x, t);
}

template <typename T> __global__ void smooth_l1_grad(const T* x, const T* t, const T* dy, T* dx, Strides s, double beta) {
    map(s, dx, [=](Sum<T> p, Sum<T> q, Sum<T> g) {
        const Sum<T> d = (p - q) / Sum<T>(beta);
        return g * (d > 1 ? Sum<T>(1) : d < -1 ? Sum<T>(-1) : d);
    }, x, t, dy);
}

template <typename T> __global__ void bce_with_logits(const T* x, const T* t, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) {
        const Sum<T> share = (p > 0 ? Sum<T>(1) : Sum<T>(0)) - q, infinite = share == 0 ? Sum<T>(0) : p * share;
        return (p - p == 0 ? (p > 0 ? p : Sum<T>(0)) - p * q : infinite) + log1p(exp(-fabs(p)));
    }, x, t);
}

template <typename T> __global__ void bce_with_logits_grad(const T* x, const T* t, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> p, Sum<T> q, Sum<T> g) {
        return (tanh(p * Sum<T>(0.5)) * Sum<T>(0.5) + Sum<T>(0.5) - q) * g;
    }, x, t, dy);
}

// log(v), at least -100; NaN stays.
template <typename S> __device__ __forceinline__ S log_of(S v) {
    const S found = log(v);
    return found < S(-100) ? S(-100) : found;
}

template <typename T> __global__ void bce(const T* x, const T* t, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return -(q * log_of(p) + (1 - q) * log_of(1 - p)); }, x, t);
}

template <typename T> __global__ void bce_grad(const T* x, const T* t, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> p, Sum<T> q, Sum<T> g) {
        const Sum<T> d = (1 - p) * p;
        return g * (p - q) / (d < Sum<T>(1e-12) ? Sum<T>(1e-12) : d);
    }, x, t, dy);
}

template <typename T> __global__ void bce_target_grad(const T* x, const T* t, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> p, Sum<T>, Sum<T> g) { return g * (log_of(1 - p) - log_of(p)); }, x, t, dy);
}

template <typename T> __global__ void kl_div(const T* x, const T* t, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return q != 0 ? q * (log(q) - p) : p != p ? p : Sum<T>(0); }, x, t);
}
