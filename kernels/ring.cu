// Several steps in one launch: a step takes its inputs from the rows of a ring and gives its outputs to rows; see ring.py.
#include "common.cuh"

#ifdef MINIDL_STAND_IN
#define __cudart_builtin__
#endif
// Of CUDA's device runtime: whether the loop around the present graph goes on.
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

enum { MOVES = 8 };

// Rows of `bytes` bytes, which follow each other at one end and have a place at the other.
struct Moves {
    int count;
    const unsigned char* from[MOVES];
    unsigned char* to[MOVES];
    long long bytes[MOVES];
};

struct alignas(16) Sixteen {
    int part[4];
};
template <typename T> __device__ __forceinline__ void move_as(const unsigned char* from, unsigned char* to, long long bytes) {
    for (long long i = first(); i < bytes / (long long)sizeof(T); i += step()) ((T*)to)[i] = ((const T*)from)[i];
}
__device__ __forceinline__ void move(const unsigned char* from, unsigned char* to, long long bytes) {
    const size_t all = (size_t)from | (size_t)to | (size_t)bytes;
    if (all % sizeof(Sixteen) == 0) move_as<Sixteen>(from, to, bytes);
    else if (all % sizeof(int) == 0) move_as<int>(from, to, bytes);
    else move_as<unsigned char>(from, to, bytes);
}

// head: the number of this step in the launch, and of all its steps.
__global__ void ring_take(const int* head, Moves m) {
    const long long turn = head[0];
    for (int k = 0; k < m.count; k++) move(m.from[k] + turn * m.bytes[k], m.to[k], m.bytes[k]);
}

__global__ void ring_give(const int* head, Moves m) {
    const long long turn = head[0];
    for (int k = 0; k < m.count; k++) move(m.from[k], m.to[k] + turn * m.bytes[k], m.bytes[k]);
}

// Copies results, the flag as the last one, which then is 0.
__global__ void ring_leave(Moves m, int* flag) {
    for (int k = 0; k < m.count; k++) move(m.from[k], m.to[k], m.bytes[k]);
    if (!first()) *flag = 0;  // the thread that has copied it
}

// Goes on to the next step, unless this was the last or `flag` is set; `done` says how many have run.
__global__ void ring_next(int* head, int* done, const int* flag, unsigned long long handle) {
    if (threadIdx.x) return;
    const int next = head[0] + 1;
    head[0] = done[0] = next;
    if (handle) cudaGraphSetConditional(handle, next < head[1] && !flag[0]);
}
