"""Hints for a name that a module lacks: what to write for a name of torch, or names that are spelt alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NoReturn

#: names of torch.nn, torch.nn.functional and torch.optim that are absent here, as regular expressions -> what to write
#: instead, empty for nothing. docs/from_torch.md has all of them
INSTEAD = {
    "utils": "the optimizer's max_norm, as in optim.SGD(..., max_norm=1.0), to clip gradients",
    "lr_scheduler": "cosine, step_decay and warmup, which return the rate of each step: opt.lr = rate(i)",
    "DataParallel": "minidl train --parallel data", "Container": "Sequential",
    "Parameter(List|Dict)": "attributes of the module", "(Uninitialized)?Buffer": "nn.state(array, name)",
    r"Lazy\w+|UninitializedParameter": "the layer with its sizes",
    "TransformerEncoder": "nn.ModuleList of TransformerEncoderLayer",
    "TransformerDecoder": "nn.ModuleList of TransformerDecoderLayer",
    "Transformer": "TransformerEncoderLayer and TransformerDecoderLayer, or models/transformer.py",
    "multi_head_attention_forward": "nn.MultiheadAttention", "RNN(Cell)?Base": "RNN, GRU or LSTM, or their cells",
    r"\w+3d(_with_indices)?": "", "batch_norm": "nn.BatchNorm2d, which keeps its statistics",
    "InstanceNorm1d|instance_norm": "GroupNorm or group_norm with as many groups as channels",
    "SyncBatchNorm|CrossMapLRN2d|LocalResponseNorm|local_response_norm": "",
    "Dropout1d|dropout[12]d": "nn.Dropout2d, for one axis of x.unsqueeze(1)",
    "(Feature)?AlphaDropout|(feature_)?alpha_dropout": "",
    "(Circular|Constant|Reflection|Replication)Pad[12]d|ZeroPad1d": "functional.pad with its mode",
    "[aA]daptive_?[mM]ax_?[pP]ool[12]d(_with_indices)?": "MaxPool2d, or x.amax((1, 2)) for one window",
    r"(MaxUn|FractionalMaxP)\w+|(max_un|fractional_max_)\w+": "", r"max_pool\dd_with_indices": "",
    r"LPPool\w+|lp_pool\w+": "avg_pool2d(x ** p, k) * k * k, to the power of 1 / p",
    r"Upsampling\w+|upsample\w*": "Upsample or interpolate",
    "(Un)?[Ff]old|unfold": "conv2d, whose weight may be constant", "affine_grid|grid_sample": "",
    "(Channel|channel_|native_channel_)[Ss]huffle|(PixelU|pixel_u)nshuffle": "reshape and transpose",
    "[Bb]ilinear": "einsum('ni,oij,nj->no', x, weight, y)", "Hardshrink|hardshrink": "where(x.abs() > lambd, x, 0)",
    "[Ss]oftshrink": "x - x.clamp(-lambd, lambd)", "[Tt]anhshrink": "x - x.tanh()",
    "[Tt]hreshold": "where(x > threshold, x, value)", "[Ss]oftmin": "softmax of -x",
    "Softmax2d": "Softmax, which is over the last axis", "RReLU|rrelu": "leaky_relu(x, 11 / 48), its form in eval()",
    "gumbel_softmax": "softmax((x - ops.log(-ops.log(ops.rand_like(x)))) / tau)",
    r"[a-z]\w*_": "the function without the last underscore: nothing is changed in place",
    "GaussianNLLLoss|gaussian_nll_loss": "(var.log() + (x - y) ** 2 / var) * 0.5",
    "PoissonNLLLoss|poisson_nll_loss": "x.exp() - y * x", "SoftMarginLoss|soft_margin_loss": "softplus(-y * x)",
    "HingeEmbeddingLoss|hinge_embedding_loss": "where(y == 1, x, (margin - x).relu())",
    "MarginRankingLoss|margin_ranking_loss": "(margin - y * (x1 - x2)).relu()",
    "MultiLabelSoftMarginLoss|multilabel_soft_margin_loss": "BCEWithLogitsLoss", "NLLLoss2d": "NLLLoss",
    "TripletMarginWithDistanceLoss|triplet_margin_with_distance_loss":
        "(d(anchor, positive) - d(anchor, negative) + margin).relu()",
    "pdist": "cdist(x, x), whose upper triangle it is",
    r"LinearCrossEntropy\w+|linear_cross_entropy": "linear and cross_entropy",
    "CTCLoss|ctc_loss|AdaptiveLogSoftmaxWithLoss|Multi(Label)?MarginLoss|multi(label)?_margin_loss": "",
    "conv_tbc|(scaled_)?grouped_mm|scaled_mm": "", "NAdam": "NAdamW", "RAdam": "AdamW with optim.warmup",
    "A(SGD|da(delta|factor|grad|max))|LBFGS|Muon|Rprop|SparseAdam": "SGD, Adam or RMSprop, which compute other updates",
}


def missing(module: str, known: Sequence[str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module with these names."""

    def raise_for(name: str) -> NoReturn:
        found = next((f"use {text}" if text else "torch's has no counterpart here" for names, text in INSTEAD.items()
                      if re.fullmatch(names, name)), "")
        if not found and not name.startswith("_") and (near := get_close_matches(name, known, 3, 0.6)):
            found = f"similar names: {', '.join(near)}"
        raise AttributeError(f"module {module!r} has no attribute {name!r}" + (found and f"; {found}"))

    return raise_for
