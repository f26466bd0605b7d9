"""Op: one differentiable operation. A subclass says which kernels its forward and its gradients call.

`input_grad(i, dy)` makes the gradient toward one input. By default the weight gradient task calls it for every input
that is a parameter, and the output gradient task for all others, so an op gets two separate tasks for free. An op that
makes several gradients in one kernel overrides `weight_grad` or `output_grad`.

Mixed precision: parameters stay float32, products are computed in 16 bits. `autocast` sets the 16-bit type. The
attribute `precision` of an op says in which types it takes its inputs, and the casts are part of the op's own tasks, so
the graph has the same tasks in any precision. A gradient has the type of its tensor: the gradients of parameters, which
are the master weights, are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.graph import Role
from ..core.tasks import Kind
from ..devices import DeviceError
from . import tape as tapes
from .tensor import FLOATS, HALVES, Node, Parameter, ShapeError, Tensor, array, cast, new


class Op:
    """One use of an operation. `forward` keeps on `self` what the backward pass needs."""

    name = "op"
    output_first = False  #: whether O makes what W reads; then O is emitted first
    precision = "any"  #: the types of its inputs: see `input_dtypes`
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
        """Adds the gradient toward input i to `total` in place and returns True if that is cheaper than a gradient
        of full size; else returns False."""
        return False

    def __call__(self, *values: Any) -> Tensor:
        """Emits the forward task and remembers this use for the backward pass. Arrays become tensors."""
        tape = tapes.current()
        inputs = [t if isinstance(t, Tensor) else array(t) for t in values]
        unit = tape.new_unit(self.name)
        given = [t.dtype for t in inputs]
        dtypes = input_dtypes(self.precision, given, tape.autocast)
        with tape.task(unit, Kind.F):
            operands = inputs if dtypes == given else [
                t if t.dtype == dtype else tape.rounded[t] if t in tape.rounded else cast(t, dtype)
                for t, dtype in zip(inputs, dtypes, strict=True)]
            out = self.forward(*operands)
            if not isinstance(out, Tensor):
                raise self.error(f"forward must return a Tensor, not a {type(out).__name__}")
        if operands is not inputs:
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
    def call(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor], **constants: Any) -> Tensor:
        """One kernel call of the task being emitted. Returns the first tensor that it writes."""
        return tapes.current().call(kernel, reads, writes, **constants)

    def out(self, shape: Sequence[int], dtype: str, name: str = "") -> Tensor:
        """A new activation, named after the op unless it is a second output."""
        return new(name or self.name, shape, dtype)

    def grad(self, t: Tensor) -> Tensor:
        """A new gradient of t's shape."""
        return new(f"grad {t.storage.name}", t.shape, t.dtype, Role.GRADIENT)

    def out_by(self, kernel: str, reads: Sequence[Tensor], shape: Sequence[int], dtype: str, /,
               **constants: Any) -> Tensor:
        """A new activation that one kernel call makes."""
        return self.call(kernel, reads, [self.out(shape, dtype)], **constants)

    def grad_by(self, kernel: str, reads: Sequence[Tensor], t: Tensor, /, **constants: Any) -> Tensor:
        """A new gradient of t's shape that one kernel call makes."""
        return self.call(kernel, reads, [self.grad(t)], **constants)

    def dense(self, t: Tensor) -> Tensor:
        """t itself if it is contiguous, else a contiguous copy, made within this task."""
        if t.contiguous:
            return t
        role = Role.GRADIENT if t.storage.role == Role.GRADIENT else Role.ACTIVATION
        return self.call("copy", [t], [new(f"{t.storage.name} copy", t.shape, t.dtype, role)])

    def broadcast(self, *tensors: Tensor) -> tuple[int, ...]:
        """The shape to which all of them broadcast."""
        try:
            return np.broadcast_shapes(*(t.shape for t in tensors))
        except ValueError:
            raise self.error(f"shapes {' and '.join(str(t.shape) for t in tensors)} do not broadcast") from None

    def error(self, message: str) -> ShapeError:
        where = "/".join(tapes.current().place.labels)
        return ShapeError(f"{self.name}{f' in {where}' if where else ''}: {message}")


