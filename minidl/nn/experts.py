"""Mixtures of experts: layers of which each token uses a few parts (Shazeer et al. 1701.06538; Fedus et al., Switch,
2101.03961; Lepikhin et al., GShard, 2006.16668)."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd.arguments import Count, Float, Size
from ..autograd.tensor import Parameter, ShapeError, Tensor
from ..ops.experts import MoveBias
from .activations import GELU
from .module import Linear, Module, Sequential, state

__all__ = ["GroupedLinear", "MoE", "balance_loss"]

SCORES = {"softmax": ops.softmax, "sigmoid": ops.sigmoid}
Score = Annotated[str, ("softmax", "sigmoid")]
Positive = Annotated[float, 0, np.inf]


class GroupedLinear(Module):
    """A linear layer for each expert: `weight` (experts, outputs, inputs) and `bias` (experts, outputs), uniform in
    +-1/sqrt(inputs) as in `Linear`. Experts' parts are contiguous. `gelu`: of GELU (the tanh form) of its input."""

    def __init__(self, experts: Size, in_features: Size, out_features: Size, bias: bool = True, *,
                 dtype: Float = "float32") -> None:
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter(random.uniform(bound, (experts, out_features, in_features), dtype))
        if bias:
            self.bias = Parameter(random.uniform(bound, (experts, out_features), dtype))

    def forward(self, x: Tensor, counts: Tensor, gelu: bool = False) -> Tensor:
        return ops.grouped_linear(x, counts, self.weight, getattr(self, "bias", None), gelu=gelu)


class MoE(Module):
    """x (..., width) -> (..., width): for each token the outputs of its `top_k` experts, times their gates, added up.

    An expert is a linear layer to `hidden`, GELU (the tanh form) and a linear layer back. The router's scores become
    chances by `score` (softmax, or sigmoid of each); a token goes to the experts with the largest chances, of equal
    ones to the lowest number, and these chances are its gates, divided by their sum with `normalize` (by default if
    top_k is above 1). `capacity`: how many tokens an expert takes of each batch or micro-batch, in their order; for
    those dropped it gives 0. `shared`: how many further experts every token uses, as one network of `shared` times
    `hidden`; its output is added.

    Two ways to even loads while training: `balance` times `balance_loss` in the network's loss; or, without a loss,
    `bias_rate`: a bias on the scores, for the choice alone, moves by so much after each batch or micro-batch (Wang et
    al. 2408.15664). `load` (2, experts), a state: how many choices of each expert there were in training, and how many
    of them it dropped.
    """

    def __init__(self, width: Size, hidden: Size, experts: Size, top_k: Size, capacity: Size | None = None,
                 shared: Count = 0, *, score: Score = "softmax", normalize: bool | None = None, bias: bool = True,
                 balance: Positive = 0.0, bias_rate: Positive = 0.0, dtype: Float = "float32") -> None:
        if top_k > experts:
            raise ValueError(f"MoE: top_k is {top_k}; a token can use from 1 to {experts} of {experts} experts")
        self.top_k, self.capacity, self.score = top_k, capacity or 0, score
        self.normalize = top_k > 1 if normalize is None else normalize
        self.balance, self.bias_rate = balance, bias_rate
        self.router = Linear(width, experts, bias=False, dtype=dtype)
        self.fc1 = GroupedLinear(experts, width, hidden, bias, dtype=dtype)
        self.fc2 = GroupedLinear(experts, hidden, width, bias, dtype=dtype)
        if shared:
            self.shared = Sequential(Linear(width, shared * hidden, bias, dtype=dtype), GELU("tanh"),
                                     Linear(shared * hidden, width, bias, dtype=dtype))
        self.load = state(np.zeros((2, experts), np.int64), "load")
        if bias_rate:
            self.score_bias = state(np.zeros(experts, dtype), "score_bias")
        self._loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[-1] != self.router.weight.shape[1]:
            raise ShapeError(f"MoE: x {x.shape} does not fit the width {self.router.weight.shape[1]}")
        tokens = ops.reshape(x, [-1, x.shape[-1]])
        p = SCORES[self.score](self.router(tokens))
        bias = self.score_bias if self.bias_rate else None
        to = ops.route(p, self.top_k, self.capacity, self.normalize, bias, self.load if self.training else None)
        rows = self.fc1(ops.dispatch(tokens, to.place), to.counts)
        y = ops.combine(self.fc2(rows, to.counts, gelu=True), to.gate, to.place)
        if hasattr(self, "shared"):
            y = y + self.shared(tokens)
        if self.training and self.balance:
            self._loss = self._balance(p, to.load)
        if self.training and bias is not None:
            MoveBias(bias, self.bias_rate)(to.load)
        return ops.reshape(y, x.shape)

    def _balance(self, p: Tensor, load: Tensor) -> Tensor:
        """E times the sum over experts of the share of choices and the mean chance: 1 where loads are even."""
        tokens, experts = p.shape
        if self.score == "sigmoid":
            p = p / ops.total(p, 1, keepdims=True)
        share = ops.astype(load, p.dtype)
        return ops.total(ops.mean(p, 0) * share) * (self.balance * experts / (tokens * self.top_k))


def balance_loss(network: Module) -> Tensor | None:
    """The sum of the balance losses of the network's MoE layers, times their `balance`, of their last forward; each is
    given once. None if there are none. Add it to the loss."""
    total = None
    for layer in network.modules():
        if isinstance(layer, MoE) and layer._loss is not None:
            total = layer._loss if total is None else total + layer._loss
            layer._loss = None
    return total
