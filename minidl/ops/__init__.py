"""The operations, one small class each, and the operators and methods that they give a Tensor."""

from __future__ import annotations

from typing import Any

from ..autograd.tensor import Tensor, array
from .activation import hardsigmoid, hardswish, relu6
from .attention import attention
from .batch_norm import batch_norm
from .conv import conv2d
from .dropout import dropout
from .elementwise import (
    absolute,
    add,
    astype,
    div,
    exp,
    gelu,
    log,
    maximum,
    minimum,
    mul,
    neg,
    power,
    relu,
    sigmoid,
    sqrt,
    sub,
    tanh,
)
from .embedding import embedding
from .join import concat, cut, split
from .layer_norm import layer_norm
from .linear import linear, matmul
from .loss import cross_entropy, log_softmax, mse, softmax
from .pool import avg_pool2d, global_avg_pool, max_pool2d
from .recurrent import gru, lstm, rnn
from .reduce import amax, broadcast_to, mean, total
from .shape import flatten, reshape, transpose

__all__ = ["absolute", "add", "amax", "astype", "attention", "avg_pool2d", "batch_norm", "broadcast_to", "concat",
           "conv2d", "cross_entropy", "cut", "div", "dropout", "embedding", "exp", "flatten", "gelu", "global_avg_pool",
           "gru", "hardsigmoid", "hardswish", "layer_norm", "linear", "log", "log_softmax", "lstm", "matmul",
           "max_pool2d", "maximum", "mean", "minimum", "mse", "mul", "neg", "power", "relu", "relu6", "reshape", "rnn",
           "sigmoid", "softmax", "split", "sqrt", "sub", "tanh", "total", "transpose"]


def _other(t: Tensor, value: Any) -> Any:
    """A Tensor or a number stays; an array becomes a tensor of t's type."""
    return value if isinstance(value, Tensor | int | float) else array(value, t.dtype)


_METHODS: dict[str, Any] = {
    "__add__": lambda a, b: add(a, _other(a, b)), "__radd__": lambda a, b: add(a, _other(a, b)),
    "__sub__": lambda a, b: sub(a, _other(a, b)), "__rsub__": lambda a, b: add(neg(a), _other(a, b)),
    "__mul__": lambda a, b: mul(a, _other(a, b)), "__rmul__": lambda a, b: mul(a, _other(a, b)),
    "__truediv__": lambda a, b: div(a, _other(a, b)), "__rtruediv__": lambda a, b: mul(power(a, -1.0), _other(a, b)),
    "__neg__": neg, "__pow__": power, "__matmul__": lambda a, b: matmul(a, _other(a, b)), "__abs__": absolute,
    "exp": exp, "log": log, "sqrt": sqrt, "tanh": tanh, "relu": relu, "sigmoid": sigmoid,
    "sum": total, "mean": mean, "max": amax, "softmax": softmax,
    "reshape": lambda t, *shape: reshape(t, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape),
    "flatten": flatten, "astype": astype,
    "transpose": lambda t, *axes: transpose(t, axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes),
    "T": property(transpose), "__getitem__": cut, "gelu": gelu, "log_softmax": log_softmax,
}
for _name, _method in _METHODS.items():
    setattr(Tensor, _name, _method)
