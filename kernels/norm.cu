// Batch norm, alone or with what comes after it; the references are in norm.py and norm_grad.py. x is (rows, channels), its
// rows `step` elements apart; all else is contiguous. What belongs to channels (parameters, statistics, sums) is in Sum<T>.
// A thread has four channels and some rows; WHOLE where four are one access to memory, in every array: see columns.cuh.
#include "norm.cuh"

// Sums of (x - x[0]) and (x - x[0])^2, so that nothing is lost to a large mean. Eight rows at a time are summed about their
// own mean in the type of x, and float64 is needed once for eight.
template <bool WHOLE, typename T>
__device__ __forceinline__ void deviations(const T* __restrict__ x, long long step, int count, long long rows, long long share,
                                           Pair* sums) {
    constexpr int R = 2 * ROWS<Sum<T>>;
    const long long end = share_end(share, rows), down = blockDim.y;
    Sum<T> first[WIDE];
    load<WHOLE>(x, count, first);
    for (long long i = share_begin(share); i < end; i += R * down) {
        Sum<T> v[R][WIDE];
        const int n = (int)min((long long)R, (end - i + down - 1) / down);
        const Sum<T> share_of_one = n == R ? Sum<T>(1.0 / R) : 1 / Sum<T>(n);
#pragma unroll
        for (int k = 0; k < R; k++) load<WHOLE>(x + min(i + k * down, end - 1) * step, count, v[k]);
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            Sum<T> mean = 0, rest = 0, squares = 0;
#pragma unroll
            for (int k = 0; k < R; k++)
                if (k < n) mean += v[k][c];
            mean *= share_of_one;
#pragma unroll
            for (int k = 0; k < R; k++) {
                const Sum<T> d = k < n ? v[k][c] - mean : Sum<T>(0);
                rest += d, squares += d * d;
            }
            const double far = double(mean) - double(first[c]);
            sums[c].a += n * far + rest;
            sums[c].b += squares + far * (2.0 * rest + n * far);
        }
    }
}

// What a share's rows add to the statistics.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256) batch_norm_parts(const T* __restrict__ x, long long step, long long rows,
                                                        long long channels, long long share, double* parts) {
    Pair sums[WIDE] = {};
    const int count = held(channels);
    if (count) deviations<WHOLE>(x + column(), step, count, rows, share, sums);
    column_sums(sums);
    keep(sums, parts, channels);
}

// y = act(norm(x) + z), and statistics from `shares` parts, which every block adds up again; with none of them, from x
// itself, whose rows are then all this block's. The first share's blocks write them and move the running ones.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256) batch_norm(const T* __restrict__ x, long long step, long long rows, long long channels,
                                                  long long share, const double* __restrict__ parts, int shares,
                                                  const Sum<T>* __restrict__ w, const Sum<T>* __restrict__ b,
                                                  const Sum<T>* running_mean, const Sum<T>* running_var,
                                                  const long long* tracked, const T* __restrict__ z, bool add, int act,
                                                  double eps, double momentum, T* __restrict__ y, Sum<T>* mean, Sum<T>* rstd,
                                                  Sum<T>* mean_after, Sum<T>* var_after, long long* tracked_after) {
    typedef Sum<T> S;
    const long long at = column();
    const int count = held(channels);
    Pair sums[WIDE] = {};
    if (shares) {
        column_sums(parts, shares, channels, sums);
    } else {
        if (count) deviations<WHOLE>(x + at, step, count, rows, share, sums);
        column_sums(sums);
    }
    if (!count) return;
    Channels<S> norm;
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
        const long long j = at + min(c, count - 1);
        double off = sums[c].a / rows, var = sums[c].b / rows - off * off;
        if (var < 0) var = 0;
        const S m = S(value(x[j]) + off), r = S(1 / sqrt(var + eps));
        if (blockIdx.y == 0 && threadIdx.y == 0 && c < count) {
            S unbiased = S(var * (rows / (rows - 1.0))), rate = S(momentum);
            S old_mean = running_mean[j], old_var = running_var[j];
            mean[j] = m, rstd[j] = r;
            mean_after[j] = old_mean + rate * (m - old_mean);
            var_after[j] = old_var + rate * (unbiased - old_var);
            if (j == 0) tracked_after[0] = tracked[0] + 1;
        }
        norm.mean[c] = m, norm.scale[c] = r * w[j], norm.bias[c] = b[j];
    }
    each_row<S, 2>(rows, share, [&](long long i, S(*v)[WIDE]) {
        load<WHOLE>(x + i * step + at, count, v[0]);
        if (add) load<WHOLE>(z + i * channels + at, count, v[1]);
    }, [&](long long i, S(*v)[WIDE]) {
        S out[WIDE];
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            const S s = norm(c, v[0][c]);
            out[c] = activated(add ? s + v[1][c] : s, act);
        }
        store<WHOLE>(y + i * channels + at, count, out);
    });
}

