// Experts: where each token goes, and a product for each expert; the references are in experts.py. All arrays are contiguous.
#include "common.cuh"
#include "gate.cuh"

// The k largest chances of each token; of equal ones the lowest expert. `flag` becomes 1 where a chance is not a number.
template <typename T>
__global__ void route_choose(const T* __restrict__ p, const T* __restrict__ bias, T* gate, long long* choice, int experts, int k,
                             bool biased, bool normalize, int* flag, long long tokens) {
    typedef Sum<T> S;
    for (long long t = first(); t < tokens; t += step()) {
        S sum = 0;
        for (int j = 0; j < k; j++) {
            int best = -1;
            S most = 0;
            for (int e = 0; e < experts; e++) {
                const S chance = value(p[t * experts + e]), v = biased ? chance + value(bias[e]) : chance;
                if (v != v) atomicExch(flag, 1);
                bool taken = false;
                for (int i = 0; i < j; i++) taken |= choice[t * k + i] == e;
                if (!taken && (best < 0 || v > most)) best = e, most = v;
            }
            choice[t * k + j] = best;
            gate[t * k + j] = p[t * experts + best];
            sum += value(p[t * experts + best]);
        }
        for (int j = 0; normalize && j < k; j++) gate[t * k + j] = as<T>(value(gate[t * k + j]) / sum);
    }
}

// A warp for each expert: the place of its pairs among each other, -1 without room, and how many there are.
__global__ void __launch_bounds__(256) route_count(const long long* __restrict__ choice, long long* place, long long* counts, long long* load,
                                                   int pairs, long long capacity, long long experts) {
    for (long long e = first_row(32); e < experts; e += row_step(32)) {
        long long found = 0;
        for (int begin = 0; begin < pairs; begin += 32) {
            const int i = begin + lane(32);
            const bool mine = i < pairs && choice[i] == e;
            const unsigned hits = __ballot_sync(0xffffffffu, mine);
            const long long at = found + __popc(hits & ((1u << lane(32)) - 1));
            if (mine) place[i] = capacity == 0 || at < capacity ? at : -1;
            found += __popc(hits);
        }
        if (lane(32) == 0) load[e] = found, counts[e] = capacity && found > capacity ? capacity : found;
    }
}

// Places among the rows of all experts.
__global__ void route_place(const long long* __restrict__ choice, const long long* __restrict__ counts, long long* place, long long pairs) {
    for (long long i = first(); i < pairs; i += step())
        for (int e = 0; place[i] >= 0 && e < choice[i]; e++) place[i] += counts[e];
}

template <typename T>
__global__ void route_grad(const T* __restrict__ p, const T* __restrict__ gate, const long long* __restrict__ choice,
                           const T* __restrict__ dgate, T* dp, int experts, int k, bool normalize, long long count) {
    typedef Sum<T> S;
    for (long long i = first(); i < count; i += step()) {
        const long long t = i / experts, e = i % experts;
        S sum = 0, along = 0, mine = 0;
        bool chosen = false;
        for (long long j = t * k; j < t * k + k; j++) {
            sum += value(p[t * experts + choice[j]]), along += value(dgate[j]) * value(gate[j]);
            if (choice[j] == e) chosen = true, mine = value(dgate[j]);
        }
        dp[i] = as<T>(!chosen ? S(0) : normalize ? (mine - along) / sum : mine);
    }
}

__global__ void count_load(const long long* load, const long long* counts, const long long* before, long long* total, long long experts) {
    for (long long e = first(); e < experts; e += step())
        total[e] = before[e] + load[e], total[experts + e] = before[experts + e] + load[e] - counts[e];
}

template <typename T>
__global__ void move_bias(const long long* load, const T* before, T* bias, double rate, long long experts) {
    for (long long e = first(); e < experts; e += step()) {
        long long apart = -load[e] * experts;
        for (long long i = 0; i < experts; i++) apart += load[i];
        bias[e] = as<T>(value(before[e]) + Sum<T>(rate) * Sum<T>((apart > 0) - (apart < 0)));
    }
}

