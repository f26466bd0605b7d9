// NAdam of many parameters in one launch; the reference is in nadam.py.
#include "update.cuh"

// p, g, m, v, powers (5,) and the copy of p (or null): see nadam_tick in nadam.py. `flag` as in sgd.cu.
template <typename P, typename G, typename L>
__global__ void nadam(Tensors tensors, const P* __restrict__ lr, double beta1, double rest1, double beta2, double rest2,
                      double eps, double shrink, int* flag) {
    typedef Sum<P> S;
    __shared__ S first_scale;
    __shared__ S ahead_scale;
    __shared__ S second_scale;
    Share share = share_of(tensors);
    P *p = array<P>(tensors, 0, share), *m = array<P>(tensors, 2, share), *v = array<P>(tensors, 3, share);
    const G* g = array<G>(tensors, 1, share);
    const double* powers = array<double>(tensors, 4, share);
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
        if (copy) store_copy<P>(copy + i, count, ps);
    }
    if (bad) atomicExch(flag, 1);
}

__device__ __forceinline__ void nadam_count(const double* powers, double* after, double beta1, double beta2, double decay) {
    double t = powers[0] + 1, mu = beta1 * (1 - 0.5 * pow(0.96, t * decay)), following = beta1 * (1 - 0.5 * pow(0.96, (t + 1) * decay));
    after[0] = t;
    after[1] = powers[1] * mu;
    after[2] = powers[2] * beta2;
    after[3] = mu;
    after[4] = following;
}
// One thread for each parameter.
__global__ void nadam_tick(const double* powers, double* after, double beta1, double beta2, double decay) {
    nadam_count(powers + 5 * blockIdx.x, after + 5 * blockIdx.x, beta1, beta2, decay);
}
__global__ void nadam_tick_guarded(const double* powers, const int* skip, double* after, double beta1, double beta2, double decay) {
    powers += 5 * blockIdx.x;
    after += 5 * blockIdx.x;
    if (!*skip) nadam_count(powers, after, beta1, beta2, decay);
    else for (int i = 0; i < 5; i++) after[i] = powers[i];
}
