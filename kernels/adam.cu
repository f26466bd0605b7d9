// Adam of many parameters in one launch; the reference is in adam.py.
#include "update.cuh"

// p, g, m, v, powers (3,) and the copy of p (or null). `rest1` is 1 - beta1; `shrink` is the decoupled weight decay, `grow` the other;
// `flag` as in sgd.cu.
template <typename P, typename G, typename L>
__global__ void adam(Tensors tensors, const P* __restrict__ lr, double beta1, double rest1, double beta2, double rest2,
                     double eps, double shrink, double grow, int* flag) {
    typedef Sum<P> S;
    __shared__ S first_scale;
    __shared__ S second_scale;
    Share share = share_of(tensors);
    P *p = array<P>(tensors, 0, share), *m = array<P>(tensors, 2, share), *v = array<P>(tensors, 3, share);
    const G* g = array<G>(tensors, 1, share);
    const double* powers = array<double>(tensors, 4, share);
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
        if (copy) store_copy<P>(copy + i, count, ps);
    }
    if (bad) atomicExch(flag, 1);
}

// One thread for each parameter. Its powers (3,) = (step, beta1^step, beta2^step), one step on.
__global__ void adam_tick(const double* powers, double* after, double beta1, double beta2) {
    powers += 3 * blockIdx.x;
    after += 3 * blockIdx.x;
    after[0] = powers[0] + 1;
    after[1] = powers[1] * beta1;
    after[2] = powers[2] * beta2;
}
__global__ void adam_tick_guarded(const double* powers, const int* skip, double* after, double beta1, double beta2) {
    powers += 3 * blockIdx.x;
    after += 3 * blockIdx.x;
    double on = *skip ? 0 : 1;
    after[0] = powers[0] + on;
    after[1] = *skip ? powers[1] : powers[1] * beta1;
    after[2] = *skip ? powers[2] : powers[2] * beta2;
}
