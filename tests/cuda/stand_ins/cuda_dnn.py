"""cuDNN's frontend, as `minidl.devices.cuda.dnn` calls it, answered by NumPy: graphs of one operation, plans to choose
from, and what they compute, from addresses alone.

There are several plans for everything. Each adds something of its own to the last bits, so that these tell which one
was taken; where bits need not repeat, those of a weight gradient are anyone's. One of them can not be built, as
happens. What is not built is not run, and every array and workspace must lie in memory that is held.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda_machine import Machine
from cuda_on_cpu import run

from minidl.kernels import cuda

PLANS = 4
UNBUILDABLE = 1  #: the place of a plan that cannot be built


class NotSupported(Exception):
    """As the frontend's cudnnGraphNotSupportedError."""


class Names:
    """Any member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


DTYPES = {"FLOAT": "float32", "HALF": "float16", "BFLOAT16": "bfloat16"}


class Tensor:
    """What is told of it, by its constructor or by methods `set_...`."""

    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def put(value: Any) -> Tensor:
            self.attributes[name.removeprefix("set_")] = value
            return self

        return put


class Graph:
    """A graph of one operation. `tensors`: by the names of their roles."""

    def __init__(self, library: Frontend, handle: int, **options: Any) -> None:
        self.library, self.options, self.unwanted, self.built = library, options, (), set[int]()
        self.operation, self.how, self.tensors, self.largest = "", dict[str, Any](), dict[str, Tensor](), 0
        assert handle in library.streams

    def tensor(self, **attributes: Any) -> Tensor:
        return Tensor(**attributes)

    def _operation(self, name: str, how: dict[str, Any], tensors: dict[str, Tensor], *outs: str) -> Any:
        self.operation, self.how = name, how
        self.tensors = tensors | {out: Tensor() for out in outs}
        found = [self.tensors[out] for out in outs]
        return found if len(outs) > 1 else found[0]

    def conv_fprop(self, image: Tensor, weight: Tensor, **window: Any) -> Tensor:
        return self._operation("forward", window, {"x": image, "w": weight}, "y")

    def conv_dgrad(self, loss: Tensor, filter: Tensor, **window: Any) -> Tensor:
        return self._operation("input_grad", window, {"y": loss, "w": filter}, "x")

    def conv_wgrad(self, image: Tensor, loss: Tensor, **window: Any) -> Tensor:
        return self._operation("weight_grad", window, {"x": image, "y": loss}, "w")

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, generate_stats: bool, **how: Any) -> Any:
        assert generate_stats
        return self._operation("sdpa", how, {"q": q, "k": k, "v": v}, "y", "lse")

    def sdpa_backward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, stats: Tensor, **how: Any) -> Any:
        return self._operation("sdpa_backward", how,
                               {"q": q, "k": k, "v": v, "y": o, "dy": do, "lse": stats}, "dq", "dk", "dv")

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None:
        self.library.machine.not_in_capture("a plan is made")
        self.library.graphs.append(self)

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.unwanted = tuple(notes)

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        self.largest = nbytes

    def check_support(self) -> None: ...

    def get_execution_plan_count(self) -> int:
        return PLANS

    def build_plan_at_index(self, index: int) -> None:
        if index == UNBUILDABLE:
            raise NotSupported("Deselecting execution plan")
        self.built.add(index)

    def get_plan_name_at_index(self, index: int) -> str:
        if index not in self.built:
            raise RuntimeError(f"Plan index {index} did not build.")
        return f"eng{7 * index}_k2={index}"

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """100 bytes for each sample, and more for later plans; 0 for what is not built."""
        return (100 + 10 * index) * next(iter(self.tensors.values())).attributes["dim"][0] if index in self.built else 0

    def execute_plan_at_index(self, pointers: dict[int, int], workspace: int, index: int, handle: int) -> None:
        machine, held = self.library.machine, self.get_workspace_size_plan_at_index(index)
        assert index in self.built, "a plan is executed that is not built"
        machine.check_held(workspace, held, "a workspace")
        self.library.executed.append((self, index, pointers, workspace, handle))
        arrays = {role: self._array(tensor, pointers) for role, tensor in self.tensors.items()}
        anyone = self.operation == "weight_grad" and "NONDETERMINISTIC" not in self.unwanted

        def body() -> None:
            outs = self._compute(arrays)
            for out in outs:
                out[...] = (np.nextafter(out, np.asarray(np.inf, out.dtype))
                            if (machine.random.integers(2) if anyone else index) else out)

        key = (self.operation, *((a.shape, a.strides, str(a.dtype)) for a in arrays.values()), index)
        machine.issue(self.library.streams[handle], body, [(a.ctypes.data, 1) for a in arrays.values() if a.size], key)

    def _array(self, tensor: Tensor, pointers: dict[int, int]) -> Any:
        """The array at the tensor's address; images with channels last, as they lie."""
        told = tensor.attributes
        aligned = told.get("alignment", 16)  # the frontend's default
        assert pointers[told["uid"]] % aligned == 0, f"the plan expects addresses that are multiples of {aligned}"
        dtype = np.dtype(DTYPES[told.get("data_type") or self.options["io_data_type"]])
        shape, strides = list(told["dim"]), [s * dtype.itemsize for s in told["stride"]]
        extent = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        found = np.ndarray(shape, dtype, (ctypes.c_ubyte * extent).from_address(pointers[told["uid"]]), 0, strides)
        return found if self.operation.startswith("sdpa") else found.transpose(0, 2, 3, 1)

    def _compute(self, arrays: dict[str, Any]) -> list[Any]:
        """What it writes."""
        how = self.how
        if not self.operation.startswith("sdpa"):
            run(cuda.Convolution(self.operation, **arrays, stride=tuple(how["stride"]), padding=tuple(how["padding"]),
                                 dilation=tuple(how["dilation"]), groups=arrays["x"].shape[3] // arrays["w"].shape[3]))
            return [arrays[{"forward": "y", "input_grad": "x", "weight_grad": "w"}[self.operation]]]
        arrays = {**arrays, "lse": arrays["lse"][..., 0]}
        outs = ("y",) if self.operation == "sdpa" else ("dq", "dk", "dv")
        run(cuda.Attention("forward" if self.operation == "sdpa" else "grad", scale=how["attn_scale"],
                           causal="diagonal_alignment" in how, **arrays))
        return [arrays[out] for out in outs]


class Frontend(SimpleNamespace):
    """The module. `graphs`: all whose plans can be built; `executed`: (graph, plan, pointers, workspace,
    handle) of every call;
    `streams`: of each handle."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine=machine, graphs=[], executed=[], streams={}, __version__="1.23.0",
                         cudnnGraphNotSupportedError=NotSupported)
        self.data_type = self.heur_mode = self.numerical_note = self.diagonal_alignment = Names()

    def backend_version(self) -> int:
        return 91900

    def create_handle(self) -> int:
        self.machine.not_in_capture("a handle is made")
        self.streams[handle := 7 + len(self.streams)] = 0
        return handle

    def set_stream(self, handle: int, stream: int) -> None:
        self.streams[handle] = stream

    def pygraph(self, **options: Any) -> Graph:
        return Graph(self, **options)
