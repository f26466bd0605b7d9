"""Convolutions at random whose arrays lie between pages that must not be touched: an access beyond an array ends the
process. Run by `test_vision_ops.py`.

    python tests/ops/guarded_convolutions.py CASES
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

import numpy as np

from minidl.kernels import KERNELS
from minidl.kernels.conv import Geometry

PAGE = mmap.PAGESIZE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(shape: Any, dtype: Any, front: bool) -> Any:
    """An array that begins behind a forbidden page, or ends before one. Its memory is never given back."""
    count = int(np.prod(shape))
    size = count * np.dtype(dtype).itemsize
    room = -(-max(size, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if protect(base, PAGE, 0) or protect(base + PAGE + room, PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return np.frombuffer(memory, dtype, count, PAGE if front else PAGE + room - size).reshape(shape)


def run(rng: np.random.Generator) -> None:
    def pick(*values: int) -> int:
        return int(rng.choice(values))

    def two(low: int, high: int) -> tuple[int, int]:
        return int(rng.integers(low, high)), int(rng.integers(low, high))

    groups, each, taps = pick(1, 1, 2, 3), pick(1, 2, 3, 5, 16, 17), two(1, 6)
    outputs = groups * pick(1, 2, 16, 18)
    geometry = Geometry(two(1, 4), two(0, 4), two(1, 3), groups)
    size = tuple(max(1, geometry.dilation[a] * (taps[a] - 1) + 1 - 2 * geometry.padding[a]) + pick(0, 1, 2, 7, 9, 20)
                 for a in (0, 1))
    n, dtype, front = pick(1, 3, 5), ("f4", "f8")[pick(0, 1)], bool(pick(0, 1))
    image, weight, out = (n, *size, groups * each), (outputs, *taps, each), (n, *geometry.output(size, taps), outputs)
    x, w, b, dy = (guarded(shape, dtype, front) for shape in (image, weight, (outputs,), out))
    for values in (x, w, b, dy):
        values[...] = rng.standard_normal(values.shape)
    first = int(rng.integers(outputs))
    for name, reads, shapes, constants in (
            ("conv2d", [x, w, b], [out], {}), ("conv2d_input_grad", [dy, w], [image], {"size": size}),
            ("conv2d_weight_grad", [x, dy], [weight, (outputs,)], {"taps": taps, "bias": True}),
            ("conv2d_weight_grad", [x, dy[..., first:]], [(outputs - first, *taps, each), (outputs - first,)],
             {"taps": taps, "bias": True, "rows": (first, outputs)})):
        kernel = KERNELS[name]
        writes = [guarded(shape, dtype, front) for shape in shapes]
        work = [guarded(*scratch, front) for scratch in kernel.work(reads, writes, geometry=geometry, **constants)]
        for thunk in kernel.bind(reads, writes, work, {"geometry": geometry, **constants}):
            thunk()


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    for _ in range(int(sys.argv[1])):
        run(generator)
    print("done", flush=True)
    os._exit(0)  # arrays of forbidden neighbours are not taken apart
