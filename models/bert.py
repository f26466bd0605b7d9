"""BERT (Devlin et al. 2019), with Hugging Face's names, so that weights can be exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import nn, ops
from ..autograd.initial import constant
from ..autograd.tensor import Parameter
from .registry import model
from .transformer import Embedding, Linear, check_heads, check_length

EPS = 1e-12  #: added to the variance of a layer norm
HEADS = ("pooler", "masked", "classes")


class _Embeddings(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float) -> None:
        self.word_embeddings = Embedding(vocabulary, width)
        self.position_embeddings = Embedding(positions, width)
        self.token_type_embeddings = Embedding(2, width)
        self.LayerNorm, self.dropout = nn.LayerNorm(width, EPS), nn.Dropout(dropout)

    def forward(self, ids: Any, segments: Any) -> Any:
        check_length("bert", ids, self.position_embeddings)
        places = np.arange(ids.shape[1])
        kinds = np.zeros_like(places) if segments is None else segments
        x = self.word_embeddings(ids) + (self.position_embeddings(places) + self.token_type_embeddings(kinds))
        return self.dropout(self.LayerNorm(x))


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))

    def forward(self, x: Any, mask: Any) -> Any:
        n, t, width = x.shape
        q, k, v = (part(x).reshape(n, t, self.heads, width // self.heads).transpose(0, 2, 1, 3)
                   for part in (self.query, self.key, self.value))
        rate = self.dropout if self.training else 0.0
        return ops.attention(q, k, v, mask, dropout=rate).transpose(0, 2, 1, 3).reshape(n, t, width)


class _Output(nn.Module):
    """A linear layer, added to what came before it, then normalised."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        self.dense, self.dropout = Linear(inputs, width), nn.Dropout(dropout)
        self.LayerNorm = nn.LayerNorm(width, EPS)

    def forward(self, x: Any, before: Any) -> Any:
        return self.LayerNorm(self.dropout(self.dense(x)) + before)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        self.self = _SelfAttention(width, heads, dropout)  # its published name
        self.output = _Output(width, width, dropout)

    def forward(self, x: Any, mask: Any) -> Any:
        return self.output(self.self(x, mask), x)


class _Intermediate(nn.Module):
    def __init__(self, width: int) -> None:
        self.dense, self.act = Linear(width, 4 * width), nn.GELU()

    def forward(self, x: Any) -> Any:
        return self.act(self.dense(x))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        self.attention, self.intermediate = _Attention(width, heads, dropout), _Intermediate(width)
        self.output = _Output(4 * width, width, dropout)

    def forward(self, x: Any, mask: Any) -> Any:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class _Encoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        self.layer = nn.ModuleList(_Layer(width, heads, dropout) for _ in range(layers))

    def forward(self, x: Any, mask: Any) -> Any:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class _Pooler(nn.Module):
    def __init__(self, width: int) -> None:
        self.dense, self.act = Linear(width, width), nn.Tanh()

    def forward(self, x: Any) -> Any:
        return self.act(self.dense(x))


class _Base(nn.Module):
    def __init__(self, vocabulary: int, positions: int, layers: int, width: int, heads: int, dropout: float,
                 pooler: bool) -> None:
        self.embeddings = _Embeddings(vocabulary, positions, width, dropout)
        self.encoder = _Encoder(layers, width, heads, dropout)
        if pooler:
            self.pooler = _Pooler(width)

    def forward(self, ids: Any, segments: Any) -> Any:
        return self.encoder(self.embeddings(ids, segments), ids)


class _Transform(nn.Module):
    def __init__(self, width: int) -> None:
        self.dense, self.act, self.LayerNorm = Linear(width, width), nn.GELU(), nn.LayerNorm(width, EPS)

    def forward(self, x: Any) -> Any:
        return self.LayerNorm(self.act(self.dense(x)))


class _Predictions(nn.Module):
    """Logits of tokens, with the weights of their embedding."""

    def __init__(self, vocabulary: int, width: int) -> None:
        self.bias, self.transform = Parameter(constant(0, vocabulary, "float32")), _Transform(width)

    def forward(self, x: Any, table: Any) -> Any:
        return ops.linear(self.transform(x), table, self.bias)


