// Up to four neighbours at once: one access to memory where they lie on an address for it, else one after the other.
#pragma once
#include "common.cuh"

template <typename T> struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) Four {
    T of[4];
};
template <typename T> __device__ __forceinline__ bool is_four(const T* x, int count) {
    return count == 4 && reinterpret_cast<unsigned long long>(x) % alignof(Four<T>) == 0;
}

// `count` is 1 to 4; the others of `to` are left as they are. All loops have fixed bounds: only so are arrays registers.
template <typename T> __device__ __forceinline__ void load(const T* x, int count, Sum<T>* to) {
    if (is_four(x, count)) {
        Four<T> all = *reinterpret_cast<const Four<T>*>(x);
#pragma unroll
        for (int k = 0; k < 4; k++) to[k] = value(all.of[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < count) to[k] = value(x[k]);
    }
}
template <typename T> __device__ __forceinline__ void store(T* y, int count, const Sum<T>* from) {
    if (is_four(y, count)) {
        Four<T> all;
#pragma unroll
        for (int k = 0; k < 4; k++) all.of[k] = as<T>(from[k]);
        *reinterpret_cast<Four<T>*>(y) = all;
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < count) y[k] = as<T>(from[k]);
    }
}

// The same where it is known beforehand whether they are WHOLE: four on an address for it. So nothing stands between the
// loads of several rows. Others are loaded past `count` too, as the last one.
template <bool WHOLE, typename T> __device__ __forceinline__ void load(const T* x, int count, Sum<T>* to) {
    if constexpr (WHOLE) {
        const Four<T> all = *reinterpret_cast<const Four<T>*>(x);
#pragma unroll
        for (int k = 0; k < 4; k++) to[k] = value(all.of[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) to[k] = value(x[min(k, count - 1)]);
    }
}
template <bool WHOLE, typename T> __device__ __forceinline__ void store(T* y, int count, const Sum<T>* from) {
    if constexpr (WHOLE) {
        Four<T> all;
#pragma unroll
        for (int k = 0; k < 4; k++) all.of[k] = as<T>(from[k]);
        *reinterpret_cast<Four<T>*>(y) = all;
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < count) y[k] = as<T>(from[k]);
    }
}
