// Softmax and losses; the reference beside each is in loss.py. A warp or a block has a row: see common.cuh. What is written
// is contiguous, what is read may be strided: the elements of a row are `apart` elements apart.
#include "elements.cuh"

// The largest of a row and the sum of exp(x - largest), in one reading.
template <typename S> struct Largest {
    S top, total;
};
template <typename S, typename F> __device__ __forceinline__ Largest<S> largest(int width, int lanes, F x) {
    const S none = log(S(0));  // minus infinity
    S top = none, total = 0;
    along_row<S, 1>(width, lanes, [&](int j, S* v) { v[0] = x(j); }, [&](int, const S* all) {
        const S v = all[0];
        if (!(v <= top)) total = total * exp(top - v) + exp(v - v), top = v;  // infinity and NaN make NaN
        else if (v > none) total += exp(v - top);
    });
    const S all = row_max(top, lanes);
    return {all, row_sum(total * exp(top - all), lanes)};
}

template <typename T>
__global__ void __launch_bounds__(512) softmax(const T* __restrict__ x, Strides rows_of_x, long long apart, T* __restrict__ y,
                                               long long rows, int width, bool logarithm, int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const T* from = x + place(rows_of_x, 0, row);
        T* to = y + row * width;
        const Largest<S> of = largest<S>(width, lanes, [&](int j) { return value(from[j * apart]); });
        if (logarithm) {
            const S shift = log(of.total);
            along_row(width, lanes, [&](int j) { to[j] = as<T>(value(from[j * apart]) - of.top - shift); });
        } else {
            const S factor = 1 / of.total;
            along_row(width, lanes, [&](int j) { to[j] = as<T>(exp(value(from[j * apart]) - of.top) * factor); });
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(512) softmax_grad(const T* __restrict__ y, const T* __restrict__ dy, Strides rows_of_dy,
                                                    long long apart, T* __restrict__ dx, long long rows, int width,
                                                    bool logarithm, int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const T *p = y + row * width, *from = dy + place(rows_of_dy, 0, row);
        T* to = dx + row * width;
        S sum = 0;
        along_row<S, 2>(width, lanes, [&](int j, S* v) { v[0] = value(from[j * apart]), v[1] = value(p[j]); },
                        [&](int, const S* v) { sum += logarithm ? v[0] : v[0] * v[1]; });
        sum = row_sum(sum, lanes);
        along_row(width, lanes, [&](int j) {
            const S d = value(from[j * apart]), v = value(p[j]);
            to[j] = as<T>(logarithm ? d - exp(v) * sum : v * (d - sum));
        });
    }
}

// Probabilities and each row's loss; one block makes the mean loss itself. Where the label is `ignore`, a row's loss is
// minus infinity, which mean_loss leaves out.
template <typename T>
__global__ void __launch_bounds__(1024) cross_entropy(const T* __restrict__ x, long long row_apart, long long apart,
                                                      const long long* __restrict__ labels, long long label_apart,
                                                      long long ignore, double smoothing, T* __restrict__ p, T* loss,
                                                      double* losses, long long rows, int width, int lanes) {
    typedef Sum<T> S;
    double mine = 0, counted = 0;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const T* from = x + row * row_apart;
        T* to = p + row * width;
        const Largest<S> of = largest<S>(width, lanes, [&](int j) { return value(from[j * apart]); });
        const S factor = 1 / of.total;
        S sum = 0;
        along_row(width, lanes, [&](int j) {
            const S v = value(from[j * apart]) - of.top;
            to[j] = as<T>(exp(v) * factor);
            sum += v;
        });
        const long long label = labels[row * label_apart];
        if (label == ignore) {
            if (gridDim.x > 1 && lane(lanes) == 0) losses[row] = log(0.0);
            continue;
        }
        double aim = value(from[label * apart]) - of.top;
        if (smoothing > 0) aim = (1 - smoothing) * aim + smoothing * double(row_sum(sum, lanes)) / width;
        const double of_row = double(log(of.total)) - aim;
        mine += of_row, counted += 1;
        if (gridDim.x > 1 && lane(lanes) == 0) losses[row] = of_row;
    }
    if (gridDim.x > 1) return;
    mine = block_sum(lane(lanes) == 0 ? mine : 0.0);
    counted = block_sum(lane(lanes) == 0 ? counted : 0.0);
    if (threadIdx.x == 0) loss[0] = as<T>(S(mine / (counted > 1 ? counted : 1)));
}

