"""Arithmetic with NumPy's broadcasting, and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor, array, new
from ..core.graph import Role
from .reduce import sum_to


class Binary(Op):
    """Two tensors, broadcast to one shape, by the kernel `name`."""

    precision = "widest"

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = same_dtype(self, a, b)
        self.a, self.b = a, b
        self.y = self.out_by(self.name, [a, b], self.broadcast(a, b), dtype)
        return self.y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        mine, other = (self.b, self.a) if i else (self.a, self.b)
        # the kernel that makes the gradient in the output's shape, and what it reads; otherwise it is dy
        made = {"sub": ("neg", [dy]) if i else None, "mul": ("mul", [dy, other]),
                "div": ("div_grad", [self.y, self.b, dy]) if i else ("div", [dy, self.b]),
                "maximum": ("maximum_grad", [mine, other, dy]),
                "minimum": ("minimum_grad", [mine, other, dy])}.get(self.name)
        if made is not None:
            dy = self.call(*made, [new(f"grad {self.name}", dy.shape, dy.dtype, Role.GRADIENT)])
        return sum_to(dy, mine)


class Unary(Op):
    """One tensor in, one of the same shape out, by the kernel `name`. The kernel of its gradient, `name`_grad, reads
    the input or the output (`saved`: x or y), then dy. `constants`: passed to both kernels."""

    def __init__(self, name: str, saved: Literal["x", "y"] = "y", **constants: Any) -> None:
        self.name, self.saved, self.constants = name, saved, constants

    def forward(self, x: Tensor) -> Tensor:
        same_dtype(self, x)
        self.x = self.dense(x)
        self.y = self.out_by(self.name, [self.x], x.shape, x.dtype, **self.constants)
        return self.y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by(f"{self.name}_grad", [self.x if self.saved == "x" else self.y, self.dense(dy)], self.x,
                            **self.constants)


class LinearUnary(Unary):
    """A linear function: its own kernel makes its gradient."""

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by(self.name, [dy], self.x, **self.constants)


class Step(Unary):
    """A function that is constant between its steps: its gradient is 0."""

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("fill", [self.x], self.x, value=0.0)


class Power(Step):
    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        if self.constants["exponent"]:
            return Unary.input_grad(self, i, dy)
        return super().input_grad(i, dy)  # also at 0, where 0 x^-1 is NaN


class Exp(Unary):
    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("mul", [dy, self.y], self.x)


class Log(Unary):
    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("div", [dy, self.x], self.x)


class Sin(Unary):
    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx = self.grad_by("cos", [self.x], self.x)
        return self.call("mul", [dy, dx], [dx])


class Cos(Unary):
    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx = self.grad_by("sin", [self.x], self.x)
        self.call("mul", [dy, dx], [dx])
        return self.call("neg", [dx], [dx])


class Shift(Unary):
    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return dy


def add(a: Tensor, b: Tensor | float) -> Tensor:
    """a + b."""
    return Binary("add")(a, b) if isinstance(b, Tensor) else Shift("shift", term=float(b))(a)


def sub(a: Tensor, b: Tensor | float) -> Tensor:
    """a - b."""
    return Binary("sub")(a, b) if isinstance(b, Tensor) else Shift("shift", term=-float(b))(a)


def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """a * b."""
    return Binary("mul")(a, b) if isinstance(b, Tensor) else LinearUnary("scale", factor=float(b))(a)


def div(a: Tensor, b: Tensor | float) -> Tensor:
    """a / b. Raises ZeroDivisionError for the number 0."""
    return Binary("div")(a, b) if isinstance(b, Tensor) else LinearUnary("scale", factor=1.0 / float(b))(a)


def power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent; the exponent is a number. Raises TypeError for a tensor."""
    if isinstance(exponent, Tensor):
        raise TypeError("power: the exponent is a tensor; it must be a number. exp(log(x) * exponent) takes tensors")
    return Power("power", "x", exponent=float(exponent))(x)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of the two tensors; if elements are equal, each gets half the gradient."""
    return Binary("maximum")(a, b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller of the two tensors; if elements are equal, each gets half the gradient."""
    return Binary("minimum")(a, b)


def _function(name: str, op: type[Unary] = Unary) -> Callable[[Tensor], Tensor]:
    """The function of one tensor with this name: an op of the kernel of this name."""
    def function(x: Tensor) -> Tensor:
        return op(name)(x)

    function.__name__ = function.__qualname__ = name
    return function


neg = _function("neg", LinearUnary)
exp = _function("exp", Exp)
log = _function("log", Log)
sin = _function("sin", Sin)
cos = _function("cos", Cos)
sqrt = _function("sqrt")
tanh = _function("tanh")
relu = _function("relu")
sigmoid = _function("sigmoid")
sign = _function("sign", Step)
floor = _function("floor", Step)
ceil = _function("ceil", Step)
trunc = _function("trunc", Step)


def round(x: Tensor, *, decimals: int = 0) -> Tensor:
    """x to the nearest multiple of 10^-decimals, of two equally near ones the even one."""
    if not decimals:
        return Step("round")(x)
    ten = array(np.array(10.0 ** abs(decimals), x.dtype))
    return div(Step("round")(mul(x, ten)), ten) if decimals > 0 else mul(Step("round")(div(x, ten)), ten)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Phi(x), Phi the normal distribution; `approximate`: "none", or "tanh" for the form with tanh. Raises ValueError
    for another one."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be none or tanh, not {approximate!r}")
    return Unary("gelu_tanh" if approximate == "tanh" else "gelu", "x")(x)


def absolute(x: Tensor) -> Tensor:
    return Unary("abs", "x")(x)
