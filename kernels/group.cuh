// Several launches of one kernel as one: a block does the work of a block of one of them, its threads in the same order, so
// that bits are the same. A kernel's body takes `Here` in place of blockIdx and threadIdx; see `grouped` in cuda.py.
#pragma once

enum { MEMBERS = 36 };  // of a launch at most: its arguments have 4 KiB

// The place of a thread in its own launch: block, number of blocks, thread, number of threads.
struct Here {
    int bx, by, bz, gy, gz, tx, ty, dx, dy;
};
__device__ __forceinline__ Here here() {
    return {int(blockIdx.x), int(blockIdx.y), int(blockIdx.z), int(gridDim.y), int(gridDim.z), int(threadIdx.x), int(threadIdx.y), int(blockDim.x), int(blockDim.y)};
}

// Blocks of a member and of all before it, its own along three axes, and the threads of a block along two.
struct Blocks {
    int end, x, y, z, dx, dy;
};
template <typename Member> struct Group {
    int count, unused;
    Blocks of[MEMBERS];
    Member member[MEMBERS];
};

// The member for which this block works, and where it is there. Threads beyond the member's have ty >= dy.
template <typename Member> __device__ __forceinline__ const Member& member_of(const Group<Member>& g, Here& h) {
    int k = 0, begin = 0, block = blockIdx.x;
    while (block >= g.of[k].end) begin = g.of[k++].end;
    const Blocks& b = g.of[k];
    block -= begin;
    h = {block % b.x, block / b.x % b.y, block / (b.x * b.y), b.y, b.z, int(threadIdx.x) % b.dx, int(threadIdx.x) / b.dx, b.dx, b.dy};
    return g.member[k];
}
