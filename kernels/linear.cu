// Copies of strided arrays, for products that cannot take them as they lie; see linear.py.
#include "common.cuh"

// What a dense array is made from: lengths and steps in elements, the last axis changes fastest. A thread copies `run`
// neighbours; it divides the last length.
struct DenseCopy {
    const void* from;
    void* to;
    long long runs;
    int run;
    int axes;
    long long length[6];
    long long step[6];
};
struct DenseCopies {
    DenseCopy of[4];
};

// Where element i of the dense array comes from. Index: int is several times faster to divide than long long.
template <typename Index> __device__ __forceinline__ long long origin(const DenseCopy& copy, Index i) {
    long long at = 0;
    for (int axis = copy.axes - 1; axis > 0; axis--) {
        Index length = (Index)copy.length[axis];
        at += i % length * copy.step[axis];
        i /= length;
    }
    return at + i * copy.step[0];
}

// Blocks: (runs, copies).
template <typename T> __global__ void make_dense(DenseCopies copies) {
    const DenseCopy& copy = copies.of[blockIdx.y];
    const T* from = static_cast<const T*>(copy.from);
    T* to = static_cast<T*>(copy.to);
    bool small = copy.runs * copy.run < 0x80000000ll;
    long long apart = copy.step[copy.axes - 1];
    for (long long i = first(); i < copy.runs; i += step()) {
        long long start = i * copy.run, at = small ? origin(copy, (int)start) : origin(copy, start);
        for (int j = 0; j < copy.run; j++) to[start + j] = from[at + j * apart];
    }
}
