// CUDA's built-ins for g++, so that kernels run on the CPU. For tests alone.
//
// Blocks run one after the other, from one that a seed decides, forwards or backwards. The threads of a block are fibers
// (fast, in an order drawn from the seed), or with -DREAL_THREADS real threads, so that sanitizers see them as they see any
// program. A barrier that only a part of the block reaches, or a shuffle that only a part of the warp reaches, is an error
// of fibers; real threads wait for ever. Shared memory is full of 0xff when a block begins: NaN, nobody has written it.
#pragma once
#define MINIDL_STAND_IN
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <math.h>  // functions for float and double, in no namespace: a kernel may be named as something of std is
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef REAL_THREADS
#include <pthread.h>
#include <unistd.h>
#else
#include <mutex>
#include <ucontext.h>
#endif

using std::max, std::min;
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;
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
extern "C" inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) { *reinterpret_cast<unsigned*>(handle) = value; }
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(stand_in::block->dynamic.get())
// `__shared__ T x[8];` has been made `SHARED(1, x, T[8]);`, with another number for each declaration.
#define SHARED(n, name, ...) \
    std::type_identity_t<__VA_ARGS__>& name = *(std::type_identity_t<__VA_ARGS__>*)stand_in::block->fixed[stand_in::shared_index<__VA_ARGS__, n>].get()

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
static inline __half __double2half(double x) { _Float16 f = (_Float16)x; __half h; memcpy(&h, &f, 2); return h; }
static inline __nv_bfloat16 __double2bfloat16(double x) {  // by way of float, rounded to odd, so that rounding again is right
    float f = (float)x;
    unsigned u; memcpy(&u, &f, 4);
    if (f == f && f != x) { if (fabs((double)f) > fabs(x)) u--; u |= 1; }
    memcpy(&f, &u, 4);
    return __float2bfloat16(f);
}
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) double2 { double x, y; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
template <typename T> static inline T __ldg(const T* p) { return *p; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }

// ------------------------------------------------------------------------------------------------ threads of a block
namespace stand_in {
inline std::atomic<const char*> failure{nullptr};
inline unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
inline unsigned my_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
inline uint3 place(unsigned rank) { return {rank % blockDim.x, rank / blockDim.x % blockDim.y, rank / blockDim.x / blockDim.y}; }

// What a launch that may start early waits for: `dependency` runs it, once. Null where the launch waits for nothing.
inline thread_local void (*awaited)() = nullptr;

// Shared memory: every declaration, and every instance of it, has an index; every block has an allocation for each.
inline std::vector<size_t>& shared_sizes() { static std::vector<size_t> sizes; return sizes; }
template <class A, int> inline const size_t shared_index = (shared_sizes().push_back(sizeof(A)), shared_sizes().size() - 1);
struct Free { void operator()(unsigned char* p) const { free(p); } };
using Memory = std::unique_ptr<unsigned char, Free>;
inline Memory memory(size_t bytes) { return Memory((unsigned char*)memset(malloc(bytes ? bytes : 1), 0xff, bytes)); }
struct Shared {
    size_t bytes;
    Memory dynamic;
    std::vector<Memory> fixed;
    explicit Shared(size_t n) : bytes(n), dynamic(memory(n)) { for (size_t size : shared_sizes()) fixed.push_back(memory(size)); }
    void forget() {
        memset(dynamic.get(), 0xff, bytes);
        for (size_t i = 0; i < fixed.size(); i++) memset(fixed[i].get(), 0xff, shared_sizes()[i]);
    }
};

#ifdef REAL_THREADS
// Nothing orders the threads of two blocks, as ThreadSanitizer sees it, although they do not run at the same time: two
// blocks that touch one place are reported as two threads are.
class Barrier {
    std::atomic<unsigned> arrived{0}, round{0};
    unsigned members;
public:
    explicit Barrier(unsigned n) : members(n) {}
    void wait() {
        unsigned now = round;
        if (++arrived == members) { arrived = 0; ++round; round.notify_all(); }
        else round.wait(now);
    }
};
struct Block : Shared {
    Barrier all;
    std::vector<std::unique_ptr<Barrier>> warps;
    std::vector<std::atomic<unsigned long long>> slots;
    std::function<void()> body;
    dim3 threads = blockDim, blocks = gridDim;
    uint3 index = blockIdx;
    std::atomic<unsigned> begun{0}, done{0};
    Block(unsigned n, size_t bytes, std::function<void()> f) : Shared(bytes), all(n), slots(n), body(f) {
        for (unsigned i = 0; i < n; i += 32) warps.push_back(std::make_unique<Barrier>(n - i < 32 ? n - i : 32));
    }
};
inline thread_local Block* block = nullptr;
inline std::atomic<unsigned> ended{0};
inline void dependency() {}  // what is awaited has run before
inline void barrier() { block->all.wait(); }
inline void warp_barrier() { block->warps[my_rank() / 32]->wait(); }
inline std::atomic<unsigned long long>& slot(unsigned rank) { return block->slots[rank]; }

inline void* enter(void* b) {
    block = (Block*)b;
    blockDim = block->threads; gridDim = block->blocks; blockIdx = block->index;
    threadIdx = place(block->begun.fetch_add(1, std::memory_order_relaxed));
    block->body();
    block->done.fetch_add(1, std::memory_order_relaxed);
    ended.fetch_add(1, std::memory_order_release);
    return nullptr;
}

struct Grid {
    std::vector<std::unique_ptr<Block>> blocks;
    size_t shared;
    explicit Grid(size_t bytes) : shared(bytes) { ended = 0; }
    ~Grid() { while (ended.load(std::memory_order_acquire) < blocks.size() * threads_of_block()) usleep(20); }
    template <class Body> void run_block(Body body, unsigned) {
        unsigned n = threads_of_block();
        blocks.push_back(std::make_unique<Block>(n, shared, body));
        Block& b = *blocks.back();
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, 512 * 1024);
        for (unsigned r = 0; r < n; r++) {
            pthread_t thread;
            if (pthread_create(&thread, &attributes, enter, &b)) { fprintf(stderr, "no thread could be started\n"); abort(); }
        }
        while (b.done.load(std::memory_order_relaxed) < n) usleep(20);
    }
};
#else
constexpr size_t STACK = 64 * 1024;
enum State { RUNS, AT_BARRIER, AT_WARP, AT_DEPENDENCY, DONE };
struct Fiber {
    ucontext_t context; void* place[5]; State state = RUNS; bool begun = false; unsigned rank = 0;
    std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK]};
};
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<unsigned long long> slots;
    void* back[5]; Fiber* current = nullptr;
    void (*call)(void*) = nullptr; void* body = nullptr;
};
// A thread of the host borrows fibers; the next one gets them with stacks that are in memory, and with their contexts.
inline std::mutex lock;
inline std::vector<std::unique_ptr<Block>> spare;
struct Borrowed {
    std::unique_ptr<Block> pool;
    Borrowed() {
        std::lock_guard guard(lock);
        if (spare.empty()) pool = std::make_unique<Block>();
        else { pool = std::move(spare.back()); spare.pop_back(); }
    }
    ~Borrowed() { std::lock_guard guard(lock); spare.push_back(std::move(pool)); }
};
// Not inline: a fiber goes on in another thread of the host, in which what is thread_local has another address.
[[gnu::noinline]] inline Block& pool() { static thread_local Borrowed mine; return *mine.pool; }
inline thread_local Shared* block = nullptr;

