"""The stand-in for CUDA notices what is wrong with a kernel: each fault here is one that a GPU may or may not show."""

from __future__ import annotations

import mmap
import struct
from dataclasses import replace

import numpy as np
import pytest
from cuda_on_cpu import run_grid, sources, with_shared_memory
from cuda_sanitizers import KEPT, SANITIZERS, Recorder, record, replay
from helpers import PATIENCE

from minidl.kernels import cuda
from minidl.kernels.cuda import Grid, Struct

pytestmark = pytest.mark.slow  # no fault of minidl shows here, but one of the tests' own tools

FAULTS = """
#include "common.cuh"
__global__ void reverse(const float* x, float* y, bool wait) {      // within a block, through shared memory
    __shared__ float s[64];
    s[threadIdx.x] = x[first()];
    if (wait) __syncthreads();
    y[first()] = s[63 - threadIdx.x];
}
__global__ void reverse_warp(const float* x, float* y, bool wait) {  // a shuffle orders no accesses to memory
    __shared__ float s[32];
    s[threadIdx.x] = x[threadIdx.x];
    float other = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
    if (wait) __syncwarp();
    y[threadIdx.x] = s[31 - threadIdx.x] + 0 * other;
}
__global__ void half_a_barrier(float* y) {
    if (threadIdx.x < 32) __syncthreads();
    y[threadIdx.x] = 1;
}
__global__ void half_a_warp(float* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = warp_sum(1.0f);
}
__global__ void shift(const float* x, float* y, int by) { y[threadIdx.x] = x[(int)threadIdx.x + by]; }
__global__ void beyond_shared(float* y, int by, bool dynamic) {
    DYNAMIC_SHARED(float, d);
    __shared__ float s[32], t;
    s[threadIdx.x] = d[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) t = 1;
    __syncthreads();
    y[threadIdx.x] = (dynamic ? d : s)[threadIdx.x + by] + t;
}
__global__ void unwritten(float* y, bool dynamic) {
    DYNAMIC_SHARED(float, d);
    __shared__ float s[32];
    if (blockIdx.x == 0) s[threadIdx.x] = d[threadIdx.x] = 1;  // of this block alone
    y[first()] = dynamic ? d[threadIdx.x] : s[threadIdx.x];
}
__global__ void next_block(const float* x, float* y) {  // reads what another block may write
    y[blockIdx.x] = x[(blockIdx.x + 1) % gridDim.x] + 1;
}
__global__ void everyone(int* y) { y[0] += 1; }
__global__ void counted(int* y) { atomicAdd(y, 1); }
__global__ void by_four(const float* x, float* y) {
    reinterpret_cast<float4*>(y)[0] = reinterpret_cast<const float4*>(x)[0];
}
__global__ void product(const int* x, int* y) { y[0] = x[0] * x[1]; }
struct Pair { int by; const float* x; float* y; };
__global__ void shift_pair(Pair p) { p.y[threadIdx.x] = p.x[(int)threadIdx.x + p.by]; }
__global__ void structured(Strides s, int* y) { y[0] = s.axes; }
template <typename T> __global__ void sums(const T* x, T* y, long long count) {
    DYNAMIC_SHARED(Sum<T>, d);
    Sum<T> sum = 0;
    for (long long i = first(); i < count; i += step()) sum += value(x[i]);
    d[threadIdx.x] = sum;
    sum = block_sum(sum) + 0 * block_max(sum);
    __syncthreads();
    if (threadIdx.x == 0) y[blockIdx.x] = as<T>(sum + 0 * d[blockDim.x - 1]);
}
"""
KERNELS = ("reverse", "reverse_warp", "half_a_barrier", "half_a_warp", "shift", "beyond_shared", "unwritten",
           "next_block", "everyone", "counted", "by_four", "product", "shift_pair", "structured",
           "sums<float>", "sums<__half>")


@pytest.fixture(autouse=True)
def faults():
    with sources({"faults.cu": FAULTS}):
        yield


def launch(kernel, *arguments, blocks=1, threads=32, shared=0):
    return Grid("faults.cu", kernel, (blocks,), (threads,), arguments, shared)


