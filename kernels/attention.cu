// Between the products of attention: scores to probabilities and back; see attention.py. A warp or a block has a row.
#include "common.cuh"

// p = softmax(scale p) over the first `end` elements of a row, those for which `seen(j)`; 0 elsewhere, and everywhere
// if none is seen.
template <typename T, typename F>
__device__ __forceinline__ void softmax_row(T* p, int width, int end, int lanes, Sum<T> scale, F seen) {
    typedef Sum<T> S;
    const S none = log(S(0));  // minus infinity
    S top = none, total = 0;
    along_row(end, lanes, [&](int j) {
        const S v = seen(j) ? value(p[j]) * scale : none;
        if (!(v <= top)) top = v;  // NaN too
    });
    top = row_max(top, lanes);
    if (top == none) top = 0;
    along_row(end, lanes, [&](int j) { total += seen(j) ? exp(value(p[j]) * scale - top) : S(0); });
    total = row_sum(total, lanes);
    const S factor = total == 0 ? S(0) : 1 / total;
    along_row(width, lanes, [&](int j) {
        p[j] = as<T>(j < end && seen(j) ? exp(value(p[j]) * scale - top) * factor : S(0));
    });
}

// p (n, heads, t, width) in place. `first`: how many keys the first query sees; each one sees one more, up to all.
template <typename T>
__global__ void __launch_bounds__(512) attention_softmax(T* p, long long rows, int t, int width, double scale, int first, int lanes) {
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        int end = min((int)(row % t) + first, width);
        softmax_row(p + row * width, width, end, lanes, Sum<T>(scale), [](int) { return true; });
    }
}

// The same with a mask (n, width), 0 for keys that nobody sees. `each`: rows of a sample, heads * t.
template <typename T, typename Mask>
__global__ void __launch_bounds__(512) attention_softmax_masked(T* p, const Mask* __restrict__ mask, long long mask_row, long long mask_step,
                                                                long long rows, long long each, int t, int width, double scale,
                                                                int first, int lanes) {
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        int end = min((int)(row % t) + first, width);
        const Mask* keep = mask + row / each * mask_row;
        softmax_row(p + row * width, width, end, lanes, Sum<T>(scale), [&](int j) { return keep[j * mask_step] != 0; });
    }
}

// ds holds dp and becomes p (dp - sum of p dp) scale.
template <typename T>
__global__ void __launch_bounds__(512) attention_score_grad(const T* __restrict__ p, T* ds, long long rows, int width, double scale,
                                                            int lanes) {
    typedef Sum<T> S;
    for (long long row = first_row(lanes); row < rows; row += row_step(lanes)) {
        const T* of = p + row * width;
        T* d = ds + row * width;
        S total = 0;
        along_row(width, lanes, [&](int j) { total += value(of[j]) * value(d[j]); });
        total = row_sum(total, lanes);
        along_row(width, lanes, [&](int j) { d[j] = as<T>(value(of[j]) * (value(d[j]) - total) * S(scale)); });
    }
}