// What a share's rows add to dw / rstd and db. With `kept`, y tells the slope of the activation, and the gradient before it is
// written to dz; else norm(x) tells the slope.
template <bool WHOLE, typename T, typename S>
__device__ __forceinline__ void grad_sums(const T* __restrict__ x, long long step, long long rows, long long channels,
                                          long long share, const Channels<S>& norm, const T* __restrict__ dy,
                                          const T* __restrict__ y, bool kept, int act, T* __restrict__ dz, Pair* sums) {
    const long long at = column();
    const int count = held(channels);
    share_sums<S, 3>(rows, share, sums, [&](long long i, S(*v)[WIDE]) {
        load<WHOLE>(x + i * step + at, count, v[0]);
        load<WHOLE>(dy + i * channels + at, count, v[1]);
        if (kept) load<WHOLE>(y + i * channels + at, count, v[2]);
    }, [&](long long i, S(*v)[WIDE], S* products, S* total) {
        S before[WIDE];
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            const S d = act ? sloped(v[1][c], kept ? v[2][c] : norm(c, v[0][c]), act) : v[1][c];
            before[c] = d;
            products[c] += d * (v[0][c] - norm.mean[c]);
            total[c] += d;
        }
        if (kept) store<WHOLE>(dz + i * channels + at, count, before);
    });
}

// dw and db, or a share's part of their sums.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256) batch_norm_sums(const T* __restrict__ x, long long step, long long rows,
                                                       long long channels, long long share,
                                                       const Sum<T>* __restrict__ mean, const Sum<T>* __restrict__ rstd,
                                                       const Sum<T>* __restrict__ w, const Sum<T>* __restrict__ b,
                                                       const T* __restrict__ dy, const T* __restrict__ y, bool kept, int act,
                                                       double* parts, Sum<T>* __restrict__ dw, Sum<T>* __restrict__ db,
                                                       T* __restrict__ dz) {
    typedef Sum<T> S;
    const long long at = column();
    const int count = held(channels);
    Pair sums[WIDE] = {};
    if (count) {
        const Channels<S> norm = channels_of(count, mean, rstd, w, b);
        grad_sums<WHOLE>(x, step, rows, channels, share, norm, dy, y, kept, act, dz, sums);
    }
    column_sums(sums);
    if (gridDim.y > 1) return keep(sums, parts, channels);
    if (threadIdx.y) return;
    for (int c = 0; c < count; c++) dw[at + c] = S(sums[c].a) * rstd[at + c], db[at + c] = S(sums[c].b);
}

// dw and db from the parts of all shares.
template <typename T>
__global__ void __launch_bounds__(256)
batch_norm_sums_end(const double* __restrict__ parts, int shares, long long channels, const Sum<T>* __restrict__ rstd,
                    Sum<T>* dw, Sum<T>* db) {
    Pair sums[WIDE] = {};
    column_sums(parts, shares, channels, sums);
    if (threadIdx.y) return;
    for (int c = 0; c < held(channels); c++) {
        const long long j = column() + c;
        dw[j] = Sum<T>(sums[c].a) * rstd[j], db[j] = Sum<T>(sums[c].b);
    }
}

