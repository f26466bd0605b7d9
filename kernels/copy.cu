// Elements moved and not computed with, of any type.
#include "elements.cuh"

template <typename T> __global__ void copy(const T* x, T* y, Strides s) {
    map(s, y, [](Value<T> v) { return v; }, x);
}

template <typename T, typename U> __global__ void cast(const T* x, U* y, Strides s) {
    map(s, y, [](Value<T> v) { return v; }, x);
}

template <typename T> __global__ void fill(T* y, double value, long long count) {
    for (long long i = first(); i < count; i += step()) put(y[i], value);
}

// Where the elements of dy lie in dx: of each axis its length, the first place, how many, how far apart, and dy's step.
struct Region {
    int axes;
    long long length[6], begin[6], size[6], apart[6], step[6];
};

// dx contiguous, zeros but for the region.
template <typename T> __global__ void unslice(const T* dy, T* dx, Region r, long long count) {
    for (long long i = first(); i < count; i += step()) {
        long long rest = i, from = 0;
        bool inside = true;
        for (int a = r.axes - 1; a >= 0 && inside; a--) {
            long long outer = rest / r.length[a], k = rest - outer * r.length[a] - r.begin[a];
            rest = outer;
            inside = k >= 0 && k < r.size[a] * r.apart[a] && k % r.apart[a] == 0;
            from += k / r.apart[a] * r.step[a];
        }
        dx[i] = inside ? dy[from] : T();
    }
}
