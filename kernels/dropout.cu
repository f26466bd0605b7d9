// Dropout and random numbers whose bits are counted; see dropout.py.
#include "four.cuh"

// Philox4x32-10: words of 32 bits, in 64 as products need them.
struct Words {
    unsigned long long of[4];
};
__device__ __forceinline__ Words philox(unsigned long long c0, unsigned long long c1, unsigned long long c2, unsigned long long c3,
                                        unsigned long long seed) {
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned long long p0 = c0 * 0xD2511F53ull, p1 = c2 * 0xCD9E8D57ull;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & 0xFFFFFFFFull;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & 0xFFFFFFFFull;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// x and y (samples, each). A thread has four neighbours of one sample: the words of one counter.
template <typename T>
__global__ void dropout(const T* x, const unsigned long long* __restrict__ counter, T* y, long long samples, long long each,
                        unsigned long long threshold, double factor, unsigned long long seed, unsigned long long draw,
                        unsigned long long sample) {
    long long groups = (each + 3) / 4, count = samples * groups;
    unsigned long long number = *counter + draw, low = number & 0xFFFFFFFFull, high = number >> 32;
    for (long long i = first(); i < count; i += step()) {
        long long n = count < 0x80000000ll ? (int)i / (int)groups : i / groups, group = i - n * groups, at = n * each + 4 * group;
        int here = each - 4 * group < 4 ? (int)(each - 4 * group) : 4;
        Words words = philox(group, n + sample, low, high, seed);
        Sum<T> xs[4] = {};
        load(x + at, here, xs);
#pragma unroll
        for (int k = 0; k < 4; k++) xs[k] = words.of[k] >= threshold ? xs[k] * Sum<T>(factor) : Sum<T>(0);
        store(y + at, here, xs);
    }
}

__device__ __forceinline__ double number(unsigned long long a, unsigned long long b, int normal, int bits, double low, double span) {
    if (normal) return sqrt(-2 * log((double)(a + 1) * 0x1p-32)) * cos((double)b * (6.283185307179586 * 0x1p-32));
    return low + (double)((a << 21 | b >> 11) >> (53 - bits)) * ldexp(1.0, -bits) * span;
}

// y (samples, each). A thread makes two neighbours of one sample from the words of one counter.
template <typename T>
__global__ void draw(const unsigned long long* __restrict__ counter, T* y, long long samples, long long each, int normal, int whole, int bits,
                     double low, double span, unsigned long long seed, unsigned long long draw, unsigned long long sample) {
    long long pairs = (each + 1) / 2, count = samples * pairs;
    unsigned long long which = *counter + draw;
    for (long long i = first(); i < count; i += step()) {
        long long n = i / pairs, block = i - n * pairs, at = n * each + 2 * block;
        Words words = philox(block, n + sample, which & 0xFFFFFFFFull, which >> 32, seed);
        for (int k = 0; k < 2 && 2 * block + k < each; k++) {
            double x = number(words.of[2 * k], words.of[2 * k + 1], normal, bits, low, span);
            y[at + k] = as<T>(whole ? floor(x) : x);
        }
    }
}

__global__ void tick(const unsigned long long* counter, unsigned long long* after, unsigned long long draws) { *after = *counter + draws; }
