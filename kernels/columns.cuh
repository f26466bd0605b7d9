// A matrix by columns, and two sums over the rows of each column, in float64 and in a fixed order. A block has a tile of
// columns and a share of the rows: blocks (tiles, shares), threads (columns of a tile, rows at a time), 512 at most. The
// geometry is in columns.py.
#pragma once
#include "common.cuh"

struct Pair {
    double a, b;
};

__device__ __forceinline__ long long column() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }

// The rows of a thread begin and end here; they are blockDim.y apart.
__device__ __forceinline__ long long share_begin(long long share) { return blockIdx.y * share + threadIdx.y; }
__device__ __forceinline__ long long share_end(long long share, long long rows) { return min(rows, (blockIdx.y + 1) * share); }

// For the rows of a thread: load(row, v) fetches N numbers, use(row, v) goes on with them. Four rows are fetched at a time, so
// that their loads do not wait for each other; past the end it is the last row, in vain.
template <typename S, int N, typename Load, typename Use>
__device__ __forceinline__ void each_row(long long rows, long long share, Load load, Use use) {
    const long long end = share_end(share, rows), down = blockDim.y;
    for (long long i = share_begin(share); i < end; i += 4 * down) {
        S v[4][N];
#pragma unroll
        for (int k = 0; k < 4; k++) load(min(i + k * down, end - 1), v[k]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * down < end) use(i + k * down, v[k]);
    }
}

// The same for what use(row, v, a, b) adds to a and b: in S for four rows, then in float64.
template <typename S, int N, typename Load, typename Use>
__device__ __forceinline__ Pair share_sums(long long rows, long long share, Load load, Use use) {
    const long long end = share_end(share, rows), down = blockDim.y;
    Pair sums = {0, 0};
    for (long long i = share_begin(share); i < end; i += 4 * down) {
        S v[4][N], a = 0, b = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) load(min(i + k * down, end - 1), v[k]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * down < end) use(i + k * down, v[k], a, b);
        sums.a += a, sums.b += b;
    }
    return sums;
}

// Sums of the threads of each column, for all of them. The whole block takes part, once in a kernel.
__device__ inline Pair column_sums(Pair mine) {
    __shared__ Pair part[512];
    int at = threadIdx.y * blockDim.x + threadIdx.x;
    part[at] = mine;
    for (int n = blockDim.y; n > 1;) {
        int half = (n + 1) / 2;
        __syncthreads();
        if (threadIdx.y + half < n) {
            part[at].a += part[at + half * blockDim.x].a;
            part[at].b += part[at + half * blockDim.x].b;
        }
        n = half;
    }
    __syncthreads();
    return part[threadIdx.x];
}

// The same of what the shares of an earlier launch left in `parts` (shares, 2, columns).
__device__ inline Pair column_sums(const double* __restrict__ parts, int shares, long long columns) {
    Pair mine = {0, 0};
    if (column() < columns)
        for (int p = threadIdx.y; p < shares; p += blockDim.y) {
            mine.a += parts[2 * p * columns + column()];
            mine.b += parts[(2 * p + 1) * columns + column()];
        }
    return column_sums(mine);
}

__device__ __forceinline__ void keep(Pair sums, double* parts, long long columns) {
    if (threadIdx.y || column() >= columns) return;
    parts[2 * blockIdx.y * columns + column()] = sums.a;
    parts[(2 * blockIdx.y + 1) * columns + column()] = sums.b;
}
