"""GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020): decoders of text, with Hugging Face's names, so that
weights can be exchanged. Layers of GPT-3 attend to all earlier tokens, not to bands of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import nn, ops
from .registry import model
from .transformer import Embedding, Linear, check_heads, check_length

Layer = Callable[[int, float, float], nn.Module]  #: (width, dropout, deviation) -> a layer


class _Attention(nn.Module):
    """Every token attends to itself and to earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float, deviation: float) -> None:
        self.heads, self.c_attn = heads, Linear(width, 3 * width, transposed=True)
        self.c_proj = Linear(width, width, deviation, transposed=True)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Any, past: Any = None) -> Any:
        n, t, width = x.shape
        qkv = self.c_attn(x).reshape(n, t, 3, self.heads, width // self.heads).transpose(2, 0, 3, 1, 4)
        rate, k, v = self.resid_dropout.p if self.training else 0.0, qkv[1], qkv[2]
        if past is not None:
            k, v = past.join(self, k, v)
        y = ops.attention(qkv[0], k, v, causal=True, dropout=rate, offset=k.shape[2] - t).transpose(0, 2, 1, 3)
        return self.resid_dropout(self.c_proj(y.reshape(n, t, width)))


class _MLP(nn.Module):
    def __init__(self, width: int, dropout: float, deviation: float) -> None:
        self.c_fc, self.act = Linear(width, 4 * width, transposed=True), nn.GELU("tanh")
        self.c_proj = Linear(4 * width, width, deviation, transposed=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class _Block(nn.Module):
    """Attention and a network of two layers, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float, deviation: float, mlp: Layer) -> None:
        self.ln_1, self.attn = nn.LayerNorm(width), _Attention(width, heads, dropout, deviation)
        self.ln_2, self.mlp = nn.LayerNorm(width), mlp(width, dropout, deviation)

    def forward(self, x: Any, past: Any = None) -> Any:
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float,
                 mlp: Layer) -> None:
        self.wte, self.wpe = Embedding(vocabulary, width), Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        deviation = 0.02 / math.sqrt(2 * layers)  # of what is added up over the layers
        self.h = nn.Sequential(*(_Block(width, heads, dropout, deviation, mlp) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: Any, past: Any = None) -> Any:
        begin = past.tokens if past is not None else 0
        check_length("gpt", ids, self.wpe, begin)
        end = begin + ids.shape[1]
        x = self.wte(ids) + self.wpe(np.arange(begin, end))
        if past is not None:
            past.tokens = end
        return self.ln_f(self.h(self.drop(x), past))


class GPT(nn.Module):
    """ids (n, t) int64 -> the logits of the token that follows each (n, t, vocabulary). The logits share the
    embedding's weights. With `past`, an `nn.Past`, ids are the slice that follows those which it has read."""

    input_dtype, objective, sliceable = "int64", "next_token", True
    tied: Mapping[str, str] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float,
                 mlp: Layer = _MLP) -> None:
        check_heads("gpt", width, heads)
        self.input_shape, self.classes = (length,), vocabulary
        self.config = {"model_type": "gpt2", "n_head": heads, "activation_function": "gelu_new",
                       "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
        self.transformer = _Transformer(vocabulary, length, width, layers, heads, dropout, mlp)

    def forward(self, ids: Any, past: Any = None) -> Any:
        return ops.linear(self.transformer(ids, past), self.transformer.wte.weight)


TINY = {"vocabulary": 256, "length": 16, "width": 32, "layers": 2, "heads": 2}
SMALL = {"vocabulary": 256, "length": 128, "width": 128, "layers": 4, "heads": 4}


@model(tiny=TINY, small=SMALL)
def gpt(vocabulary: int = 50257, length: int = 1024, width: int = 768, layers: int = 12, heads: int = 12,
        dropout: float = 0.1) -> GPT:
    """ids (n, t) -> logits (n, t, vocabulary), t at most `length`; by default the smallest GPT-2."""
    return GPT(vocabulary, length, width, layers, heads, dropout)


@model(tiny=TINY, small=SMALL)
def gpt2_medium(vocabulary: int = 50257, length: int = 1024, width: int = 1024, layers: int = 24, heads: int = 16,
                dropout: float = 0.1) -> GPT:
    """354,823,168 parameters."""
    return GPT(vocabulary, length, width, layers, heads, dropout)


@model(tiny=TINY, small=SMALL)
def gpt3_medium(vocabulary: int = 50257, length: int = 2048, width: int = 1024, layers: int = 24, heads: int = 16,
                dropout: float = 0.1) -> GPT:
    """355,871,744 parameters."""
    return GPT(vocabulary, length, width, layers, heads, dropout)