// ---------------------------------------------------------------------------------------------------- tokens to rows, back
// A row for each pair that has a place; all others have been cleared.
template <typename T>
__global__ void __launch_bounds__(512) dispatch(const T* __restrict__ x, const long long* __restrict__ place, const T* __restrict__ gate,
                                                T* rows, int k, bool gated, long long pairs, int width, int lanes) {
    for (long long i = first_row(lanes); i < pairs; i += row_step(lanes)) {
        if (place[i] < 0) continue;
        const T* from = x + i / k * width;
        T* to = rows + place[i] * width;
        along_row(width, lanes, [&](int c) { to[c] = gated ? as<T>(value(from[c]) * value(gate[i])) : from[c]; });
    }
}

template <typename T>
__global__ void combine(const T* __restrict__ rows, const long long* __restrict__ place, const T* __restrict__ gate, T* y, int k,
                        bool gated, int width, long long count) {
    for (long long i = first(); i < count; i += step()) {
        const long long t = i / width, c = i % width;
        Sum<T> sum = 0;
        for (long long j = t * k; j < t * k + k; j++)
            if (place[j] >= 0) sum += value(rows[place[j] * width + c]) * (gated ? value(gate[j]) : Sum<T>(1));
        y[i] = as<T>(sum);
    }
}

template <typename T>
__global__ void __launch_bounds__(512) gate_grad(const T* __restrict__ dy, const T* __restrict__ rows, const long long* __restrict__ place,
                                                 T* dgate, int k, long long pairs, int width, int lanes) {
    for (long long i = first_row(lanes); i < pairs; i += row_step(lanes)) {
        Sum<T> sum = 0;
        const T *a = dy + i / k * width, *b = rows + max(place[i], 0LL) * width;
        along_row(width, lanes, [&](int c) { sum += value(a[c]) * value(b[c]); });
        sum = row_sum(sum, lanes);
        if (lane(lanes) == 0) dgate[i] = as<T>(place[i] < 0 ? Sum<T>(0) : sum);
    }
}

// -------------------------------------------------------------------------------------------------------- grouped products
// How many numbers `width` wide rows of all groups have.
__device__ __forceinline__ long long used(const long long* __restrict__ counts, int groups, int width) {
    long long rows = 0;
    for (int g = 0; g < groups; g++) rows += counts[g];
    return rows * width;
}

// z = GELU (the tanh form) of the rows of all groups, zeros after them.
template <typename T>
__global__ void gelu_rows(const long long* __restrict__ counts, const T* __restrict__ x, T* z, int groups, int width, long long count) {
    const long long end = used(counts, groups, width);
    for (long long i = first(); i < count; i += step()) {
        const Sum<T> v = i < end ? value(x[i]) : Sum<T>(0);
        z[i] = as<T>(v < Sum<T>(-20) ? Sum<T>(0) : v * Gate<Sum<T>>(v).s);
    }
}

// Multiplies the rows of all groups by the slope at x.
template <typename T>
__global__ void gelu_grad_rows(const long long* __restrict__ counts, const T* __restrict__ x, T* dx, int groups, int width, long long count) {
    const long long end = used(counts, groups, width);
    for (long long i = first(); i < count && i < end; i += step()) dx[i] = as<T>(value(dx[i]) * gelu_tanh_slope(value(x[i])));
}

