// Updates of many parameters in one launch; the references are in optimizer.py.
#include "update.cuh"

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
