"""Losses as modules, with torch's names: each calls a function of `nn.functional` with a prediction and a target."""

from __future__ import annotations

from ..autograd.tensor import Tensor
from . import functional
from .activations import Activation, layer

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CosineEmbeddingLoss", "CosineSimilarity", "CrossEntropyLoss", "HuberLoss",
           "KLDivLoss", "L1Loss", "MSELoss", "NLLLoss", "PairwiseDistance", "SmoothL1Loss", "TripletMarginLoss"]


class Loss(Activation):
    """A layer that calls a function of x and target."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return type(self).function(x, target, *self.arguments, **self.named)


class Pair(Activation):
    """A layer that calls a function of two tensors."""

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:  # type: ignore[override]
        return type(self).function(x1, x2, *self.arguments, **self.named)


class PairLoss(Activation):
    """The same of two tensors and a target."""

    def forward(self, x1: Tensor, x2: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return type(self).function(x1, x2, target, *self.arguments, **self.named)


class TripletLoss(Activation):
    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:  # type: ignore[override]
        return type(self).function(anchor, positive, negative, *self.arguments, **self.named)


BCELoss = layer("BCELoss", functional.binary_cross_entropy, Loss)
BCEWithLogitsLoss = layer("BCEWithLogitsLoss", functional.binary_cross_entropy_with_logits, Loss)
CosineEmbeddingLoss = layer("CosineEmbeddingLoss", functional.cosine_embedding_loss, PairLoss)
CosineSimilarity = layer("CosineSimilarity", functional.cosine_similarity, Pair)
CrossEntropyLoss = layer("CrossEntropyLoss", functional.cross_entropy, Loss)
HuberLoss = layer("HuberLoss", functional.huber_loss, Loss)
KLDivLoss = layer("KLDivLoss", functional.kl_div, Loss)
L1Loss = layer("L1Loss", functional.l1_loss, Loss)
MSELoss = layer("MSELoss", functional.mse_loss, Loss)
NLLLoss = layer("NLLLoss", functional.nll_loss, Loss)
PairwiseDistance = layer("PairwiseDistance", functional.pairwise_distance, Pair)
SmoothL1Loss = layer("SmoothL1Loss", functional.smooth_l1_loss, Loss)
TripletMarginLoss = layer("TripletMarginLoss", functional.triplet_margin_loss, TripletLoss)
