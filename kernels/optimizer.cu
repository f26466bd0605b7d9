// Updates of many parameters in one launch, loss scaling and the global norm; the references are in optimizer.py.
#include "four.cuh"

// What a launch works on: `of` has for each tensor up to six arrays of its size, null where there is none. Blocks
// start[i] to start[i + 1] - 1 belong to tensor i, each with 2048 of its elements. All launch parameters together have
// to fit in 4 KiB.
struct Tensors {
    int start[63];
    long long size[62];
    void* of[6][62];
    const void* factor;
    const int* skip;
};

// A block's share of a tensor: for (long long i = share.first; i < share.end; i += 4 * blockDim.x), up to four elements.
struct Share {
    int tensor;
    long long first, end;
    __device__ __forceinline__ int count(long long i) const { return end - i < 4 ? (int)(end - i) : 4; }
};
__device__ __forceinline__ Share share_of(const Tensors& tensors) {
    int low = 0, high = 62;  // start[low] <= block < start[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (tensors.start[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    long long begin = (long long)(blockIdx.x - tensors.start[low]) * 2048;
    return {low, begin + 4 * threadIdx.x, min(begin + 2048, tensors.size[low])};
}
template <typename T> __device__ __forceinline__ T* array(const Tensors& tensors, int which, const Share& share) {
    return static_cast<T*>(tensors.of[which][share.tensor]);
}
__device__ __forceinline__ bool skipped(const Tensors& tensors) { return tensors.skip && *tensors.skip; }
template <typename T> __device__ __forceinline__ Sum<T> factor(const Tensors& tensors) {
    return tensors.factor ? value(*static_cast<const T*>(tensors.factor)) : Sum<T>(1);
}

// p, g, v (null without momentum) and the copy of p (or null). Sums of products are written as fma, so that every
// compiler rounds alike. `flag` becomes 1 where a gradient that is used is not finite.
template <typename P, typename G, typename L>
__global__ void sgd(Tensors tensors, const P* __restrict__ lr, double momentum, double weight_decay, bool nesterov, int* flag) {
    typedef Sum<P> S;
    Share share = share_of(tensors);
    P *p = array<P>(tensors, 0, share), *v = array<P>(tensors, 2, share);
    const G* g = array<G>(tensors, 1, share);
    L* copy = array<L>(tensors, 5, share);
    bool skip = skipped(tensors), bad = false;
    S clip = factor<P>(tensors), rate = value(lr[0]), keep = S(momentum), decay = S(weight_decay);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ps[4] = {}, vs[4] = {};
        Sum<G> gs[4] = {};
        load(p + i, count, ps);
        if (!skip) {
            load(g + i, count, gs);
            if (v) load(v + i, count, vs);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                S used = S(gs[k]) * clip, d = fma(decay, ps[k], used);
                bad |= !isfinite(used);
                vs[k] = fma(keep, vs[k], d);
                ps[k] = fma(-rate, nesterov ? fma(keep, vs[k], d) : vs[k], ps[k]);
            }
            store(p + i, count, ps);
            if (v) store(v + i, count, vs);
        }
        if (copy) {
            Sum<L> copies[4];
#pragma unroll
            for (int k = 0; k < 4; k++) copies[k] = Sum<L>(value(as<P>(ps[k])));
            store(copy + i, count, copies);
        }
    }
    if (bad) atomicExch(flag, 1);
}

// p, g, m, v and the copy of p (or null). `rest1` is 1 - beta1; `shrink` is the decoupled weight decay, `grow` the other;
// `flag` as for sgd.
template <typename P, typename G, typename L>
__global__ void adam(Tensors tensors, const P* __restrict__ lr, const double* __restrict__ powers, double beta1, double rest1,
                     double beta2, double rest2, double eps, double shrink, double grow, int* flag) {
    typedef Sum<P> S;
    __shared__ S first_scale;
    __shared__ S second_scale;
    Share share = share_of(tensors);
    P *p = array<P>(tensors, 0, share), *m = array<P>(tensors, 2, share), *v = array<P>(tensors, 3, share);
    const G* g = array<G>(tensors, 1, share);
    L* copy = array<L>(tensors, 5, share);
    bool skip = skipped(tensors), bad = false;
    S clip = factor<P>(tensors), rate = value(lr[0]);
    if (threadIdx.x == 0) {
        first_scale = rate / S(1 - powers[1]);
        second_scale = S(1 / sqrt(1 - powers[2]));
    }
    __syncthreads();
    S size = first_scale, root = second_scale, left = S(1) - rate * S(shrink);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ps[4] = {}, ms[4] = {}, vs[4] = {};
        Sum<G> gs[4] = {};
        load(p + i, count, ps);
        if (!skip) {
            load(g + i, count, gs);
            load(m + i, count, ms);
            load(v + i, count, vs);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                S used = S(gs[k]) * clip, d = fma(S(grow), ps[k], used);
                bad |= !isfinite(used);
                ms[k] = fma(S(beta1), ms[k], S(rest1) * d);
                vs[k] = fma(S(beta2), vs[k], S(rest2) * d * d);
                ps[k] = fma(ps[k], left, -(size * ms[k] / fma(sqrt(vs[k]), root, S(eps))));
            }
            store(p + i, count, ps);
            store(m + i, count, ms);
            store(v + i, count, vs);
        }
        if (copy) {
            Sum<L> copies[4];
#pragma unroll
            for (int k = 0; k < 4; k++) copies[k] = Sum<L>(value(as<P>(ps[k])));
            store(copy + i, count, copies);
        }
    }
    if (bad) atomicExch(flag, 1);
}