template <typename T>
__global__ void __launch_bounds__(512) cross_entropy_grad(const T* __restrict__ p, const long long* __restrict__ labels,
                                                          long long label_apart, long long ignore, bool some,
                                                          const T* __restrict__ dy, double smoothing, T* __restrict__ dx,
                                                          long long rows, int width, int lanes) {
    typedef Sum<T> S;
    double counted = double(rows);
    if (some) {  // every block counts the labels again: they are few beside the logits
        __shared__ double of_all;
        counted = 0;
        for (long long row = threadIdx.x; row < rows; row += blockDim.x) counted += labels[row * label_apart] != ignore;
        counted = block_sum(counted);
        if (threadIdx.x == 0) of_all = counted > 1 ? counted : 1;
        __syncthreads();
        counted = of_all;
    }
    const S factor = value(dy[0]) / S(counted), hit = S(1 - smoothing), rest = S(smoothing / width);
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const long long label = labels[row * label_apart], at = row * width;
        if (label == ignore) {
            along_row(width, lanes, [&](int j) { dx[at + j] = as<T>(S(0)); });
            continue;
        }
        along_row(width, lanes, [&](int j) {
            const S v = j == label ? value(p[at + j]) - hit : value(p[at + j]);
            dx[at + j] = as<T>((v - rest) * factor);
        });
    }
}

// Each row has the weight of its label there, and 0 elsewhere; it is 0 where the label is `ignore`.
template <typename T>
__global__ void __launch_bounds__(512) label_weights(const T* __restrict__ weight, long long weight_apart,
                                                     const long long* __restrict__ labels, long long label_apart,
                                                     long long ignore, T* __restrict__ y, long long rows, int width,
                                                     int lanes) {
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const long long label = labels[row * label_apart], at = row * width;
        along_row(width, lanes, [&](int j) {
            y[at + j] = j == label && j != ignore ? weight[j * weight_apart] : as<T>(Sum<T>(0));
        });
    }
}

// The mean of (x - target)^2, or each block's part of the sum.
template <typename T>
__global__ void __launch_bounds__(1024) mse(const T* __restrict__ x, const T* __restrict__ target, long long count, T* loss,
                                            double* parts) {
    double mine = 0;
    auto square = [&](long long i) {
        const Sum<T> d = value(x[i]) - value(target[i]);
        return d * d;
    };
    long long i = first();
    for (; i + 3 * step() < count; i += 4 * step())
        mine += (square(i) + square(i + step())) + (square(i + 2 * step()) + square(i + 3 * step()));
    for (; i < count; i += step()) mine += square(i);
    mine = block_sum(mine);
    if (threadIdx.x) return;
    if (gridDim.x > 1) parts[blockIdx.x] = mine;
    else loss[0] = as<T>(Sum<T>(mine / count));
}

template <typename T>
__global__ void __launch_bounds__(512) mse_grad(const T* __restrict__ x, const T* __restrict__ target,
                                                const T* __restrict__ dy, double factor, T* __restrict__ dx, long long count) {
    const Sum<T> by = value(dy[0]) * Sum<T>(factor);
    for (long long i = first(); i < count; i += step()) dx[i] = as<T>((value(x[i]) - value(target[i])) * by);
}

// One block: the sum of `parts`, divided by `count`; without the parts that are minus infinity, each of which counts 1.
template <typename T>
__global__ void __launch_bounds__(1024) mean_loss(const double* __restrict__ parts, long long n, long long count, T* loss) {
    const double none = log(0.0);
    double mine = 0, left_out = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        if (parts[i] == none) left_out += 1;
        else mine += parts[i];
    }
    mine = block_sum(mine);
    left_out = block_sum(left_out);
    const double counted = double(count) - left_out;
    if (threadIdx.x == 0) loss[0] = as<T>(Sum<T>(mine / (counted > 1 ? counted : 1)));
}
