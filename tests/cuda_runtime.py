"""CUDA devices on the CPU, by the engine's own driver and products, on a GPU that is not there (`cuda_machine`).

`Runtime` is `minidl.cuda.driver.Driver` on the calls of CuPy and cuda-bindings as `cuda_machine` answers them, so all but
the GPU is what runs on one. cuBLASLt's calls are answered by `cuda_blas`; in cuDNN's place stands NumPy.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import cuda_blas
import cuda_machine
import numpy as np
from cuda_machine import Machine
from cuda_on_cpu import run

from minidl.cuda import device as devices
from minidl.cuda import driver, products
from minidl.cuda.device import Cuda
from minidl.kernels import Thunk, cuda


class Runtime(driver.Driver):
    """The driver of a GPU that is not there. `issued`: calls that went to a stream."""

    def __init__(self, seed: int = 0, machine: type[Machine] = Machine) -> None:
        self.machine = machine(seed)
        libraries = cuda_machine.cupy(self.machine), cuda_machine.cupyx(self.machine), cuda_machine.bindings(self.machine)
        with mock.patch.object(driver, "libraries", return_value=libraries):
            super().__init__(0)

    @property
    def issued(self) -> int:
        return self.machine.issued

    def launch(self, grid: cuda.Grid, stream: Any) -> Thunk:
        thunk = super().launch(grid, stream)
        packed: Any = thunk.owners[0]  # type: ignore[attr-defined]
        self.machine.sizes[self._function(grid.source, grid.kernel)] = [ctypes.sizeof(v) for v in packed.values]
        return thunk


def plain(call: Any) -> Any:
    """The call with arrays that NumPy may look into."""
    return replace(call, **{f.name: x.view(np.ndarray) for f in fields(call) if isinstance(x := getattr(call, f.name), np.ndarray)})


def make_products(runtime: Runtime) -> Any:
    """The engine's products, with cuBLASLt's calls on the same machine."""
    with mock.patch.object(products, "libraries", return_value=cuda_blas.libraries(runtime.machine)):
        return products.Products(runtime)


class Dnn:
    """cuDNN's results, by NumPy. Where they need not repeat their bits, the last ones of a convolution's weight gradient are
    anyone's."""

    flash = True

    def __init__(self, runtime: Runtime) -> None:
        self.machine = runtime.machine

    def bind(self, call: cuda.Convolution | cuda.Attention, stream: Any, *, tf32: bool, deterministic: bool) -> Thunk:
        self.machine.not_in_capture("a plan is made")
        host, machine = plain(call), self.machine
        arrays = [a for f in fields(host) if isinstance(a := getattr(host, f.name), np.ndarray) and a.size]

        def body() -> None:
            run(host)
            if call.what == "weight_grad" and not deterministic:
                host.w[...] = np.nextafter(host.w, np.inf) if machine.random.integers(2) else host.w

        loads = type(call), call.what, *((a.shape, a.strides, str(a.dtype)) for a in arrays)
        return lambda: machine.issue(stream.ptr, body, [(cuda.pointer(a), 1) for a in arrays], loads)


def device(seed: int = 0) -> Cuda:
    """A CUDA device without a GPU, one more each time. It is known as the owner of its memory, but not found by name."""
    runtime = Runtime(seed)
    made = Cuda(runtime, lambda: make_products(runtime), lambda: Dnn(runtime), "cuda:0")
    devices._devices[min(devices._devices, default=0) - 1] = made
    return made