// As adam, with powers of five numbers: see nadam_tick in optimizer.py.
template <typename P, typename G, typename L>
__global__ void nadam(Tensors tensors, const P* __restrict__ lr, const double* __restrict__ powers, double beta1, double rest1,
                     double beta2, double rest2, double eps, double shrink, int* flag) {
    typedef Sum<P> S;
    __shared__ S first_scale;
    __shared__ S ahead_scale;
    __shared__ S second_scale;
    Share share = share_of(tensors);
    P *p = array<P>(tensors, 0, share), *m = array<P>(tensors, 2, share), *v = array<P>(tensors, 3, share);
    const G* g = array<G>(tensors, 1, share);
    L* copy = array<L>(tensors, 5, share);
    bool skip = skipped(tensors), bad = false;
    S clip = factor<P>(tensors), rate = value(lr[0]);
    if (threadIdx.x == 0) {
        first_scale = rate * S((1 - powers[3]) / (1 - powers[1]));
        ahead_scale = rate * S(powers[4] / (1 - powers[1] * powers[4]));
        second_scale = S(1 / sqrt(1 - powers[2]));
    }
    __syncthreads();
    S size = first_scale, ahead = ahead_scale, root = second_scale, left = S(1) - rate * S(shrink);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ps[4] = {}, ms[4] = {}, vs[4] = {};
        Sum<G> gs[4] = {};
        load(p + i, count, ps);
        if (!skip) {
            load(g + i, count, gs);
            load(m + i, count, ms);
            load(v + i, count, vs);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                S used = S(gs[k]) * clip, d = used;
                bad |= !isfinite(used);
                ms[k] = fma(S(beta1), ms[k], S(rest1) * d);
                vs[k] = fma(S(beta2), vs[k], S(rest2) * d * d);
                ps[k] = fma(ps[k], left, -(fma(ahead, ms[k], size * d) / fma(sqrt(vs[k]), root, S(eps))));
            }
            store(p + i, count, ps);
            store(m + i, count, ms);
            store(v + i, count, vs);
        }
        if (copy) {
            Sum<L> copies[4];
#pragma unroll
            for (int k = 0; k < 4; k++) copies[k] = Sum<L>(value(as<P>(ps[k])));
            store(copy + i, count, copies);
        }
    }
    if (bad) atomicExch(flag, 1);
}

// p, g, v, if `centered` the mean a of the gradients, u (null without momentum), and the copy of p (or null). `rest` is
// 1 - alpha; `flag` as for sgd.
template <typename P, typename G, typename L>
__global__ void rmsprop(Tensors tensors, const P* __restrict__ lr, double alpha, double rest, double eps, double momentum,
                        double weight_decay, bool centered, int* flag) {
    typedef Sum<P> S;
    Share share = share_of(tensors);
    P *p = array<P>(tensors, 0, share), *v = array<P>(tensors, 2, share);
    P *a = centered ? array<P>(tensors, 3, share) : nullptr, *u = array<P>(tensors, centered ? 4 : 3, share);
    const G* g = array<G>(tensors, 1, share);
    L* copy = array<L>(tensors, 5, share);
    bool skip = skipped(tensors), bad = false;
    S clip = factor<P>(tensors), rate = value(lr[0]), keep = S(momentum), decay = S(weight_decay);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ps[4] = {}, vs[4] = {}, means[4] = {}, us[4] = {};
        Sum<G> gs[4] = {};
        load(p + i, count, ps);
        if (!skip) {
            load(g + i, count, gs);
            load(v + i, count, vs);
            if (a) load(a + i, count, means);
            if (u) load(u + i, count, us);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                S used = S(gs[k]) * clip, d = fma(decay, ps[k], used);
                bad |= !isfinite(used);
                vs[k] = fma(S(alpha), vs[k], S(rest) * d * d);
                if (a) means[k] = fma(S(alpha), means[k], S(rest) * d);
                us[k] = fma(keep, us[k], d / (sqrt(fma(-means[k], means[k], vs[k])) + S(eps)));
                ps[k] = fma(-rate, us[k], ps[k]);
            }
            store(p + i, count, ps);
            store(v + i, count, vs);
            if (a) store(a + i, count, means);
            if (u) store(u + i, count, us);
        }
        if (copy) {
            Sum<L> copies[4];
#pragma unroll
            for (int k = 0; k < 4; k++) copies[k] = Sum<L>(value(as<P>(ps[k])));
            store(copy + i, count, copies);
        }
    }
    if (bad) atomicExch(flag, 1);
}

