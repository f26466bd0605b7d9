// CUDA's built-ins for g++, so that kernels run on the CPU. For tests alone.
//
// Blocks run one after the other. The threads of a block are fibers (fast, in an order drawn from a seed), or with
// -DREAL_THREADS real threads, so that ThreadSanitizer and AddressSanitizer see them as they see any program. A barrier
// that only a part of the block reaches, or a shuffle that only a part of the warp reaches, is an error.
#pragma once
#define MINIDL_STAND_IN
#include <algorithm>  // min and max: programs are in namespace std
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#ifdef REAL_THREADS
#include <barrier>
#include <thread>
#else
#include <csetjmp>
#include <memory>
#include <ucontext.h>
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;
inline thread_local unsigned char* stand_in_shared = nullptr;
static const int warpSize = 32;

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static const
#ifdef REAL_THREADS
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(stand_in_shared)

// ------------------------------------------------------------------------------------------------------ 16-bit types
struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };
static inline float __half2float(__half h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
static inline __half __float2half(float x) { _Float16 f = (_Float16)x; __half h; memcpy(&h, &f, 2); return h; }
static inline float __bfloat162float(__nv_bfloat16 h) { unsigned u = (unsigned)h.bits << 16; float x; memcpy(&x, &u, 4); return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) {
    unsigned u; memcpy(&u, &x, 4);
    if (x != x) return {(unsigned short)((u >> 16) | 0x40)};
    return {(unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) double2 { double x, y; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
template <typename T> static inline T __ldg(const T* p) { return *p; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }

// ------------------------------------------------------------------------------------------------ threads of a block
namespace stand_in {
enum State { RUNS, AT_BARRIER, AT_WARP, DONE };
inline std::atomic<const char*> failure{nullptr};
inline unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
inline unsigned my_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline uint3 place(unsigned rank) { return {rank % blockDim.x, rank / blockDim.x % blockDim.y, rank / blockDim.x / blockDim.y}; }

#ifdef REAL_THREADS
struct Block {
    std::barrier<> all;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    std::vector<unsigned long long> slots;
    explicit Block(unsigned n) : all(n), slots(n) {
        for (unsigned i = 0; i < n; i += 32) warps.push_back(std::make_unique<std::barrier<>>(n - i < 32 ? n - i : 32));
    }
};
inline thread_local Block* block = nullptr;
inline void barrier() { block->all.arrive_and_wait(); }
inline void warp_barrier() { block->warps[my_rank() / 32]->arrive_and_wait(); }
inline unsigned long long& slot(unsigned rank) { return block->slots[rank]; }

template <class Body> void run_block(Body body, unsigned) {
    Block b(threads_of_block());
    dim3 bd = blockDim, gd = gridDim; uint3 bi = blockIdx; unsigned char* shared = stand_in_shared;
    std::vector<std::thread> threads;
    for (unsigned r = 0; r < b.slots.size(); r++)
        threads.emplace_back([&, r] {
            blockDim = bd; gridDim = gd; blockIdx = bi; threadIdx = place(r); block = &b; stand_in_shared = shared;
            body();
        });
    for (auto& t : threads) t.join();
}
#else
constexpr size_t STACK = 64 * 1024;
struct Fiber {
    ucontext_t context; jmp_buf place; State state = RUNS; bool begun = false; unsigned rank = 0;
    std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK]};
};
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<unsigned long long> slots;
    ucontext_t scheduler; jmp_buf back; Fiber* current = nullptr;
    void (*call)(void*) = nullptr; void* body = nullptr;
};
inline thread_local Block pool;

inline void pause(State state) {
    Fiber* me = pool.current;
    me->state = state;
    if (_setjmp(me->place) == 0) _longjmp(pool.back, 1);
}
inline void barrier() { pause(AT_BARRIER); }
inline void warp_barrier() { pause(AT_WARP); }
inline unsigned long long& slot(unsigned rank) { return pool.slots[rank]; }
inline void enter() {
    pool.call(pool.body);
    pool.current->state = DONE;
    _longjmp(pool.back, 1);
}
inline void resume(Fiber& f) {
    pool.current = &f;
    threadIdx = place(f.rank);
    if (_setjmp(pool.back) == 0) {
        if (f.begun) _longjmp(f.place, 1);
        f.begun = true;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
        setcontext(&f.context);
    }
}

template <class Body> void run_block(Body body, unsigned seed) {
    unsigned n = threads_of_block();
    while (pool.fibers.size() < n) pool.fibers.push_back(std::make_unique<Fiber>());
    pool.slots.assign(n, 0);
    pool.body = &body;
    pool.call = [](void* b) { (*(Body*)b)(); };
    for (unsigned r = 0; r < n; r++) { Fiber& f = *pool.fibers[r]; f.state = RUNS; f.begun = false; f.rank = r; }
    for (unsigned done = 0; done < n;) {
        bool moved = false;
        unsigned start = seed % n, stride = seed & 1 ? n - 1 : 1;  // from anywhere, forwards or backwards
        for (unsigned k = 0, i = start; k < n; k++, i = (i + stride) % n) {
            Fiber& f = *pool.fibers[i];
            if (f.state != RUNS) continue;
            resume(f);
            moved = true;
            done += f.state == DONE;
        }
        seed = seed * 1664525u + 1013904223u;
        for (unsigned w = 0; w < n; w += 32) {
            unsigned waiting = 0, members = n - w < 32 ? n - w : 32;
            for (unsigned i = w; i < w + members; i++) waiting += pool.fibers[i]->state == AT_WARP;
            if (waiting == members) { for (unsigned i = w; i < w + members; i++) pool.fibers[i]->state = RUNS; moved = true; }
        }
        unsigned waiting = 0;
        for (unsigned i = 0; i < n; i++) waiting += pool.fibers[i]->state == AT_BARRIER;
        if (waiting == n) { for (unsigned i = 0; i < n; i++) pool.fibers[i]->state = RUNS; moved = true; }
        if (!moved && done < n) { failure = "a barrier or shuffle is reached by only a part of its threads"; return; }
    }
}
#endif

template <class T> T exchange(T x, unsigned source_lane) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    unsigned me = my_rank(), first = me / 32 * 32;
    memcpy(&slot(me), &x, sizeof(T));
    warp_barrier();
    T y;
    unsigned from = first + source_lane;
    memcpy(&y, &slot(from < threads_of_block() ? from : me), sizeof(T));
    warp_barrier();
    return y;
}

// A kernel called as the driver does: one pointer to each argument.
template <class... P, size_t... I> void launch(void (*k)(P...), void** a, dim3 grid, dim3 threads, size_t shared,
                                               unsigned seed, std::index_sequence<I...>) {
    std::vector<unsigned char> memory(shared + 16);
    gridDim = grid; blockDim = threads;
    stand_in_shared = (unsigned char*)(((uintptr_t)memory.data() + 15) & ~(uintptr_t)15);
    for (unsigned z = 0; z < grid.z; z++) for (unsigned y = 0; y < grid.y; y++) for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        memset(stand_in_shared, 0xff, shared);  // NaN: nobody has written it yet
        run_block([&] { k(*(std::remove_const_t<std::remove_reference_t<P>>*)a[I]...); }, seed);
        seed = seed * 1664525u + 1013904223u;
    }
}
template <class... P> const char* call(void (*k)(P...), void** a, const unsigned* g, const unsigned* t, size_t shared, unsigned seed) {
    failure = nullptr;
    launch(k, a, dim3{g[0], g[1], g[2]}, dim3{t[0], t[1], t[2]}, shared, seed, std::index_sequence_for<P...>{});
    return failure;
}
}  // namespace stand_in

