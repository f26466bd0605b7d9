"""Layers and containers, with torch's names; and the functions of which losses are made."""

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
from .layers import (
    ELU,
    GELU,
    Dropout,
    Flatten,
    Hardtanh,
    Identity,
    LeakyReLU,
    Linear,
    LogSigmoid,
    LogSoftmax,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
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
from .module import Module, ModuleList, Sequential, state
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .sequence import Embedding, LayerNorm, MultiheadAttention, RMSNorm
from .vision import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    Dropout2d,
    GlobalAvgPool,
    GroupNorm,
    Hardsigmoid,
    Hardswish,
    MaxPool2d,
    ReLU6,
    Upsample,
)

__all__ = ["ELU", "GELU", "GRU", "LSTM", "RNN", "AdaptiveAvgPool2d", "AvgPool2d", "BCELoss", "BCEWithLogitsLoss",
           "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d", "ConvTranspose2d", "CrossEntropyLoss", "Dropout",
           "Dropout2d", "Embedding", "Flatten", "GRUCell", "GlobalAvgPool", "GroupNorm", "Hardsigmoid", "Hardswish",
           "Hardtanh", "HuberLoss", "Identity", "KLDivLoss", "L1Loss", "LSTMCell", "LayerNorm", "LeakyReLU", "Linear",
           "LogSigmoid", "LogSoftmax", "MSELoss", "MaxPool2d", "Mish", "Module", "ModuleList", "MultiheadAttention",
           "NLLLoss", "Parameter", "RMSNorm", "RNNCell", "ReLU", "ReLU6", "Sequential", "SiLU", "Sigmoid",
           "SmoothL1Loss", "Softmax", "Softplus", "Tanh", "Upsample", "attention", "concat", "cross_entropy",
           "dropout", "embedding", "functional", "gelu", "init", "layer_norm", "log_softmax", "mse", "relu", "softmax",
           "split", "state"]
