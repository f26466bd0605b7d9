// SGD of many parameters in one launch; the reference is in sgd.py.
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
        if (copy) store_copy<P>(copy + i, count, ps);
    }
    if (bad) atomicExch(flag, 1);
}
