// Convolution with one filter for each channel; the reference is conv2d and its gradients in conv.py.
//
// 3x3 and 5x5 with stride 1 or 2 and no dilation: a block has up to CHANNELS channels and several lanes; a thread keeps
// its channel's taps in registers and makes RUN neighbours of a line at a time, so that what it has read of a line serves
// all of them. Other windows: a thread for each element (or tap), which reads its taps from the cache.
#include "group.cuh"
#include "window.cuh"

enum { RUN = 4, CHANNELS = 64, THREADS = 256 };  // RUN is a multiple of both strides

// Which channel is a thread's, and which runs: first, first + step, ... Blocks: (tiles of channels, shares of the runs).
struct Mine {
    int channel;
    long long first, step;
};
__device__ __forceinline__ Mine mine(const Here& h = here()) {
    return {h.bx * h.dx + h.tx, (long long)h.by * h.dy + h.ty, (long long)h.gy * h.dy};
}

// Reads the taps w (c, K, K) of a thread's channel by way of shared memory, where the block's taps lie as they come.
template <typename T, int K> __device__ __forceinline__ void read_taps(const T* __restrict__ w, int c, Sum<T> (&tap)[K * K]) {
    __shared__ Sum<T> taps[CHANNELS * K * K];
    int begin = blockIdx.x * blockDim.x, here = min(int(blockDim.x), c - begin);
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < here * K * K; i += blockDim.x * blockDim.y)
        taps[i] = value(w[(long long)begin * K * K + i]);
    __syncthreads();
    if (int(threadIdx.x) < here) {
#pragma unroll
        for (int i = 0; i < K * K; i++) tap[i] = taps[threadIdx.x * K * K + i];
    }
}

// N neighbours of one channel of a line of `length` pixels, from place `from` on; zeros outside.
template <typename T, int N>
__device__ __forceinline__ void read_line(const T* __restrict__ line, int from, int length, int c, Sum<T> (&seen)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        int at = from + i;
        seen[i] = at >= 0 && at < length ? Sum<T>(value(line[(long long)at * c])) : Sum<T>(0);
    }
}

template <typename T, int K, int S>
__device__ __forceinline__ void forward_runs(const T* __restrict__ x, const Sum<T> (&tap)[K * K], Sum<T> bias, T* y, const Window& g, Mine m) {
    int across = (g.ow + RUN - 1) / RUN;
    long long runs = (long long)g.n * g.oh * across;
    for (long long run = m.first; run < runs; run += m.step) {
        Place p = place(run, g.oh, across, 1);
        int ox = p.x * RUN;
        Sum<T> sum[RUN] = {};
#pragma unroll
        for (int ky = 0; ky < K; ky++) {
            int iy = p.y * S - g.ph + ky;
            if (iy < 0 || iy >= g.h) continue;
            Sum<T> seen[(RUN - 1) * S + K];
            read_line(x + pixel(p.sample, iy, 0, g.h, g.w, g.c) + m.channel, ox * S - g.pw, g.w, g.c, seen);
#pragma unroll
            for (int r = 0; r < RUN; r++)
#pragma unroll
                for (int kx = 0; kx < K; kx++) sum[r] += seen[r * S + kx] * tap[ky * K + kx];
        }
        T* out = y + pixel(p.sample, p.y, ox, g.oh, g.ow, g.c) + m.channel;
#pragma unroll
        for (int r = 0; r < RUN; r++)
            if (ox + r < g.ow) out[(long long)r * g.c] = as<T>(sum[r] + bias);
    }
}

template <typename T, int K>
__device__ __forceinline__ void forward(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ b, T* y, const Window& g, bool bias) {
    Sum<T> tap[K * K];
    read_taps<T, K>(w, g.c, tap);
    Mine m = mine();
    if (m.channel >= g.c) return;
    Sum<T> term = bias ? Sum<T>(value(b[m.channel])) : Sum<T>(0);
    if (g.sw == 1) forward_runs<T, K, 1>(x, tap, term, y, g, m);
    else forward_runs<T, K, 2>(x, tap, term, y, g, m);
}

