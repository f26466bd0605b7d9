"""Layers and containers, with torch's names; and the functions of which losses are made."""

from typing import TYPE_CHECKING

from ..autograd.hints import missing
from ..autograd.tensor import Parameter
from ..ops import (attention, concat, cross_entropy, dropout, embedding, gelu, layer_norm, log_softmax, mse, relu,
                   softmax, split)
from . import activations, experts, functional, init, losses, matrices, module, recurrent, sequence, spiking, vision
from .activations import *  # noqa: F403
from .experts import *  # noqa: F403
from .losses import *  # noqa: F403
from .matrices import *  # noqa: F403
from .module import *  # noqa: F403
from .recurrent import *  # noqa: F403
from .sequence import *  # noqa: F403
from .spiking import *  # noqa: F403
from .vision import *  # noqa: F403

__all__ = ["Parameter", "attention", "concat", "cross_entropy", "dropout", "embedding", "functional", "gelu", "init",
           "layer_norm", "log_softmax", "mse", "relu", "softmax", "split"]
for _room in (activations, experts, losses, matrices, module, recurrent, sequence, spiking, vision):
    __all__ += _room.__all__

if not TYPE_CHECKING:  # a checker shall still know which names there are
    __getattr__ = missing(__name__, "nn", __all__)
