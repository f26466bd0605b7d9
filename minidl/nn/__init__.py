"""Layers and containers, with torch's names; and the functions that losses are made of."""

from ..ops import cross_entropy, dropout, relu, softmax
from .layers import Dropout, Flatten, Linear, ReLU, Sigmoid, Tanh
from .module import Module, Sequential

__all__ = ["Dropout", "Flatten", "Linear", "Module", "ReLU", "Sequential", "Sigmoid", "Tanh", "cross_entropy", "dropout", "relu",
           "softmax"]