class _Heads(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        self.predictions = _Predictions(vocabulary, width)

    def forward(self, x: Any, table: Any) -> Any:
        return self.predictions(x, table)


class BERT(nn.Module):
    """Tokens (n, t) int64, 0 for padding, and segments (n, t) int64 of 0 and 1 or None for 0 -> logits.

    `head`: "masked", the published head of masked tokens -> (n, t, vocabulary); "classes", pooler and classifier on the
    first token -> (n, classes); "pooler", the pooler on every token and the embedding's weights -> (n, t, vocabulary),
    a head with the same parameters as the published base network.
    """

    input_dtype, objective = "int64", "masked_token"
    others: Mapping[str, str] = {"classification": "head=classes"}

    def __init__(self, vocabulary: int, length: int, positions: int, width: int, layers: int, heads: int,
                 dropout: float, head: str, classes: int) -> None:
        check_heads("bert", width, heads)
        if head not in HEADS:
            raise ValueError(f"bert: unknown head {head!r}; known: {', '.join(HEADS)}")
        if length > positions:
            raise ValueError(f"bert: a length of {length} is above the {positions} positions")
        self.input_shape, self.head, self.classes = (length,), head, classes if head == "classes" else vocabulary
        self.vocabulary = vocabulary
        self.config = {"model_type": "bert", "num_attention_heads": heads, "hidden_act": "gelu", "layer_norm_eps": EPS,
                       "is_decoder": False, "position_embedding_type": "absolute"}
        self.bert = _Base(vocabulary, positions, layers, width, heads, dropout, pooler=head != "masked")
        if head == "masked":
            self.cls = _Heads(vocabulary, width)
            self.tied = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                         "cls.predictions.decoder.bias": "cls.predictions.bias"}
        elif head == "classes":
            self.objective = "classification"
            self.dropout, self.classifier = nn.Dropout(dropout), Linear(width, classes)

    def forward(self, ids: Any, segments: Any = None) -> Any:
        x, table = self.bert(ids, segments), self.bert.embeddings.word_embeddings.weight
        if self.head == "masked":
            return self.cls(x, table)
        if self.head == "classes":
            return self.classifier(self.dropout(self.bert.pooler(x[:, 0])))
        return ops.linear(self.bert.pooler(x), table)


TINY = {"vocabulary": 256, "length": 16, "positions": 16, "width": 32, "layers": 2, "heads": 2}
SMALL = {"vocabulary": 256, "length": 128, "positions": 128, "width": 128, "layers": 4, "heads": 4}


@model(tiny=TINY, small=SMALL)
def bert(vocabulary: int = 30522, length: int = 128, positions: int = 512, width: int = 768, layers: int = 12,
         heads: int = 12, dropout: float = 0.1, head: str = "pooler", classes: int = 2) -> BERT:
    """Tokens (n, length) -> logits. BERT-24, BERT-36 and BERT-48 of the pipeline experiments have width 1024 and 16
    heads."""
    return BERT(vocabulary, length, positions, width, layers, heads, dropout, head, classes)


@model(tiny=TINY, small=SMALL)
def bert_base(vocabulary: int = 30522, length: int = 128, positions: int = 512, width: int = 768, layers: int = 12,
              heads: int = 12, dropout: float = 0.1, head: str = "pooler", classes: int = 2) -> BERT:
    """109,482,240 parameters."""
    return BERT(vocabulary, length, positions, width, layers, heads, dropout, head, classes)


@model(tiny=TINY, small=SMALL)
def bert_large(vocabulary: int = 30522, length: int = 128, positions: int = 512, width: int = 1024, layers: int = 24,
               heads: int = 16, dropout: float = 0.1, head: str = "pooler", classes: int = 2) -> BERT:
    """335,141,888 parameters."""
    return BERT(vocabulary, length, positions, width, layers, heads, dropout, head, classes)
