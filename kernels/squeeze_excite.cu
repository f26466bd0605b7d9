// Squeeze and excite; the reference is in squeeze_excite.py. x, y and their gradients are (samples, pixels, channels), w1
// (squeezed, channels), w2 (channels, squeezed); all contiguous.
//
// A block has some samples, 4 at most, so that a weight is loaded once for all of them, and some channels, in strips of 32; its
// threads are (32, warps): a warp goes over pixels or weights of one strip, or over rows of weights. What all channels of a
// sample meet in, the squeezed vector, is made of what every block leaves in `parts` (samples, tiles, squeezed) and the next
// launch adds up; where one block has all channels both stages are one launch.
#include "common.cuh"

struct Excite {
    long long pixels;
    int samples, channels, squeezed;  // in all
    int group, width;                 // samples and channels of a block
    int stages;                       // those of this launch: FIRST, SECOND or both
};
enum { FIRST = 1, SECOND = 2 };
enum { MOST = 4 };  // samples of a block

// What belongs to a block: samples and channels from the first ones on; `across` is the channels in whole strips.
struct Block {
    long long first;
    int samples, begin, channels, strips, across;

    __device__ explicit Block(const Excite& e) {
        first = (long long)blockIdx.x * e.group, begin = blockIdx.y * e.width;
        samples = int(min((long long)e.group, e.samples - first)), channels = min(e.width, e.channels - begin);
        strips = (channels + 31) / 32, across = 32 * strips;
    }
};

template <typename S> __device__ __forceinline__ S hardsigmoid_of(S v) {
    v += 3;
    return (v < 0 ? S(0) : v > 6 ? S(6) : v) * S(1.0 / 6);
}

__device__ __forceinline__ int pieces_of(int strips) { return max(1, int(blockDim.y) / strips); }

// body(strip, piece, pieces): the warps share out the strips, or where there are fewer of them the pieces of a strip.
template <typename F> __device__ __forceinline__ void each_strip(int strips, F body) {
    const int pieces = pieces_of(strips), piece = threadIdx.y % pieces;
    for (int strip = threadIdx.y / pieces; strip < strips; strip += blockDim.y / pieces) body(strip, piece, pieces);
}

// store(k, sum of the pieces of place k), of what they have left in scratch (pieces, count).
template <typename S, typename Store> __device__ __forceinline__ void join(const S* scratch, int count, int pieces, Store store) {
    __syncthreads();
    for (int k = threadIdx.y * 32 + threadIdx.x; k < count; k += 32 * blockDim.y) {
        S sum = 0;
        for (int p = 0; p < pieces; p++) sum += scratch[p * count + k];
        store(k, sum);
    }
    __syncthreads();
}

// For a piece of the pixels: load(pixel, v) fetches N numbers, use(pixel, v) goes on with them; eight pixels are fetched at a
// time, so that their loads do not wait for each other.
template <typename S, int N, typename Load, typename Use>
__device__ __forceinline__ void each_pixel(long long pixels, int piece, int pieces, Load load, Use use) {
    S v[8][N];
    long long p = piece;
    for (; p + 7 * pieces < pixels; p += 8 * pieces) {
#pragma unroll
        for (int k = 0; k < 8; k++) load(p + k * pieces, v[k]);
#pragma unroll
        for (int k = 0; k < 8; k++) use(p + k * pieces, v[k]);
    }
#pragma unroll 1
    for (; p < pixels; p += pieces) load(p, v[0]), use(p, v[0]);
}

// store(k, place, sum over pixels of load(place of a pixel)) for the block's channels, k in (samples, across).
template <typename S, typename Load, typename Store>
__device__ __forceinline__ void channel_sums(const Excite& e, const Block& b, S* scratch, Load load, Store store) {
    const int units = b.samples * b.strips;
    each_strip(units, [&](int unit, int piece, int pieces) {
        const int g = unit / b.strips, i = 32 * (unit % b.strips) + threadIdx.x;
        const long long at = (b.first + g) * e.pixels * e.channels + b.begin + i;
        S sum = 0;
        if (i < b.channels)
            each_pixel<S, 1>(e.pixels, piece, pieces, [&](long long p, S* v) { v[0] = load(at + p * e.channels); },
                             [&](long long, const S* v) { sum += v[0]; });
        scratch[32 * (piece * units + unit) + threadIdx.x] = sum;
    });
    join(scratch, 32 * units, pieces_of(units), [&](int k, S sum) {
        const int g = k / b.across, i = k % b.across;
        if (i < b.channels) store(k, (b.first + g) * e.channels + b.begin + i, sum);
    });
}

