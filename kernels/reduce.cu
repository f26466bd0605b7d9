// Sums, maxima and counts of ties over axes; the references are in reduce.py. Arrays are seen as a place for each output
// (`kept`) times the places that become one (`over`); x is array 0 of both.
#include "elements.cuh"

// How the threads of a block share the work: `lanes`, a power of two, for each output. Neighbouring threads have
// neighbouring outputs, or (`along`) neighbouring places of one output. gridDim.y parts of `over` are made one by one.
struct Shares {
    int lanes, along;
};

// load(place in x, output) for all that becomes one, joined in an order that depends on the shapes alone, and stored.
// start(output) is what a thread begins with.
template <typename S, typename Start, typename Load, typename Join, typename Store>
__device__ __forceinline__ void fold(const Strides& kept, const Strides& over, Shares shares, Start start, Load load, Join join, Store store) {
    __shared__ S part[256];
    const int lanes = shares.lanes, outputs = blockDim.x / lanes;
    const int lane = shares.along ? threadIdx.x % lanes : threadIdx.x / outputs;
    const int mine = shares.along ? threadIdx.x / lanes : threadIdx.x % outputs;
    const long long output = (long long)blockIdx.x * outputs + mine;
    const long long size = (over.count + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * size, end = min(begin + size, over.count);
    if (output < kept.count) {
        const long long at = place(kept, 0, output);
        S total = start(at);
        long long i = begin + lane;
        if (over.axes == 1) {
            const long long step = over.step[0][0];
            for (; i + 3 * lanes < end; i += 4 * lanes) {  // loads that do not wait for one another
                S a = load(at + i * step, output), b = load(at + (i + lanes) * step, output);
                S c = load(at + (i + 2 * lanes) * step, output), d = load(at + (i + 3 * lanes) * step, output);
                total = join(join(join(join(total, a), b), c), d);
            }
        }
#pragma unroll 1
        for (; i < end; i += lanes) total = join(total, load(at + place(over, 0, i), output));
        part[lane * outputs + mine] = total;
    }
    for (int d = lanes / 2; d > 0; d /= 2) {
        __syncthreads();
        if (lane < d) part[lane * outputs + mine] = join(part[lane * outputs + mine], part[(lane + d) * outputs + mine]);
    }
    if (lane == 0 && output < kept.count) store(output, part[mine]);
}

template <typename S, typename Load, typename Store>
__device__ __forceinline__ void total(const Strides& kept, const Strides& over, Shares shares, Load load, Store store) {
    fold<S>(kept, over, shares, [](long long) { return S(0); }, load, [](S a, S b) { return a + b; }, store);
}

// NaN wins, as in NumPy.
template <typename S, typename T, typename Store>
__device__ __forceinline__ void largest(const Strides& kept, const Strides& over, Shares shares, const T* x, Store store) {
    auto load = [=](long long at, long long = 0) { return S(value(x[at])); };
    fold<S>(kept, over, shares, load, load, [](S a, S b) { return a > b || a != a ? a : b; }, store);
}

template <typename T> __global__ void sum_(const T* x, T* y, Strides kept, Strides over, Shares shares, double factor) {
    total<Sum<T>>(kept, over, shares, [=](long long at, long long) { return value(x[at]); },
                  [&](long long i, Sum<T> v) { y[place(kept, 1, i)] = as<T>(v * Sum<T>(factor)); });
}

template <typename T> __global__ void sum_parts(const T* x, double* parts, Strides kept, Strides over, Shares shares) {
    total<Sum<T>>(kept, over, shares, [=](long long at, long long) { return value(x[at]); },
                  [&](long long i, Sum<T> v) { parts[blockIdx.y * kept.count + i] = v; });
}

template <typename T> __global__ void sum_of_parts(const double* parts, T* y, Strides kept, Strides over, Shares shares, double factor) {
    total<double>(kept, over, shares, [=](long long at, long long) { return parts[at]; },
                  [&](long long i, double v) { put(y[place(kept, 1, i)], v * factor); });
}

template <typename T> __global__ void max_(const T* x, T* y, Strides kept, Strides over, Shares shares) {
    largest<Sum<T>>(kept, over, shares, x, [&](long long i, Sum<T> v) { y[place(kept, 1, i)] = as<T>(v); });
}

template <typename T> __global__ void max_parts(const T* x, double* parts, Strides kept, Strides over, Shares shares) {
    largest<Sum<T>>(kept, over, shares, x, [&](long long i, Sum<T> v) { parts[blockIdx.y * kept.count + i] = v; });
}

template <typename T> __global__ void max_of_parts(const double* parts, T* y, Strides kept, Strides over, Shares shares) {
    largest<double>(kept, over, shares, parts, [&](long long i, double v) { put(y[place(kept, 1, i)], v); });
}

// How many elements of x equal the maximum y, a contiguous array.
template <typename T, typename Store>
__device__ __forceinline__ void ties(const Strides& kept, const Strides& over, Shares shares, const T* x, const T* y, Store store) {
    total<long long>(kept, over, shares, [=](long long at, long long i) { return (long long)(value(x[at]) == value(y[i])); }, store);
}

// share = dy / ties.
template <typename T>
__global__ void tie_share(const T* x, const T* y, const T* dy, T* share, Strides kept, Strides over, Shares shares) {
    ties(kept, over, shares, x, y, [&](long long i, long long n) { share[i] = as<T>(value(dy[place(kept, 1, i)]) / Sum<T>(n)); });
}

template <typename T> __global__ void tie_parts(const T* x, const T* y, double* parts, Strides kept, Strides over, Shares shares) {
    ties(kept, over, shares, x, y, [&](long long i, long long n) { parts[blockIdx.y * kept.count + i] = n; });
}

template <typename T>
__global__ void tie_share_of_parts(const double* parts, const T* dy, T* share, Strides kept, Strides over, Shares shares) {
    total<double>(kept, over, shares, [=](long long at, long long) { return parts[at]; },
                  [&](long long i, double n) { share[i] = as<T>(value(dy[place(kept, 1, i)]) / Sum<T>(n)); });
}

template <typename T> __global__ void max_grad(const T* x, const T* y, const T* share, T* dx, Strides s) {
    map(s, dx, [](Sum<T> v, Sum<T> top, Sum<T> g) { return Sum<T>(v == top) * g; }, x, y, share);  // where y is NaN all is
}

// x (outer, n, inner), y (outer, inner): a thread for each output.
template <typename T> __global__ void argmax(const T* x, long long* y, long long n, long long inner, long long count) {
    for (long long i = first(); i < count; i += step()) {
        const T* from = x + i / inner * n * inner + i % inner;
        Sum<T> best = value(from[0]);
        long long where = 0;
        for (long long k = 1; k < n; k++) {
            Sum<T> v = value(from[k * inner]);
            if (v > best || (v != v && best == best)) best = v, where = k;
        }
        y[i] = where;
    }
}
