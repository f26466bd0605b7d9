"""Activations without parameters as layers, with torch's names: each calls a function of `minidl.ops`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .. import ops
from ..autograd.arguments import check_arguments
from ..autograd.tensor import Tensor
from .module import Module


class Activation(Module):
    """A layer that calls a function of x. It is made with the function's other arguments."""

    function: Callable[..., Tensor]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        check_arguments(type(self).__name__, type(self), arguments, named)
        self.arguments, self.named = arguments, named

    def forward(self, x: Tensor) -> Tensor:
        return type(self).function(x, *self.arguments, **self.named)


def _layer(name: str, function: Callable[..., Tensor]) -> type[Activation]:
    """The class of this name, with the function's arguments, of which `axis` is called `dim`, and its documentation."""
    _, *others = inspect.signature(function).parameters.values()
    own = inspect.Signature([p.replace(name="dim") if p.name == "axis" else p for p in others])
    return type(name, (Activation,), {"__doc__": function.__doc__, "__module__": __name__, "__signature__": own,
                                      "function": staticmethod(function)})


CELU = _layer("CELU", ops.celu)
ELU = _layer("ELU", ops.elu)
GELU = _layer("GELU", ops.gelu)
GLU = _layer("GLU", ops.glu)
Hardsigmoid = _layer("Hardsigmoid", ops.hardsigmoid)
Hardswish = _layer("Hardswish", ops.hardswish)
LeakyReLU = _layer("LeakyReLU", ops.leaky_relu)
LogSigmoid = _layer("LogSigmoid", ops.logsigmoid)
LogSoftmax = _layer("LogSoftmax", ops.log_softmax)
Mish = _layer("Mish", ops.mish)
ReLU = _layer("ReLU", ops.relu)
ReLU6 = _layer("ReLU6", ops.relu6)
SELU = _layer("SELU", ops.selu)
Sigmoid = _layer("Sigmoid", ops.sigmoid)
SiLU = _layer("SiLU", ops.silu)
Softmax = _layer("Softmax", ops.softmax)
Softplus = _layer("Softplus", ops.softplus)
Softsign = _layer("Softsign", ops.softsign)
Tanh = _layer("Tanh", ops.tanh)
