// RMS norm; the reference is in rms_norm.py. All arrays are contiguous; w and the saved scale are in Sum<T>.
#include "common.cuh"

template <typename T>
__global__ void __launch_bounds__(512) rms_norm(const T* __restrict__ x, const Sum<T>* __restrict__ w, bool affine,
                                                T* __restrict__ y, Sum<T>* mean, Sum<T>* scale, long long rows, int width,
                                                double eps, int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const T* from = x + row * width;
        T* to = y + row * width;
        S squares = 0;
        along_row<S, 1>(width, lanes, [&](int j, S* v) { v[0] = value(from[j]); },
                        [&](int, const S* v) { squares += v[0] * v[0]; });
        const S s = 1 / sqrt(row_sum(squares, lanes) / S(width) + S(eps));
        if (lane(lanes) == 0) mean[row] = 0, scale[row] = s;
        along_row(width, lanes, [&](int j) {
            S v = value(from[j]) * s;
            if (affine) v *= w[j];
            to[j] = as<T>(v);
        });
    }
}

template <typename T>
__global__ void __launch_bounds__(512)
rms_norm_input_grad(const T* __restrict__ x, const Sum<T>* __restrict__ scale, const T* __restrict__ dy,
                    const Sum<T>* __restrict__ w, bool affine, T* __restrict__ dx, long long rows, int width, int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const long long at = row * width;
        const S s = scale[row];
        S products = 0;
        along_row<S, 3>(width, lanes, [&](int j, S* v) {
            v[0] = value(x[at + j]), v[1] = value(dy[at + j]), v[2] = affine ? w[j] : S(1);
        }, [&](int, const S* v) { products += v[1] * v[2] * v[0]; });
        const S slope = row_sum(products, lanes) * s * s / S(width);
        along_row(width, lanes, [&](int j) {
            S g = value(dy[at + j]);
            if (affine) g *= w[j];
            dx[at + j] = as<T>(s * (g - value(x[at + j]) * slope));
        });
    }
}
