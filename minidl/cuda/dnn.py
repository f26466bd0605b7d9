"""cuDNN's plans by way of its frontend: made, kept and run, for the operations that `convolutions` and `attention` describe.

A plan is made for each key (operation, shapes, types, arithmetic) once and kept, so that every executor runs the same
one and bits agree; each stream has its own handle and workspace. What is left of a call may be captured.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from ..kernels import Thunk, cuda
from . import attention, convolutions

OPERATIONS: dict[type, Any] = {cuda.Convolution: convolutions, cuda.Attention: attention}


class Key(Protocol):
    """What a plan depends on: an operation on arrays of one type, and the arithmetic that is allowed."""

    @property
    def dtype(self) -> str: ...

    @property
    def unwanted(self) -> list[str]:
        """cuDNN's names of what an engine must not do (`numerical_note`)."""
        ...

    def describe(self, graph: Any) -> None:
        """Puts the operation into a graph of cuDNN's."""
        ...


def plan(key: Key, **options: Any) -> Any:
    """A built plan. `options` go to cudnn's graph: a handle, or the properties of a device that is not there.

    Raises RuntimeError where cuDNN has no engine that keeps to what the key allows.
    """
    import cudnn

    kind = {"float32": cudnn.data_type.FLOAT, "float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[key.dtype]
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, **options)
    try:
        key.describe(graph)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in key.unwanted])
        graph.check_support()
        graph.build_plans()
    except Exception as error:  # the frontend raises several kinds
        raise RuntimeError(f"cuDNN has no plan for {key}: {error}") from error
    return graph


class Dnn:
    """cuDNN on one device."""

    def __init__(self, driver: Any) -> None:
        import cudnn

        self.cudnn, self.driver = cudnn, driver
        self._handles: dict[int, Any] = {}
        self._plans: dict[Key, Any] = {}
        self._workspaces: dict[int, Any] = {}

    @property
    def flash(self) -> bool:
        """Whether attention has a gradient: from 1.24 on the frontend makes none with a cuDNN before 9.22."""
        frontend = tuple(int(n) for n in self.cudnn.__version__.split(".")[:2])
        return frontend < (1, 24) or self.cudnn.backend_version() >= 92200

    def _handle(self, stream: Any) -> Any:
        if stream.number not in self._handles:
            handle = self.cudnn.create_handle()
            self.cudnn.set_stream(handle=handle, stream=stream.ptr)
            self._handles[stream.number] = handle
        return self._handles[stream.number]

    def bind(self, call: cuda.Convolution | cuda.Attention, stream: Any, *, tf32: bool = False, deterministic: bool = True) -> Thunk:
        """One prebuilt call. `tf32` as for products; `deterministic`: only engines that repeat their bits. Raises
        RuntimeError where cuDNN has no plan."""
        operation, handle = OPERATIONS[type(call)], self._handle(stream)
        key = operation.Key.of(call, tf32, deterministic)
        if key not in self._plans:
            self._plans[key] = plan(key, handle=handle)
        graph = self._plans[key]
        workspace = self._workspace(stream, max(1, int(graph.get_workspace_size())))
        thunk: Any = partial(graph.execute, operation.pointers(call), workspace.data.ptr, handle=handle)
        thunk.owners = (call, graph, workspace)
        return thunk

    def _workspace(self, stream: Any, nbytes: int) -> Any:
        """The stream's own, as large as any plan there needs; calls keep the one that they were bound to."""
        held = self._workspaces.get(stream.number)
        if held is None or held.nbytes < nbytes:
            held = self._workspaces[stream.number] = self.driver.allocate(nbytes, stream)
        return held