def floats(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1


def results(grid, out, seeds=range(8)):
    """What `out` holds after the launch, for several orders of threads and blocks."""
    start, found = out.copy(), []
    for seed in seeds:
        out[...] = start
        run_grid(grid, seed=seed)
        found.append(out.copy())
    out[...] = start
    return found


def differ(arrays):
    return any(not np.array_equal(arrays[0], a) for a in arrays)


def watched(grid, sanitizer, seconds=PATIENCE):
    """What the sanitizer says to a launch; nothing if it is content."""
    out = [a for a in grid.arguments if isinstance(a, np.ndarray)]
    start = [a.copy() for a in out]
    recorded = record(grid, lambda: run_grid(grid))
    for a, before in zip(out, start, strict=True):
        a[...] = before
    try:
        replay([recorded], sanitizer, seconds, kernels=KERNELS)
    except AssertionError as report:
        return str(report)
    return ""


# ------------------------------------------------------------------------------------------------------------- barriers
def test_a_missing_barrier_changes_what_comes_out():
    x, y = floats(128), np.zeros(128, np.float32)
    assert not differ(results(launch("reverse", x, y, True, blocks=2, threads=64), y))
    assert differ(results(launch("reverse", x, y, False, blocks=2, threads=64), y))


@pytest.mark.few(1)
@pytest.mark.parametrize(("kernel", "threads"), [("reverse", 64), ("reverse_warp", 32)])
def test_a_missing_barrier_is_a_data_race(kernel, threads):
    x, y = floats(threads), np.zeros(threads, np.float32)
    assert watched(launch(kernel, x, y, True, threads=threads), "thread") == ""
    assert "data race" in watched(launch(kernel, x, y, False, threads=threads), "thread")


@pytest.mark.parametrize(("kernel", "threads"), [("half_a_barrier", 64), ("half_a_warp", 32)])
def test_a_barrier_for_a_part_of_its_threads_is_an_error(kernel, threads):
    grid = launch(kernel, np.zeros(64, np.float32), threads=threads)
    for seed in range(4):
        with pytest.raises(AssertionError,
                           match=f"{kernel}: a barrier or shuffle is reached by only a part of its threads"):
            run_grid(grid, seed=seed)
    run_grid(launch("unwritten", np.zeros(32, np.float32), True, shared=128))  # the next launch is as any other


@pytest.mark.slow
def test_real_threads_that_wait_for_ever_are_given_up():
    y = np.zeros(64, np.float32)
    recorded = record(launch("half_a_barrier", y, threads=64), lambda: None)
    with pytest.raises(AssertionError, match="no end, threads may wait"):
        replay([recorded], "address", seconds=1, kernels=KERNELS)


# --------------------------------------------------------------------------------------------------------------- blocks
def test_blocks_must_not_read_what_another_writes():
    x, y = floats(3), np.zeros(3, np.float32)
    assert not differ(results(launch("next_block", x, y, blocks=3, threads=1), y))
    assert differ(results(launch("next_block", x, x, blocks=3, threads=1), x))
    assert watched(launch("next_block", x, y, blocks=3, threads=1), "thread") == ""
    assert "data race" in watched(launch("next_block", x, x, blocks=3, threads=1), "thread")


@pytest.mark.parametrize(("blocks", "threads"), [(1, 2), (2, 1)])
def test_an_update_that_is_not_atomic_is_a_data_race(blocks, threads):
    y = np.zeros(1, np.int32)
    assert "data race" in watched(launch("everyone", y, blocks=blocks, threads=threads), "thread")
    assert watched(launch("counted", y, blocks=blocks, threads=threads), "thread") == ""


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.few(1)
@pytest.mark.parametrize(("by", "strided"), [(1, False), (-1, False), (1, True)])
def test_reading_beside_an_array_is_noticed(by, strided):
    x, y = floats(40)[4:36], np.zeros(32, np.float32)  # what lies beside x exists in NumPy's memory
    assert watched(launch("shift", x, y, 0), "address") == ""
    report = watched(launch("shift", x[::2] if strided else x, y, by), "address")
    assert "AddressSanitizer: heap-buffer-overflow" in report
    assert " in shift " in report


def test_structs_may_hold_addresses():
    both = [np.frombuffer(mmap.mmap(-1, 4096), np.float32) for _ in range(2)]  # not at low addresses
    both[0][:40] = floats(40)
    x, y = (array[4:36] for array in both)
    for by in (0, 1):
        recorder = Recorder()
        grid = launch("shift_pair", Struct("Pair", struct.pack("<qQQ", by, x.ctypes.data, y.ctypes.data)))
        recorder.run_grid(run_grid, grid)
        assert recorder.kept == {("faults.cu", "shift_pair", False, False): {}}  # nobody knows what it points at
        recorder.cuda_calls(lambda *bound: None, None, [x], [y], [], {})
        recorder.run_grid(run_grid, grid)
        (kept,) = recorder.kept["faults.cu", "shift_pair", False, False].values()
        assert np.array_equal(y, x + by)
        assert sorted(len(before) for before, _, _ in kept.memory) == [128, 128]
        if by == 0:
            replay([kept], "address", kernels=KERNELS)
        else:
            with pytest.raises(AssertionError, match="heap-buffer-overflow"):
                replay([kept], "address", kernels=KERNELS)


def test_arrays_that_overlap_share_their_memory():
    x = floats(40)
    assert watched(launch("shift", x[:32], x[4:36], 0, threads=4), "address") == ""
    assert watched(launch("next_block", x[:3], x[:3], threads=1), "address") == ""
    assert "heap-buffer-overflow" in watched(launch("shift", x[:3], x[4:8], 0, threads=4), "address")


@pytest.mark.parametrize("dynamic", [False, True])
def test_reading_beside_shared_memory_is_noticed(dynamic):
    y = np.zeros(32, np.float32)
    assert watched(launch("beyond_shared", y, 0, dynamic, shared=128), "address") == ""
    assert "heap-buffer-overflow" in watched(launch("beyond_shared", y, 1, dynamic, shared=128), "address")


@pytest.mark.parametrize("dynamic", [False, True])
def test_shared_memory_that_nobody_has_written_is_nan(dynamic):
    y = np.zeros(64, np.float32)
    for found in results(launch("unwritten", y, dynamic, blocks=2, shared=128), y):
        assert (found[:32] == 1).all()
        assert np.isnan(found[32:]).all()


def test_undefined_arithmetic_is_noticed():
    y = np.zeros(1, np.int32)
    assert watched(launch("product", np.array([3, 2**20], np.int32), y, threads=1), "address") == ""
    assert "signed integer overflow" in watched(launch("product", np.array([2**12, 2**20], np.int32), y, threads=1),
                                                "address")


@pytest.mark.parametrize("at", [1, 2, 4])
def test_loads_of_four_must_be_aligned(at):
    memory = np.zeros(64, np.float32)
    start = -memory.ctypes.data // 4 % 4
    # on fibers it may crash
    recorded = record(launch("by_four", memory[start + at:][:4], memory[start + 16:][:4], threads=1), lambda: None)
    if at == 4:
        replay([recorded], "address", kernels=KERNELS)
    else:
        with pytest.raises(AssertionError, match="misaligned address"):
            replay([recorded], "address", kernels=KERNELS)


def test_a_struct_has_the_size_that_its_kernel_has():
    size, y = cuda.STRIDES.itemsize, np.zeros(1, np.int32)
    run_grid(launch("structured", Struct("Strides", bytes([3, *[0] * (size - 1)])), y, threads=1))
    assert y[0] == 3
    for wrong in (size - 1, size + 8):
        with pytest.raises(AssertionError, match=f"argument 0, Strides, has {size} bytes, not {wrong}"):
            run_grid(launch("structured", Struct("Strides", bytes(wrong)), y, threads=1))


# --------------------------------------------------------------------------------------------------------------- replay
@pytest.mark.few(1)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_kernel_without_faults_leaves_the_same_bytes(sanitizer):
    """Also with warps that are not whole and more blocks than one."""
    recorded = []
    for dtype, name in ((np.float32, "float"), (np.float16, "__half")):
        for count in (1, 300):
            x, y = (floats(count) / 7).astype(dtype), np.zeros(3, dtype)
            grid = launch(f"sums<{name}>", x, y, count, blocks=3, threads=64, shared=512)
            recorded.append(record(grid, lambda grid=grid: run_grid(grid)))
            assert abs(float(y.sum()) / float(x.astype(float).sum()) - 1) < 2e-3
    replay(recorded, sanitizer, kernels=KERNELS)


def test_other_bytes_are_noticed():
    x, y = floats(32), np.zeros(32, np.float32)
    grid = launch("shift", x, y, 0)
    recorded = record(grid, lambda: run_grid(grid))
    before, after, lead = recorded.memory[1]
    recorded.memory[1] = before, after[:17] + b"\x55" + after[18:], lead
    with pytest.raises(AssertionError, match="byte 17 of allocation 1 differs from what fibers leave"):
        replay([recorded], "address", kernels=KERNELS)
    with pytest.raises(AssertionError, match="argument 2 has 8 bytes"):
        replay([replace(recorded, arguments=[*recorded.arguments[:2], (bytes(8), [])])], "address", kernels=KERNELS)


def test_a_few_small_launches_of_each_kernel_are_kept():
    recorder = Recorder()
    for count in (*range(1, 20), 2_000_000):
        for blocks in (1, 2, 60):
            x, y = np.ones(count, np.float32), np.zeros(blocks, np.float32)
            recorder.run_grid(run_grid, launch("sums<float>", x, y, count, blocks=blocks, threads=64, shared=256))
            assert y.sum() == count
    assert {kind: len(kept) for kind, kept in recorder.kept.items()} == {("faults.cu", "sums", several, False): KEPT
                                                                         for several in (False, True)}
    assert {r.geometry[0] for kept in recorder.kept.values() for r in kept.values()} == {1, 2}
    assert all(len(r.memory[0][0]) < 80 for kept in recorder.kept.values() for r in kept.values())


def test_shared_memory_is_declared_for_a_block():
    text = ("__shared__ S part[32]; __shared__ float a[32], b ,c[2] [N + 1];\n  __shared__ "
            "__align__(16) unsigned char n;")
    assert with_shared_memory(text) == ("SHARED(1, part, S[32]); SHARED(2, a, float[32]); SHARED(3, b, float); "
                                        "SHARED(4, c, float[2] [N + 1]);\n"
                                        "  SHARED(5, n, unsigned char);")
    with pytest.raises(AssertionError, match="one variable each"):
        with_shared_memory("__shared__ int (*pointer)[3];")
