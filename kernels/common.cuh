// What every kernel uses: the types that sums are made in, loops over a grid, sums over a warp and a block.
// Kernels are templates over T, the type in memory; arithmetic is done in Sum<T>, float for the 16-bit types.
#pragma once
#ifndef MINIDL_STAND_IN
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

template <typename T> struct SumOf { typedef float type; };
template <> struct SumOf<double> { typedef double type; };
template <> struct SumOf<long long> { typedef long long type; };
template <typename T> using Sum = typename SumOf<T>::type;

__device__ __forceinline__ float value(float x) { return x; }
__device__ __forceinline__ double value(double x) { return x; }
__device__ __forceinline__ long long value(long long x) { return x; }
__device__ __forceinline__ float value(__half x) { return __half2float(x); }
__device__ __forceinline__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T as(Sum<T> x) { return T(x); }
template <> __device__ __forceinline__ __half as<__half>(float x) { return __float2half(x); }
template <> __device__ __forceinline__ __nv_bfloat16 as<__nv_bfloat16>(float x) { return __float2bfloat16(x); }

// Each kernel begins with this; `text` of cuda.py puts it there. Compiled with DEPENDENT, a kernel may be launched before
// the one before it has ended: here it waits until all of that one's work is done and seen, and then lets the next one be
// launched. As every kernel waits, what is done then includes everything that was issued earlier.
__device__ __forceinline__ void begin_kernel() {
#ifdef MINIDL_STAND_IN
    stand_in::dependency();
#elif defined(DEPENDENT) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The elements that belong to a thread: for (long long i = first(); i < count; i += step()).
__device__ __forceinline__ long long first() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ long long step() { return (long long)gridDim.x * blockDim.x; }

// Sums and maxima in a fixed order, so that their bits do not change from run to run. All 32 threads of a warp take part.
template <typename S> __device__ __forceinline__ S warp_sum(S x) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
template <typename S> __device__ __forceinline__ S warp_max(S x) {
    for (int d = 16; d > 0; d /= 2) {
        S other = __shfl_xor_sync(0xffffffffu, x, d);
        x = x < other || other != other ? other : x;
    }
    return x;
}

// All threads of a one-dimensional block (whole warps, at most 1024 threads) take part and get the result.
template <typename S> __device__ S block_sum(S x) {
    __shared__ S part[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    __syncthreads();  // the last call's parts have been read
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? part[lane] : S(0));
}
template <typename S> __device__ S block_max(S x) {
    __shared__ S part[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp_max(part[lane < warps ? lane : 0]);
}

// A row belongs to `lanes` neighbouring threads of a one-dimensional block: to a warp (32), or to all of the block:
// for (long long row = first_row(lanes); row < rows; row += row_step(lanes))
__device__ __forceinline__ long long first_row(int lanes) { return (long long)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes; }
__device__ __forceinline__ long long row_step(int lanes) { return (long long)gridDim.x * (blockDim.x / lanes); }
__device__ __forceinline__ int lane(int lanes) { return threadIdx.x % lanes; }
template <typename S> __device__ S row_sum(S x, int lanes) { return lanes == 32 ? warp_sum(x) : block_sum(x); }
template <typename S> __device__ S row_max(S x, int lanes) { return lanes == 32 ? warp_max(x) : block_max(x); }

// `body(j)` for a thread's elements of a row, four at a time, so that their loads do not wait for each other.
template <typename F> __device__ __forceinline__ void along_row(int width, int lanes, F body) {
    int j = lane(lanes);
    for (; j + 3 * lanes < width; j += 4 * lanes) {
#pragma unroll
        for (int k = 0; k < 4; k++) body(j + k * lanes);
    }
#pragma unroll 1
    for (; j < width; j += lanes) body(j);
}

// The same where branches would keep the loads apart: load(j, v) fetches N numbers, use(j, v) goes on with them. Past the end
// the last element is fetched, in vain.
template <typename S, int N, typename Load, typename Use>
__device__ __forceinline__ void along_row(int width, int lanes, Load load, Use use) {
    for (int j = lane(lanes); j < width; j += 4 * lanes) {
        S v[4][N];
#pragma unroll
        for (int k = 0; k < 4; k++) load(min(j + k * lanes, width - 1), v[k]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (j + k * lanes < width) use(j + k * lanes, v[k]);
    }
}

// Dynamic shared memory as an array of T.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(T, name)                                  \
    extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    T* name = reinterpret_cast<T*>(name##_bytes)
#endif

// Up to four arrays seen with one shape: lengths and steps in elements, 0 where an array repeats itself; the last axis
// changes fastest. `vector` is 4 where four neighbours on the last axis may be loaded and stored at once, else 1.
struct Strides {
    int axes, vector;
    long long count;
    long long length[6];
    long long step[4][6];
};
