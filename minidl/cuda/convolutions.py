"""Convolutions through cuDNN's frontend: the only file that knows it.

A plan is made for each key (operation, shapes, types, arithmetic) once and kept, so that every executor runs the same
one and bits agree; each stream has its own handle and workspace. Only deterministic engines are taken, and in strict
float32 none that rounds its inputs for the tensor cores. Images are NHWC in memory, filters KRSC.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..kernels import Thunk, cuda

X, W, Y = 1, 2, 3  #: names of the tensors in a plan


@dataclass(frozen=True)
class Key:
    """What a plan depends on; x (n, h, w, c), w (o, kh, kw, c / groups), y (n, oh, ow, o), each as its shape and its strides
    in elements: pixels may have gaps between them."""

    what: str
    x: tuple[tuple[int, ...], tuple[int, ...]]
    w: tuple[tuple[int, ...], tuple[int, ...]]
    y: tuple[tuple[int, ...], tuple[int, ...]]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    dtype: str
    tf32: bool

    @classmethod
    def of(cls, call: cuda.Convolution, tf32: bool) -> Key:
        dtype = str(call.x.dtype)
        x, w, y = ((tuple(a.shape), tuple(s // a.itemsize for s in a.strides)) for a in (call.x, call.w, call.y))
        return cls(call.what, x, w, y, call.stride, call.padding, call.dilation, dtype, tf32 and dtype == "float32")


def plan(key: Key, **options: Any) -> Any:
    """A built plan. `options` go to cudnn's graph: a handle, or the properties of a device that is not there.

    Raises RuntimeError where cuDNN has no engine that is deterministic and exact enough.
    """
    import cudnn

    kind = {"float32": cudnn.data_type.FLOAT, "float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[key.dtype]
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, **options)
    shapes = {X: key.x, W: key.w, Y: key.y}

    def tensor(uid: int) -> Any:
        dims, strides = _channels_second(*shapes[uid])
        return graph.tensor(name="?xwy"[uid], dim=dims, stride=strides, data_type=kind, uid=uid)

    window = {"padding": list(key.padding), "stride": list(key.stride), "dilation": list(key.dilation)}
    if key.what == "forward":
        out, uid = graph.conv_fprop(image=tensor(X), weight=tensor(W), **window), Y
    elif key.what == "input_grad":
        out, uid = graph.conv_dgrad(loss=tensor(Y), filter=tensor(W), **window), X
    else:
        out, uid = graph.conv_wgrad(image=tensor(X), loss=tensor(Y), **window), W
    dims, strides = _channels_second(*shapes[uid])
    out.set_output(True).set_dim(dims).set_stride(strides).set_data_type(kind).set_uid(uid)
    notes = cudnn.numerical_note
    unwanted = [notes.NONDETERMINISTIC]
    if key.dtype == "float32" and not key.tf32:
        unwanted += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes(unwanted)
        graph.check_support()
        graph.build_plans()
    except Exception as error:  # the frontend raises several kinds
        raise RuntimeError(f"cuDNN has no plan for {key}: {error}") from error
    return graph


def _channels_second(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and strides in the order in which cuDNN names axes."""
    return [shape[axis] for axis in (0, 3, 1, 2)], [strides[axis] for axis in (0, 3, 1, 2)]


class Convolutions:
    """cuDNN on one device."""

    def __init__(self, driver: Any) -> None:
        import cudnn

        self.cudnn, self.driver = cudnn, driver
        self._handles: dict[int, Any] = {}
        self._plans: dict[Key, Any] = {}
        self._workspaces: dict[int, Any] = {}

    def _handle(self, stream: Any) -> Any:
        if stream.number not in self._handles:
            handle = self.cudnn.create_handle()
            self.cudnn.set_stream(handle=handle, stream=stream.ptr)
            self._handles[stream.number] = handle
        return self._handles[stream.number]

    def bind(self, call: cuda.Convolution, stream: Any, tf32: bool) -> Thunk:
        """One prebuilt call. `tf32` as for products. Raises RuntimeError where cuDNN has no plan."""
        key, handle = Key.of(call, tf32), self._handle(stream)
        if key not in self._plans:
            self._plans[key] = plan(key, handle=handle)
        graph = self._plans[key]
        workspace = self._workspace(stream, max(1, int(graph.get_workspace_size())))
        pointers = {X: cuda.pointer(call.x), W: cuda.pointer(call.w), Y: cuda.pointer(call.y)}
        thunk: Any = partial(graph.execute, pointers, workspace.data.ptr, handle=handle)
        thunk.owners = (call, graph, workspace)
        return thunk

    def _workspace(self, stream: Any, nbytes: int) -> Any:
        """The stream's own, as large as any plan there needs; calls keep the one that they were bound to."""
        held = self._workspaces.get(stream.number)
        if held is None or held.nbytes < nbytes:
            held = self._workspaces[stream.number] = self.driver.allocate(nbytes, stream)
        return held
