// The global norm, casts and loss scaling; the references are in gradients.py.
#include "update.cuh"

// Each element x of an array becomes change(x) in another one, which may be of another type.
template <typename T, typename U, typename Change>
__device__ __forceinline__ void change_all(const Tensors& tensors, Change change) {
    Share share = share_of(tensors);
    const T* x = array<T>(tensors, 0, share);
    U* y = array<U>(tensors, 1, share);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        Sum<T> xs[4] = {};
        Sum<U> ys[4];
        load(x + i, count, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) ys[k] = change(xs[k]);
        store(y + i, count, ys);
    }
}

// g -> g / scale. `flag` was 0 and becomes 1 where something is not finite.
template <typename G, typename L> __global__ void unscale(Tensors tensors, const float* __restrict__ scale, int* flag) {
    float inverse = 1 / scale[0];
    int bad = 0;
    change_all<G, L>(tensors, [&](Sum<G> g) {
        Sum<L> out = Sum<L>(g * Sum<G>(inverse));
        if (!isfinite(value(as<L>(out)))) bad = 1;
        return out;
    });
    if (block_max(bad) && threadIdx.x == 0) *flag = 1;
}

// x -> x in another type.
template <typename T, typename U> __global__ void cast_many(Tensors tensors) {
    change_all<T, U>(tensors, [](Sum<T> x) { return Sum<U>(x); });
}

// One thread. `flag` becomes 1 where another flag is set.
__global__ void note_flag(const int* x, int* flag) {
    if (*x) *flag = 1;
}

// One thread. `good` counts the steps since the scale changed or a gradient was not finite.
__global__ void scale_update(const float* scale, const int* good, const int* flag, float* scale_after, int* good_after,
                             double growth, double backoff, int interval) {
    if (*flag) {
        *scale_after = (float)(*scale * backoff);
        *good_after = 0;
        return;
    }
    bool grows = *good + 1 >= interval;
    float larger = (float)(*scale * growth);
    *scale_after = grows && isfinite(larger) ? larger : *scale;
    *good_after = grows ? 0 : *good + 1;
}

// parts (blocks,): each block's sum of squares.
template <typename T> __global__ void square_sums(const T* __restrict__ x, double* parts, long long count) {
    double total = 0, more = 0;
    for (long long i = 4 * first(); i < count; i += 4 * step()) {
        Sum<T> xs[4] = {};
        load(x + i, count - i < 4 ? (int)(count - i) : 4, xs);
        total += (double)xs[0] * xs[0] + (double)xs[1] * xs[1];
        more += (double)xs[2] * xs[2] + (double)xs[3] * xs[3];
    }
    total = block_sum(total + more);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}
// One block.
__global__ void add_parts(const double* __restrict__ parts, double* total, int count) {
    double mine = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) mine += parts[i];
    mine = block_sum(mine);
    if (threadIdx.x == 0) *total = mine;
}

// One block of 256 threads adds sums of squares in their order, first to last of all launches: norm and the clip factor.
struct Squares {
    const double* at[480];
    int count;
    bool is_first, is_last;
};
template <typename T> __global__ void clip_factor(Squares squares, double* norm, T* factor, double limit) {
    __shared__ double some[256];
    double total = squares.is_first ? 0 : *norm;
    for (int begin = 0; begin < squares.count; begin += 256) {
        int count = min(squares.count - begin, 256);
        __syncthreads();
        if (threadIdx.x < count) some[threadIdx.x] = *squares.at[begin + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < count; i++) total += some[i];
    }
    if (threadIdx.x > 0) return;
    if (squares.is_last) {
        total = sqrt(total);
        double scale = limit / (total + 1e-6);
        *factor = as<T>(Sum<T>(scale > 1 ? 1.0 : scale));  // NaN is to be seen
    }
    *norm = total;
}
