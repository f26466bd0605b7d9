// What happens to the gates in one step of time, between its products; see recurrent.py. Arrays are (n, gates d) with
// neighbours side by side, but for gx and dy, whose rows and elements may be any steps apart.
#include "common.cuh"

// The values of a thread: for (long long i = row(); i < n; i += rows()) for column() < d. Blocks: (columns, rows).
__device__ __forceinline__ int column() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ long long row() { return (long long)blockIdx.y * blockDim.y + threadIdx.y; }
__device__ __forceinline__ long long rows() { return (long long)gridDim.y * blockDim.y; }

template <typename S> __device__ __forceinline__ S sigmoid(S x) { return 1 / (1 + exp(-x)); }

// h holds h w^T and becomes tanh or relu of (gx + h w^T + b).
template <typename T>
__global__ void rnn_step(const T* __restrict__ gx, long long gx_row, long long gx_step, const T* __restrict__ b, long long b_step,
                         bool biased, T* h, long long n, int d, bool relu) {
    typedef Sum<T> S;
    int j = column();
    if (j >= d) return;
    S bias = biased ? value(b[j * b_step]) : S(0);
    for (long long i = row(); i < n; i += rows()) {
        S a = value(gx[i * gx_row + j * gx_step]) + (value(h[i * d + j]) + bias);
        h[i * d + j] = as<T>(relu ? (a <= 0 ? S(0) : a) : tanh(a));
    }
}

template <typename T>
__global__ void rnn_grad_step(const T* __restrict__ dy, long long dy_row, long long dy_step, const T* __restrict__ dh,
                              const T* __restrict__ h, T* __restrict__ da, long long n, int d, bool relu) {
    typedef Sum<T> S;
    int j = column();
    if (j >= d) return;
    for (long long i = row(); i < n; i += rows()) {
        S total = value(dy[i * dy_row + j * dy_step]) + value(dh[i * d + j]), now = value(h[i * d + j]);
        da[i * d + j] = as<T>(relu ? (now > 0 ? total : S(0)) : total * (1 - now * now));
    }
}

// kept (n, 4d) holds h w^T in its last three parts and becomes r, z, n and n's h w^T + b.
template <typename T>
__global__ void gru_step(const T* __restrict__ gx, long long gx_row, long long gx_step, const T* __restrict__ b, long long b_step,
                         bool biased, T* kept, const T* __restrict__ before, T* __restrict__ after, long long n, int d) {
    typedef Sum<T> S;
    int j = column();
    if (j >= d) return;
    S bias[3];
    for (int k = 0; k < 3; k++) bias[k] = biased ? value(b[((long long)k * d + j) * b_step]) : S(0);
    for (long long i = row(); i < n; i += rows()) {
        const T* x = gx + i * gx_row + j * gx_step;
        T* mine = kept + i * 4 * d + j;
        long long apart = d * gx_step;
        S r = sigmoid(value(x[0]) + (value(mine[d]) + bias[0])), z = sigmoid(value(x[apart]) + (value(mine[2 * d]) + bias[1]));
        S inner = value(mine[3 * d]) + bias[2], fresh = tanh(value(x[2 * apart]) + r * inner);
        mine[0] = as<T>(r);
        mine[d] = as<T>(z);
        mine[2 * d] = as<T>(fresh);
        mine[3 * d] = as<T>(inner);
        after[i * d + j] = as<T>(fresh + z * (value(before[i * d + j]) - fresh));
    }
}

// dh, toward the state after the step, becomes its part toward the state before that does not go through h w^T.
template <typename T>
__global__ void gru_grad_step(const T* __restrict__ dy, long long dy_row, long long dy_step, T* dh, const T* __restrict__ kept,
                              const T* __restrict__ before, T* __restrict__ dgx, T* __restrict__ dgh, long long n, int d) {
    typedef Sum<T> S;
    int j = column();
    if (j >= d) return;
    for (long long i = row(); i < n; i += rows()) {
        const T* mine = kept + i * 4 * d + j;
        S r = value(mine[0]), z = value(mine[d]), fresh = value(mine[2 * d]), inner = value(mine[3 * d]);
        S total = value(dy[i * dy_row + j * dy_step]) + value(dh[i * d + j]);
        S dn = total * (1 - z) * (1 - fresh * fresh), dr = dn * inner * r * (1 - r);
        S dz = total * (value(before[i * d + j]) - fresh) * z * (1 - z);
        T *x = dgx + i * 3 * d + j, *h = dgh + i * 3 * d + j;
        x[0] = h[0] = as<T>(dr);
        x[d] = h[d] = as<T>(dz);
        x[2 * d] = as<T>(dn);
        h[2 * d] = as<T>(dn * r);
        dh[i * d + j] = as<T>(total * z);
    }
}

// gates (n, 4d) holds h w^T and becomes i, f, g, o; the cell and the state after the step.
template <typename T>
__global__ void lstm_step(const T* __restrict__ gx, long long gx_row, long long gx_step, const T* __restrict__ b, long long b_step,
                          bool biased, T* gates, const T* __restrict__ before, T* __restrict__ after, T* __restrict__ h, long long n, int d) {
    typedef Sum<T> S;
    int j = column();
    if (j >= d) return;
    S bias[4];
    for (int k = 0; k < 4; k++) bias[k] = biased ? value(b[((long long)k * d + j) * b_step]) : S(0);
    for (long long i = row(); i < n; i += rows()) {
        const T* x = gx + i * gx_row + j * gx_step;
        T* mine = gates + i * 4 * d + j;
        S a[4];
        for (int k = 0; k < 4; k++) {
            a[k] = value(x[k * d * gx_step]) + value(mine[k * d]) + bias[k];
            a[k] = k == 2 ? tanh(a[k]) : sigmoid(a[k]);
            mine[k * d] = as<T>(a[k]);
        }
        S cell = a[1] * value(before[i * d + j]) + a[0] * a[2];
        after[i * d + j] = as<T>(cell);
        h[i * d + j] = as<T>(a[3] * tanh(cell));
    }
}

// dc, toward the cell after the step, becomes that toward the cell before it.
template <typename T>
__global__ void lstm_grad_step(const T* __restrict__ dy, long long dy_row, long long dy_step, const T* __restrict__ dh, T* dc,
                               const T* __restrict__ gates, const T* __restrict__ before, const T* __restrict__ after, T* __restrict__ dgx,
                               long long n, int d) {
    typedef Sum<T> S;
    int j = column();
    if (j >= d) return;
    for (long long k = row(); k < n; k += rows()) {
        const T* mine = gates + k * 4 * d + j;
        S i = value(mine[0]), f = value(mine[d]), g = value(mine[2 * d]), o = value(mine[3 * d]);
        S root = tanh(value(after[k * d + j])), total = value(dy[k * dy_row + j * dy_step]) + value(dh[k * d + j]);
        S c = value(dc[k * d + j]) + total * o * (1 - root * root);
        T* out = dgx + k * 4 * d + j;
        out[0] = as<T>(c * g * i * (1 - i));
        out[d] = as<T>(c * value(before[k * d + j]) * f * (1 - f));
        out[2 * d] = as<T>(c * i * (1 - g * g));
        out[3 * d] = as<T>(total * root * o * (1 - o));
        dc[k * d + j] = as<T>(c * f);
    }
}
