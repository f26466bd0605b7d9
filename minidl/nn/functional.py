"""The functions of torch.nn.functional, with torch's order of arguments, channels last. `import minidl.nn.functional
as F`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..autograd.tensor import ShapeError, Tensor, array
from ..ops import (
    adaptive_avg_pool2d,
    avg_pool2d,
    binary_cross_entropy_with_logits,
    conv1d,
    conv2d,
    conv_transpose2d,
    gelu,
    group_norm,
    hardsigmoid,
    hardswish,
    interpolate,
    kl_div,
    l1_loss,
    leaky_relu,
    linear,
    log_softmax,
    max_pool2d,
    mse_loss,
    relu,
    relu6,
    sigmoid,
    silu,
    smooth_l1_loss,
    softmax,
    tanh,
)
from ..ops.pair_loss import reduce

__all__ = ["adaptive_avg_pool2d", "avg_pool2d", "binary_cross_entropy_with_logits", "conv1d", "conv2d",
           "conv_transpose2d", "cross_entropy", "dropout", "embedding", "gelu", "group_norm", "hardsigmoid",
           "hardswish", "interpolate", "kl_div", "l1_loss", "layer_norm", "leaky_relu", "linear", "log_softmax",
           "max_pool2d", "mse_loss", "nll_loss", "one_hot", "relu", "relu6", "rms_norm",
           "scaled_dot_product_attention", "sigmoid", "silu", "smooth_l1_loss", "softmax", "tanh"]


def cross_entropy(x: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean",
                  label_smoothing: float = 0.0) -> Tensor:
    """For logits (..., classes) and labels (...) int64: the classes are last. Labels that are `ignore_index` do not
    count. Raises ValueError for an `ignore_index` that may be a class with the reduction none."""
    logits, labels = _rows(x, target)
    if reduction in ("mean", "sum"):
        loss = ops.cross_entropy(logits, labels, label_smoothing, ignore_index)
        return loss if reduction == "mean" else loss * _count(labels, ignore_index).astype(loss.dtype)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"the label smoothing is {label_smoothing}; it must be from 0 to 1")
    if ignore_index >= 0:
        raise ValueError("cross_entropy: ignore_index needs the reduction mean or sum")
    rows = log_softmax(logits)
    losses = _picked(rows, labels) * (1 - label_smoothing)
    if label_smoothing:
        losses = losses - ops.mean(rows, -1) * label_smoothing
    return reduce(ops.reshape(losses, target.shape), reduction)


def _count(labels: Tensor, ignored: int) -> Tensor:
    return ops.total(ops.compare("not_equal", labels, ignored))


def nll_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """-x at the label: for log-probabilities (..., classes) and labels (...) int64."""
    losses = _picked(*_rows(x, target))
    return reduce(ops.reshape(losses, target.shape), reduction)


def _rows(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(n, classes) and (n,)."""
    if target.dtype != "int64" or target.shape != x.shape[:-1]:
        raise ShapeError(f"the target is {target.dtype} {target.shape}; expected int64 {x.shape[:-1]}, the labels of "
                         f"logits {x.shape}, whose classes are last")
    return ops.reshape(x, [-1, x.shape[-1]]), ops.reshape(target, [-1])


def _picked(rows: Tensor, labels: Tensor) -> Tensor:
    return -ops.index(rows, (np.arange(rows.shape[0]), labels))


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """(...) int64 -> (..., num_classes) int64: 1 at the index, 0 elsewhere. Raises IndexError for one out of range."""
    classes = array(np.arange(num_classes))
    known = ops.index(classes, index)  # the same numbers, of which a lookup has checked the range
    return ops.astype(ops.compare("equal", ops.unsqueeze(known, -1), classes), "int64")


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """x with elements dropped with probability `p` and the rest scaled up, while `training`."""
    return ops.dropout(x, p) if training else x


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight` at the index."""
    return ops.embedding(weight, index)


def layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
               eps: float = 1e-5) -> Tensor:
    """x normalised over its last axes, whose lengths are `normalized_shape`. Raises ValueError where they are not."""
    if x.shape[x.ndim - len(normalized_shape) :] != tuple(normalized_shape):
        raise ValueError(f"layer_norm: input {x.shape} does not end in {tuple(normalized_shape)}")
    return ops.layer_norm(x, weight, bias, axes=len(normalized_shape), eps=eps)


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
             eps: float | None = None) -> Tensor:
    """x divided by its root mean square over its last axes. Raises ValueError where their lengths are others."""
    if x.shape[x.ndim - len(normalized_shape) :] != tuple(normalized_shape):
        raise ValueError(f"rms_norm: input {x.shape} does not end in {tuple(normalized_shape)}")
    return ops.rms_norm(x, weight, axes=len(normalized_shape), eps=eps)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False,
                                 scale: float | None = None) -> Tensor:
    """softmax(query key^T scale) value for (n, heads, t, d); for masks see `nn.attention`."""
    return ops.attention(query, key, value, causal=is_causal, scale=scale)
