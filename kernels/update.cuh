// Launches over many tensors; see update.py.
#pragma once
#include "four.cuh"

// What a launch works on: `of` has for each tensor up to six arrays, most of its size, null where there is none. Blocks
// start[i] to start[i + 1] - 1 belong to tensor i, each with 2048 of its elements. All launch parameters together have
// to fit in 4 KiB.
struct Tensors {
    int start[63];
    long long size[62];
    void* of[6][62];
    const void* factor;
    const int* skip;
};

// A block's share of a tensor: for (long long i = share.first; i < share.end; i += 4 * blockDim.x), up to four elements.
struct Share {
    int tensor;
    long long first, end;
    __device__ __forceinline__ int count(long long i) const { return end - i < 4 ? (int)(end - i) : 4; }
};
__device__ __forceinline__ Share share_of(const Tensors& tensors) {
    int low = 0, high = 62;  // start[low] <= block < start[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (tensors.start[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    long long begin = (long long)(blockIdx.x - tensors.start[low]) * 2048;
    return {low, begin + 4 * threadIdx.x, min(begin + 2048, tensors.size[low])};
}
template <typename T> __device__ __forceinline__ T* array(const Tensors& tensors, int which, const Share& share) {
    return static_cast<T*>(tensors.of[which][share.tensor]);
}
__device__ __forceinline__ bool skipped(const Tensors& tensors) { return tensors.skip && *tensors.skip; }
template <typename T> __device__ __forceinline__ Sum<T> factor(const Tensors& tensors) {
    return tensors.factor ? value(*static_cast<const T*>(tensors.factor)) : Sum<T>(1);
}
// Writes up to four parameters, as rounded to their own type P, in the type of their copy.
template <typename P, typename L> __device__ __forceinline__ void store_copy(L* copy, int count, const Sum<P>* parameters) {
    Sum<L> copies[4];
#pragma unroll
    for (int k = 0; k < 4; k++) copies[k] = Sum<L>(value(as<P>(parameters[k])));
    store(copy, count, copies);
}
