// Sums over rows; the reference is in sums.py.
#include "common.cuh"
#include "group.cuh"

// out (parts, columns): row p is the sum of the rows p * share to (p + 1) * share - 1 of x (rows, columns), whose steps
// are given in elements. Blocks: (tiles of columns, parts). Threads: (columns of a tile, rows at a time), both powers of
// two, 512 in all. Each thread has four sums, so that an addition need not wait for the one before it.
template <typename T, typename U>
__device__ __forceinline__ void sum_rows(const T* __restrict__ x, U* __restrict__ out, long long rows, long long columns, long long row_step,
                                         long long column_step, long long share, const Here& h) {
    __shared__ Sum<T> part[512];
    long long column = (long long)h.bx * h.dx + h.tx;
    long long row = h.by * share + h.ty, end = min(rows, (h.by + 1) * share), apart = h.dy;
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
    int mine = h.ty * h.dx + h.tx;
    part[mine] = (a + b) + (c + d);
    for (int half = h.dy / 2; half > 0; half /= 2) {
        __syncthreads();
        if (h.ty < half) part[mine] += part[mine + half * h.dx];
    }
    if (h.ty == 0 && column < columns) out[h.by * columns + column] = as<U>(part[mine]);
}

template <typename T, typename U>
__global__ void row_sums(const T* __restrict__ x, U* __restrict__ out, long long rows, long long columns, long long row_step,
                         long long column_step, long long share) {
    sum_rows(x, out, rows, columns, row_step, column_step, share, here());
}

struct RowSums {
    const void* x;
    void* out;
    long long rows, columns, row_step, column_step, share;
};
template <typename T, typename U> __global__ void row_sums_group(Group<RowSums> g) {
    Here h;
    const RowSums& m = member_of(g, h);
    sum_rows((const T*)m.x, (U*)m.out, m.rows, m.columns, m.row_step, m.column_step, m.share, h);
}
