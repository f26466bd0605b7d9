"""Softmax and its logarithm; cross-entropy and mean squared error."""

from __future__ import annotations

from typing import Any

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from ..kernels.registry import check_range
from .elementwise import Elementwise
from .masks import compare, where
from .names import with_dim
from .shape import axis_of, swap_axes


class Softmax(Elementwise):
    """Softmax or its logarithm over the last axis."""

    precision = "full"

    def forward(self, *inputs: Tensor) -> Tensor:
        if not inputs[0].ndim or not inputs[0].shape[-1]:
            raise self.error(f"the last axis of shape {inputs[0].shape} must have at least one element")
        return super().forward(*inputs)


class CrossEntropy(Op):
    """Logits (n, c) and labels (n,) int64 -> the mean loss over rows whose label is not `ignore`, a scalar."""

    name = "cross_entropy"
    precision = "full"

    def __init__(self, smoothing: float, ignore: int | None) -> None:
        self.constants: dict[str, Any] = {"smoothing": smoothing} | ({} if ignore is None else {"ignore": ignore})
        self.ignore = ignore

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        if x.ndim != 2 or labels.shape != x.shape[:1] or not x.size:
            raise self.error(f"logits {x.shape} and labels {labels.shape} do not fit; expected (n, classes) and (n,), "
                             f"n and classes at least 1")
        if labels.dtype != "int64":
            raise self.error(f"labels must be int64, not {labels.dtype}")
        if not labels.storage.recorded:  # while recording: when the step runs
            check_range("label", labels.numpy(), x.shape[1], self.ignore)
        self.x, self.labels = x, labels
        self.p, loss = self.out(x.shape, dtype, "probabilities"), self.out([], dtype)
        return self.call("cross_entropy", [self.dense(x), labels], [loss, self.p], **self.constants)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("cross_entropy_grad", [self.p, self.labels, dy], self.x, **self.constants)


class LabelWeights(Op):
    """A weight of each class (c,) and labels (n,) int64 -> (n, c): the weight of each row's label, 0 elsewhere."""

    name = "label_weights"
    precision = "full"

    def __init__(self, ignore: int) -> None:
        self.ignore = ignore

    def forward(self, weight: Tensor, labels: Tensor) -> Tensor:
        dtype = same_dtype(self, weight)
        if not labels.storage.recorded:  # a recorded step checks its labels when it runs
            check_range("label", labels.numpy(), weight.shape[0], self.ignore)
        return self.out_by("label_weights", [weight, labels], [*labels.shape, *weight.shape], dtype, ignore=self.ignore)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        raise NotImplementedError("class weights have no gradient; detach() them")


class MSE(Op):
    """The mean of (x - target)^2, a scalar."""

    name = "mse"
    precision = "full"

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        dtype = same_dtype(self, x, target)
        if x.shape != target.shape or not x.size:
            raise self.error(f"shapes {x.shape} and {target.shape}; expected one shape, and elements to average")
        self.pair = [self.dense(x), self.dense(target)]
        return self.out_by("mse", self.pair, [], dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        x, target = self.pair[:: 1 - 2 * i]
        return self.grad_by("mse_grad", [x, target, dy], x, factor=2 / x.size)


def _softmax(name: str, x: Tensor, axis: int) -> Tensor:
    op = Softmax(name, f"{name}_grad y dy")
    if x.ndim and axis_of(x, axis, name) != x.ndim - 1:
        return swap_axes(op(swap_axes(x, axis, -1)), axis, -1)
    return op(x)


@with_dim
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Probabilities over one axis."""
    return _softmax("softmax", x, axis)


@with_dim
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax over one axis."""
    return _softmax("log_softmax", x, axis)


def label_weights(weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """For weights of classes (c,) and labels (n,) int64: (n, c), each row the weight of its label there and 0
    elsewhere, and all 0 where the label is `ignore_index`. Raises ValueError for a label out of range."""
    return LabelWeights(ignore_index)(weight, labels)


def cross_entropy(x: Tensor, labels: Tensor, smoothing: float = 0.0, ignore_index: int | None = None) -> Tensor:
    """The mean over samples of -sum(target log softmax(x)) for logits (n, c) and labels (n,) int64. The target is 1 -
    smoothing at the label plus smoothing / c everywhere. Samples whose label is `ignore_index` do not count; if none
    counts, the loss is not a number. Raises ValueError unless 0 <= smoothing <= 1, and for a label out of range."""
    if isinstance(smoothing, Tensor):
        raise TypeError("the third argument of this cross_entropy is the label smoothing, a number; class weights are "
                        "an argument of nn.functional.cross_entropy and nn.CrossEntropyLoss")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is {smoothing}; it must be from 0 to 1")
    loss = CrossEntropy(smoothing, ignore_index)(x, labels)
    return loss if ignore_index is None else where(compare("not_equal", labels, ignore_index).any(), loss, float("nan"))


def mse(x: Tensor, target: Tensor) -> Tensor:
    """The mean of (x - target)^2; gradients toward both."""
    return MSE()(x, target)