[[gnu::noinline]] inline void pause(State state) {
    Block& b = pool();
    Fiber* me = b.current;
    me->state = state;
    if (__builtin_setjmp(me->place) == 0) __builtin_longjmp(b.back, 1);
}
inline void dependency() { if (awaited) pause(AT_DEPENDENCY); }
inline void barrier() { pause(AT_BARRIER); }
inline void warp_barrier() { pause(AT_WARP); }
inline unsigned long long& slot(unsigned rank) { return pool().slots[rank]; }
inline void enter() {
    for (;;) { Block& b = pool(); b.call(b.body); pause(DONE); }
}
inline void resume(Block& b, Fiber& f) {
    b.current = &f;
    threadIdx = place(f.rank);
    if (__builtin_setjmp(b.back) == 0) {
        if (f.begun) __builtin_longjmp(f.place, 1);
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
    Block& b = pool();
    block->forget();
    while (b.fibers.size() < n) b.fibers.push_back(std::make_unique<Fiber>());
    b.slots.assign(n, 0);
    b.body = &body;
    b.call = [](void* body) { (*(Body*)body)(); };
    for (unsigned r = 0; r < n; r++) { Fiber& f = *b.fibers[r]; f.begun &= f.state == DONE; f.state = RUNS; f.rank = r; }
    for (unsigned done = 0; done < n;) {
        bool moved = false;
        unsigned start = seed % n, stride = seed & 1 ? n - 1 : 1;  // from anywhere, forwards or backwards
        for (unsigned k = 0, i = start; k < n; k++, i = (i + stride) % n) {
            Fiber& f = *b.fibers[i];
            if (f.state != RUNS) continue;
            resume(b, f);
            moved = true;
            done += f.state == DONE;
        }
        seed = seed * 1664525u + 1013904223u;
        for (unsigned w = 0; w < n; w += 32) {
            unsigned waiting = 0, members = n - w < 32 ? n - w : 32;
            for (unsigned i = w; i < w + members; i++) waiting += b.fibers[i]->state == AT_WARP;
            if (waiting == members) { for (unsigned i = w; i < w + members; i++) b.fibers[i]->state = RUNS; moved = true; }
        }
        for (unsigned i = 0; i < n; i++) {
            Fiber& f = *b.fibers[i];
            if (f.state != AT_DEPENDENCY) continue;
            if (awaited) std::exchange(awaited, nullptr)();  // on the scheduler's stack
            f.state = RUNS;
            moved = true;
        }
        unsigned waiting = 0;
        for (unsigned i = 0; i < n; i++) waiting += b.fibers[i]->state == AT_BARRIER;
        if (waiting == n) { for (unsigned i = 0; i < n; i++) b.fibers[i]->state = RUNS; moved = true; }
        if (!moved && done < n) { failure = "a barrier or shuffle is reached by only a part of its threads"; return; }
    }
}

struct Grid {
    Shared shared;
    explicit Grid(size_t bytes) : shared(bytes) { block = &shared; }
    template <class Body> void run_block(Body body, unsigned seed) { stand_in::run_block(body, seed); }
};
#endif

// A shuffle meets the warp but orders none of its accesses to memory.
#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreSyncBegin(const char*, int);
extern "C" void AnnotateIgnoreSyncEnd(const char*, int);
struct Unordered {
    Unordered() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
    ~Unordered() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
};
#else
struct Unordered { ~Unordered() {} };
#endif
template <class T> T exchange(T x, unsigned source_lane) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    Unordered unordered;
    unsigned me = my_rank(), from = me / 32 * 32 + source_lane;
    unsigned long long bits = 0;
    memcpy(&bits, &x, sizeof(T));
    slot(me) = bits;
    warp_barrier();
    bits = slot(from < threads_of_block() ? from : me);
    warp_barrier();
    memcpy(&x, &bits, sizeof(T));
    return x;
}

