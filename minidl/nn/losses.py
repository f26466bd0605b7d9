"""Losses as modules, with torch's names: each calls a function of `nn.functional` with a prediction and a target."""

from __future__ import annotations

from ..autograd.tensor import Tensor
from . import functional
from .activations import Activation, layer

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss",
           "NLLLoss", "SmoothL1Loss"]


class Loss(Activation):
    """A layer that calls a function of x and target."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return type(self).function(x, target, *self.arguments, **self.named)


BCELoss = layer("BCELoss", functional.binary_cross_entropy, Loss)
BCEWithLogitsLoss = layer("BCEWithLogitsLoss", functional.binary_cross_entropy_with_logits, Loss)
CrossEntropyLoss = layer("CrossEntropyLoss", functional.cross_entropy, Loss)
HuberLoss = layer("HuberLoss", functional.huber_loss, Loss)
KLDivLoss = layer("KLDivLoss", functional.kl_div, Loss)
L1Loss = layer("L1Loss", functional.l1_loss, Loss)
MSELoss = layer("MSELoss", functional.mse_loss, Loss)
NLLLoss = layer("NLLLoss", functional.nll_loss, Loss)
SmoothL1Loss = layer("SmoothL1Loss", functional.smooth_l1_loss, Loss)
