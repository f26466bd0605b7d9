"""Softmax and cross-entropy."""

from __future__ import annotations

from ..op import Op, same_dtype
from ..tensor import Tensor


class Softmax(Op):
    """Over the last axis."""

    name = "softmax"

    def forward(self, x: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        if not x.ndim or not x.shape[-1]:
            raise self.error(f"nothing to choose from in shape {x.shape}")
        self.x, self.y = x, self.out(x.shape, dtype)
        self.call("softmax", [x], [self.y])
        return self.y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx = self.grad(self.x)
        self.call("softmax_grad", [self.y, dy], [dx])
        return dx


class CrossEntropy(Op):
    """Logits (n, c) and labels (n,) int64 -> the mean loss, a scalar."""

    name = "cross_entropy"

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        if x.ndim != 2 or labels.shape != x.shape[:1] or not x.size:
            raise self.error(f"logits {x.shape} and labels {labels.shape} do not fit; expected (n, classes) and (n,)")
        if labels.dtype != "int64":
            raise self.error(f"labels must be int64, not {labels.dtype}")
        check_labels(labels, x.shape[1])
        self.x, self.labels = x, labels
        self.p, loss = self.out(x.shape, dtype), self.out([], dtype)
        self.call("cross_entropy", [self.dense(x), labels], [loss, self.p])
        return loss

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx = self.grad(self.x)
        self.call("cross_entropy_grad", [self.p, self.labels, dy], [dx])
        return dx


def check_labels(labels: Tensor, classes: int) -> None:
    """Raises ValueError that names the first label out of range; recorded labels are checked when they come in."""
    if labels.storage.data is None:
        return
    values = labels.numpy()
    bad = (values < 0) | (values >= classes)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"label {int(values[at])} of sample {at} is out of range: the model has classes 0 to {classes - 1}")


def softmax(x: Tensor) -> Tensor:
    """Probabilities over the last axis."""
    return Softmax()(x)


def cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of -log softmax(x)[label]."""
    return CrossEntropy()(x, labels)
