// Dithered rounding; the reference is in dither.py.
#include "common.cuh"

// One block: the step is s times the standard deviation of all elements, summed in a fixed order.
template <typename T> __global__ void __launch_bounds__(1024) dither_step(const T* x, double* out, long long count, double s) {
    double sum = 0, square = 0;
    for (long long i = first(); i < count; i += step()) sum += (double)value(x[i]);
    const double mean = block_sum(sum) / (count > 0 ? count : 1);
    for (long long i = first(); i < count; i += step()) {
        const double d = (double)value(x[i]) - mean;
        square += d * d;
    }
    square = block_sum(square);
    if (threadIdx.x == 0) *out = s * sqrt(square / (count > 0 ? count : 1));
}

template <typename T> __global__ void dither(const T* x, const T* u, const double* __restrict__ size, T* q, long long count) {
    const double d = *size;
    for (long long i = first(); i < count; i += step()) {
        const double v = (double)value(x[i]);
        q[i] = as<T>(d == 0 ? v : d * floor(v / d + (double)value(u[i])));
    }
}