class Layer(Op):
    """An op whose inputs after the first one are weights: `weights_grad` makes all the wanted gradients toward them."""

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        raise NotImplementedError

    def output_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        found = self.weights_grad(dy, weights) if (weights := [i for i in wanted if i]) else {}
        return found | {0: self.input_grad(0, dy)} if 0 in wanted else found

    weight_grad = output_grad


def layout_hint(x: Tensor, channels: int) -> str:
    """A hint for the message about an image without `channels` channels, where axis 1 has that many; else empty."""
    if x.ndim == 4 and x.shape[1] == channels != x.shape[3]:
        return ("; images have their channels last here, and this looks like (n, c, h, w): x.transpose(0, 2, 3, 1) "
                "turns it to (n, h, w, c)")
    return ""


def same_dtype(op: Op, *tensors: Tensor, also: Sequence[str] = ()) -> str:
    """The one type of these tensors, a float type or one of `also`. Raises ShapeError."""
    types = {t.dtype for t in tensors}
    if len(types) > 1:
        floats = "; x.astype('float32') changes the type" if {"float32", "float64"} <= types else ""
        raise op.error(f"types differ: {', '.join(t.dtype for t in tensors)}; they must have one type{floats}")
    (dtype,) = types
    if dtype not in also:
        check_float(op, dtype)
    return dtype


def check_float(op: Op, dtype: str) -> None:
    """Raises ShapeError if `dtype` is not a float type, and DeviceError if the device lacks it."""
    if dtype in HALVES:
        usable(dtype, tapes.current().device)
    elif dtype not in FLOATS:
        hint = "; whole numbers and masks have no arithmetic: x.float() has" if dtype in ("int64", "bool") else ""
        raise op.error(f"needs float32 or float64, not {dtype}{hint}")


def statistics_dtype(op: Op, x: Tensor, *parameters: Tensor) -> str:
    """The one type of the statistics and parameters of a norm over x: x's type, or float32 if x has 16 bits. Raises
    ShapeError if the parameters have another type."""
    if x.dtype in HALVES and all(t.dtype == "float32" for t in parameters):
        same_dtype(op, x)
        return "float32"
    return same_dtype(op, x, *parameters)


# --------------------------------------------------------------------------------------------------------- precision
def usable(dtype: str, device: Any) -> None:
    """Raises DeviceError if this device or this installation has no such 16-bit floats."""
    if not device.halves:
        raise DeviceError(f"{dtype} needs a CUDA device; {device.name} computes in float32 and float64")
    if dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401  NumPy knows the type by its name from then on
        except ImportError:
            raise DeviceError("bfloat16 needs ml_dtypes: pip install 'minidl[cuda13]' (or [cuda12])") from None


@contextmanager
def autocast(dtype: str) -> Iterator[None]:
    """Computes products inside (linear, matmul, conv2d, attention, recurrent layers) in `dtype`, bfloat16 or float16:
    float32 inputs and parameters are rounded to it. Losses and softmax are in float32, other ops in their inputs' type.

    A parameter is rounded once, until an optimizer's step changes it. float64 is left alone. Raises ValueError for
    another type, and DeviceError if the device does not compute in this type.
    """
    if dtype not in HALVES:
        raise ValueError(f"autocast takes {' or '.join(HALVES)}, not {dtype!r}")
    usable(dtype, tapes.current().device)
    with tapes.setting(autocast=dtype, rounded={}):
        yield


def input_dtypes(precision: str, dtypes: Sequence[str], low: str | None) -> list[str]:
    """The types to which an op casts inputs of these types. `low`: the type of the `autocast` in force.

    `precision`: `any` leaves them; `low` rounds to `low`; `widest` takes all floats to the widest of their types;
    `full` takes them to at least float32.
    """
    if precision == "low" and low is not None:
        return [low if t in ("float32", *HALVES) else t for t in dtypes]
    floats = {t for t in dtypes if t in (*FLOATS, *HALVES)}
    if precision == "full" or (precision == "widest" and len(floats) > 1):
        wide = max({"float32", *floats} - {*HALVES})
        return [wide if t in HALVES else t for t in dtypes]
    return list(dtypes)
