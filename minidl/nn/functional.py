"""The functions of torch.nn.functional, with torch's arguments, channels last. `import minidl.nn.functional as F`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import ops
from ..autograd.arguments import checked
from ..autograd.hints import missing
from ..autograd.tensor import ShapeError, Tensor, array
from ..ops import (adaptive_avg_pool1d, adaptive_avg_pool2d, avg_pool1d, avg_pool2d, binary_cross_entropy_with_logits,
                   celu, conv1d, conv2d, conv_transpose1d, conv_transpose2d, elu, gelu, glu, group_norm, hardsigmoid,
                   hardswish, huber_loss, interpolate, kl_div, l1_loss, leaky_relu, linear, log_softmax, logsigmoid,
                   max_pool1d, max_pool2d, mish, mse_loss, pad, pixel_shuffle, prelu, relu, relu6, selu, sigmoid, silu,
                   smooth_l1_loss, softmax, softplus, softsign, tanh)
from ..ops.by_index import scatter_max
from ..ops.pair_loss import PairLoss, reduce
from ..ops.shape import axis_of

__all__ = ["adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "binary_cross_entropy",
           "binary_cross_entropy_with_logits", "celu", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d",
           "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "dropout", "elu", "embedding",
           "embedding_bag", "gelu", "glu", "group_norm", "hardsigmoid", "hardswish", "hardtanh", "huber_loss",
           "interpolate", "kl_div", "l1_loss", "layer_norm", "leaky_relu", "linear", "log_softmax", "logsigmoid",
           "max_pool1d", "max_pool2d", "mish", "mse_loss", "nll_loss", "normalize", "one_hot", "pad",
           "pairwise_distance", "pixel_shuffle", "prelu", "relu", "relu6", "rms_norm", "scaled_dot_product_attention",
           "selu", "sigmoid", "silu", "smooth_l1_loss", "softmax", "softplus", "softsign", "tanh",
           "triplet_margin_loss"]


def cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100,
                  reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """For logits (..., classes) and labels (...) int64: the classes are last. `weight` (classes,): how much a sample of
    each class counts, also in the mean. Labels of `ignore_index` do not count; if none counts, the mean is NaN."""
    if weight is None and reduction == "mean":
        rows, labels = _rows(x, target)
        return ops.cross_entropy(rows, labels, label_smoothing, ignore_index)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    return _of_labels(log_softmax(x), target, weight, ignore_index, reduction, label_smoothing)


def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100,
             reduction: str = "mean") -> Tensor:
    """-x at the label, for log-probabilities (..., classes) and labels (...) int64; see `cross_entropy`."""
    return _of_labels(x, target, weight, ignore_index, reduction, 0.0)


def _of_labels(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str,
               smoothing: float) -> Tensor:
    """The loss of log-probabilities x: (1 - smoothing) of it at the label, the rest spread over all classes."""
    rows, labels = _rows(x, target)
    if weight is None:
        weight = array(np.ones(rows.shape[-1], rows.dtype))
    elif weight.shape != rows.shape[-1:]:
        raise ShapeError(f"the class weights are {weight.shape}; expected {rows.shape[-1:]}, one for each class")
    hit = ops.label_weights(weight, labels, ignore_index)
    chosen = ops.where(ops.compare("not_equal", hit, 0), hit * rows, 0)  # 0 times the logarithm of 0 is NaN
    losses, share = -ops.total(chosen, -1), ops.total(hit, -1)
    if smoothing:
        every = ops.where(ops.compare("not_equal", labels, ignore_index), ops.mean(rows * weight, -1), 0)
        losses = losses * (1 - smoothing) - every * smoothing
    if reduction == "mean":
        whole = ops.total(share)
        loss = ops.total(losses) / ops.clamp(whole, min=float(np.finfo(rows.dtype).tiny))
        return ops.where(ops.compare("not_equal", whole, 0), loss, float("nan"))
    return reduce(ops.reshape(losses, target.shape), reduction)


def _rows(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(n, classes) and (n,)."""
    if target.dtype != "int64" or target.shape != x.shape[:-1]:
        raise ShapeError(f"the target is {target.dtype} {target.shape}; expected int64 {x.shape[:-1]}, the labels of "
                         f"logits {x.shape}, whose classes are last")
    return ops.reshape(x, [-1, x.shape[-1]]), ops.reshape(target, [-1])


def binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean") -> Tensor:
    """-target log x - (1 - target) log(1 - x) for probabilities x; as in torch, a logarithm is at least -100, and the
    gradient's x (1 - x) at least 1e-12. If x comes from a sigmoid, `binary_cross_entropy_with_logits` is exact. Raises
    ValueError for numbers outside 0..1; in a recorded step, whose numbers are not known, the loss is then not a number.
    """
    for name, t in (("input", x), ("target", target)):
        if not t.storage.recorded and ((t.numpy() < 0) | (t.numpy() > 1)).any():
            raise ValueError(f"binary_cross_entropy: the {name} has numbers outside 0..1; for logits use "
                             f"binary_cross_entropy_with_logits")
    losses = PairLoss("bce", "bce_grad a b dy", "bce_target_grad a b dy")(x, target)
    return reduce(losses if weight is None else losses * weight, reduction)


def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """x, from `min_val` to `max_val`; the gradient at both is 0. Raises ValueError if min_val is above max_val."""
    if min_val > max_val:
        raise ValueError(f"hardtanh: min_val {min_val} is above max_val {max_val}")
    low, high = ops.compare("less_equal", x, min_val), ops.compare("greater_equal", x, max_val)
    return ops.where(low, min_val, ops.where(high, max_val, x))


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """x divided by its norm along `dim`, or by `eps` if that is larger; `p`: 1, 2 (Euclidean) or inf."""
    axis = axis_of(x, dim, "normalize")
    return x / _norm(x, axis, eps) if p == 2 else x / ops.clamp(ops.norm(x, p, axis, keepdims=True), min=eps)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The sum along `dim` of the products of x1 and x2, each divided by its norm, or by `eps` if that is larger."""
    axis = axis_of(x1, dim, "cosine_similarity")
    return ops.total(x1 / _norm(x1, axis, eps) * (x2 / _norm(x2, axis, eps)), axis)


def _norm(x: Tensor, dim: int, eps: float) -> Tensor:
    """The square is clamped, not its root: the root's gradient at 0 is not finite."""
    return ops.sqrt(ops.clamp(ops.total(x * x, dim, keepdims=True), min=eps * eps))


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """The norm over the last axis of x1 - x2 + eps; `p`: 1, 2 or inf."""
    return ops.norm(x1 - x2 + eps, p, -1, keepdim)


def triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
                        eps: float = 1e-6, swap: bool = False, *, reduction: str = "mean") -> Tensor:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin), d the `pairwise_distance`. `swap`: the distance of
    the positive to the negative counts if it is smaller."""
    if margin <= 0:
        raise ValueError(f"triplet_margin_loss: margin is {margin}; it must be above 0")
    near, far = pairwise_distance(anchor, positive, p, eps), pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = ops.minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduce(ops.clamp(near - far + margin, min=0.0), reduction)


def cosine_embedding_loss(x1: Tensor, x2: Tensor, target: Tensor, margin: float = 0.0, *,
                          reduction: str = "mean") -> Tensor:
    """For rows x1 and x2 (..., d) and a target (...): 1 - cos if it is 1, max(0, cos - margin) if it is -1."""
    if target.shape != x1.shape[:-1] or x1.shape != x2.shape:
        raise ShapeError(f"cosine_embedding_loss: rows {x1.shape} and {x2.shape} and the target {target.shape} do not "
                         f"fit; expected (..., d) twice and (...)")
    square, other = (ops.total(x * x, -1) + 1e-12 for x in (x1, x2))
    cos = ops.total(x1 * x2, -1) / ops.sqrt(square * other)
    unlike = ops.where(ops.compare("equal", target, -1), ops.clamp(cos - margin, min=0.0), 0)
    return reduce(ops.where(ops.compare("equal", target, 1), 1.0 - cos, unlike), reduction)


def embedding_bag(index: Tensor, weight: Tensor, offsets: Tensor | None = None, *, mode: str = "mean",
                  per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
                  padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` (rows, d) at `index`, one sum, mean or maximum (`mode`) a bag -> (bags, d); zeros for an
    empty one. A row of index (bags, n) int64 is a bag; or index (n,) has several, which begin at `offsets` (bags,)
    int64, the first at 0; with `include_last_offset` the end of the last bag follows, behind which nothing counts.
    `per_sample_weights`: as index, factors of a sum. Entries that are `padding_idx` do not count. Raises ShapeError or
    ValueError if they do not fit."""
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"embedding_bag: mode is {mode!r}; it must be sum, mean or max")
    if index.ndim not in (1, 2) or (index.ndim == 1) != (offsets is not None):
        raise ShapeError(f"embedding_bag: index {index.shape} with{'' if offsets is not None else 'out'} offsets; "
                         f"expected (bags, n) without, or (n,) with offsets")
    rows = ops.embedding(weight, ops.reshape(index, [-1]), padding_idx)
    if per_sample_weights is not None:
        if mode != "sum" or per_sample_weights.shape != index.shape:
            raise ShapeError(f"embedding_bag: per_sample_weights are {per_sample_weights.shape} in mode {mode!r}; "
                             f"expected {index.shape}, as index, in mode 'sum'")
        rows = rows * ops.reshape(per_sample_weights, [-1, 1])
    bags, bag = (index.shape[0], array(np.repeat(np.arange(index.shape[0]), index.shape[1]))) if offsets is None else (
        _bags(offsets, index.size, include_last_offset))
    if padding_idx is not None:  # a bag of their own, which is left out
        bag = ops.where(ops.compare("equal", ops.reshape(index, [-1]), padding_idx), bags, bag)
    zeros = ops.broadcast_to(array(np.zeros((), rows.dtype)), (bags + 1, rows.shape[1]))
    if mode == "max":
        return scatter_max(zeros, bag, rows)[:bags]
    sums = ops.index_add(zeros, 0, bag, rows)[:bags]
    if mode == "sum":
        return sums
    count = ops.astype(ops.bincount(bag, minlength=bags + 1)[:bags], rows.dtype)
    return sums / ops.unsqueeze(ops.clamp(count, min=1.0), 1)


