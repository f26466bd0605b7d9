// Batch norm, alone or with what comes after it; the reference is in norm.py. x is (rows, channels), its rows `step`
// elements apart; all else is contiguous. What belongs to channels (parameters, statistics, sums) is in Sum<T>. A thread has
// one channel and some rows: see columns.cuh.
#include "columns.cuh"

enum { NONE, RELU, RELU6, HARDSWISH };  // as in norm.py

template <typename S> __device__ __forceinline__ S activated(S v, int act) {
    if (act == RELU) return !(v <= 0) ? v : S(0);  // NaN passes through
    if (act == RELU6) return v < 0 ? S(0) : v > 6 ? S(6) : v;
    if (act == HARDSWISH) {
        S gate = v + 3;
        return v * ((gate < 0 ? S(0) : gate > 6 ? S(6) : gate) * S(1.0 / 6));
    }
    return v;
}

// dy times the slope of the activation at v. For relu and relu6 v may be the output, too.
template <typename S> __device__ __forceinline__ S sloped(S dy, S v, int act) {
    if (act == RELU) return v > 0 ? dy : S(0);
    if (act == RELU6) return v > 0 && v < 6 ? dy : S(0);
    if (act == HARDSWISH) return v > -3 && v < 3 ? dy * (v * S(1.0 / 3) + S(0.5)) : v < 0 ? S(0) : dy;
    return dy;
}

// One channel's mean, weight / standard deviation, bias. The backward pass makes the same bits as the forward pass.
template <typename S> struct Channel {
    S mean, scale, bias;
    __device__ __forceinline__ S operator()(S x) const { return fma(x - mean, scale, bias); }
};

// Sums of (x - x[0]) and (x - x[0])^2, so that nothing is lost to a large mean. Eight rows at a time are summed about their
// own mean in the type of x, and float64 is needed once for eight.
template <typename T>
__device__ Pair deviations(const T* __restrict__ x, long long step, long long rows, long long share) {
    Pair sums = {0, 0};
    const long long end = share_end(share, rows), down = blockDim.y;
    const double origin = value(x[0]);
    for (long long i = share_begin(share); i < end; i += 8 * down) {
        Sum<T> v[8], mean = 0, rest = 0, squares = 0;
        int n = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = value(x[min(i + k * down, end - 1) * step]);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (i + k * down < end) mean += v[k], n++;
        mean /= n;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const Sum<T> d = i + k * down < end ? v[k] - mean : Sum<T>(0);
            rest += d, squares += d * d;
        }
        const double far = double(mean) - origin;
        sums.a += n * far + rest;
        sums.b += squares + far * (2.0 * rest + n * far);
    }
    return sums;
}

// What a share's rows add to the statistics.
template <typename T>
__global__ void __launch_bounds__(512) batch_norm_parts(const T* __restrict__ x, long long step, long long rows,
                                                        long long channels, long long share, double* parts) {
    Pair sums = {0, 0};
    if (column() < channels) sums = deviations(x + column(), step, rows, share);
    keep(column_sums(sums), parts, channels);
}

// y = act(norm(x) + z), and statistics from `shares` parts, which every block adds up again; with none of them, from x
// itself, whose rows are then all this block's. The first share's blocks write them and move the running ones.
template <typename T>
__global__ void __launch_bounds__(512) batch_norm(const T* __restrict__ x, long long step, long long rows, long long channels,
                                                  long long share, const double* __restrict__ parts, int shares,
                                                  const Sum<T>* __restrict__ w, const Sum<T>* __restrict__ b,
                                                  const Sum<T>* running_mean, const Sum<T>* running_var,
                                                  const long long* tracked, const T* __restrict__ z, bool add, int act,
                                                  double eps, double momentum, T* __restrict__ y, Sum<T>* mean, Sum<T>* rstd,
                                                  Sum<T>* mean_after, Sum<T>* var_after, long long* tracked_after) {
    typedef Sum<T> S;
    const long long j = column();
    Pair sums = {0, 0};
    if (!shares && j < channels) sums = deviations(x + j, step, rows, share);
    sums = shares ? column_sums(parts, shares, channels) : column_sums(sums);
    if (j >= channels) return;
    double off = sums.a / rows, var = sums.b / rows - off * off;
    if (var < 0) var = 0;
    const S m = S(value(x[j]) + off), r = S(1 / sqrt(var + eps));
    if (blockIdx.y == 0 && threadIdx.y == 0) {
        S unbiased = S(var * (rows / (rows - 1.0))), rate = S(momentum);
        S old_mean = running_mean[j], old_var = running_var[j];
        mean[j] = m, rstd[j] = r;
        mean_after[j] = old_mean + rate * (m - old_mean);
        var_after[j] = old_var + rate * (unbiased - old_var);
        if (j == 0) tracked_after[0] = tracked[0] + 1;
    }
    const Channel<S> norm = {m, r * w[j], b[j]};
    each_row<S, 2>(rows, share, [&](long long i, S* v) {
        v[0] = value(x[i * step + j]);
        if (add) v[1] = value(z[i * channels + j]);
    }, [&](long long i, const S* v) {
        const S s = norm(v[0]);
        y[i * channels + j] = as<T>(activated(add ? s + v[1] : s, act));
    });
}

