// Running sums and the order of elements along one axis; the references are in along_axis.py. Arrays are seen as
// (outer, n, inner).
#include "elements.cuh"

template <typename T> __global__ void cumsum(const T* x, T* y, long long n, long long inner, long long reverse, long long rows) {
    for (long long i = first(); i < rows; i += step()) {
        long long at = i / inner * n * inner + i % inner + (reverse ? inner * (n - 1) : 0);
        Sum<T> total = 0;
        for (long long k = 0; k < n; k++, at += reverse ? -inner : inner) {
            total += value(x[at]);
            y[at] = T(total);
        }
    }
}

// One thread for each element: its place in the order is the number of elements before it.
template <typename T> __global__ void argsort(const T* x, long long* y, long long n, long long inner, long long descending,
                                               long long count) {
    for (long long i = first(); i < count; i += step()) {
        const long long own = i / inner % n, start = i - own * inner;
        const Sum<T> v = value(x[i]);
        long long before = 0;
        for (long long k = 0; k < n; k++) {
            const Sum<T> w = value(x[start + k * inner]);
            const bool same = w == v || (w != w && v != v);
            const bool less = w < v || (v != v && w == w);
            before += same ? k < own : less != (descending != 0);
        }
        y[start + before * inner] = own;
    }
}