// Runs begin where place + padding is a multiple of the stride: so it is known when compiling which taps meet a pixel.
template <typename T, int K, int S>
__device__ __forceinline__ void input_grad_runs(const T* __restrict__ dy, const Sum<T> (&tap)[K * K], T* dx, const Window& g, Mine m) {
    constexpr int BEFORE = (K - 1) / S;  // neighbours in dy before the one at the run's begin
    int early = g.pw % S, across = (g.w + early + RUN - 1) / RUN;
    long long runs = (long long)g.n * g.h * across;
    for (long long run = m.first; run < runs; run += m.step) {
        Place p = place(run, g.h, across, 1);
        int ix = p.x * RUN - early, ox = (ix + g.pw) / S;
        Sum<T> sum[RUN] = {};
#pragma unroll
        for (int ky = 0; ky < K; ky++) {
            int up = p.y + g.ph - ky, oy = up / S;
            if (up < 0 || up % S != 0 || oy >= g.oh) continue;
            Sum<T> seen[BEFORE + (RUN - 1) / S + 1];
            read_line(dy + pixel(p.sample, oy, 0, g.oh, g.ow, g.c) + m.channel, ox - BEFORE, g.ow, g.c, seen);
#pragma unroll
            for (int r = 0; r < RUN; r++)
#pragma unroll
                for (int kx = 0; kx < K; kx++)
                    if ((r - kx) % S == 0) sum[r] += seen[BEFORE + (r - kx) / S] * tap[ky * K + kx];
        }
        T* out = dx + pixel(p.sample, p.y, 0, g.h, g.w, g.c) + m.channel;
#pragma unroll
        for (int r = 0; r < RUN; r++)
            if (ix + r >= 0 && ix + r < g.w) out[(long long)(ix + r) * g.c] = as<T>(sum[r]);
    }
}

template <typename T, int K>
__device__ __forceinline__ void input_grad(const T* __restrict__ dy, const T* __restrict__ w, T* dx, const Window& g) {
    Sum<T> tap[K * K];
    read_taps<T, K>(w, g.c, tap);
    Mine m = mine();
    if (m.channel >= g.c) return;
    if (g.sw == 1) input_grad_runs<T, K, 1>(dy, tap, dx, g, m);
    else input_grad_runs<T, K, 2>(dy, tap, dx, g, m);
}

// Adds N sums of each thread over the block's lanes. They are sums for the taps from `tap` on, of `taps` in all, and go
// to a share (c, taps) of `part`; if this block has all the runs, to dw.
template <typename T, int N>
__device__ __forceinline__ void add_lanes(const Sum<T>* sums, int tap, int taps, int c, double* part, T* dw, const Here& h = here()) {
    __shared__ Sum<T> lanes[THREADS * N];
    int wide = h.dx * N;
    __syncthreads();  // the last call's sums have been read
    if (h.ty < h.dy) {
#pragma unroll
        for (int i = 0; i < N; i++) lanes[h.ty * wide + i * h.dx + h.tx] = sums[i];
    }
    __syncthreads();
    for (int i = h.ty * h.dx + h.tx; h.ty < h.dy && i < wide; i += h.dx * h.dy) {
        int channel = h.bx * h.dx + i % h.dx;
        if (channel >= c) continue;
        double sum = 0;
        for (int lane = 0; lane < h.dy; lane++) sum += lanes[lane * wide + i];
        long long at = (long long)channel * taps + tap + i / h.dx;
        if (h.gy == 1) dw[at] = as<T>(Sum<T>(sum));
        else part[h.by * ((long long)c * taps) + at] = sum;
    }
}

template <typename T, int K, int S>
__device__ __forceinline__ void weight_grad_runs(const T* __restrict__ x, const T* __restrict__ dy, Sum<T> (&total)[K * K], const Window& g, Mine m) {
    int across = (g.ow + RUN - 1) / RUN;
    long long runs = (long long)g.n * g.oh * across;
    for (long long run = m.first; run < runs; run += m.step) {
        Place p = place(run, g.oh, across, 1);
        int ox = p.x * RUN;
        Sum<T> up[RUN];
        read_line(dy + pixel(p.sample, p.y, 0, g.oh, g.ow, g.c) + m.channel, ox, g.ow, g.c, up);
#pragma unroll
        for (int ky = 0; ky < K; ky++) {
            int iy = p.y * S - g.ph + ky;
            if (iy < 0 || iy >= g.h) continue;
            Sum<T> seen[(RUN - 1) * S + K];
            read_line(x + pixel(p.sample, iy, 0, g.h, g.w, g.c) + m.channel, ox * S - g.pw, g.w, g.c, seen);
#pragma unroll
            for (int r = 0; r < RUN; r++)
#pragma unroll
                for (int kx = 0; kx < K; kx++) total[ky * K + kx] += up[r] * seen[r * S + kx];
        }
    }
}

template <typename T, int K>
__device__ __forceinline__ void weight_grad(const T* __restrict__ x, const T* __restrict__ dy, double* part, T* dw, const Window& g, const Here& h) {
    Sum<T> total[K * K] = {};
    Mine m = mine(h);
    if (m.channel < g.c && h.ty < h.dy) {
        if (g.sw == 1) weight_grad_runs<T, K, 1>(x, dy, total, g, m);
        else weight_grad_runs<T, K, 2>(x, dy, total, g, m);
    }
#pragma unroll
    for (int ky = 0; ky < K; ky++) add_lanes<T, K>(total + ky * K, ky * K, K * K, g.c, part, dw, h);
}

