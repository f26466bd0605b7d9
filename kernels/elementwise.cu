// Element by element; the reference beside each is in elementwise.py.
#include "common.cuh"

template <typename T> __global__ void relu(const T* __restrict__ x, T* y, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Sum<T> v = value(x[i]);
        y[i] = !(v <= Sum<T>(0)) ? x[i] : as<T>(Sum<T>(0));  // NaN passes through
    }
}
