"""Layers that call a function, with torch's names: here activations without parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .. import ops
from ..autograd.arguments import check_arguments
from ..autograd.tensor import Tensor
from . import functional
from .module import Module

__all__ = ["CELU", "ELU", "GELU", "GLU", "SELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
           "LogSoftmax", "Mish", "ReLU", "ReLU6", "SiLU", "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh"]


class Function(Module):
    """A layer that calls a function of one or several tensors. It is made with the function's other arguments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        check_arguments(type(self).__name__, type(self), arguments, named)
        self.named = inspect.signature(type(self)).bind(*arguments, **named).arguments


def layer(name: str, function: Callable[..., Tensor], tensors: int = 1) -> type[Function]:
    """The class of this name, with the function's documentation. Its `forward` has the first arguments of the function,
    which are so many `tensors`, and it is made with the others; `axis` is called `dim`."""
    known = [p.replace(name="dim") if p.name == "axis" else p for p in inspect.signature(function).parameters.values()]

    def forward(self: Function, *inputs: Any, **named: Any) -> Tensor:
        return function(*inputs, **named, **self.named)

    forward.__annotations__ = {p.name: Tensor for p in known[:tensors]}
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    setattr(forward, "__signature__", inspect.Signature([own, *known[:tensors]]))  # noqa: B010  (for the checker)
    return type(name, (Function,), {
        "__doc__": function.__doc__, "__module__": __name__, "__signature__": inspect.Signature(known[tensors:]),
        "function": staticmethod(function), "forward": forward})


CELU = layer("CELU", ops.celu)
ELU = layer("ELU", ops.elu)
GELU = layer("GELU", ops.gelu)
GLU = layer("GLU", ops.glu)
Hardsigmoid = layer("Hardsigmoid", ops.hardsigmoid)
Hardtanh = layer("Hardtanh", functional.hardtanh)
Hardswish = layer("Hardswish", ops.hardswish)
LeakyReLU = layer("LeakyReLU", ops.leaky_relu)
LogSigmoid = layer("LogSigmoid", ops.logsigmoid)
LogSoftmax = layer("LogSoftmax", ops.log_softmax)
Mish = layer("Mish", ops.mish)
ReLU = layer("ReLU", ops.relu)
ReLU6 = layer("ReLU6", ops.relu6)
SELU = layer("SELU", ops.selu)
Sigmoid = layer("Sigmoid", ops.sigmoid)
SiLU = layer("SiLU", ops.silu)
Softmax = layer("Softmax", ops.softmax)
Softplus = layer("Softplus", ops.softplus)
Softsign = layer("Softsign", ops.softsign)
Tanh = layer("Tanh", ops.tanh)
