"""CUDA devices on the CPU, by the engine's own code, on a GPU that is not there (`cuda_machine`).

`Runtime` is `minidl.devices.cuda.driver.Driver` on the calls of CuPy and cuda-bindings as `cuda_machine` answers them,
so all but the GPU is what runs on one. cuBLASLt's calls are answered by `cuda_blas`, those of cuDNN's frontend by
`cuda_dnn`. Times mean nothing there, so what is timed is timed once.
"""

from __future__ import annotations

import ctypes
from typing import Any
from unittest import mock

import cuda_blas
import cuda_dnn
import cuda_machine
from cuda_machine import Machine

from minidl.devices.cuda import clock, dnn, driver, products
from minidl.devices.cuda import device as devices
from minidl.devices.cuda.device import Cuda
from minidl.kernels import Thunk, cuda

clock.WARM, devices.HELD = 0.0, 1 << 10  # a CPU needs no fills before timing, and none that take long


class Runtime(driver.Driver):
    """The driver of a GPU that is not there. `issued`: calls that went to a stream."""

    def __init__(self, seed: int = 0, machine: type[Machine] = Machine) -> None:
        self.machine = machine(seed)
        libraries = (cuda_machine.cupy(self.machine), cuda_machine.cupyx(self.machine),
                     cuda_machine.bindings(self.machine))
        with mock.patch.object(driver, "libraries", return_value=libraries):
            super().__init__(0)
        self.extended = cuda_machine.extended(self.machine)

    @property
    def issued(self) -> int:
        return self.machine.issued

    def launch(self, grid: cuda.Grid, stream: Any) -> Thunk:
        thunk = super().launch(grid, stream)
        packed: Any = thunk.owners[0]  # type: ignore[attr-defined]
        function = self._function(grid.source, grid.kernel, self.dependent)
        self.machine.sizes[function] = [ctypes.sizeof(v) for v in packed.values]
        return thunk


def make_products(runtime: Runtime) -> Any:
    """The engine's products, with cuBLASLt's calls on the same machine."""
    with mock.patch.object(products, "libraries", return_value=cuda_blas.libraries(runtime.machine)):
        return products.Products(runtime)


def make_dnn(runtime: Runtime) -> Any:
    """The engine's cuDNN, with the frontend's calls on the same machine."""
    with mock.patch.object(dnn, "library", return_value=cuda_dnn.Frontend(runtime.machine)):
        return dnn.Dnn(runtime)


class Timed(Cuda):
    """Repeats what it times twice."""

    def task_times(self, programs: Any, progress: Any = None, repeats: int = 2, stream: Any = None) -> list[float]:
        return super().task_times(programs, progress, repeats, stream)


def device(seed: int = 0) -> Cuda:
    """A CUDA device without a GPU, one more each time. It is known as the owner of its memory, but
    not found by name."""
    clock.REPEATS, clock.ROUNDS = 2, 1
    runtime = Runtime(seed)
    made = Timed(runtime, lambda: make_products(runtime), lambda: make_dnn(runtime), "cuda:0")
    devices._devices[min(devices._devices, default=0) - 1] = made
    return made
