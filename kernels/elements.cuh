// Element by element: the loops of all kernels whose outputs depend on one place of each input, four neighbours at a time
// where memory allows. An output may be one of the inputs.
#pragma once
#include "common.cuh"

// Types that are copied and not computed with.
template <typename T> __device__ __forceinline__ T value(T x) { return x; }

// What elements of type T are in arithmetic.
template <typename T> using Value = decltype(value(T()));

// y = v in y's type; a float64 becomes a 16-bit float in one rounding.
template <typename T, typename S> __device__ __forceinline__ void put(T& y, S v) { y = T(v); }
__device__ __forceinline__ void put(__half& y, float v) { y = __float2half(v); }
__device__ __forceinline__ void put(__half& y, double v) { y = __double2half(v); }
__device__ __forceinline__ void put(__nv_bfloat16& y, float v) { y = __float2bfloat16(v); }
__device__ __forceinline__ void put(__nv_bfloat16& y, double v) { y = __double2bfloat16(v); }
__device__ __forceinline__ void put(__half& y, __half v) { y = v; }
__device__ __forceinline__ void put(__nv_bfloat16& y, __nv_bfloat16 v) { y = v; }

// N neighbours, 1 or 4, in accesses of up to 16 bytes.
template <typename T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T at[N]; };

template <int N, typename T> __device__ __forceinline__ Pack<T, N> load(const T* x, bool repeated) {
    if constexpr (N > 1)
        if (repeated) return {*x, *x, *x, *x};
    return *reinterpret_cast<const Pack<T, N>*>(x);
}

template <typename F, typename S> __device__ __forceinline__ auto apply(F f, const S (&x)[1]) { return f(x[0]); }
template <typename F, typename S> __device__ __forceinline__ auto apply(F f, const S (&x)[2]) { return f(x[0], x[1]); }
template <typename F, typename S> __device__ __forceinline__ auto apply(F f, const S (&x)[3]) { return f(x[0], x[1], x[2]); }

// y = f(x...) for N neighbours of each of M inputs.
template <int N, int M, typename T, typename U, typename F>
__device__ __forceinline__ void make(U* y, F f, const T* const (&x)[M], const bool (&repeated)[M]) {
    Pack<T, N> in[M];
    Pack<U, N> out;
#pragma unroll
    for (int k = 0; k < M; k++) in[k] = load<N>(x[k], repeated[k]);
#pragma unroll
    for (int v = 0; v < N; v++) {
        Value<T> each[M];
#pragma unroll
        for (int k = 0; k < M; k++) each[k] = value(in[k].at[v]);
        put(out.at[v], apply(f, each));
    }
    *reinterpret_cast<Pack<U, N>*>(y) = out;
}

// y = f(x...) for contiguous arrays of `count` elements.
template <typename F, typename U, typename T, typename... More>
__device__ __forceinline__ void map(long long count, U* y, F f, const T* x, const More*... more) {
    constexpr int M = 1 + sizeof...(more);
    size_t apart = reinterpret_cast<size_t>(y) % alignof(Pack<U, 4>);
    for (const T* in : {x, more...}) apart |= reinterpret_cast<size_t>(in) % alignof(Pack<T, 4>);
    const long long packs = apart ? 0 : count / 4;
    for (long long i = first(); i < packs; i += step()) make<4, M>(y + 4 * i, f, {x + 4 * i, more + 4 * i...}, {});
#pragma unroll 1
    for (long long i = 4 * packs + first(); i < count; i += step()) make<1, M>(y + i, f, {x + i, more + i...}, {});
}

// Where element i of an array lies, from its first one.
__device__ __forceinline__ long long place(const Strides& s, int array, long long i) {
    long long at = 0;
#pragma unroll 1
    for (int a = s.axes - 1; a > 0; a--) {
        long long outer = i / s.length[a];
        at += (i - outer * s.length[a]) * s.step[array][a];
        i = outer;
    }
    return at + i * s.step[array][0];
}

// y = f(x...) for arrays of any strides; those of y come first.
template <typename F, typename U, typename T, typename... More>
__device__ __forceinline__ void map(const Strides& s, U* y, F f, const T* x, const More*... more) {
    constexpr int M = 1 + sizeof...(more);
    const T* const in[M] = {x, more...};
    const int last = s.axes - 1;
    for (long long i = first() * s.vector; i < s.count; i += step() * s.vector) {
        long long at[M + 1] = {}, rest = i;
#pragma unroll 1
        for (int a = last; a > 0; a--) {
            long long outer = rest / s.length[a], index = rest - outer * s.length[a];
            rest = outer;
#pragma unroll
            for (int k = 0; k <= M; k++) at[k] += index * s.step[k][a];
        }
        U* to = y + at[0] + rest * s.step[0][0];
        const T* from[M];
        bool repeated[M];
#pragma unroll
        for (int k = 0; k < M; k++) {
            from[k] = in[k] + at[k + 1] + rest * s.step[k + 1][0];
            repeated[k] = s.step[k + 1][last] == 0;
        }
        if (s.vector == 4) make<4, M>(to, f, from, repeated);
        else make<1, M>(to, f, from, repeated);
    }
}