// A block computes a tile of 32 rows and 32 columns, from tiles of 32 terms in shared memory: thread t the elements
// (t / 8, t % 8 + 8 i).
template <typename S> __device__ __forceinline__ void add_terms(const S (&a)[32][33], const S (&b)[32][33], S (&sum)[4]) {
    __syncthreads();
    for (int j = 0; j < 32; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += a[threadIdx.x / 8][j] * b[j][threadIdx.x % 8 + 8 * i];
    __syncthreads();
}

// out (rows, n) = a (rows, k) b[e] (k, n), or b[e] (n, k) transposed, for the rows of each expert; plus its bias (E, n).
template <typename T>
__global__ void __launch_bounds__(256) grouped_rows(const long long* __restrict__ counts, const T* __restrict__ a, const T* __restrict__ b,
                                                    const T* __restrict__ bias, T* out, int groups, int experts, int k, int n,
                                                    bool transposed, bool biased) {
    typedef Sum<T> S;
    __shared__ S left[32][33], right[32][33];
    long long begin = 0, tile = blockIdx.x;
    int g = 0;
    for (; g < groups && tile >= (counts[g] + 31) / 32; g++) tile -= (counts[g] + 31) / 32, begin += counts[g];
    if (g == groups) return;
    const long long end = begin + counts[g];
    begin += 32 * tile;
    b += (long long)(g % experts) * k * n;
    const int column = 32 * blockIdx.y;
    S sum[4] = {0, 0, 0, 0};
    for (int from = 0; from < k; from += 32) {
        for (int i = threadIdx.x; i < 1024; i += 256) {
            const int r = i / 32, c = i % 32;
            left[r][c] = begin + r < end && from + c < k ? value(a[(begin + r) * k + from + c]) : S(0);
            const int term = transposed ? c : r, at = column + (transposed ? r : c);
            right[term][at - column] = from + term < k && at < n
                                           ? value(b[transposed ? (long long)at * k + from + term : (long long)(from + term) * n + at])
                                           : S(0);
        }
        add_terms(left, right, sum);
    }
    const long long row = begin + threadIdx.x / 8;
    for (int i = 0; i < 4; i++) {
        const int at = column + threadIdx.x % 8 + 8 * i;
        if (row < end && at < n) out[row * n + at] = as<T>(biased ? sum[i] + value(bias[(g % experts) * n + at]) : sum[i]);
    }
}

// out[e] (m, n) = the sum over the rows of each expert e of a (rows, m)^T b (rows, n), of one source after the other.
template <typename T>
__global__ void __launch_bounds__(256) grouped_sums(const long long* __restrict__ counts, const T* __restrict__ a, const T* __restrict__ b,
                                                    T* out, int sources, int experts, int m, int n) {
    typedef Sum<T> S;
    __shared__ S left[32][33], right[32][33];
    const int e = blockIdx.z, row = 32 * blockIdx.x, column = 32 * blockIdx.y;
    S total[4] = {0, 0, 0, 0};
    long long begin = 0;
    for (int s = 0, g = 0; s < sources; s++) {
        S sum[4] = {0, 0, 0, 0};
        for (int own = 0; own < experts; own++, g++) {
            const long long end = begin + counts[g];
            for (; own == e && begin < end; begin += 32) {
                for (int i = threadIdx.x; i < 1024; i += 256) {
                    const int r = i / 32, c = i % 32;
                    left[c][r] = begin + r < end && row + c < m ? value(a[(begin + r) * m + row + c]) : S(0);
                    right[r][c] = begin + r < end && column + c < n ? value(b[(begin + r) * n + column + c]) : S(0);
                }
                add_terms(left, right, sum);
            }
            begin = end;
        }
        for (int i = 0; i < 4; i++) total[i] = s ? total[i] + sum[i] : sum[i];
    }
    for (int i = 0; i < 4; i++) {
        const int r = row + threadIdx.x / 8, c = column + threadIdx.x % 8 + 8 * i;
        if (r < m && c < n) out[((long long)e * m + r) * n + c] = as<T>(total[i]);
    }
}

// total (E, n): the sums of each expert's rows of dy, of one source after the other.
template <typename T>
__global__ void grouped_bias(const long long* __restrict__ counts, const T* __restrict__ dy, T* total, int sources, int experts, int n,
                             long long count) {
    for (long long i = first(); i < count; i += step()) {
        const int e = i / n, c = i % n;
        Sum<T> all = 0;
        long long begin = 0;
        for (int s = 0, g = 0; s < sources; s++) {
            Sum<T> sum = 0;
            for (int own = 0; own < experts; own++, g++) {
                for (long long row = begin; own == e && row < begin + counts[g]; row++) sum += value(dy[row * n + c]);
                begin += counts[g];
            }
            all = s ? all + sum : sum;
        }
        total[i] = as<T>(all);
    }
}
