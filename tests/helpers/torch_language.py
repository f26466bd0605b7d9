"""GPT-2 and BERT again in torch, from their papers, with the names and shapes of Hugging Face's weights: what ours are
compared with. Importing needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Transposed(nn.Module):
    """A linear layer whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.02 * torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def attention(q: Any, k: Any, v: Any, heads: int, dropout: float, **mask: Any) -> Any:
    n, t, width = q.shape
    q, k, v = (part.view(n, t, heads, -1).transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **mask)
    return y.transpose(1, 2).reshape(n, t, width)


class GPTAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn, self.c_proj = Transposed(width, 3 * width), Transposed(width, width)

    def forward(self, x: Any) -> Any:
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        dropout = self.dropout if self.training else 0.0
        return F.dropout(self.c_proj(attention(q, k, v, self.heads, dropout, is_causal=True)), dropout, self.training)


class GPTMLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.c_fc, self.c_proj = dropout, Transposed(width, 4 * width), Transposed(4 * width, width)

    def forward(self, x: Any) -> Any:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Grouped(nn.Module):
    """The weights of a linear layer of each expert."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(experts, outputs))


class Exchange(torch.autograd.Function):
    """Rows to other ranks, by gloo; gradients go back the same way. `leave`, `come`: how many rows to and from each."""

    @staticmethod
    def forward(context: Any, rows: Any, leave: list[int], come: list[int]) -> Any:
        context.numbers = leave, come
        out = rows.new_empty(sum(come), rows.shape[1])
        torch.distributed.all_to_all_single(out, rows.contiguous(), come, leave)
        return out

    @staticmethod
    def backward(context: Any, dy: Any) -> Any:
        leave, come = context.numbers
        return Exchange.apply(dy, come, leave), None, None


class Experts(nn.Module):
    """Each token goes to its top_k of all experts; each of `ranks` processes has an equal share of them. `lost`: the
    balance loss of the last forward, times `balance`."""

    def __init__(self, width: int, dropout: float, hidden: int, experts: int, top_k: int, balance: float,
                 ranks: int = 1) -> None:
        super().__init__()
        self.top_k, self.experts, self.ranks, self.dropout, self.balance = top_k, experts, ranks, dropout, balance
        self.router = nn.Linear(width, experts, bias=False)
        self.fc1, self.fc2 = Grouped(experts // ranks, width, hidden), Grouped(experts // ranks, hidden, width)
        self.lost: Any = 0.0

    def forward(self, x: Any) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        p = torch.softmax(self.router(tokens), 1)
        gate, choice = p.topk(self.top_k)
        if self.top_k > 1:
            gate = gate / gate.sum(1, keepdim=True)
        load = torch.bincount(choice.reshape(-1), minlength=self.experts)
        self.lost = (p.mean(0) * load).sum() * (self.balance * self.experts / choice.numel())
        order = torch.argsort(choice.reshape(-1), stable=True)
        rows = self.through(tokens[order // self.top_k], load)
        rows = rows * gate.reshape(-1)[order, None]
        y = torch.zeros_like(tokens).index_add(0, order // self.top_k, rows)
        return F.dropout(y.view(x.shape), self.dropout, self.training)

    def through(self, rows: Any, load: Any) -> Any:
        """Rows, sorted by expert, through their experts, on whatever rank these are."""
        if self.ranks == 1:
            return torch.cat([self.expert(e, part) for e, part in enumerate(rows.split(load.tolist()))])
        counts = torch.empty_like(load)
        torch.distributed.all_to_all_single(counts, load)
        leave, come = ([int(n) for n in one.view(self.ranks, -1).sum(1)] for one in (load, counts))
        parts = Exchange.apply(rows, leave, come).split(counts.tolist())  # by source and expert
        own = self.experts // self.ranks
        made = [self.expert(e, torch.cat(parts[e::own])).split([len(part) for part in parts[e::own]])
                for e in range(own)]
        return Exchange.apply(torch.cat([made[e][s] for s in range(self.ranks) for e in range(own)]), come, leave)

    def expert(self, e: int, rows: Any) -> Any:
        hidden = F.gelu(F.linear(rows, self.fc1.weight[e], self.fc1.bias[e]), approximate="tanh")
        return F.linear(hidden, self.fc2.weight[e], self.fc2.bias[e])


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, **experts: Any) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), GPTAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Experts(width, dropout, **experts) if experts else GPTMLP(width, dropout)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """`experts`: what `Experts` takes besides the width and dropout; none without."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float,
                 **experts: Any) -> None:
        super().__init__()
        self.dropout = dropout
        parts = {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(length, width),
                 "h": nn.ModuleList(GPTBlock(width, heads, dropout, **experts) for _ in range(layers)),
                 "ln_f": nn.LayerNorm(width)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Any) -> Any:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class Named(nn.Module):
    """Modules by name, some of which are no attributes in Python."""

    def __init__(self, /, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def output(inputs: int, width: int) -> Any:
    return Named(dense=nn.Linear(inputs, width), LayerNorm=nn.LayerNorm(width, 1e-12))


class BERT(nn.Module):
    """`head`: masked or classes."""

    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int, dropout: float, head: str,
                 classes: int) -> None:
        super().__init__()
        self.heads, self.rate, self.head = heads, dropout, head
        embeddings = Named(word_embeddings=nn.Embedding(vocabulary, width),
                           position_embeddings=nn.Embedding(positions, width),
                           token_type_embeddings=nn.Embedding(2, width), LayerNorm=nn.LayerNorm(width, 1e-12))
        layer = [Named(attention=Named(self=Named(query=nn.Linear(width, width), key=nn.Linear(width, width),
                                                        value=nn.Linear(width, width)), output=output(width, width)),
                       intermediate=Named(dense=nn.Linear(width, 4 * width)), output=output(4 * width, width))
                 for _ in range(layers)]
        parts = {"embeddings": embeddings, "encoder": Named(layer=nn.ModuleList(layer))}
        if head == "classes":
            parts["pooler"] = Named(dense=nn.Linear(width, width))
            self.classifier = nn.Linear(width, classes)
        self.bert = Named(**parts)
        if head == "masked":
            decoder = nn.Linear(width, vocabulary)
            decoder.weight = embeddings.word_embeddings.weight
            predictions = Named(transform=Named(dense=nn.Linear(width, width), LayerNorm=nn.LayerNorm(width, 1e-12)),
                                decoder=decoder)
            predictions.bias = decoder.bias
            self.cls = Named(predictions=predictions)

    def drop(self, x: Any) -> Any:
        return F.dropout(x, self.rate, self.training)

    def forward(self, ids: Any, segments: Any = None) -> Any:
        e = self.bert.embeddings
        x = (e.word_embeddings(ids) + e.token_type_embeddings(torch.zeros_like(ids) if segments is None else segments)
             + e.position_embeddings(torch.arange(ids.shape[1], device=ids.device)))
        x, mask = self.drop(e.LayerNorm(x)), (ids != 0)[:, None, None, :]
        for layer in self.bert.encoder.layer:
            own, out = layer.attention.self, layer.attention.output
            y = attention(own.query(x), own.key(x), own.value(x), self.heads, self.rate if self.training else 0.0,
                          attn_mask=mask)
            x = out.LayerNorm(self.drop(out.dense(y)) + x)
            y = layer.output.dense(F.gelu(layer.intermediate.dense(x)))
            x = layer.output.LayerNorm(self.drop(y) + x)
        if self.head == "classes":
            return self.classifier(self.drop(torch.tanh(self.bert.pooler.dense(x[:, 0]))))
        transform = self.cls.predictions.transform
        return self.cls.predictions.decoder(transform.LayerNorm(F.gelu(transform.dense(x))))


def twin(name: str, arguments: dict[str, Any]) -> Any:
    """The torch network for one of ours; `arguments` are complete."""
    given = dict(arguments)
    if name.startswith("gpt"):
        return GPT(**given)
    if name == "moe_gpt":
        return GPT(**{key: value for key, value in given.items()
                      if key not in ("capacity", "shared", "score", "bias_rate")})
    del given["length"]
    return BERT(**given)


def balance_of(network: Any) -> Any:
    """The balance losses of all layers with experts; 0.0 without."""
    return sum((layer.lost for layer in network.modules() if isinstance(layer, Experts)), 0.0)


def load(network: Any, model: Any) -> Any:
    """The twin with the weights of one of our models. Tied weights have one name in ours."""
    values = {name: torch.from_numpy(value) for name, value in model.state_dict().items()
              if not name.endswith(".load")}  # of experts, a state
    missing, unknown = network.load_state_dict(values, strict=False)
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unknown
    assert set(missing) <= tied
    return network