// Sums over the warp of 16 numbers of each lane, with N = 8: lanes 2k and 2k + 1 get the k-th. Each half of the lanes gives
// away the half of the numbers that it does not go on with.
template <int N, typename S> __device__ __forceinline__ S sums_of(S* v) {
    const bool upper = threadIdx.x & 2 * N;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const S mine = upper ? v[k + N] : v[k], other = upper ? v[k] : v[k + N];
        v[k] = mine + __shfl_xor_sync(0xffffffffu, other, 2 * N);
    }
    if constexpr (N > 1) return sums_of<N / 2>(v);
    else return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

// out(g, row, w[row] v[g]) for matrices w (rows, columns), whose rows begin `apart` elements from each other, and v (samples,
// columns), whose rows `step`. A warp has four rows.
template <typename S, typename T, typename Out>
__device__ __forceinline__ void by_rows(const T* __restrict__ w, int rows, int columns, int apart, const S* v, int step, int samples, Out out) {
    for (int row = 4 * threadIdx.y; row < rows; row += 4 * blockDim.y) {
        S sum[4 * MOST] = {};
        const T* from = w + row * apart;
#pragma unroll 2
        for (int i = threadIdx.x; i < columns; i += 32) {
            S at[4];
#pragma unroll
            for (int r = 0; r < 4; r++) at[r] = row + r < rows ? value(from[r * apart + i]) : S(0);
#pragma unroll
            for (int g = 0; g < MOST; g++)
                if (g < samples)
#pragma unroll
                    for (int r = 0; r < 4; r++) sum[MOST * r + g] += at[r] * v[g * step + i];
        }
        const S total = sums_of<8>(sum);
        const int r = threadIdx.x / 2 / MOST, g = threadIdx.x / 2 % MOST;
        if (threadIdx.x % 2 == 0 && row + r < rows && g < samples) out(g, row + r, total);
    }
}

// out(g, column, sum over rows of v[g, row] w[row, column]) for the same matrices, v (samples, rows).
template <typename S, typename T, typename Out>
__device__ __forceinline__ void by_columns(const T* __restrict__ w, int rows, int columns, int apart, const S* v, int step, int samples,
                                           S* scratch, Out out) {
    const int strips = (columns + 31) / 32;
    each_strip(strips, [&](int strip, int piece, int pieces) {
        const int column = 32 * strip + threadIdx.x;
        S sum[MOST] = {};
        if (column < columns)
#pragma unroll 4
            for (int row = piece; row < rows; row += pieces) {
                const S at = value(w[row * apart + column]);
#pragma unroll
                for (int g = 0; g < MOST; g++)
                    if (g < samples) sum[g] += at * v[g * step + row];
            }
#pragma unroll
        for (int g = 0; g < MOST; g++)
            if (g < samples) scratch[32 * ((piece * samples + g) * strips + strip) + threadIdx.x] = sum[g];
    });
    join(scratch, 32 * samples * strips, pieces_of(strips), [&](int k, S sum) {
        const int g = k / (32 * strips), column = k % (32 * strips);
        if (column < columns) out(g, column, sum);
    });
}

// Where the first stage leaves element j of the squeezed vector, as far as the block's channels make it.
template <typename S> __device__ __forceinline__ S& left(const Excite& e, const Block& b, S* parts, S* narrow, int g, int j) {
    return e.stages & SECOND ? narrow[g * e.squeezed + j] : parts[((b.first + g) * gridDim.y + blockIdx.y) * e.squeezed + j];
}

// narrow (samples, squeezed) = make(k, place, sum of what all blocks have left), k in these.
template <typename S, typename Make>
__device__ __forceinline__ void squeezed_sums(const Excite& e, const Block& b, const S* __restrict__ parts, S* narrow, Make make) {
    __syncthreads();
    for (int k = threadIdx.y * 32 + threadIdx.x; k < b.samples * e.squeezed; k += 32 * blockDim.y) {
        S sum = 0;
        const long long g = b.first + k / e.squeezed;
        if (e.stages & FIRST) sum = narrow[k];
        else
#pragma unroll 4
            for (int tile = 0; tile < gridDim.y; tile++) sum += parts[(g * gridDim.y + tile) * e.squeezed + k % e.squeezed];
        narrow[k] = make(k % e.squeezed, b.first * e.squeezed + k, sum);
    }
    __syncthreads();
}

