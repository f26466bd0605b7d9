// Comparisons, logic on masks, and choices by a mask; the references are in masks.py.
#include "elements.cuh"

template <typename T> __global__ void equal(const T* a, const T* b, bool* y, Strides s) {
    map(s, y, [](Value<T> p, Value<T> q) { return p == q; }, a, b);
}

template <typename T> __global__ void not_equal(const T* a, const T* b, bool* y, Strides s) {
    map(s, y, [](Value<T> p, Value<T> q) { return p != q; }, a, b);
}

template <typename T> __global__ void less(const T* a, const T* b, bool* y, Strides s) {
    map(s, y, [](Value<T> p, Value<T> q) { return p < q; }, a, b);
}

template <typename T> __global__ void less_equal(const T* a, const T* b, bool* y, Strides s) {
    map(s, y, [](Value<T> p, Value<T> q) { return p <= q; }, a, b);
}

template <typename T> __global__ void greater(const T* a, const T* b, bool* y, Strides s) {
    map(s, y, [](Value<T> p, Value<T> q) { return p > q; }, a, b);
}

template <typename T> __global__ void greater_equal(const T* a, const T* b, bool* y, Strides s) {
    map(s, y, [](Value<T> p, Value<T> q) { return p >= q; }, a, b);
}

__global__ void logical_and(const bool* a, const bool* b, bool* y, Strides s) {
    map(s, y, [](bool p, bool q) { return p && q; }, a, b);
}

__global__ void logical_or(const bool* a, const bool* b, bool* y, Strides s) {
    map(s, y, [](bool p, bool q) { return p || q; }, a, b);
}

__global__ void logical_xor(const bool* a, const bool* b, bool* y, Strides s) {
    map(s, y, [](bool p, bool q) { return p != q; }, a, b);
}

__global__ void logical_not(const bool* x, bool* y, Strides s) {
    map(s, y, [](bool p) { return !p; }, x);
}

// The mask has another type than the values, so these go element by element.
template <typename T> __global__ void where(const bool* mask, const T* a, const T* b, T* y, Strides s) {
    for (long long i = first(); i < s.count; i += step())
        y[place(s, 0, i)] = mask[place(s, 1, i)] ? a[place(s, 2, i)] : b[place(s, 3, i)];
}

template <typename T> __global__ void where_grad(const bool* mask, const T* dy, T* dx, Strides s, bool chosen) {
    for (long long i = first(); i < s.count; i += step())
        dx[place(s, 0, i)] = mask[place(s, 1, i)] == chosen ? dy[place(s, 2, i)] : T();
}
