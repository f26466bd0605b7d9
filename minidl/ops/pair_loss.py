"""Losses of a prediction and a target of one shape: L1, smooth L1, binary cross-entropy, Kullback-Leibler.

Each is computed element by element, then reduced: `reduction` is mean, sum or none.
"""

from __future__ import annotations

import math

from ..autograd.op import same_dtype
from ..autograd.tensor import Tensor
from .create import zeros_like
from .elementwise import Alike
from .loss import mse
from .masks import compare, logic, where
from .reduce import mean, total


class PairLoss(Alike):
    """x, target -> the loss of each element. `gradients`: as of `Elementwise`, and the target's may be missing."""

    precision = "full"

    def forward(self, *pair: Tensor) -> Tensor:
        same_dtype(self, *pair)
        if pair[0].shape != pair[1].shape:
            raise self.error(f"prediction {pair[0].shape} and target {pair[1].shape} must have one shape")
        return super().forward(*pair)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        if i >= len(self.gradients):
            raise NotImplementedError(f"{self.name} has no gradient toward its target; detach() the target")
        return super().input_grad(i, dy)


def reduce(losses: Tensor, reduction: str) -> Tensor:
    """The mean or the sum of the losses, or with `none` the losses themselves. Raises ValueError for another word."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"the reduction is {reduction!r}; it must be mean, sum or none")
    return mean(losses) if reduction == "mean" else total(losses) if reduction == "sum" else losses


def l1_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """The distance `|x - target|`."""
    return reduce(PairLoss("l1", "l1_grad a b dy", "l1_grad b a dy")(x, target), reduction)


def smooth_l1_loss(x: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """d^2 / (2 beta) where the distance d of x and target is below `beta`, d - beta / 2 elsewhere. Raises ValueError
    unless beta is above 0; with beta 0 it would be `l1_loss`."""
    if not beta > 0:
        raise ValueError(f"the beta of smooth_l1_loss is {beta}; it must be above 0")
    losses = PairLoss("smooth_l1", "smooth_l1_grad a b dy", "smooth_l1_grad b a dy", beta=float(beta))(x, target)
    return reduce(losses, reduction)


def huber_loss(x: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """d^2 / 2 where the distance d of x and target is below `delta`, delta (d - delta / 2) elsewhere. Raises ValueError
    unless delta is above 0."""
    if not delta > 0:
        raise ValueError(f"the delta of huber_loss is {delta}; it must be above 0")
    return smooth_l1_loss(x, target, reduction=reduction, beta=delta) * delta


def mse_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """(x - target)^2."""
    return mse(x, target) if reduction == "mean" else reduce((x - target) ** 2, reduction)


def binary_cross_entropy_with_logits(x: Tensor, target: Tensor, weight: Tensor | None = None, *,
                                     reduction: str = "mean", pos_weight: Tensor | None = None) -> Tensor:
    """-target log s - (1 - target) log(1 - s), with s = sigmoid(x), for any logits x; targets are from 0 to 1.
    `weight` and `pos_weight` broadcast to x: how much each element counts, and the first of the two terms."""
    losses = (PairLoss("bce_with_logits", "bce_with_logits_grad a b dy")(x, target) if pos_weight is None else
              _times(target * pos_weight, softplus(-x)) + _times(1.0 - target, softplus(x)))
    return reduce(losses if weight is None else losses * weight, reduction)


def _times(share: Tensor, loss: Tensor) -> Tensor:
    """Their product, in which a share of 0 leaves nothing of an infinite loss."""
    return where(logic("logical_and", compare("equal", share, 0), compare("equal", loss, math.inf)), 0, share * loss)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), for any x: the binary cross-entropy of x and 0."""
    return binary_cross_entropy_with_logits(x, zeros_like(x), reduction="none")


def kl_div(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """target (log target - x) for log-probabilities x and probabilities `target`. With `batchmean` the sum divided by
    the length of the first axis, which is the divergence; the mean over all elements is torch's default."""
    losses = PairLoss("kl_div", "mul dy b; neg dx")(x, target)
    return total(losses) / x.shape[0] if reduction == "batchmean" else reduce(losses, reduction)
