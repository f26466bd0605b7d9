// RMSprop of many parameters in one launch; the reference is in rmsprop.py.
#include "update.cuh"

// p, g, v, if `centered` the mean a of the gradients, u (null without momentum), and the copy of p (or null). `rest` is
// 1 - alpha; `flag` as in sgd.cu.
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
        if (copy) store_copy<P>(copy + i, count, ps);
    }
    if (bad) atomicExch(flag, 1);
}