template <typename T>
__global__ void __launch_bounds__(256) depthwise3(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ b, T* y, Window g, bool bias) {
    forward<T, 3>(x, w, b, y, g, bias);
}
template <typename T>
__global__ void __launch_bounds__(256) depthwise5(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ b, T* y, Window g, bool bias) {
    forward<T, 5>(x, w, b, y, g, bias);
}
template <typename T>
__global__ void __launch_bounds__(256) depthwise3_input_grad(const T* __restrict__ dy, const T* __restrict__ w, T* dx, Window g) {
    input_grad<T, 3>(dy, w, dx, g);
}
template <typename T>
__global__ void __launch_bounds__(256) depthwise5_input_grad(const T* __restrict__ dy, const T* __restrict__ w, T* dx, Window g) {
    input_grad<T, 5>(dy, w, dx, g);
}
template <typename T>
__global__ void __launch_bounds__(256) depthwise3_weight_grad(const T* __restrict__ x, const T* __restrict__ dy, double* part, T* dw, Window g) {
    weight_grad<T, 3>(x, dy, part, dw, g, here());
}
template <typename T>
__global__ void __launch_bounds__(256) depthwise5_weight_grad(const T* __restrict__ x, const T* __restrict__ dy, double* part, T* dw, Window g) {
    weight_grad<T, 5>(x, dy, part, dw, g, here());
}

struct WeightGrad {
    const void *x, *dy;
    double* part;
    void* dw;
    Window g;
};
template <typename T, int K> __device__ __forceinline__ void weight_grad(const Group<WeightGrad>& g) {
    Here h;
    const WeightGrad& m = member_of(g, h);
    weight_grad<T, K>((const T*)m.x, (const T*)m.dy, m.part, (T*)m.dw, m.g, h);
}
template <typename T> __global__ void __launch_bounds__(256) depthwise3_weight_grad_group(Group<WeightGrad> g) { weight_grad<T, 3>(g); }
template <typename T> __global__ void __launch_bounds__(256) depthwise5_weight_grad_group(Group<WeightGrad> g) { weight_grad<T, 5>(g); }

// ------------------------------------------------------------------------------------------------------- any window
template <typename T>
__global__ void depthwise(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ b, T* y, Window g, bool bias, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.oh, g.ow, g.c);
        const T* taps = w + (long long)p.channel * g.kh * g.kw;
        Sum<T> sum = 0;
        for (int ky = 0; ky < g.kh; ky++) {
            int iy = p.y * g.sh - g.ph + ky * g.dh;
            if (iy < 0 || iy >= g.h) continue;
            for (int kx = 0; kx < g.kw; kx++) {
                int ix = p.x * g.sw - g.pw + kx * g.dw;
                if (ix >= 0 && ix < g.w) sum += value(x[pixel(p.sample, iy, ix, g.h, g.w, g.c) + p.channel]) * value(taps[ky * g.kw + kx]);
            }
        }
        y[i] = as<T>(bias ? sum + value(b[p.channel]) : sum);
    }
}

template <typename T>
__global__ void depthwise_input_grad(const T* __restrict__ dy, const T* __restrict__ w, T* dx, Window g, long long count) {
    for (long long i = first(); i < count; i += step()) {
        Place p = place(i, g.h, g.w, g.c);
        const T* taps = w + (long long)p.channel * g.kh * g.kw;
        Sum<T> sum = 0;
        for (int ky = 0; ky < g.kh; ky++) {
            int up = p.y + g.ph - ky * g.dh, oy = up / g.sh;
            if (up < 0 || up % g.sh != 0 || oy >= g.oh) continue;
            for (int kx = 0; kx < g.kw; kx++) {
                int left = p.x + g.pw - kx * g.dw, ox = left / g.sw;
                if (left >= 0 && left % g.sw == 0 && ox < g.ow)
                    sum += value(dy[pixel(p.sample, oy, ox, g.oh, g.ow, g.c) + p.channel]) * value(taps[ky * g.kw + kx]);
            }
        }
        dx[i] = as<T>(sum);
    }
}

// Blocks: (tiles of channels, shares of the pixels, taps).
template <typename T>
__global__ void __launch_bounds__(256) depthwise_weight_grad(const T* __restrict__ x, const T* __restrict__ dy, double* part, T* dw, Window g) {
    Mine m = mine();
    long long pixels = (long long)g.n * g.oh * g.ow;
    for (int tap = blockIdx.z; tap < g.kh * g.kw; tap += gridDim.z) {
        Sum<T> total = 0;
        for (long long i = m.first; m.channel < g.c && i < pixels; i += m.step) {
            Place p = place(i, g.oh, g.ow, 1);
            int iy = p.y * g.sh - g.ph + tap / g.kw * g.dh, ix = p.x * g.sw - g.pw + tap % g.kw * g.dw;
            if (iy >= 0 && iy < g.h && ix >= 0 && ix < g.w)
                total += value(dy[i * g.c + m.channel]) * value(x[pixel(p.sample, iy, ix, g.h, g.w, g.c) + m.channel]);
        }
        add_lanes<T, 1>(&total, tap, g.kh * g.kw, g.c, part, dw);
    }
}
