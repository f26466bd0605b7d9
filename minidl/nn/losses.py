"""Losses as modules, with torch's names; each calls the function of the same name of `nn.functional`."""

from __future__ import annotations

from ..autograd.tensor import Tensor
from . import functional
from .module import Module


class CrossEntropyLoss(Module):
    """Logits (..., classes) and labels (...) int64; see `functional.cross_entropy`."""

    def __init__(self, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean",
                 label_smoothing: float = 0.0) -> None:
        self.arguments = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction,
                          "label_smoothing": label_smoothing}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x, target, **self.arguments)  # type: ignore[arg-type]


class NLLLoss(Module):
    """Log-probabilities (..., classes) and labels (...) int64; see `functional.nll_loss`."""

    def __init__(self, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean") -> None:
        self.arguments = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.nll_loss(x, target, **self.arguments)  # type: ignore[arg-type]


class _PairLoss(Module):
    """A prediction and a target of one shape."""

    def __init__(self, *, reduction: str = "mean") -> None:
        self.reduction = reduction


class MSELoss(_PairLoss):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(x, target, reduction=self.reduction)


class L1Loss(_PairLoss):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.l1_loss(x, target, reduction=self.reduction)


class SmoothL1Loss(Module):
    def __init__(self, *, reduction: str = "mean", beta: float = 1.0) -> None:
        self.reduction, self.beta = reduction, beta

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.smooth_l1_loss(x, target, reduction=self.reduction, beta=self.beta)


class HuberLoss(Module):
    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        self.reduction, self.delta = reduction, delta

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.huber_loss(x, target, self.reduction, self.delta)


class BCELoss(Module):
    """Probabilities and targets from 0 to 1; see `functional.binary_cross_entropy`."""

    def __init__(self, weight: Tensor | None = None, *, reduction: str = "mean") -> None:
        self.weight_of_each, self.reduction = weight, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy(x, target, self.weight_of_each, reduction=self.reduction)


class BCEWithLogitsLoss(Module):
    """Logits and targets from 0 to 1; see `functional.binary_cross_entropy_with_logits`."""

    def __init__(self, weight: Tensor | None = None, *, reduction: str = "mean",
                 pos_weight: Tensor | None = None) -> None:
        self.arguments = {"weight": weight, "reduction": reduction, "pos_weight": pos_weight}

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(x, target, **self.arguments)  # type: ignore[arg-type]


class KLDivLoss(_PairLoss):
    """Log-probabilities and probabilities; `reduction` may also be batchmean."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.kl_div(x, target, reduction=self.reduction)
