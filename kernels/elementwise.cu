// Arithmetic with broadcasting, element by element; the reference beside each is in elementwise.py. Those that C has a
// function of the same name for end in an underscore.
#include "elements.cuh"

template <typename T> __global__ void add(const T* a, const T* b, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return p + q; }, a, b);
}

template <typename T> __global__ void sub(const T* a, const T* b, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return p - q; }, a, b);
}

template <typename T> __global__ void mul(const T* a, const T* b, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return p * q; }, a, b);
}

template <typename T> __global__ void div_(const T* a, const T* b, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return p / q; }, a, b);
}

// NaN wins, as in NumPy.
template <typename T> __global__ void maximum(const T* a, const T* b, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return p > q || p != p ? p : q; }, a, b);
}

template <typename T> __global__ void minimum(const T* a, const T* b, T* y, Strides s) {
    map(s, y, [](Sum<T> p, Sum<T> q) { return p < q || p != p ? p : q; }, a, b);
}

template <typename T> __global__ void neg(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return -v; }, x);
}

template <typename T> __global__ void exp_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return exp(v); }, x);
}

template <typename T> __global__ void log_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return log(v); }, x);
}

template <typename T> __global__ void sqrt_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return sqrt(v); }, x);
}

template <typename T> __global__ void tanh_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return tanh(v); }, x);
}

template <typename T> __global__ void sin_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return sin(v); }, x);
}

template <typename T> __global__ void cos_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return cos(v); }, x);
}

template <typename T> __global__ void abs_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return fabs(v); }, x);
}

// NaN stays, as in NumPy.
template <typename T> __global__ void sign(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return v != v ? v : Sum<T>((v > 0) - (v < 0)); }, x);
}

template <typename T> __global__ void round_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return rint(v); }, x);
}

template <typename T> __global__ void floor_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return floor(v); }, x);
}

template <typename T> __global__ void ceil_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return ceil(v); }, x);
}

template <typename T> __global__ void trunc_(const T* x, T* y, Strides s) {
    map(s, y, [](Sum<T> v) { return trunc(v); }, x);
}

template <typename T> __global__ void scale(const T* x, T* y, Strides s, double factor) {
    map(s, y, [=](Sum<T> v) { return v * Sum<T>(factor); }, x);
}

template <typename T> __global__ void lerp(const T* start, const T* end, T* y, Strides s, double weight) {
    map(s, y, [=](Sum<T> p, Sum<T> q) { return (p - q) * Sum<T>(1 - weight) + q; }, start, end);
}

// See past in elementwise.py.
template <typename T> __global__ void past(const T* weights, const T* average, const double* steps, T* y, long long count,
                                           double age, double decay, bool done) {
    double t = *steps, whole = t ? min(t, age) * (1 - decay) / (1 - pow(decay, t)) : 0;
    double share = done || !t ? whole : decay / whole;
    map(count, y, [=](Sum<T> w, Sum<T> a) {
        return share < 0.5 ? w + (a - w) * Sum<T>(share) : a - (a - w) * Sum<T>(1 - share);
    }, weights, average);
}

template <typename T> __global__ void shift(const T* x, T* y, Strides s, double term) {
    map(s, y, [=](Sum<T> v) { return v + Sum<T>(term); }, x);
}

template <typename T> __global__ void power(const T* x, T* y, Strides s, double exponent) {
    map(s, y, [=](Sum<T> v) { return pow(v, Sum<T>(exponent)); }, x);
}

template <typename T> __global__ void power_grad(const T* x, const T* dy, T* dx, Strides s, double exponent) {
    map(s, dx, [=](Sum<T> v, Sum<T> g) { return g * pow(v, Sum<T>(exponent - 1)) * Sum<T>(exponent); }, x, dy);
}

template <typename T> __global__ void div_grad(const T* y, const T* b, const T* dy, T* db, Strides s) {
    map(s, db, [](Sum<T> v, Sum<T> d, Sum<T> g) { return -(g * v) / d; }, y, b, dy);
}

template <typename T> __global__ void maximum_grad(const T* x, const T* other, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> p, Sum<T> q, Sum<T> g) { return p == q ? g * Sum<T>(0.5) : p > q ? g : Sum<T>(0); }, x, other, dy);
}

template <typename T> __global__ void minimum_grad(const T* x, const T* other, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> p, Sum<T> q, Sum<T> g) { return p == q ? g * Sum<T>(0.5) : p < q ? g : Sum<T>(0); }, x, other, dy);
}

template <typename T> __global__ void sqrt_grad(const T* y, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> v, Sum<T> g) { return g / (v + v); }, y, dy);
}

template <typename T> __global__ void abs_grad(const T* x, const T* dy, T* dx, Strides s) {
    map(s, dx, [](Sum<T> v, Sum<T> g) { return v != v ? v : Sum<T>((v > 0) - (v < 0)) * g; }, x, dy);
}

// Contiguous arrays alone from here on.
template <typename T> __global__ void relu(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return v <= 0 ? Sum<T>(0) : v; }, x);  // NaN passes through
}

template <typename T> __global__ void relu_grad(const T* y, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return v > 0 ? g : Sum<T>(0); }, y, dy);
}

template <typename T> __global__ void root_grad(const T* y, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return v == 0 ? v : g / (v + v); }, y, dy);
}

template <typename T> __global__ void sigmoid(const T* x, T* y, long long count) {
    map(count, y, [](Sum<T> v) { return tanh(v * Sum<T>(0.5)) * Sum<T>(0.5) + Sum<T>(0.5); }, x);
}

template <typename T> __global__ void sigmoid_grad(const T* y, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return g * (v * (1 - v)); }, y, dy);
}

template <typename T> __global__ void tanh_grad(const T* y, const T* dy, T* dx, long long count) {
    map(count, dx, [](Sum<T> v, Sum<T> g) { return g * (1 - v * v); }, y, dy);
}