template <typename T>
__global__ void __launch_bounds__(512) batch_norm_eval(const T* __restrict__ x, long long step, long long rows,
                                                       long long channels, long long share, const Sum<T>* __restrict__ w,
                                                       const Sum<T>* __restrict__ b, const Sum<T>* __restrict__ mean,
                                                       const Sum<T>* __restrict__ var, double eps, T* __restrict__ y,
                                                       Sum<T>* __restrict__ rstd) {
    typedef Sum<T> S;
    const long long j = column();
    if (j >= channels) return;
    const S r = 1 / sqrt(var[j] + S(eps));
    if (blockIdx.y == 0 && threadIdx.y == 0) rstd[j] = r;
    const Channel<S> norm = {mean[j], r * w[j], b[j]};
    each_row<S, 1>(rows, share, [&](long long i, S* v) { v[0] = value(x[i * step + j]); },
                   [&](long long i, const S* v) { y[i * channels + j] = as<T>(norm(v[0])); });
}

// dw and db, or a share's part of their sums. With `kept`, y tells the slope of the activation, and the gradient before it
// is written to dz; else norm(x) tells the slope.
template <typename T>
__global__ void __launch_bounds__(512) batch_norm_sums(const T* __restrict__ x, long long step, long long rows,
                                                       long long channels, long long share,
                                                       const Sum<T>* __restrict__ mean, const Sum<T>* __restrict__ rstd,
                                                       const Sum<T>* __restrict__ w, const Sum<T>* __restrict__ b,
                                                       const T* __restrict__ dy, const T* __restrict__ y, bool kept, int act,
                                                       double* parts, Sum<T>* __restrict__ dw, Sum<T>* __restrict__ db,
                                                       T* __restrict__ dz) {
    typedef Sum<T> S;
    const long long j = column();
    Pair sums = {0, 0};
    if (j < channels) {
        const Channel<S> norm = {mean[j], rstd[j] * w[j], b[j]};
        sums = share_sums<S, 3>(rows, share, [&](long long i, S* v) {
            v[0] = value(x[i * step + j]), v[1] = value(dy[i * channels + j]);
            if (kept) v[2] = value(y[i * channels + j]);
        }, [&](long long i, const S* v, S& products, S& total) {
            const S d = act ? sloped(v[1], kept ? v[2] : norm(v[0]), act) : v[1];
            if (kept) dz[i * channels + j] = as<T>(d);
            products += d * (v[0] - norm.mean);
            total += d;
        });
    }
    sums = column_sums(sums);
    if (gridDim.y > 1) keep(sums, parts, channels);
    else if (j < channels && threadIdx.y == 0) dw[j] = S(sums.a) * rstd[j], db[j] = S(sums.b);
}

// dw and db from the parts of all shares.
template <typename T>
__global__ void __launch_bounds__(512)
batch_norm_sums_end(const double* __restrict__ parts, int shares, long long channels, const Sum<T>* __restrict__ rstd,
                    Sum<T>* dw, Sum<T>* db) {
    const Pair sums = column_sums(parts, shares, channels);
    const long long j = column();
    if (threadIdx.y || j >= channels) return;
    dw[j] = Sum<T>(sums.a) * rstd[j];
    db[j] = Sum<T>(sums.b);
}

template <typename T>
__global__ void __launch_bounds__(512)
batch_norm_input_grad(const T* __restrict__ x, long long step, long long rows, long long channels, long long share,
                      const Sum<T>* __restrict__ mean, const Sum<T>* __restrict__ rstd, const Sum<T>* __restrict__ w,
                      const Sum<T>* __restrict__ b, const Sum<T>* __restrict__ dw, const Sum<T>* __restrict__ db,
                      const T* __restrict__ dy, int act, T* __restrict__ dx) {
    typedef Sum<T> S;
    const long long j = column();
    if (j >= channels) return;
    const Channel<S> norm = {mean[j], rstd[j] * w[j], b[j]};
    const S shift = db[j] / S(rows), slope = rstd[j] * dw[j] / S(rows);
    each_row<S, 2>(rows, share, [&](long long i, S* v) {
        v[0] = value(x[i * step + j]), v[1] = value(dy[i * channels + j]);
    }, [&](long long i, const S* v) {
        const S d = act ? sloped(v[1], norm(v[0]), act) : v[1];
        dx[i * channels + j] = as<T>((d - shift - (v[0] - norm.mean) * slope) * norm.scale);
    });
}

template <typename T>
__global__ void __launch_bounds__(512)
batch_norm_eval_input_grad(const T* __restrict__ dy, long long rows, long long channels, long long share,
                           const Sum<T>* __restrict__ w, const Sum<T>* __restrict__ rstd, T* __restrict__ dx) {
    const long long j = column();
    if (j >= channels) return;
    typedef Sum<T> S;
    const S scale = w[j] * rstd[j];
    each_row<S, 1>(rows, share, [&](long long i, S* v) { v[0] = value(dy[i * channels + j]); },
                   [&](long long i, const S* v) { dx[i * channels + j] = as<T>(v[0] * scale); });
}
