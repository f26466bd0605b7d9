// The parts of a step of Muon besides its products; the reference is in muon.py.
#include "update.cuh"

// m, g and the direction x, of one matrix. `flag` as in sgd.cu.
template <typename P>
__global__ void muon_start(Tensors tensors, double keep, double rest, bool nesterov, int* flag) {
    typedef Sum<P> S;
    Share share = share_of(tensors);
    P *m = array<P>(tensors, 0, share), *x = array<P>(tensors, 2, share);
    const P* g = array<P>(tensors, 1, share);
    bool skip = skipped(tensors), bad = false;
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ms[4] = {}, gs[4] = {}, xs[4];
        load(m + i, count, ms);
        load(g + i, count, gs);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            bad |= !isfinite(gs[k]);
            ms[k] = fma(S(rest), gs[k] - ms[k], ms[k]);
            xs[k] = nesterov ? fma(S(keep), ms[k] - gs[k], gs[k]) : ms[k];
        }
        store(x + i, count, xs);
        if (!skip) store(m + i, count, ms);
    }
    if (bad && !skip) atomicExch(flag, 1);
}

// The direction, divided by its norm.
template <typename P> __global__ void muon_unit(Tensors tensors, const double* __restrict__ total, double eps) {
    Share share = share_of(tensors);
    P* x = array<P>(tensors, 0, share);
    Sum<P> norm = Sum<P>(max(sqrt(*total), eps));
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        Sum<P> xs[4] = {};
        load(x + i, count, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) xs[k] = xs[k] / norm;
        store(x + i, count, xs);
    }
}

// y = own y + other x.
template <typename P> __global__ void muon_mix(Tensors tensors, double own, double other) {
    typedef Sum<P> S;
    Share share = share_of(tensors);
    P* y = array<P>(tensors, 0, share);
    const P* x = array<P>(tensors, 1, share);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ys[4] = {}, xs[4] = {};
        load(y + i, count, ys);
        load(x + i, count, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) ys[k] = fma(S(own), ys[k], S(other) * xs[k]);
        store(y + i, count, ys);
    }
}

// The parameter and its direction.
template <typename P>
__global__ void muon_end(Tensors tensors, const P* __restrict__ lr, double scale, double shrink) {
    typedef Sum<P> S;
    if (skipped(tensors)) return;
    Share share = share_of(tensors);
    P* p = array<P>(tensors, 0, share);
    const P* x = array<P>(tensors, 1, share);
    S rate = value(lr[0]), keep = S(1) - rate * S(shrink), far = rate * S(scale);
    for (long long i = share.first; i < share.end; i += 4 * blockDim.x) {
        int count = share.count(i);
        S ps[4] = {}, xs[4] = {};
        load(p + i, count, ps);
        load(x + i, count, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) ps[k] = fma(ps[k], keep, -far * xs[k]);
        store(p + i, count, ps);
    }
}
