// Products of small matrices, with everything that belongs to them in one launch; see small_product.py.
#include "common.cuh"
#include "gate.cuh"

enum {
    TILE = 16,         // rows and columns of a block's part of the result
    WARPS = 8,         // each adds up every eighth slice of k
    SLICE = 8,         // products of a slice
    DEEP = WARPS * SLICE,
    PITCH = TILE + 4,  // keeps four neighbours aligned and banks apart
    EACH = DEEP * TILE / (32 * WARPS)  // elements of a tile of a or b that a thread fetches
};

// Steps, in elements, of a and b along the result and along k, of the result's rows, and from matrix to matrix.
struct SmallProduct {
    int m, n, k, count;
    long long a_row, a_k, a_next, b_column, b_k, b_next, out_row, out_next;
    int accumulate, act, biased, summed;
};

// A tile (DEEP, TILE) of an operand from `first` on along k; zeros beyond its end. Neighbouring threads take neighbours in
// memory: along k where its step is 1, else across.
template <typename T>
__device__ __forceinline__ void fetch(const T* from, int at, int across, long long across_step, int first, int k,
                                      long long k_step, Sum<T>* held) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int i = threadIdx.x + e * 32 * WARPS;
        int deep = first + (k_step == 1 ? i % DEEP : i / TILE), line = at + (k_step == 1 ? i / DEEP : i % TILE);
        held[e] = deep < k && line < across ? value(from[line * across_step + deep * k_step]) : Sum<T>(0);
    }
}

template <typename S> __device__ __forceinline__ void put(S (*tile)[PITCH], long long k_step, const S* held) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int i = threadIdx.x + e * 32 * WARPS;
        if (k_step == 1) tile[i % DEEP][i / DEEP] = held[e];
        else tile[i / TILE][i % TILE] = held[e];
    }
}

enum { NO_ACT, RELU, RELU_GRAD, GELU_TANH_GRAD };  // as in small_product.py

// `seen`: where the slope of an activation is read.
template <typename S> __device__ __forceinline__ S ended(S v, S seen, int act) {
    if (act == RELU) return v <= 0 ? S(0) : v;  // NaN passes through
    if (act == RELU_GRAD) return seen > 0 ? v : S(0);
    return act == GELU_TANH_GRAD ? v * gelu_tanh_slope(seen) : v;
}

// out = relu(a b + bias), or added to out; sums (m) = the sums of a's rows. Blocks: (tiles along n, tiles
// along m, matrices). Threads: 256. A warp adds up its slices of k, two by four elements of the tile in each thread; then the
// warps' parts are added in their order.
template <typename T>
__global__ void __launch_bounds__(256) small_product(const T* __restrict__ a, const T* __restrict__ b, T* out, const T* bias,
                                                     T* sums, const T* seen, SmallProduct p) {
    __shared__ __align__(16) Sum<T> left[DEEP][PITCH];
    __shared__ __align__(16) Sum<T> right[DEEP][PITCH];
    __shared__ Sum<T> part[WARPS][TILE][TILE];
    __shared__ Sum<T> line[WARPS][TILE];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4 * 2, column = lane % 4 * 4;
    int top = blockIdx.y * TILE, start = blockIdx.x * TILE;
    bool adds = p.summed && blockIdx.x == 0;
    for (int matrix = blockIdx.z; matrix < p.count; matrix += gridDim.z) {
        const T* x = a + matrix * p.a_next;
        const T* y = b + matrix * p.b_next;
        Sum<T> total[2][4] = {}, added = 0, next_left[EACH], next_right[EACH];
        fetch(x, top, p.m, p.a_row, 0, p.k, p.a_k, next_left);
        fetch(y, start, p.n, p.b_column, 0, p.k, p.b_k, next_right);
        for (int first = 0; first < p.k; first += DEEP) {
            __syncthreads();  // the last tiles have been read
            put(left, p.a_k, next_left);
            put(right, p.b_k, next_right);
            __syncthreads();
            fetch(x, top, p.m, p.a_row, first + DEEP, p.k, p.a_k, next_left);
            fetch(y, start, p.n, p.b_column, first + DEEP, p.k, p.b_k, next_right);
#pragma unroll
            for (int d = warp * SLICE; d < (warp + 1) * SLICE; d++) {
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) total[i][j] += left[d][row + i] * right[d][column + j];
                if (adds && lane < TILE) added += left[d][lane];
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) part[warp][row + i][column + j] = total[i][j];
        if (adds && lane < TILE) line[warp][lane] = added;
        __syncthreads();
        int r = threadIdx.x / TILE, c = threadIdx.x % TILE;
        if (top + r < p.m && start + c < p.n) {
            Sum<T> all = part[0][r][c];
#pragma unroll
            for (int w = 1; w < WARPS; w++) all += part[w][r][c];
            if (p.biased) all += value(bias[start + c]);
            long long at = matrix * p.out_next + (top + r) * p.out_row + start + c;
            if (p.accumulate) all += value(out[at]);
            out[at] = as<T>(ended(all, p.act > RELU ? value(seen[at]) : Sum<T>(0), p.act));
        }
        if (adds && threadIdx.x < TILE && top + threadIdx.x < p.m) {
            Sum<T> all = line[0][threadIdx.x];
#pragma unroll
            for (int w = 1; w < WARPS; w++) all += line[w][threadIdx.x];
            sums[top + threadIdx.x] = as<T>(all);
        }
    }
}
