"""Layers and containers, with torch's names; and the functions of which losses are made."""

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
from .layers import GELU, Dropout, Flatten, Linear, LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from .module import Module, ModuleList, Sequential
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .sequence import Embedding, LayerNorm, MultiheadAttention
from .vision import (
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    GlobalAvgPool,
    Hardsigmoid,
    Hardswish,
    MaxPool2d,
    ReLU6,
)

__all__ = ["GELU", "GRU", "LSTM", "RNN", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Conv2d", "Dropout", "Embedding",
           "Flatten", "GRUCell", "GlobalAvgPool", "Hardsigmoid", "Hardswish", "LSTMCell", "LayerNorm", "Linear",
           "LogSoftmax", "MaxPool2d", "Module", "ModuleList", "MultiheadAttention", "RNNCell", "ReLU", "ReLU6",
           "Sequential", "Sigmoid", "Softmax", "Tanh", "attention", "concat", "cross_entropy", "dropout", "embedding",
           "gelu", "layer_norm", "log_softmax", "mse", "relu", "softmax", "split"]
