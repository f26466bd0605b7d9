// Copies of strided arrays, for products that cannot take them as they lie; see linear.py.
#include "four.cuh"

// Up to four arrays and what they are copied to, which is dense. `vector` neighbours on the last axis are a thread's.
struct DenseCopies {
    const void* from[4];
    void* to[4];
    Strides at[4];
};

// Where element i of the dense array comes from. int is several times faster to divide than long long.
template <typename Index> __device__ __forceinline__ long long origin(const Strides& s, Index i) {
    long long at = 0;
    for (int axis = s.axes - 1; axis > 0; axis--) {
        Index length = (Index)s.length[axis], outer = i / length;
        at += (i - outer * length) * s.step[0][axis];
        i = outer;
    }
    return at + i * s.step[0][0];
}

// Blocks: (elements / vector, arrays).
template <typename T> __global__ void make_dense(DenseCopies copies) {
    const Strides& s = copies.at[blockIdx.y];
    const T* from = static_cast<const T*>(copies.from[blockIdx.y]);
    T* to = static_cast<T*>(copies.to[blockIdx.y]);
    long long apart = s.step[0][s.axes - 1];
    for (long long i = first() * s.vector; i < s.count; i += step() * s.vector) {
        long long at = s.count < 0x80000000ll ? origin(s, (int)i) : origin(s, i);
        if (s.vector == 4 && apart == 1) {
            Sum<T> xs[4];
            load(from + at, 4, xs);
            store(to + i, 4, xs);
        } else {
            for (int k = 0; k < s.vector; k++) to[i + k] = from[at + k * apart];
        }
    }
}