// dx of a share's rows, from dw and db of the thread's channels; with `add`, plus `more`, whose rows are `apart` elements
// apart. `y` as for the sums.
template <bool WHOLE, typename T, typename S>
__device__ __forceinline__ void input_grad(const T* __restrict__ x, long long step, long long rows, long long channels,
                                           long long share, const Channels<S>& norm, const S* __restrict__ rstd,
                                           const S* dw, const S* db, const T* __restrict__ dy, const T* __restrict__ y,
                                           bool kept, int act, const T* __restrict__ more, long long apart, bool add,
                                           T* __restrict__ dx) {
    const long long at = column();
    const int count = held(channels);
    S shift[WIDE], slope[WIDE];
#pragma unroll
    for (int c = 0; c < WIDE; c++) shift[c] = db[c] / S(rows), slope[c] = rstd[at + min(c, count - 1)] * dw[c] / S(rows);
    each_row<S, 4>(rows, share, [&](long long i, S(*v)[WIDE]) {
        load<WHOLE>(x + i * step + at, count, v[0]);
        load<WHOLE>(dy + i * channels + at, count, v[1]);
        if (kept) load<WHOLE>(y + i * channels + at, count, v[2]);
        if (add) load<WHOLE>(more + i * apart + at, count, v[3]);
    }, [&](long long i, S(*v)[WIDE]) {
        S out[WIDE];
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            const S d = act ? sloped(v[1][c], kept ? v[2][c] : norm(c, v[0][c]), act) : v[1][c];
            out[c] = (d - shift[c] - (v[0][c] - norm.mean[c]) * slope[c]) * norm.scale[c];
            if (add) out[c] += v[3][c];
        }
        store<WHOLE>(dx + i * channels + at, count, out);
    });
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256)
batch_norm_input_grad(const T* __restrict__ x, long long step, long long rows, long long channels, long long share,
                      const Sum<T>* __restrict__ mean, const Sum<T>* __restrict__ rstd, const Sum<T>* __restrict__ w,
                      const Sum<T>* __restrict__ b, const Sum<T>* __restrict__ dw, const Sum<T>* __restrict__ db,
                      const T* __restrict__ dy, int act, T* __restrict__ dx) {
    typedef Sum<T> S;
    const int count = held(channels);
    if (!count) return;
    S given_dw[WIDE], given_db[WIDE];
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
        const long long j = column() + min(c, count - 1);
        given_dw[c] = dw[j], given_db[c] = db[j];
    }
    input_grad<WHOLE>(x, step, rows, channels, share, channels_of(count, mean, rstd, w, b), rstd, given_dw, given_db, dy, x,
                      false, act, x, 0, false, dx);
}

// dw, db and dx at once. With `shares`, an earlier launch of batch_norm_sums left the parts of the sums (and wrote dz): every
// block adds up those of its channels. Else a block has all rows, for the sums and again for dx.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(256)
batch_norm_grad(const T* __restrict__ x, long long step, long long rows, long long channels, long long share,
                const Sum<T>* __restrict__ mean, const Sum<T>* __restrict__ rstd, const Sum<T>* __restrict__ w,
                const Sum<T>* __restrict__ b, const T* __restrict__ dy, const T* __restrict__ y, bool kept, int act,
                const double* __restrict__ parts, int shares, const T* __restrict__ more, long long apart, bool add,
                Sum<T>* __restrict__ dw, Sum<T>* __restrict__ db, T* __restrict__ dz, T* __restrict__ dx) {
    typedef Sum<T> S;
    const long long at = column();
    const int count = held(channels);
    Pair sums[WIDE] = {};
    Channels<S> norm;
    if (count) norm = channels_of(count, mean, rstd, w, b);
    if (shares) {
        column_sums(parts, shares, channels, sums);
    } else {
        if (count) grad_sums<WHOLE>(x, step, rows, channels, share, norm, dy, y, kept, act, dz, sums);
        column_sums(sums);
    }
    if (!count) return;
    S own_dw[WIDE], own_db[WIDE];
#pragma unroll
    for (int c = 0; c < WIDE; c++) {
        own_dw[c] = S(sums[c].a) * rstd[at + min(c, count - 1)], own_db[c] = S(sums[c].b);
        if (blockIdx.y == 0 && threadIdx.y == 0 && c < count) dw[at + c] = own_dw[c], db[at + c] = own_db[c];
    }
    input_grad<WHOLE>(x, step, rows, channels, share, norm, rstd, own_dw, own_db, dy, y, kept, act, more, apart, add, dx);
}
