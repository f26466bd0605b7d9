"""Losses as modules, with torch's names: each calls a function of `nn.functional` with a prediction and a target."""

from . import functional
from .activations import layer

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CosineEmbeddingLoss", "CosineSimilarity", "CrossEntropyLoss", "HuberLoss",
           "KLDivLoss", "L1Loss", "MSELoss", "NLLLoss", "PairwiseDistance", "SmoothL1Loss", "TripletMarginLoss"]

BCELoss = layer("BCELoss", functional.binary_cross_entropy, 2)
BCEWithLogitsLoss = layer("BCEWithLogitsLoss", functional.binary_cross_entropy_with_logits, 2)
CosineEmbeddingLoss = layer("CosineEmbeddingLoss", functional.cosine_embedding_loss, 3)
CosineSimilarity = layer("CosineSimilarity", functional.cosine_similarity, 2)
CrossEntropyLoss = layer("CrossEntropyLoss", functional.cross_entropy, 2)
HuberLoss = layer("HuberLoss", functional.huber_loss, 2)
KLDivLoss = layer("KLDivLoss", functional.kl_div, 2)
L1Loss = layer("L1Loss", functional.l1_loss, 2)
MSELoss = layer("MSELoss", functional.mse_loss, 2)
NLLLoss = layer("NLLLoss", functional.nll_loss, 2)
PairwiseDistance = layer("PairwiseDistance", functional.pairwise_distance, 2)
SmoothL1Loss = layer("SmoothL1Loss", functional.smooth_l1_loss, 2)
TripletMarginLoss = layer("TripletMarginLoss", functional.triplet_margin_loss, 3)
