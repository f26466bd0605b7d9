"""Layers and containers, with torch's names; and the functions of which losses are made."""

from typing import TYPE_CHECKING

from ..autograd.tensor import Parameter
from ..ops import (
    attention,
    concat,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    log_softmax,
    mse,
    relu,
    softmax,
    split,
)
from . import functional, init
from .activations import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardsigmoid,
    Hardswish,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)
from .hints import missing
from .losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
)
from .module import (
    Dropout,
    Flatten,
    Hardtanh,
    Identity,
    Linear,
    Module,
    ModuleDict,
    ModuleList,
    PReLU,
    Sequential,
    Unflatten,
    state,
)
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .sequence import Embedding, LayerNorm, MultiheadAttention, Past, RMSNorm, TransformerEncoderLayer
from .spiking import LIF, Potentials
from .vision import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Dropout2d,
    GlobalAvgPool,
    GroupNorm,
    InstanceNorm2d,
    MaxPool1d,
    MaxPool2d,
    PixelShuffle,
    Upsample,
    ZeroPad2d,
)

__all__ = ["CELU", "ELU", "GELU", "GLU", "GRU", "LIF", "LSTM", "RNN", "SELU", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d",
           "AvgPool1d", "AvgPool2d", "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d",
           "ConvTranspose1d", "ConvTranspose2d", "CrossEntropyLoss", "Dropout", "Dropout2d", "Embedding", "Flatten",
           "GRUCell", "GlobalAvgPool", "GroupNorm", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "Identity",
           "InstanceNorm2d", "KLDivLoss", "L1Loss", "LSTMCell", "LayerNorm", "LeakyReLU", "Linear", "LogSigmoid",
           "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d", "Mish", "Module", "ModuleDict", "ModuleList",
           "MultiheadAttention", "NLLLoss", "PReLU", "Parameter", "Past", "PixelShuffle", "Potentials", "RMSNorm",
           "RNNCell", "ReLU", "ReLU6", "Sequential", "SiLU", "Sigmoid", "SmoothL1Loss", "Softmax", "Softplus",
           "Softsign", "Tanh", "TransformerEncoderLayer", "Unflatten", "Upsample", "ZeroPad2d", "attention", "concat",
           "cross_entropy", "dropout", "embedding", "functional", "gelu", "init", "layer_norm", "log_softmax", "mse",
           "relu", "softmax", "split", "state"]

if not TYPE_CHECKING:  # a checker shall still know which names there are
    __getattr__ = missing(__name__, __all__, {
        "utils": "the optimizer's max_norm, as in optim.SGD(..., max_norm=1.0), to clip gradients",
        "DataParallel": "minidl train --parallel data",
        "TransformerEncoder": "nn.ModuleList of TransformerEncoderLayer",
        "Transformer": "TransformerEncoderLayer, or models/transformer.py", "Buffer": "nn.state(array, name)",
        "ParameterList": "attributes of the module", "AdaptiveMaxPool2d": "MaxPool2d, or x.amax((1, 2)) for one window",
        "InstanceNorm1d": "GroupNorm with as many groups as channels", "Dropout1d": "Dropout2d of x.unsqueeze(1)"})