// What is kept for the backward pass (mean, hidden, and `pre`, from which the gates are made) is rounded to T, and gone on with
// as it is kept.
template <typename T>
__global__ void __launch_bounds__(512, 2) squeeze_excite(const T* __restrict__ x, const T* __restrict__ w1, const T* __restrict__ b1,
                                                      const T* __restrict__ w2, const T* __restrict__ b2, Excite e, Sum<T>* parts,
                                                      T* __restrict__ y, T* __restrict__ mean, T* __restrict__ hidden,
                                                      T* __restrict__ pre) {
    typedef Sum<T> S;
    DYNAMIC_SHARED(S, memory);
    const Block b(e);
    S *wide = memory, *narrow = wide + e.group * e.width, *scratch = narrow + e.group * e.squeezed;
    if (e.stages & FIRST) {
        channel_sums(e, b, scratch, [&](long long at) { return value(x[at]); }, [&](int k, long long at, S sum) {
            mean[at] = as<T>(sum / S(e.pixels));
            wide[k] = value(mean[at]);
        });
        by_rows(w1 + b.begin, e.squeezed, b.channels, e.channels, wide, b.across, b.samples,
                [&](int g, int j, S sum) { left(e, b, parts, narrow, g, j) = sum; });
    }
    if (!(e.stages & SECOND)) return;
    squeezed_sums(e, b, parts, narrow, [&](int j, long long at, S sum) {
        const S v = sum + value(b1[j]);
        const T h = as<T>(!(v <= 0) ? v : S(0));  // NaN passes through
        if (blockIdx.y == 0) hidden[at] = h;
        return value(h);
    });
    by_rows(w2 + b.begin * e.squeezed, b.channels, e.squeezed, e.squeezed, narrow, e.squeezed, b.samples, [&](int g, int i, S sum) {
        const T p = as<T>(sum + value(b2[b.begin + i]));
        pre[(b.first + g) * e.channels + b.begin + i] = p;
        wide[g * b.across + i] = hardsigmoid_of(value(p));
    });
    __syncthreads();
    each_strip(b.samples * b.strips, [&](int unit, int piece, int pieces) {
        const int g = unit / b.strips, i = 32 * (unit % b.strips) + threadIdx.x;
        if (i >= b.channels) return;
        const long long at = (b.first + g) * e.pixels * e.channels + b.begin + i;
        const S gate = wide[g * b.across + i];
        each_pixel<S, 1>(e.pixels, piece, pieces, [&](long long p, S* v) { v[0] = value(x[at + p * e.channels]); },
                         [&](long long p, const S* v) { y[at + p * e.channels] = as<T>(v[0] * gate); });
    });
}

// The same way back: dpre from the sums over pixels, dhidden by w2, the mean's gradient by w1.
template <typename T>
__global__ void __launch_bounds__(512, 2)
squeeze_excite_input_grad(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ w1, const T* __restrict__ w2,
                          const T* __restrict__ hidden, const T* __restrict__ pre, Excite e, Sum<T>* parts, T* __restrict__ dx,
                          T* __restrict__ dpre, T* __restrict__ dhidden) {
    typedef Sum<T> S;
    DYNAMIC_SHARED(S, memory);
    const Block b(e);
    S *wide = memory, *narrow = wide + e.group * e.width, *scratch = narrow + e.group * e.squeezed;
    if (e.stages & FIRST) {
        channel_sums(e, b, scratch, [&](long long at) { return value(dy[at]) * value(x[at]); }, [&](int k, long long at, S sum) {
            const S v = value(pre[at]);
            dpre[at] = as<T>(v > -3 && v < 3 ? sum * S(1.0 / 6) : S(0));
            wide[k] = value(dpre[at]);
        });
        by_columns(w2 + b.begin * e.squeezed, b.channels, e.squeezed, e.squeezed, wide, b.across, b.samples, scratch,
                   [&](int g, int j, S sum) { left(e, b, parts, narrow, g, j) = sum; });
    }
    if (!(e.stages & SECOND)) return;
    squeezed_sums(e, b, parts, narrow, [&](int, long long at, S sum) {
        const T d = as<T>(value(hidden[at]) > 0 ? sum : S(0));
        if (blockIdx.y == 0) dhidden[at] = d;
        return value(d);
    });
    by_columns(w1 + b.begin, e.squeezed, b.channels, e.channels, narrow, e.squeezed, b.samples, scratch,
               [&](int g, int i, S sum) { wide[g * b.across + i] = sum / S(e.pixels); });
    each_strip(b.samples * b.strips, [&](int unit, int piece, int pieces) {
        const int g = unit / b.strips, i = 32 * (unit % b.strips) + threadIdx.x;
        if (i >= b.channels) return;
        const long long at = (b.first + g) * e.pixels * e.channels + b.begin + i;
        const S gate = hardsigmoid_of(value(pre[(b.first + g) * e.channels + b.begin + i])), share = wide[g * b.across + i];
        each_pixel<S, 1>(e.pixels, piece, pieces, [&](long long p, S* v) { v[0] = value(dy[at + p * e.channels]); },
                         [&](long long p, const S* v) { dx[at + p * e.channels] = as<T>(v[0] * gate + share); });
    });
}
