"""Convolutions as graphs of cuDNN's; `dnn` makes plans from them. Images are NHWC in memory, filters KRSC.

In strict float32 no engine may round its inputs for the tensor cores; by default, every engine must repeat its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...kernels import cuda

X, W, Y = 1, 2, 3  #: names of the tensors in a plan
WIDEST = 16  #: the largest alignment in bytes that cuDNN's kernels use


@dataclass(frozen=True)
class Key:
    """The key of a plan. x (n, h, w, c), w (o, kh, kw, c / groups), y (n, oh, ow, o): shape and strides (in elements)
    of each; there may be gaps between pixels. `alignments`: of their addresses, in bytes, at most 16. An array in a
    slab may begin at any element, and cuDNN assumes 16 unless a tensor says less."""

    what: str
    x: tuple[tuple[int, ...], tuple[int, ...]]
    w: tuple[tuple[int, ...], tuple[int, ...]]
    y: tuple[tuple[int, ...], tuple[int, ...]]
    alignments: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    dtype: str
    tf32: bool
    deterministic: bool

    @classmethod
    def of(cls, call: cuda.Convolution, tf32: bool, deterministic: bool) -> Key:
        dtype = str(call.x.dtype)
        x, w, y = ((tuple(a.shape), tuple(s // a.itemsize for s in a.strides)) for a in (call.x, call.w, call.y))
        alignments = tuple(cuda.alignment(a, WIDEST) for a in (call.x, call.w, call.y))
        return cls(call.what, x, w, y, alignments, call.stride, call.padding, call.dilation, dtype,
                   tf32 and dtype == "float32", deterministic)

    @property
    def unwanted(self) -> list[str]:
        """cuDNN's names of what an engine must not do."""
        rounds = ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"] if self.dtype == "float32" and not self.tf32 else []
        return [*(["NONDETERMINISTIC"] if self.deterministic else []), *rounds]

    def describe(self, cudnn: Any, graph: Any) -> None:
        """Adds the convolution to a graph of cuDNN's."""
        shapes = {X: self.x, W: self.w, Y: self.y}

        def tensor(uid: int) -> Any:
            dims, strides = _channels_second(*shapes[uid])
            made = graph.tensor(name="?xwy"[uid], dim=dims, stride=strides, uid=uid)
            return made.set_alignment(self.alignments[uid - 1])

        window = {"padding": list(self.padding), "stride": list(self.stride), "dilation": list(self.dilation)}
        if self.what == "forward":
            out, uid = graph.conv_fprop(image=tensor(X), weight=tensor(W), **window), Y
        elif self.what == "input_grad":
            out, uid = graph.conv_dgrad(loss=tensor(Y), filter=tensor(W), **window), X
        else:
            out, uid = graph.conv_wgrad(image=tensor(X), loss=tensor(Y), **window), W
        dims, strides = _channels_second(*shapes[uid])
        out.set_output(True).set_dim(dims).set_stride(strides).set_uid(uid).set_alignment(self.alignments[uid - 1])


def _channels_second(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Shape and strides in cuDNN's order of axes."""
    return [shape[axis] for axis in (0, 3, 1, 2)], [strides[axis] for axis in (0, 3, 1, 2)]


def pointers(call: cuda.Convolution) -> dict[int, int]:
    """The addresses of a plan's tensors."""
    return {X: cuda.pointer(call.x), W: cuda.pointer(call.w), Y: cuda.pointer(call.y)}
