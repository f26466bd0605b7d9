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
from .layers import GELU, Dropout, Flatten, LeakyReLU, Linear, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from .losses import BCEWithLogitsLoss, CrossEntropyLoss, KLDivLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
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
    GlobalAvgPool,
    GroupNorm,
    Hardsigmoid,
    Hardswish,
    MaxPool2d,
    ReLU6,
    Upsample,
)

__all__ = ["GELU", "GRU", "LSTM", "RNN", "AdaptiveAvgPool2d", "AvgPool2d", "BCEWithLogitsLoss", "BatchNorm1d",
           "BatchNorm2d", "Conv1d", "Conv2d", "ConvTranspose2d", "CrossEntropyLoss", "Dropout", "Embedding", "Flatten",
           "GRUCell", "GlobalAvgPool", "GroupNorm", "Hardsigmoid", "Hardswish", "KLDivLoss", "L1Loss", "LSTMCell",
           "LayerNorm", "LeakyReLU", "Linear", "LogSoftmax", "MSELoss", "MaxPool2d", "Module", "ModuleList",
           "MultiheadAttention", "NLLLoss", "Parameter", "RMSNorm", "RNNCell", "ReLU", "ReLU6", "Sequential", "SiLU",
           "Sigmoid", "SmoothL1Loss", "Softmax", "Tanh", "Upsample", "attention", "concat", "cross_entropy", "dropout",
           "embedding", "functional", "gelu", "init", "layer_norm", "log_softmax", "mse", "relu", "softmax", "split",
           "state"]
