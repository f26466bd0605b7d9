"""Arithmetic with NumPy's broadcasting, and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor, array, new
from ..core.graph import Role
from .reduce import sum_to


@cache
def _parsed(gradient: str) -> list[tuple[str, list[str]]]:
    """The kernels of a gradient, each with what it reads."""
    return [(kernel, reads) for kernel, *reads in map(str.split, gradient.split(";") if gradient else [])]


class Elementwise(Op):
    """Tensors, broadcast to one shape, by the kernel `name`. `gradients`: of each input a, b the kernel calls that make
    its gradient, such as "cos a; mul dy dx": a kernel and what it reads, which are inputs, the output y, its gradient
    dy, and dx, made by the call before; without a call it is dy. `constants`: of all these kernels."""

    precision = "widest"

    def __init__(self, name: str, *gradients: str, **constants: Any) -> None:
        self.name, self.gradients, self.constants = name, gradients, constants

    def forward(self, *inputs: Tensor) -> Tensor:
        dtype = same_dtype(self, *inputs)
        self.inputs: Sequence[Tensor] = inputs
        shape = inputs[0].shape
        self.y = self.out_by(self.name, inputs, shape if shape == inputs[-1].shape else self.broadcast(*inputs), dtype,
                             **self.constants)
        return self.y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return sum_to(self.called(i, dy), self.inputs[i])

    def called(self, i: int, dy: Tensor) -> Tensor:
        """The gradient in the output's shape."""
        calls = _parsed(self.gradients[i])
        if not calls:
            return dy
        dx = new(f"grad {self.inputs[i].storage.name}", self.y.shape, dy.dtype, Role.GRADIENT)
        known = {"a": self.inputs[0], "b": self.inputs[-1], "y": self.y, "dy": dy, "dx": dx}
        for kernel, reads in calls:
            self.call(kernel, [known[name] for name in reads], [dx], **self.constants)
        return dx


class Alike(Elementwise):
    """The same of contiguous tensors of one shape."""

    precision = "any"

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*[self.dense(t) for t in inputs])

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.called(i, self.dense(dy) if "_grad " in self.gradients[i] else dy)


class Step(Alike):
    """A function that is constant between its steps: its gradient is 0."""

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("fill", [self.inputs[i]], self.inputs[i], value=0.0)


def add(a: Tensor, b: Tensor | float) -> Tensor:
    """a + b."""
    return Elementwise("add", "", "")(a, b) if isinstance(b, Tensor) else Alike("shift", "", term=float(b))(a)


def sub(a: Tensor, b: Tensor | float) -> Tensor:
    """a - b."""
    return Elementwise("sub", "", "neg dy")(a, b) if isinstance(b, Tensor) else add(a, -float(b))


def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """a * b."""
    if isinstance(b, Tensor):
        return Elementwise("mul", "mul dy b", "mul dy a")(a, b)
    return Alike("scale", "scale dy", factor=float(b))(a)


def div(a: Tensor, b: Tensor | float) -> Tensor:
    """a / b. Raises ZeroDivisionError for the number 0."""
    if isinstance(b, Tensor):
        return Elementwise("div", "div dy b", "div_grad y b dy")(a, b)
    tiny = abs(b) < 1e-38  # whose reciprocal may be infinite: both times 2^64, which is exact
    return mul(mul(a, 2.0**64) if tiny else a, 1.0 / (float(b) * (2.0**64 if tiny else 1.0)))


def power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent; the exponent is a number. Raises TypeError for a tensor."""
    if isinstance(exponent, Tensor):
        raise TypeError("power: the exponent is a tensor; it must be a number. exp(log(x) * exponent) takes tensors")
    if not exponent:  # the gradient is 0 also at 0, where 0 x^-1 is NaN
        return Step("power", "", exponent=0.0)(x)
    return Alike("power", "power_grad a dy", exponent=float(exponent))(x)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of the two tensors; if elements are equal, each gets half the gradient."""
    return Elementwise("maximum", "maximum_grad a b dy", "maximum_grad b a dy")(a, b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller of the two tensors; if elements are equal, each gets half the gradient."""
    return Elementwise("minimum", "minimum_grad a b dy", "minimum_grad b a dy")(a, b)


def function(name: str, gradient: str = "", text: str = "", op: type[Alike] = Alike) -> Callable[[Tensor], Tensor]:
    """The function of one tensor with this name, by the kernel of this name. `gradient`: as of `Elementwise`."""
    def call(x: Tensor) -> Tensor:
        return op(name, gradient)(x)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = text
    return call


neg = function("neg", "neg dy")
exp = function("exp", "mul dy y")
log = function("log", "div dy a")
sin = function("sin", "cos a; mul dy dx")
cos = function("cos", "sin a; mul dy dx; neg dx")
sqrt = function("sqrt", "sqrt_grad y dy")
tanh = function("tanh", "tanh_grad y dy")
sigmoid = function("sigmoid", "sigmoid_grad y dy")
relu = function("relu", "relu_grad y dy")
relu6 = function("relu6", "relu6_grad y dy", "min(max(x, 0), 6).")
hardsigmoid = function("hardsigmoid", "hardsigmoid_grad a dy", "min(max(x + 3, 0), 6) / 6.")
hardswish = function("hardswish", "hardswish_grad a dy", "x min(max(x + 3, 0), 6) / 6.")
silu = function("silu", "silu_grad a dy", "x sigmoid(x), also called swish.")
mish = function("mish", "mish_grad a dy", "x tanh(softplus(x)).")
softsign = function("softsign", "softsign_grad a dy", "x / (1 + abs(x)).")
sign, floor, ceil, trunc, _round = (function(name, op=Step) for name in ("sign", "floor", "ceil", "trunc", "round"))


def absolute(x: Tensor) -> Tensor:
    """abs(x)."""
    return Alike("abs", "abs_grad a dy")(x)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x where it is above 0, `negative_slope` times x elsewhere."""
    return Alike("leaky_relu", "leaky_relu_grad a dy", slope=float(negative_slope))(x) if negative_slope else relu(x)


def round(x: Tensor, *, decimals: int = 0) -> Tensor:
    """x to the nearest multiple of 10^-decimals, of two equally near ones the even one."""
    if not decimals:
        return _round(x)
    ten = array(np.array(10.0 ** abs(decimals), x.dtype))
    return div(_round(mul(x, ten)), ten) if decimals > 0 else mul(_round(div(x, ten)), ten)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Phi(x), Phi the normal distribution; `approximate`: "none", or "tanh" for the form with it; else ValueError."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be none or tanh, not {approximate!r}")
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return Alike(name, f"{name}_grad a dy")(x)
