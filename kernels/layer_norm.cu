// Layer norm; the reference is in layer_norm.py. All arrays are contiguous; w, b, statistics and sums are in Sum<T>.
#include "columns.cuh"

// `affine`: 0, 1 where there is w, 2 where there is b, too.
template <typename T>
__global__ void __launch_bounds__(512) layer_norm(const T* __restrict__ x, const Sum<T>* __restrict__ w,
                                                  const Sum<T>* __restrict__ b, int affine, T* __restrict__ y, Sum<T>* mean,
                                                  Sum<T>* scale, long long rows, int width, double eps, int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const T* from = x + row * width;
        T* to = y + row * width;
        S sum = 0, rest = 0, squares = 0;
        along_row<S, 1>(width, lanes, [&](int j, S* v) { v[0] = value(from[j]); }, [&](int, const S* v) { sum += v[0]; });
        const S near = row_sum(sum, lanes) / S(width);
        along_row(width, lanes, [&](int j) {
            S d = value(from[j]) - near;
            rest += d, squares += d * d;
        });
        rest = row_sum(rest, lanes) / S(width);  // what rounding has left between `near` and the mean
        const S m = near + rest, s = 1 / sqrt(row_sum(squares, lanes) / S(width) - rest * rest + S(eps));
        if (lane(lanes) == 0) mean[row] = m, scale[row] = s;
        along_row(width, lanes, [&](int j) {
            S v = (value(from[j]) - m) * s;
            if (affine > 0) v *= w[j];
            if (affine > 1) v += b[j];
            to[j] = as<T>(v);
        });
    }
}

template <typename T>
__global__ void __launch_bounds__(512)
layer_norm_input_grad(const T* __restrict__ x, const Sum<T>* __restrict__ mean, const Sum<T>* __restrict__ scale,
                      const T* __restrict__ dy, const Sum<T>* __restrict__ w, bool affine, T* __restrict__ dx,
                      long long rows, int width, int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const long long at = row * width;
        const S m = mean[row], s = scale[row];
        S sum = 0, products = 0;
        along_row<S, 3>(width, lanes, [&](int j, S* v) {
            v[0] = value(x[at + j]), v[1] = value(dy[at + j]), v[2] = affine ? w[j] : S(1);
        }, [&](int, const S* v) {
            const S g = v[1] * v[2];
            sum += g, products += g * (v[0] - m);
        });
        const S shift = row_sum(sum, lanes) / S(width), slope = row_sum(products, lanes) * s * s / S(width);
        along_row(width, lanes, [&](int j) {
            S g = value(dy[at + j]);
            if (affine) g *= w[j];
            dx[at + j] = as<T>(s * (g - shift - (value(x[at + j]) - m) * slope));
        });
    }
}

// dw and, with `bias`, db, or a share's part of both. WHOLE where four columns are one access to memory: see columns.cuh.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256) layer_norm_sums(const T* __restrict__ x, const Sum<T>* __restrict__ mean,
                                                       const Sum<T>* __restrict__ scale, const T* __restrict__ dy,
                                                       long long rows, long long width, long long share, double* parts,
                                                       Sum<T>* dw, Sum<T>* db, bool bias) {
    typedef Sum<T> S;
    const long long at = column();
    const int count = held(width);
    Pair sums[WIDE] = {};
    if (count)
        share_sums<S, 3>(rows, share, sums, [&](long long i, S(*v)[WIDE]) {
            load<WHOLE>(x + i * width + at, count, v[0]);
            load<WHOLE>(dy + i * width + at, count, v[1]);
            v[2][0] = mean[i], v[2][1] = scale[i];
        }, [&](long long, S(*v)[WIDE], S* products, S* total) {
#pragma unroll
            for (int c = 0; c < WIDE; c++) {
                products[c] += v[1][c] * ((v[0][c] - v[2][0]) * v[2][1]);
                total[c] += v[1][c];
            }
        });
    column_sums(sums);
    if (gridDim.y > 1) return keep(sums, parts, width);
    if (threadIdx.y) return;
    for (int c = 0; c < count; c++) {
        dw[at + c] = S(sums[c].a);
        if (bias) db[at + c] = S(sums[c].b);
    }
}

// dw and db from the parts of all shares.
template <typename T>
__global__ void __launch_bounds__(256)
layer_norm_sums_end(const double* __restrict__ parts, int shares, long long width, Sum<T>* dw, Sum<T>* db, bool bias) {
    Pair sums[WIDE] = {};
    column_sums(parts, shares, width, sums);
    if (threadIdx.y) return;
    for (int c = 0; c < held(width); c++) {
        dw[column() + c] = Sum<T>(sums[c].a);
        if (bias) db[column() + c] = Sum<T>(sums[c].b);
    }
}
