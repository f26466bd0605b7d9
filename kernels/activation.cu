// Activations; the reference beside each is in activation.py. NaN passes through.
#include "elements.cuh"

template <typename S> __device__ __forceinline__ S clamp6(S v) { return v < 0 ? S(0) : v > 6 ? S(6) : v; }

template <typename T> __global__ void relu6(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return clamp6(v); }, x);
}

template <typename T> __global__ void relu6_grad(const T* y, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return v > 0 && v < 6 ? g : Sum<T>(0); }, y, dy);
}

template <typename T> __global__ void hardsigmoid(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return clamp6(v + 3) * Sum<T>(1.0 / 6); }, x);
}

template <typename T> __global__ void hardsigmoid_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return v > -3 && v < 3 ? g * Sum<T>(1.0 / 6) : Sum<T>(0); }, x, dy);
}

template <typename T> __global__ void hardswish(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return max(v, Sum<T>(-3)) * (clamp6(v + 3) * Sum<T>(1.0 / 6)); }, x);
}

template <typename T> __global__ void hardswish_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        Sum<T> outer = v < 0 ? Sum<T>(0) : g;
        return v > -3 && v < 3 ? g * (v * Sum<T>(1.0 / 3) + Sum<T>(0.5)) : outer;
    }, x, dy);
}

// v where the other factor is exactly 0 or 1 beyond: see FAR in activation.py.
template <typename S> __device__ __forceinline__ S near(S v) { return max(min(v, S(1000)), S(-1000)); }

template <typename S> __device__ __forceinline__ S sigmoid_of(S v) { return tanh(v * S(0.5)) * S(0.5) + S(0.5); }

template <typename T> __global__ void silu(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return max(v, Sum<T>(-1000)) * sigmoid_of(v); }, x);
}

template <typename T> __global__ void silu_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        const Sum<T> s = sigmoid_of(v);
        return g * (s * (1 + near(v) * (1 - s)));
    }, x, dy);
}

// tanh(log(1 + exp(v))) = n / d, both polynomials of e = exp(-|v|).
template <typename S> struct Mish {
    S e, n, d;
    __device__ __forceinline__ explicit Mish(S v) {
        e = exp(-fabs(v));
        n = v < 0 ? e * (e + 2) : 1 + 2 * e;
        d = n + (v < 0 ? S(2) : 2 * e * e);
    }
};

template <typename T> __global__ void mish(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) {
        const Mish<Sum<T>> of(v);
        return max(v, Sum<T>(-1000)) * (of.n / of.d);
    }, x);
}

template <typename T> __global__ void mish_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        const Mish<Sum<T>> of(v);
        const Sum<T> slope = 4 * of.e * (1 + of.e) * (v < 0 ? Sum<T>(1) : of.e) / (of.d * of.d);
        return g * (of.n / of.d + near(v) * slope);
    }, x, dy);
}

template <typename T> __global__ void softsign(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) {
        const Sum<T> most = Sum<T>(1e30), w = v > most ? most : v < -most ? -most : v;
        return w / (1 + fabs(w));
    }, x);
}

template <typename T> __global__ void softsign_grad(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return g / (1 + fabs(v)) / (1 + fabs(v)); }, x, dy);
}

template <typename T> __global__ void leaky_relu(const T* x, T* y, Strides s, double slope) {
    map(s, y, [=](Sum<T> v) { return v > 0 ? v : Sum<T>(slope) * v; }, x);
}

template <typename T> __global__ void leaky_relu_grad(const T* x, const T* dy, T* dx, Strides s, double slope) {
    map(s, dx, [=](Sum<T> v, Sum<T> g) { return v > 0 ? g : Sum<T>(slope) * g; }, x, dy);
}

template <typename T> __global__ void spike(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return v >= 1 ? Sum<T>(1) : v < 1 ? Sum<T>(0) : v; }, x);
}

template <typename T> __global__ void spike_triangle(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) {
        const Sum<T> near = 1 - fabs(v - 1);
        return g * (near < 0 ? Sum<T>(0) : near);
    }, x, dy);
}

template <typename T> __global__ void spike_rectangle(const T* x, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return g * (fabs(v - 1) <= Sum<T>(0.5) ? Sum<T>(1) : Sum<T>(0)); }, x, dy);
}