// A kernel called as the driver does: one pointer to each argument.
template <class... P, size_t... I> void launch(void (*k)(P...), void** a, size_t shared, unsigned seed, std::index_sequence<I...>) {
    Grid grid(shared);
    unsigned total = gridDim.x * gridDim.y * gridDim.z, at = seed % total, stride = seed & 1 ? total - 1 : 1;
    for (unsigned i = 0; i < total && !failure; i++, at = (at + stride) % total) {
        blockIdx = {at % gridDim.x, at / gridDim.x % gridDim.y, at / gridDim.x / gridDim.y};
        grid.run_block([=] { k(*(std::remove_const_t<std::remove_reference_t<P>>*)a[I]...); }, seed);
        seed = seed * 1664525u + 1013904223u;
    }
}
// `before`: runs the launch before this one, which this one waits for; null where it has ended.
template <class... P>
const char* call(void (*k)(P...), void** a, const unsigned* g, const unsigned* t, size_t shared, unsigned seed, void (*before)()) {
    failure = nullptr;
#ifdef REAL_THREADS
    if (before) before();
#else
    awaited = before;
#endif
    gridDim = dim3{g[0], g[1], g[2]}; blockDim = dim3{t[0], t[1], t[2]};
    launch(k, a, shared, seed, std::index_sequence_for<P...>{});
    if (awaited && !failure) failure = "it was started before the launch before it had ended, and does not wait for that";
    awaited = nullptr;
    return failure;
}
template <class... P> size_t bytes_of(void (*)(P...), int argument) {
    const size_t sizes[] = {sizeof(P)..., 0};
    return sizes[argument];
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
// Atomics order nothing but themselves.
template <class T, class F> static inline T stand_in_update(T* p, F f) {
    std::atomic_ref<T> a(*p);
    T old = a.load(std::memory_order_relaxed);
    while (!a.compare_exchange_weak(old, f(old), std::memory_order_relaxed)) {}
    return old;
}
template <class T> static inline T atomicAdd(T* p, T x) { return stand_in_update(p, [=](T old) { return (T)(old + x); }); }
template <class T> static inline T atomicExch(T* p, T x) { return stand_in_update(p, [=](T) { return x; }); }
template <class T> static inline T atomicMax(T* p, T x) { return stand_in_update(p, [=](T old) { return old < x ? x : old; }); }
