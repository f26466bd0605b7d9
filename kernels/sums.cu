// Sums over rows; the reference is in sums.py.
#include "common.cuh"

// out (parts, columns): row p is the sum of the rows p * share to (p + 1) * share - 1 of x (rows, columns), whose steps
// are given in elements. Blocks: (tiles of columns, parts). Threads: (columns of a tile, rows at a time), both powers of
// two, 512 in all. Each thread has four sums, so that an addition need not wait for the one before it.
template <typename T, typename U>
__global__ void row_sums(const T* __restrict__ x, U* __restrict__ out, long long rows, long long columns, long long row_step,
                         long long column_step, long long share) {
    __shared__ Sum<T> part[512];
    long long column = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long row = blockIdx.y * share + threadIdx.y, end = min(rows, (blockIdx.y + 1) * share), apart = blockDim.y;
    Sum<T> a = 0, b = 0, c = 0, d = 0;
    if (column < columns) {
        const T* from = x + column * column_step;
        for (; row + 3 * apart < end; row += 4 * apart) {
            a += value(from[row * row_step]);
            b += value(from[(row + apart) * row_step]);
            c += value(from[(row + 2 * apart) * row_step]);
            d += value(from[(row + 3 * apart) * row_step]);
        }
        for (; row < end; row += apart) a += value(from[row * row_step]);
    }
    int mine = threadIdx.y * blockDim.x + threadIdx.x;
    part[mine] = (a + b) + (c + d);
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) part[mine] += part[mine + half * blockDim.x];
    }
    if (threadIdx.y == 0 && column < columns) out[blockIdx.y * columns + column] = as<U>(part[mine]);
}
