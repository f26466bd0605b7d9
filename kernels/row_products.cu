// Small products of two matrices that lie row by row: out (m, n) = the sum over rows of a (rows, m) times b (rows, n); see
// row_products.py.
#include "common.cuh"
#include "group.cuh"

enum { TILE = 32, CHUNK = 16, HALF = 16 };  // outputs of a block along both axes; rows at a time; 256 threads of 2 x 2 outputs

struct RowProducts {
    const void *a, *b;
    void *out, *bias;
    double* part;
    int rows, a_row, a_column, b_row, b_column, share, m, n, with_bias, unused;
};

// Block (x, y, z): tile of columns, tile of rows of out, share of the rows. With a bias, which is the sum of a's rows, b has
// one more column, of ones. Shares go to `part`: each m * n products, then m sums.
template <typename T>
__device__ __forceinline__ void products(const T* __restrict__ a, const T* __restrict__ b, T* out, T* bias, double* part, const RowProducts& p, const Here& h) {
    __shared__ Sum<T> left[CHUNK * TILE];
    __shared__ Sum<T> right[CHUNK * TILE];
    int thread = h.ty * h.dx + h.tx, row = thread / HALF, column = thread % HALF, top = h.by * TILE, first = h.bx * TILE;
    int end = min(p.rows, (h.bz + 1) * p.share);
    Sum<T> sum[2][2] = {};
    for (int begin = h.bz * p.share; begin < end; begin += CHUNK) {
        __syncthreads();  // the last chunk has been read
        for (int i = thread; i < CHUNK * TILE; i += 256) {
            long long at = begin + i / TILE, o = top + i % TILE, c = first + i % TILE;
            left[i] = at < end && o < p.m ? Sum<T>(value(a[at * p.a_row + o * p.a_column])) : Sum<T>(0);
            right[i] = at < end && c < p.n ? Sum<T>(value(b[at * p.b_row + c * p.b_column])) : Sum<T>(c == p.n);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int v = 0; v < 2; v++) sum[u][v] += left[k * TILE + row + u * HALF] * right[k * TILE + column + v * HALF];
    }
    long long each = (long long)p.m * (p.n + p.with_bias);
    for (int u = 0; u < 2; u++)
        for (int v = 0; v < 2; v++) {
            int o = top + row + u * HALF, c = first + column + v * HALF;
            if (o >= p.m || c >= p.n + p.with_bias) continue;
            long long at = c < p.n ? (long long)o * p.n + c : (long long)p.m * p.n + o;
            if (h.gz > 1) part[h.bz * each + at] = sum[u][v];
            else if (c < p.n) out[at] = as<T>(sum[u][v]);
            else bias[o] = as<T>(sum[u][v]);
        }
}

template <typename T>
__global__ void __launch_bounds__(256) row_products(const T* __restrict__ a, const T* __restrict__ b, T* out, T* bias, double* part, int rows, int a_row, int a_column,
                                                    int b_row, int b_column, int share, int m, int n, int with_bias, int unused) {
    products<T>(a, b, out, bias, part, {a, b, out, bias, part, rows, a_row, a_column, b_row, b_column, share, m, n, with_bias, unused}, here());
}
template <typename T> __global__ void __launch_bounds__(256) row_products_group(Group<RowProducts> g) {
    Here h;
    const RowProducts& p = member_of(g, h);
    products<T>((const T*)p.a, (const T*)p.b, (T*)p.out, (T*)p.bias, p.part, p, h);
}
