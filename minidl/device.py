"""A device: memory, the array module, and bound kernels. Here the CPU; CUDA will stand beside it.

The CPU keeps BLAS to one thread for each stream, because two streams with two BLAS threads each would fight for the
same cores and because the bits of a product may depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .graph import Launch, View
from .kernels import KERNELS, Thunk

ALIGNMENT = 256  #: bytes; every buffer begins at a multiple


class CPU:
    """Host memory and NumPy. `blas_threads`: how many threads one matrix product may use, on any stream."""

    name = "cpu"
    xp = np

    def __init__(self, blas_threads: int = 1) -> None:
        self.set_blas_threads(blas_threads)

    def set_blas_threads(self, threads: int) -> None:
        """For this process, from now on."""
        from threadpoolctl import threadpool_limits

        self._limits = threadpool_limits(threads, "blas")
        self.blas_threads = threads

    def allocate(self, nbytes: int) -> Any:
        """Uninitialised bytes, aligned."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def array(self, memory: Any, view: View, base: int = 0) -> Any:
        """The strided array that `view` means in `memory`, whose storage begins at byte `base`."""
        size = np.dtype(view.dtype).itemsize
        if 0 in view.shape:
            return np.empty(view.shape, view.dtype)
        return np.ndarray(view.shape, view.dtype, memory, base + view.offset * size, tuple(s * size for s in view.strides))

    def bind(self, launch: Launch, array: Any) -> list[Thunk]:
        """Prebuilt calls for one launch; `array(view)` gives the arrays."""
        reads, writes, work = ([array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        return KERNELS[launch.kernel].bind(reads, writes, work, dict(launch.constants))


@cache
def cpu() -> CPU:
    """The one CPU of this process."""
    return CPU()


def get(name: str) -> CPU:
    """The device of this name. Raises ValueError for one that this build does not have."""
    if name == "cpu":
        return cpu()
    if name.partition(":")[0] == "cuda":
        raise ValueError(f"device {name} is not there yet in this version; use cpu")
    raise ValueError(f"unknown device {name!r}; known: cpu")


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