static inline void __syncthreads() { stand_in::barrier(); }
static inline void __syncwarp(unsigned = 0xffffffffu) { stand_in::warp_barrier(); }
static inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T> static inline T __shfl_sync(unsigned, T x, int lane, int = 32) { return stand_in::exchange(x, lane & 31); }
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int m, int = 32) { return stand_in::exchange(x, (stand_in::my_rank() & 31) ^ m); }
template <class T> static inline T __shfl_down_sync(unsigned, T x, unsigned d, int = 32) {
    unsigned lane = stand_in::my_rank() & 31;
    return stand_in::exchange(x, lane + d < 32 ? lane + d : lane);
}
template <class T> static inline T __shfl_up_sync(unsigned, T x, unsigned d, int = 32) {
    unsigned lane = stand_in::my_rank() & 31;
    return stand_in::exchange(x, lane >= d ? lane - d : lane);
}
static inline unsigned __ballot_sync(unsigned, int p) {
    unsigned found = 0;
    for (int i = 0; i < 32; i++) found |= (stand_in::exchange(p != 0 ? 1u : 0u, i) ? 1u : 0u) << i;
    return found;
}
template <class T> static inline T atomicAdd(T* p, T x) {
    std::atomic_ref<T> a(*p);
    T old = a.load();
    while (!a.compare_exchange_weak(old, old + x)) {}
    return old;
}
template <class T> static inline T atomicMax(T* p, T x) {
    std::atomic_ref<T> a(*p);
    T old = a.load();
    while (old < x && !a.compare_exchange_weak(old, x)) {}
    return old;
}
