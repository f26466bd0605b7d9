// A matrix by columns, and two sums over the rows of each column, in float64 and in a fixed order. A thread has four
// neighbouring columns, which are one access to memory where WHOLE (8 bytes of a 16-bit type, 16 of float), and some rows. A
// block has a tile of columns and a share of the rows: blocks (tiles, shares), threads (fours of columns of a tile, rows at a
// time), 256 at most. The geometry is in columns.py; it does not depend on WHOLE, and so no bits do.
#pragma once
#include "four.cuh"

constexpr int WIDE = 4;  // columns of a thread

struct alignas(16) Pair {
    double a, b;
};

// The first of a thread's columns, and how many of them there are.
__device__ __forceinline__ long long column() { return WIDE * ((long long)blockIdx.x * blockDim.x + threadIdx.x); }
__device__ __forceinline__ int held(long long columns) {
    const long long left = columns - column();
    return left < 0 ? 0 : left < WIDE ? (int)left : WIDE;
}

// The rows of a thread begin and end here; they are blockDim.y apart.
__device__ __forceinline__ long long share_begin(long long share) { return blockIdx.y * share + threadIdx.y; }
__device__ __forceinline__ long long share_end(long long share, long long rows) { return min(rows, (blockIdx.y + 1) * share); }

// For the rows of a thread: load(row, v) fetches N times four numbers, use(row, v) goes on with them. R rows are fetched at a
// time, so that their loads do not wait for each other; past the end it is the last row, in vain.
template <typename S> constexpr int ROWS = sizeof(S) > 4 ? 2 : 4;
template <typename S, int N, typename Load, typename Use>
__device__ __forceinline__ void each_row(long long rows, long long share, Load load, Use use) {
    constexpr int R = ROWS<S>;
    const long long end = share_end(share, rows), down = blockDim.y;
    for (long long i = share_begin(share); i < end; i += R * down) {
        S v[R][N][WIDE];
#pragma unroll
        for (int k = 0; k < R; k++) load(min(i + k * down, end - 1), v[k]);
#pragma unroll
        for (int k = 0; k < R; k++)
            if (i + k * down < end) use(i + k * down, v[k]);
    }
}

// The same for what use(row, v, a, b) adds to a and b of four columns: in S for the rows that are fetched together, then in
// float64, to `sums`.
template <typename S, int N, typename Load, typename Use>
__device__ __forceinline__ void share_sums(long long rows, long long share, Pair* sums, Load load, Use use) {
    constexpr int R = ROWS<S>;
    const long long end = share_end(share, rows), down = blockDim.y;
    for (long long i = share_begin(share); i < end; i += R * down) {
        S v[R][N][WIDE], a[WIDE] = {}, b[WIDE] = {};
#pragma unroll
        for (int k = 0; k < R; k++) load(min(i + k * down, end - 1), v[k]);
#pragma unroll
        for (int k = 0; k < R; k++)
            if (i + k * down < end) use(i + k * down, v[k], a, b);
#pragma unroll
        for (int c = 0; c < WIDE; c++) sums[c].a += a[c], sums[c].b += b[c];
    }
}

// Sums of the threads of each column, for all of them. The whole block takes part, once in a kernel.
__device__ inline void column_sums(Pair* sums) {
    __shared__ double part[2 * WIDE][256];
    const int at = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int c = 0; c < WIDE; c++) part[2 * c][at] = sums[c].a, part[2 * c + 1][at] = sums[c].b;
    for (int n = blockDim.y; n > 1;) {
        const int half = (n + 1) / 2;
        __syncthreads();
        if (threadIdx.y + half < n) {
#pragma unroll
            for (int c = 0; c < 2 * WIDE; c++) part[c][at] += part[c][at + half * blockDim.x];
        }
        n = half;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < WIDE; c++) sums[c] = {part[2 * c][threadIdx.x], part[2 * c + 1][threadIdx.x]};
}

// The same of what the shares of an earlier launch left in `parts` (shares, columns, 2).
__device__ inline void column_sums(const double* __restrict__ parts, int shares, long long columns, Pair* sums) {
    const int count = held(columns);
    const Pair* mine = reinterpret_cast<const Pair*>(parts) + column();
    for (int p = threadIdx.y; p < shares; p += blockDim.y) {
#pragma unroll
        for (int c = 0; c < WIDE; c++)
            if (c < count) {
                const Pair one = mine[p * columns + c];
                sums[c].a += one.a, sums[c].b += one.b;
            }
    }
    column_sums(sums);
}

__device__ __forceinline__ void keep(const Pair* sums, double* parts, long long columns) {
    if (threadIdx.y) return;
    Pair* mine = reinterpret_cast<Pair*>(parts) + blockIdx.y * columns + column();
    for (int c = 0; c < held(columns); c++) mine[c] = sums[c];
}
