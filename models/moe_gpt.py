"""GPT whose blocks have experts: each token goes through attention and then through a few of the E networks of its
block, as in Switch Transformers (Fedus et al. 2021) and Mixtral (Jiang et al. 2024)."""

from __future__ import annotations

from functools import partial
from typing import Any

from .. import nn
from ..autograd import random
from ..autograd.initial import constant
from .gpt import GPT, SMALL, TINY
from .registry import model
from .transformer import DEVIATION


class _Experts(nn.MoE):
    """With GPT-2's initial values and dropout."""

    def __init__(self, width: int, dropout: float, deviation: float, **given: Any) -> None:
        super().__init__(width, **given)
        self.dropout = nn.Dropout(dropout)
        shared = [*self.shared.children()] if hasattr(self, "shared") else []
        for layer, own in ((self.router, DEVIATION), (self.fc1, DEVIATION), (self.fc2, deviation),
                           *zip(shared[::2], (DEVIATION, deviation), strict=False)):
            layer.weight.assign(random.normal(own, layer.weight.shape, "float32"))
            if hasattr(layer, "bias"):
                layer.bias.assign(constant(0, layer.bias.shape, "float32"))

    def forward(self, x: Any) -> Any:
        return self.dropout(super().forward(x))


class MoEGPT(GPT):
    """A GPT whose loss has the balance losses of its layers. A slice of a sequence has its own capacity, so a network
    with one is not read in slices."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float,
                 experts: dict[str, Any]) -> None:
        super().__init__(vocabulary, length, width, layers, heads, dropout, partial(_Experts, **experts))
        self.config, self.sliceable = {}, experts["capacity"] is None

    def loss(self, loss: Any, output: Any) -> Any:
        more = nn.balance_loss(self)
        return loss if more is None else loss + more


@model(tiny={**TINY, "hidden": 32, "experts": 4}, small={**SMALL, "hidden": 512, "experts": 8})
def moe_gpt(vocabulary: int = 50257, length: int = 1024, width: int = 768, layers: int = 12, heads: int = 12,
            dropout: float = 0.1, hidden: int = 3072, experts: int = 8, top_k: int = 2, capacity: int = 0,
            shared: int = 0, score: str = "softmax", balance: float = 0.01, bias_rate: float = 0.0) -> MoEGPT:
    """ids (n, t) -> logits (n, t, vocabulary). Each block has `experts` networks of `hidden`, of which a token uses
    `top_k`; see `nn.MoE` for the others. `capacity`: tokens an expert takes of a micro-batch; by default all."""
    return MoEGPT(vocabulary, length, width, layers, heads, dropout, {
        "hidden": hidden, "experts": experts, "top_k": top_k, "capacity": capacity or None, "shared": shared,
        "score": score, "balance": balance, "bias_rate": bias_rate})
