"""Op: one differentiable operation. A subclass says which kernels its forward and its gradients call.

`input_grad(i, dy)` makes the gradient toward one input. By default the weight gradient task calls it for every input
that is a parameter, and the output gradient task for all others, so an op gets two separate tasks for free. An op that
makes several gradients in one kernel overrides `weight_grad` or `output_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph import Role
from ..tasks import Kind
from . import precision
from . import tape as tapes
from .precision import HALVES
from .tensor import FLOATS, Node, Parameter, ShapeError, Tensor, array, cast, new


class Op:
    """One use of an operation. `forward` keeps on `self` what the backward pass needs."""

    name = "op"
    output_first = False  #: whether O makes what W reads; then O is emitted first
    precision = "any"  #: the types of its inputs: see `precision.input_dtypes`
    kept: Sequence[Tensor] = ()  #: gradients that a later task of this op reads again: never add to them in place

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calls kernels and returns the output; or returns a view of an input, without a call."""
        raise NotImplementedError

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        """The gradient toward input i, with its shape."""
        raise NotImplementedError(f"{self.name} has no gradient toward input {i}")

    def output_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        """Gradients toward inputs that are not parameters: one O task."""
        return {i: self.input_grad(i, dy) for i in wanted}

    def weight_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        """Gradients toward parameters: one W task."""
        return {i: self.input_grad(i, dy) for i in wanted}

    def add_grad(self, i: int, dy: Tensor, total: Tensor) -> bool:
        """Adds the gradient toward input i to `total` in place and returns True, where that is cheaper than a gradient
        of full size; else returns False."""
        return False

    def __call__(self, *values: Any) -> Tensor:
        """Emits the forward task and remembers this use for the backward pass. Arrays become tensors."""
        tape = tapes.current()
        inputs = [t if isinstance(t, Tensor) else array(t) for t in values]
        unit = tape.new_unit(self.name)
        dtypes = precision.input_dtypes(self.precision, [t.dtype for t in inputs], tape.autocast)
        with tape.task(unit, Kind.F):
            operands = [t if t.dtype == dtype else tape.rounded[t] if t in tape.rounded else cast(t, dtype)
                        for t, dtype in zip(inputs, dtypes, strict=True)]
            out = self.forward(*operands)
        tape.rounded |= {t: low for t, low in zip(inputs, operands, strict=True)
                         if isinstance(t, Parameter) and low is not t}
        tracked = tape.gradients and any(t.requires_grad for t in inputs) and out.dtype in (*FLOATS, *HALVES)
        if any(out is t for t in inputs):
            out = out.detach()
        out.requires_grad = tracked
        out.weight = tracked and all(t.weight for t in inputs)
        if tracked:
            out.node = Node(self, unit, inputs, out, tape.place.micro_batch if tape.place.inner else None)
        return out

    # ----------------------------------------------------------------------------------------------- for subclasses
    def call(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor], **constants: Any) -> None:
        """One kernel call of the task being emitted."""
        tapes.current().call(kernel, reads, writes, **constants)

    def out(self, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
        """A new activation, named after the op unless it is a second output."""
        return new(name or self.name, shape, dtype)

    def grad(self, t: Tensor) -> Tensor:
        """A new gradient of t's shape."""
        return new(f"grad {t.storage.name}", t.shape, t.dtype, Role.GRADIENT)

    def dense(self, t: Tensor) -> Tensor:
        """t itself if it is contiguous, else a contiguous copy, made within this task."""
        if t.contiguous:
            return t
        copy = new(f"{t.storage.name} copy", t.shape, t.dtype,
                   Role.GRADIENT if t.storage.role == Role.GRADIENT else Role.ACTIVATION)
        self.call("copy", [t], [copy])
        return copy

    def error(self, message: str) -> ShapeError:
        where = "/".join(tapes.current().place.labels)
        return ShapeError(f"{self.name}{f' in {where}' if where else ''}: {message}")


def layout_hint(x: Tensor, channels: int) -> str:
    """A hint for the message about an image without `channels` channels, where axis 1 has that many; else empty."""
    if x.ndim == 4 and x.shape[1] == channels != x.shape[3]:
        return ("; images have their channels last here, and this looks like (n, c, h, w): x.transpose(0, 2, 3, 1) "
                "turns it to (n, h, w, c)")
    return ""


def same_dtype(op: Op, *tensors: Tensor) -> str:
    """The one float type of these tensors. Raises ShapeError."""
    types = {t.dtype for t in tensors}
    if len(types) > 1:
        raise op.error(f"types differ: {', '.join(t.dtype for t in tensors)}; they must have one type")
    (dtype,) = types
    check_float(op, dtype)
    return dtype


def check_float(op: Op, dtype: str) -> None:
    """Raises ShapeError where `dtype` is not a float type, and DeviceError where the device lacks it."""
    if dtype in HALVES:
        precision.usable(dtype, tapes.current().device)
    elif dtype not in FLOATS:
        hint = "; whole numbers and masks have no arithmetic: x.float() has" if dtype in ("int64", "bool") else ""
        raise op.error(f"needs float32 or float64, not {dtype}{hint}")


def statistics_dtype(op: Op, x: Tensor, *parameters: Tensor) -> str:
    """The one type of the statistics and parameters of a norm over x: that of x, or float32 where x has 16 bits.

    Raises ShapeError where the parameters have another type.
    """
    if x.dtype in HALVES and all(t.dtype == "float32" for t in parameters):
        same_dtype(op, x)
        return "float32"
    return same_dtype(op, x, *parameters)
