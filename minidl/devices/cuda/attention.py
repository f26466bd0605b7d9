"""Attention as a graph of cuDNN's; `dnn` makes plans from it. By default, only kernels that repeat their bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...kernels import cuda
from .convolutions import WIDEST

#: the arrays of a call; their positions, from 1 on, are the names of the tensors in a plan
FORWARD = ("q", "k", "v", "y", "lse")
GRAD = (*FORWARD, "dy", "dq", "dk", "dv")


@dataclass(frozen=True)
class Key:
    """The key of a plan. `arrays`: shape and strides (in elements) of each array, in the order of FORWARD or GRAD;
    `alignments`: of their addresses, in bytes, at most 16."""

    what: str
    arrays: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    alignments: tuple[int, ...]
    scale: float
    causal: bool
    dtype: str
    deterministic: bool

    @classmethod
    def of(cls, call: cuda.Attention, tf32: bool, deterministic: bool) -> Key:
        """The key of a call. `tf32` has no effect: only lse is float32."""
        arrays = tuple((tuple(a.shape), tuple(s // a.itemsize for s in a.strides)) for a in _arrays(call))
        alignments = tuple(cuda.alignment(a, WIDEST) for a in _arrays(call))
        return cls(call.what, arrays, alignments, call.scale, call.causal, str(call.q.dtype), deterministic)

    @property
    def unwanted(self) -> list[str]:
        """cuDNN's names of what an engine must not do."""
        return ["NONDETERMINISTIC"] if self.deterministic else []

    def describe(self, cudnn: Any, graph: Any) -> None:
        """Adds attention, or its gradient, to a graph of cuDNN's."""
        def of(name: str) -> dict[str, Any]:
            shape, strides = self.arrays[GRAD.index(name)]
            single = {"data_type": cudnn.data_type.FLOAT} if name == "lse" else {}
            more = (1,) * (4 - len(shape))  # lse has rows of one element
            return {"dim": [*shape, *more], "stride": [*strides, *more], "uid": 1 + GRAD.index(name), **single}

        def tensors(*names: str) -> list[Any]:
            return [aligned(name, graph.tensor(name=name, **of(name))) for name in names]

        def aligned(name: str, tensor: Any) -> Any:
            return tensor.set_alignment(self.alignments[GRAD.index(name)])

        how: dict[str, Any] = {"attn_scale": self.scale}
        if self.causal:
            how |= {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0}
        if self.what == "forward":
            outs = graph.sdpa(*tensors("q", "k", "v"), generate_stats=True, **how)
        else:
            outs = graph.sdpa_backward(*tensors("q", "k", "v", "y", "dy", "lse"),
                                       use_deterministic_algorithm=self.deterministic, **how)
        for out, name in zip(outs, FORWARD[3:] if self.what == "forward" else GRAD[6:], strict=True):
            for attribute, value in of(name).items():
                getattr(out, f"set_{attribute}")(value)
            aligned(name, out).set_output(True)


def _arrays(call: cuda.Attention) -> list[Any]:
    return [getattr(call, name) for name in (FORWARD if call.what == "forward" else GRAD)]


def pointers(call: cuda.Attention) -> dict[int, int]:
    """The addresses of a plan's tensors."""
    return {uid: cuda.pointer(array) for uid, array in enumerate(_arrays(call), 1)}