def _bags(offsets: Tensor, size: int, last: bool) -> tuple[int, Tensor]:
    """How many bags begin at these offsets, and the number of the bag of each of `size` positions; positions behind the
    `last` end have the number of bags."""
    if offsets.ndim != 1 or len(offsets) < 1 + last:
        raise ShapeError(f"embedding_bag: offsets {offsets.shape}; expected (bags,)" + ", and the last end" * last)
    if not offsets.storage.recorded and (offsets.numpy()[0] or (np.diff(offsets.numpy()) < 0).any()):
        raise ValueError("embedding_bag: the offsets must begin with 0 and rise")
    begun = ops.index_add(ops.zeros(size + 1, dtype="float64"), 0, offsets[1:],
                          ops.ones(len(offsets) - 1, dtype="float64"))
    return len(offsets) - last, ops.astype(ops.cumsum(begun, 0)[:size], "int64")


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """(...) int64 -> (..., num_classes) int64: 1 at the index, 0 elsewhere. Raises IndexError for one out of range."""
    classes = array(np.arange(num_classes))
    try:
        known = ops.index(classes, index)  # the same numbers, of which a lookup has checked the range
    except IndexError as error:
        raise IndexError(f"one_hot: num_classes is {num_classes}: {error}") from None
    return ops.astype(ops.compare("equal", ops.unsqueeze(known, -1), classes), "int64")


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """x with elements dropped with probability `p` and the rest scaled up, while `training`."""
    return ops.dropout(x, p) if training else x


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight` at the index."""
    return ops.embedding(weight, index)


def layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
               eps: float = 1e-5) -> Tensor:
    """x normalised over its last axes, whose lengths are `normalized_shape`. Raises ValueError if they are not."""
    return ops.layer_norm(x, weight, bias, axes=_axes("layer_norm", x, normalized_shape), eps=eps)


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
             eps: float | None = None) -> Tensor:
    """x divided by its root mean square over its last axes. Raises ValueError if their lengths are others."""
    return ops.rms_norm(x, weight, axes=_axes("rms_norm", x, normalized_shape), eps=eps)


def _axes(name: str, x: Tensor, normalized_shape: Sequence[int]) -> int:
    if x.shape[x.ndim - len(normalized_shape) :] != tuple(normalized_shape):
        raise ValueError(f"{name}: input {x.shape} does not end in {tuple(normalized_shape)}")
    return len(normalized_shape)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False,
                                 scale: float | None = None) -> Tensor:
    """softmax(query key^T scale) value for (n, heads, t, d); for masks see `nn.attention`."""
    return ops.attention(query, key, value, causal=is_causal, scale=scale)


globals().update((name, checked(globals()[name], first=False)) for name in __all__)

if not TYPE_CHECKING:  # a checker shall still know which names there are
    __getattr__ = missing(__name__, "F", __all__)
