// Batch norm with given statistics, its gradient, and the update of running statistics; the references are in norm_eval.py.
// Arrays, Sum<T> and WHOLE are as in norm.cu.
#include "norm.cuh"

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256) batch_norm_eval(const T* __restrict__ x, long long step, long long rows,
                                                       long long channels, long long share, const Sum<T>* __restrict__ w,
                                                       const Sum<T>* __restrict__ b, const Sum<T>* __restrict__ mean,
                                                       const Sum<T>* __restrict__ var, double eps, T* __restrict__ y,
                                                       Sum<T>* __restrict__ rstd) {
    typedef Sum<T> S;
    const long long at = column();
    const int count = held(channels);
    if (!count) return;
    Channels<S> norm;
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
        const long long j = at + min(c, count - 1);
        const S r = 1 / sqrt(var[j] + S(eps));
        if (blockIdx.y == 0 && threadIdx.y == 0 && c < count) rstd[j] = r;
        norm.mean[c] = mean[j], norm.scale[c] = r * w[j], norm.bias[c] = b[j];
    }
    each_row<S, 1>(rows, share, [&](long long i, S(*v)[WIDE]) { load<WHOLE>(x + i * step + at, count, v[0]); },
                   [&](long long i, S(*v)[WIDE]) {
        S out[WIDE];
#pragma unroll
        for (int c = 0; c < WIDE; c++) out[c] = norm(c, v[0][c]);
        store<WHOLE>(y + i * channels + at, count, out);
    });
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256)
batch_norm_eval_input_grad(const T* __restrict__ dy, long long rows, long long channels, long long share,
                           const Sum<T>* __restrict__ w, const Sum<T>* __restrict__ rstd, T* __restrict__ dx) {
    typedef Sum<T> S;
    const long long at = column();
    const int count = held(channels);
    if (!count) return;
    S scale[WIDE];
#pragma unroll
    for (int c = 0; c < WIDE; c++) scale[c] = w[at + min(c, count - 1)] * rstd[at + min(c, count - 1)];
    each_row<S, 1>(rows, share, [&](long long i, S(*v)[WIDE]) { load<WHOLE>(dy + i * channels + at, count, v[0]); },
                   [&](long long i, S(*v)[WIDE]) {
        S out[WIDE];
#pragma unroll
        for (int c = 0; c < WIDE; c++) out[c] = v[0][c] * scale[c];
        store<WHOLE>(dx + i * channels + at, count, out);
    });
}

// Running statistics, moved by those of a batch as batch_norm moves them.
template <typename P>
__global__ void batch_norm_move(const P* mean, const P* var, const P* running_mean, const P* running_var,
                                const long long* tracked, P* mean_after, P* var_after, long long* tracked_after,
                                double momentum, long long channels) {
    const P rate = P(momentum);
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    for (long long j = first; j < channels; j += (long long)gridDim.x * blockDim.x) {
        P old_mean = running_mean[j], old_var = running_var[j];
        mean_after[j] = old_mean + rate * (mean[j] - old_mean);
        var_after[j] = old_var + rate * (var[j] - old_var);
    }
    if (first == 0) tracked_after[0] = tracked[0] + 1;
}
