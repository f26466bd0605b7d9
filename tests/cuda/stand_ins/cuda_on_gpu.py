"""A kernel's CUDA form on a CUDA device, from NumPy arrays and back: the tests of kernels, on a GPU.

With MINIDL_TEST_GPU=1 `cuda_on_cpu.run_kernel` comes here, so that `tests/cuda` tries the same examples with
the real compiler, cuBLAS and cuDNN.

After a kernel that writes where it must not, every call fails until the process ends; a kernel that never ends is
waited for as long. So a test on a GPU that leaves it so ends its process, and where that is a worker of pytest-xdist
(-n 1) the tests after it are run in another.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_ubyte
from typing import Any

import numpy as np
import pytest

from minidl.kernels import KERNELS, cuda

PATIENCE = 200.0  #: seconds for one test


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Around a test that uses a GPU."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    error = failed_for_good()
    if error is None:
        return
    said = f"the GPU cannot be used any more after {name}: {error}"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(said, 3)
    print(said, file=sys.stderr, flush=True)
    os._exit(3)


def failed_for_good() -> str | None:
    """What the GPU says to every call, if it does."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not cupy.cuda.is_available():
        return None
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return None


class Mirror:
    """Host arrays on a device, in memory that lies as theirs does: views of one array stay views of one."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.bases: dict[int, tuple[Any, Any]] = {}  # address -> host bytes, memory

    def __call__(self, array: Any) -> Any:
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        start, end = np.lib.array_utils.byte_bounds(base)
        if start not in self.bases:
            host = np.frombuffer((c_ubyte * (end - start)).from_address(start), np.uint8)
            memory = self.device.allocate(max(end - start, 1))
            if host.size:
                self.device.driver.copy(host, memory, self.device.main)()
            self.bases[start] = host, memory
        return self.device.driver.array(self.bases[start][1], array.shape, str(array.dtype), array.strides,
                                        array.ctypes.data - start)

    def bring_back(self) -> None:
        for host, memory in self.bases.values():
            if host.size:
                self.device.driver.copy(memory, host, self.device.main)()
        self.device.synchronize()


def run_kernel_on(device: Any, name: str, reads: Sequence[Any], writes: Sequence[Any], work: Sequence[Any],
                  constants: dict[str, Any]
                  ) -> Sequence[cuda.Call]:
    """Runs it and puts what it wrote into `writes`; returns its calls."""
    mirror = Mirror(device)
    there = [[mirror(a) for a in arrays] for arrays in (reads, writes, work)]
    calls = KERNELS[name].cuda_calls(*there, constants)
    thunks = [device._thunk(call, device.main) for call in calls]
    for thunk in thunks:
        thunk()
    mirror.bring_back()
    return calls
