"""Layers and containers, with torch's names; and the functions of which losses are made."""

from typing import TYPE_CHECKING

from ..autograd.tensor import Parameter
from ..ops import (attention, concat, cross_entropy, dropout, embedding, gelu, layer_norm, log_softmax, mse, relu,
                   softmax, split)
from . import activations, functional, init, losses, module, recurrent, sequence, spiking, vision
from .activations import *  # noqa: F403
from .hints import missing
from .losses import *  # noqa: F403
from .module import *  # noqa: F403
from .recurrent import *  # noqa: F403
from .sequence import *  # noqa: F403
from .spiking import *  # noqa: F403
from .vision import *  # noqa: F403

__all__ = ["Parameter", "attention", "concat", "cross_entropy", "dropout", "embedding", "functional", "gelu", "init",
           "layer_norm", "log_softmax", "mse", "relu", "softmax", "split"]
for _room in (activations, losses, module, recurrent, sequence, spiking, vision):
    __all__ += _room.__all__

if not TYPE_CHECKING:  # a checker shall still know which names there are
    __getattr__ = missing(__name__, __all__, {
        "utils": "the optimizer's max_norm, as in optim.SGD(..., max_norm=1.0), to clip gradients",
        "DataParallel": "minidl train --parallel data",
        "TransformerEncoder": "nn.ModuleList of TransformerEncoderLayer",
        "Transformer": "TransformerEncoderLayer, or models/transformer.py", "Buffer": "nn.state(array, name)",
        "ParameterList": "attributes of the module", "AdaptiveMaxPool2d": "MaxPool2d, or x.amax((1, 2)) for one window",
        "InstanceNorm1d": "GroupNorm with as many groups as channels", "Dropout1d": "Dropout2d of x.unsqueeze(1)"})