// g -> g / scale, which may be of another type. `flag` was 0 and becomes 1 where something is not finite.
template <typename G, typename L> __global__ void unscale(Tensors tensors, const float* __restrict__ scale, int* flag) {
    Share share = share_of(tensors);
    const G* g = array<G>(tensors, 0, share);
    L* out = array<L>(tensors, 1, share);
    float inverse = 1 / scale[0];
    int bad = 0;
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        Sum<G> gs[4] = {};
        Sum<L> outs[4];
        load(g + i, count, gs);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            outs[k] = Sum<L>(gs[k] * Sum<G>(inverse));
            if (!isfinite(value(as<L>(outs[k])))) bad = 1;
        }
        store(out + i, count, outs);
    }
    if (block_max(bad) && threadIdx.x == 0) *flag = 1;
}

// The second array of a tensor, times the factor, in place of the first where `skip` is set.
template <typename T> __global__ void amend(Tensors tensors) {
    if (!skipped(tensors)) return;
    Share share = share_of(tensors);
    T* current = array<T>(tensors, 0, share);
    const T* x = array<T>(tensors, 1, share);
    Sum<T> times = factor<T>(tensors);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        Sum<T> xs[4] = {};
        load(x + i, count, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) xs[k] = xs[k] * times;
        store(current + i, count, xs);
    }
}

// One thread. `flag` becomes 1 where another flag is set, or a factor is not 1.
__global__ void note_flag(const int* x, int* flag) {
    if (*x) *flag = 1;
}
template <typename T> __global__ void note_factor(const T* x, int* flag) {
    if (value(*x) != Sum<T>(1)) *flag = 1;
}
__global__ void invert(int* flag) { *flag = !*flag; }

// x -> x in another type.
template <typename T, typename U> __global__ void cast_many(Tensors tensors) {
    Share share = share_of(tensors);
    const T* x = array<T>(tensors, 0, share);
    U* y = array<U>(tensors, 1, share);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        Sum<T> xs[4] = {};
        Sum<U> ys[4];
        load(x + i, count, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) ys[k] = Sum<U>(xs[k]);
        store(y + i, count, ys);
    }
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

// One thread. powers (3,) = (step, beta1^step, beta2^step), one step on.
__global__ void adam_tick(const double* powers, double* after, double beta1, double beta2) {
    after[0] = powers[0] + 1;
    after[1] = powers[1] * beta1;
    after[2] = powers[2] * beta2;
}
__global__ void adam_tick_guarded(const double* powers, const int* skip, double* after, double beta1, double beta2) {
    double on = *skip ? 0 : 1;
    after[0] = powers[0] + on;
    after[1] = *skip ? powers[1] : powers[1] * beta1;
    after[2] = *skip ? powers[2] : powers[2] * beta2;
}

__device__ __forceinline__ void nadam_count(const double* powers, double* after, double beta1, double beta2, double decay) {
    double t = powers[0] + 1, mu = beta1 * (1 - 0.5 * pow(0.96, t * decay)), following = beta1 * (1 - 0.5 * pow(0.96, (t + 1) * decay));
    after[0] = t;
    after[1] = powers[1] * mu;
    after[2] = powers[2] * beta2;
    after[3] = mu;
    after[4] = following;
}
__global__ void nadam_tick(const double* powers, double* after, double beta1, double beta2, double decay) {
    nadam_count(powers, after, beta1, beta2, decay);
}
__global__ void nadam_tick_guarded(const double* powers, const int* skip, double* after, double beta1, double beta2, double decay) {
    if (!*skip) nadam_count(powers, after, beta1, beta2, decay);
    else for (int i = 0; i < 5; i++) after[i] = powers[i];
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
