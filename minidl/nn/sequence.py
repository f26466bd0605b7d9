"""Layers for sequences and tokens: embedding, layer norm, attention. Batch first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd.arguments import Float, Rate, Size
from ..autograd.initial import constant
from ..autograd.tensor import Parameter, Tensor
from . import functional
from .module import Dropout, Linear, Module

__all__ = ["Embedding", "EmbeddingBag", "LayerNorm", "MultiheadAttention", "Past", "RMSNorm", "TransformerDecoderLayer",
           "TransformerEncoderLayer"]


class Embedding(Module):
    """Indices (...) int64 -> (..., width); weight (rows, width), normal as in torch. `padding_idx`: a row that is zero
    at first and gets no gradient."""

    padding_idx: int | None = None

    def __init__(self, num_embeddings: Size, embedding_dim: Size, padding_idx: int | None = None,
                 *, dtype: Float = "float32") -> None:
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise ValueError(f"{type(self).__name__}: padding_idx is {padding_idx}; it must be from 0 to "
                             f"{num_embeddings - 1}")
        self.padding_idx = padding_idx
        values: Any = random.normal(1, (num_embeddings, embedding_dim), dtype)
        if padding_idx is not None:
            values = np.where(np.arange(num_embeddings)[:, None] == padding_idx, np.zeros((), dtype), values)
        self.weight = Parameter(values)

    def forward(self, index: Tensor) -> Tensor:
        return ops.embedding(self.weight, index, self.padding_idx)


class EmbeddingBag(Embedding):
    """`functional.embedding_bag` of weight (rows, width): int64 (bags, n), or (n,) with offsets -> (bags, width)."""

    def __init__(self, num_embeddings: Size, embedding_dim: Size, *, mode: str = "mean",
                 include_last_offset: bool = False, padding_idx: int | None = None, dtype: Float = "float32") -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, dtype=dtype)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, index: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return functional.embedding_bag(index, self.weight, offsets, mode=self.mode, padding_idx=self.padding_idx,
                                        per_sample_weights=per_sample_weights,
                                        include_last_offset=self.include_last_offset)


class LayerNorm(Module):
    """Over the last axes, of lengths `normalized_shape`; `elementwise_affine` scales and (with `bias`) shifts it."""

    def __init__(self, normalized_shape: Size | Sequence[Size], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True, *, dtype: Float = "float32") -> None:
        self.shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        self.eps = eps
        if elementwise_affine:
            self.weight = Parameter(constant(1, self.shape, dtype))
            if bias:
                self.bias = Parameter(constant(0, self.shape, dtype))

    def forward(self, x: Tensor) -> Tensor:
        bias = getattr(self, "bias", None)
        return functional.layer_norm(x, self.shape, getattr(self, "weight", None), bias, self.eps)


class RMSNorm(LayerNorm):
    """Divides by the root mean square over the last axes, whose lengths are `normalized_shape`;
    `elementwise_affine` scales the result."""

    def __init__(self, normalized_shape: Size | Sequence[Size], eps: float | None = None,
                 elementwise_affine: bool = True, *, dtype: Float = "float32") -> None:
        super().__init__(normalized_shape, 0.0, elementwise_affine, bias=False, dtype=dtype)
        self.eps = eps  # type: ignore[assignment]  # None: of the type, as in torch

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.shape, getattr(self, "weight", None), self.eps)


class Past:
    """Keys and values, or states, of the slices of sequences that a causal network has read: to read (n, length) tokens
    slice by slice, give one `Past` to every call, as in `model(tokens[:, :4], past)`, `model(tokens[:, 4:], past)`.
    `tokens`: how many it has read, which the network counts."""

    def __init__(self, length: int) -> None:
        self.length, self.tokens = length, 0
        self._kept: dict[Module, list[Tensor]] = {}
        self._states: dict[Module, Any] = {}

    def join(self, layer: Module, *new: Tensor) -> list[Tensor]:
        """A layer's keys and values of a slice, (n, heads, t, width) each, behind the earlier slices': (n,
        heads, tokens + t, width)."""
        before = self._kept.get(layer)
        self._kept[layer] = [ops.concat([t] if before is None else [before[i], t], 2, room=self.length)
                             for i, t in enumerate(new)]
        return self._kept[layer]

    def state(self, layer: Module) -> Any:
        """The state in which the last slice left a recurrent layer; None before the first."""
        return self._states.get(layer)

    def keep(self, layer: Module, state: Any) -> None:
        self._states[layer] = state


class MultiheadAttention(Module):
    """x (n, t, width), memory (n, s, width) or None for x itself, mask (n, s) of bool or int64 that is False or 0 for
    padding, or None -> (n, t, width). Parameters as torch's: in_proj_weight holds query, key and value one below the
    other. `dropout`: the rate at which probabilities are dropped while training. `batch_first`: True, the only way."""

    def __init__(self, embed_dim: Size, num_heads: Size, dropout: Rate = 0.0, bias: bool = True, *,
                 batch_first: bool = True, causal: bool = False, dtype: Float = "float32") -> None:
        _check_order(self, batch_first)
        if embed_dim % num_heads:
            raise ValueError(f"MultiheadAttention({embed_dim}, {num_heads}): the heads must divide the width")
        self.width, self.heads, self.causal, self.dropout = embed_dim, num_heads, causal, dropout
        bound = math.sqrt(6 / (4 * embed_dim))
        self.in_proj_weight = Parameter(random.uniform(bound, (3 * embed_dim, embed_dim), dtype))
        if bias:
            self.in_proj_bias = Parameter(constant(0, 3 * embed_dim, dtype))
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        if bias:
            self.out_proj.bias = Parameter(constant(0, embed_dim, dtype))

    def _project(self, x: Tensor, begin: int, count: int) -> list[Tensor]:
        """`count` of query, key, value from `begin` on, each (n, heads, t, width / heads), views of one product."""
        rows = slice(begin * self.width, (begin + count) * self.width)
        both = (self.in_proj_weight, getattr(self, "in_proj_bias", None))
        affine = [p if count == 3 else ops.cut(p, rows) for p in both if p is not None]
        y = ops.reshape(ops.linear(x, *affine), (*x.shape[:2], count, self.heads, self.width // self.heads))
        y = ops.transpose(y, (2, 0, 3, 1, 4))
        return [ops.cut(y, i) for i in range(count)]

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        for t in (x, memory):
            if t is not None and (t.ndim != 3 or t.shape[-1] != self.width):
                raise ValueError(f"MultiheadAttention: input {t.shape}; expected (n, steps, {self.width})")
        q, k, v = self._project(x, 0, 3) if memory is None else (*self._project(x, 0, 1), *self._project(memory, 1, 2))
        rate = self.dropout if self.training else 0.0
        y = ops.transpose(ops.attention(q, k, v, mask, causal=self.causal, dropout=rate), (0, 2, 1, 3))
        return self.out_proj(ops.reshape(y, x.shape))


def _check_order(layer: Module, batch_first: bool) -> None:
    if not batch_first:
        raise ValueError(f"{type(layer).__name__}: inputs are (n, steps, width) here; say so with batch_first=True")


class TransformerEncoderLayer(Module):
    """Attention and two linear layers, each with a norm and a sum beside: x (n, t, width), mask (n, t) of bool or int64
    that is False or 0 for padding, or None -> (n, t, width). Parameters as torch's. `batch_first` must be True, which
    torch's default is not. `activation`: relu or gelu. `causal`: a step sees the ones before it alone."""

    attentions: tuple[str, ...] = ("self_attn",)
    self_attn: MultiheadAttention

    def __init__(self, d_model: Size, nhead: Size, dim_feedforward: Size = 2048, dropout: Rate = 0.1,
                 activation: str = "relu", layer_norm_eps: float = 1e-5, batch_first: bool = False,
                 norm_first: bool = False, bias: bool = True, *, causal: bool = False,
                 dtype: Float = "float32") -> None:
        _check_order(self, batch_first)
        if activation not in ("relu", "gelu"):
            raise ValueError(f"{type(self).__name__}: the activation is {activation!r}; it must be relu or gelu")
        for name in self.attentions:
            setattr(self, name, MultiheadAttention(d_model, nhead, dropout, bias, dtype=dtype,
                                                   causal=causal and name == "self_attn"))
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype=dtype)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype=dtype)
        for i in range(len(self.attentions) + 1):
            setattr(self, f"norm{i + 1}", LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype))
        self.activation, self.norm_first = {"relu": ops.relu, "gelu": ops.gelu}[activation], norm_first
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._sums(x, lambda x: self.dropout(self.self_attn(x, None, mask)), self._feed)

    def _sums(self, x: Tensor, *blocks: Callable[[Tensor], Tensor]) -> Tensor:
        """x with each block's result added to it, each with a norm: of the block's input, or of the sum."""
        for i, block in enumerate(blocks, 1):
            norm = getattr(self, f"norm{i}")
            x = x + block(norm(x)) if self.norm_first else norm(x + block(x))
        return x

    def _feed(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class TransformerDecoderLayer(TransformerEncoderLayer):
    """The same with attention to `memory` (n, s, width) between: x (n, t, width), memory, their masks (n, t) and (n, s)
    -> (n, t, width). In decoders a step sees the ones before it alone: `causal=True`."""

    attentions = "self_attn", "multihead_attn"
    multihead_attn: MultiheadAttention

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None,  # type: ignore[override]
                memory_mask: Tensor | None = None) -> Tensor:
        return self._sums(x, lambda x: self.dropout(self.self_attn(x, None, mask)),
                          lambda x: self.dropout(self.multihead_attn(x, memory, memory_mask)), self._feed)
