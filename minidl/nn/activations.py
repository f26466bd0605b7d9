"""Activations without parameters as layers, with torch's names: each calls a function of `minidl.ops`."""

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


class Activation(Module):
    """A layer that calls a function of x. It is made with the function's other arguments."""

    function: Callable[..., Tensor]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        check_arguments(type(self).__name__, type(self), arguments, named)
        self.arguments, self.named = arguments, named

    def forward(self, x: Tensor) -> Tensor:
        return type(self).function(x, *self.arguments, **self.named)


def layer(name: str, function: Callable[..., Tensor], base: type[Activation] = Activation) -> type[Activation]:
    """The class of this name, with the function's documentation and with its arguments, except the ones that the base's
    `forward` takes. `axis` is called `dim`."""
    taken = inspect.signature(base.forward).parameters
    others = [p for p in inspect.signature(function).parameters.values() if p.name not in taken]
    own = inspect.Signature([p.replace(name="dim") if p.name == "axis" else p for p in others])
    return type(name, (base,), {"__doc__": function.__doc__, "__module__": base.__module__, "__signature__": own,
                                "function": staticmethod(function)})


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
