"""Layers and containers, with torch's names; and the functions that losses are made of."""

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
from .module import Module, Sequential
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .sequence import Embedding, LayerNorm, MultiheadAttention

__all__ = ["GELU", "GRU", "LSTM", "RNN", "Dropout", "Embedding", "Flatten", "GRUCell", "LSTMCell", "LayerNorm",
           "Linear", "LogSoftmax", "Module", "MultiheadAttention", "RNNCell", "ReLU", "Sequential", "Sigmoid",
           "Softmax", "Tanh", "attention", "concat", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm",
           "log_softmax", "mse", "relu", "softmax", "split"]
