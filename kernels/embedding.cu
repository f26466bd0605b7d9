// Rows of a table by number, and the sums of gradients back to them; the reference is in embedding.py. `index` may be
// strided, all else is contiguous.
#include "elements.cuh"

template <typename T>
__global__ void __launch_bounds__(512) embedding(const T* __restrict__ table, const long long* __restrict__ index,
                                                 Strides of_index, T* __restrict__ y, long long positions, int width, int lanes) {
    for (long long n = first_row(lanes); n < positions; n += row_step(lanes)) {
        const T* from = table + index[place(of_index, 0, n)] * width;
        T* to = y + n * width;
        along_row(width, lanes, [&](int j) { to[j] = from[j]; });
    }
}

// A thread's sums of the columns `column`, + 32, + 64 and + 96; those past the last one sum the last one and are left out.
template <typename S> struct Columns {
    S of[4];
    int column, width;
    __device__ __forceinline__ Columns(int first, int count) : of{0, 0, 0, 0}, column(first), width(count) {}
    template <typename T> __device__ __forceinline__ void add(const T* row, bool really = true) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const S v = value(row[min(column + 32 * c, width - 1)]);
            of[c] += really ? v : S(0);
        }
    }
    template <typename T> __device__ __forceinline__ void put(T* row) const {
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (column + 32 * c < width) row[column + 32 * c] = as<T>(of[c]);
    }
};

// For few positions: a warp for 128 columns of a row looks through the whole index, and adds four gradients at a time.
template <typename T>
__global__ void __launch_bounds__(256) embedding_grad(const long long* __restrict__ index, Strides of_index,
                                                      const T* __restrict__ dy, T* __restrict__ grad, int positions,
                                                      long long rows, int width) {
    const int column = 128 * blockIdx.y + threadIdx.x % 32;
    for (long long row = first_row(32); row < rows; row += row_step(32)) {
        Columns<Sum<T>> sums(column, width);
        for (int n = 0; n < positions; n += 32) {
            const int mine = n + threadIdx.x % 32;
            unsigned hits = __ballot_sync(0xffffffffu, mine < positions && index[place(of_index, 0, mine)] == row);
            while (hits) {
                int at[4], last = 0;
                bool hit[4];
#pragma unroll
                for (int k = 0; k < 4; k++, hits &= hits - 1) {
                    hit[k] = hits != 0;
                    at[k] = last = hit[k] ? n + __ffs(hits) - 1 : last;
                }
#pragma unroll
                for (int k = 0; k < 4; k++) sums.add(dy + (long long)at[k] * width, hit[k]);
            }
        }
        sums.put(grad + row * width);
    }
}

// For many, first: pieces of 2048 positions sorted by (row, position), which is one number and never twice the same.
__global__ void __launch_bounds__(1024) embedding_sort(const long long* __restrict__ index, Strides of_index, int positions,
                                                       unsigned long long* keys) {
    __shared__ unsigned long long key[2048];
    const int begin = 2048 * blockIdx.x, t = threadIdx.x;
    for (int i = t; i < 2048; i += 1024) {
        const int n = begin + i;
        key[i] = n < positions ? (unsigned long long)index[place(of_index, 0, n)] << 32 | n : ~0ull;
    }
    for (int size = 2; size <= 2048; size *= 2)
        for (int apart = size / 2; apart > 0; apart /= 2) {
            __syncthreads();
            const int i = 2 * t - t % apart;
            const unsigned long long a = key[i], b = key[i + apart];
            if ((a > b) == !(i & size)) key[i] = b, key[i + apart] = a;
        }
    __syncthreads();
    for (int i = t; i < 2048 && begin + i < positions; i += 1024) keys[begin + i] = key[i];
}

// How many of all keys are less.
__device__ inline int rank(unsigned long long key, const unsigned long long* __restrict__ keys, int positions) {
    int less = 0;
    for (int begin = 0; begin < positions; begin += 2048) {
        int low = begin, high = min(begin + 2048, positions);
        while (low < high) {
            const int middle = (low + high) / 2;
            if (keys[middle] < key) low = middle + 1;
            else high = middle;
        }
        less += low - begin;
    }
    return less;
}

// Second: all positions in this order, and where each row begins among them.
__global__ void __launch_bounds__(256) embedding_order(const unsigned long long* __restrict__ keys, int positions, int rows,
                                                       int* order, int* begins) {
    for (long long i = first(); i < (long long)positions + rows + 1; i += step()) {
        if (i < positions) order[rank(keys[i], keys, positions)] = int(keys[i] & 0xffffffffu);
        else begins[i - positions] = rank((unsigned long long)(i - positions) << 32, keys, positions);
    }
}

// Third: the sums, 8 rows and 128 columns to a block. A row with few positions belongs to a warp; one with many to all eight,
// each with an eighth of the positions.
template <typename T>
__global__ void __launch_bounds__(256) embedding_sums(const int* __restrict__ order, const int* __restrict__ begins,
                                                      const T* __restrict__ dy, T* __restrict__ grad, int rows, int width) {
    typedef Sum<T> S;
    __shared__ S part[8 * 128];
    const int warp = threadIdx.x / 32, in_tile = threadIdx.x % 32, column = 128 * blockIdx.y + in_tile;
    auto sum = [&](int from, int to) {
        Columns<S> sums(column, width);
#pragma unroll 4
        for (int k = from; k < to; k++) sums.add(dy + (long long)order[k] * width);
        return sums;
    };
    for (int group = 8 * blockIdx.x; group < rows; group += 8 * gridDim.x)
        for (int row = group; row < min(group + 8, rows); row++) {
            const int begin = begins[row], count = begins[row + 1] - begin;
            T* to = grad + (long long)row * width;
            if (count <= 64) {
                if (warp == row - group) sum(begin, begin + count).put(to);
                continue;
            }
            const Columns<S> mine = sum(begin + (long long)count * warp / 8, begin + (long long)count * (warp + 1) / 8);
            for (int c = 0; c < 4; c++) part[128 * warp + 32 * c + in_tile] = mine.of[c];
            __syncthreads();
            if (warp == 0) {
                Columns<S> all(column, width);
                for (int w = 0; w < 8; w++)
                    for (int c = 0; c < 4; c++) all.of[c] += part[128 * w + 32 * c + in_tile];
                all.put(to);
            }
            __syncthreads();
        }
}

// Or, third: for each row and column the place behind the rows of its largest element; the row itself if it has none.
template <typename T>
__global__ void embedding_largest(const int* __restrict__ order, const int* __restrict__ begins, const T* __restrict__ x,
                                  long long* found, long long rows, long long width, long long count) {
    for (long long i = first(); i < count; i += step()) {
        const long long row = i / width, column = i - row * width;
        long long best = -1;
        for (int k = begins[row]; k < begins[row + 1]; k++) {
            const Sum<T> v = value(x[order[k] * width + column]), top = value(x[max(best, 0LL) * width + column]);
            if (best < 0 || v > top || (v != v && top == top)) best = order[k];
        }
        found[i] = best < 0 ? row : rows + best;
    }
}
