"""Scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..autograd import tape as tapes
from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from .dropout import check_rate, next_draw
from .elementwise import mul


class Attention(Op):
    """q (n, h, t, d), k (n, h, s, d), v (n, h, s, e), mask (n, s) of bool or int64 -> (n, h, t, e)."""

    name = "attention"
    precision = "low"

    def __init__(self, causal: bool, scale: float | None, dropout: float = 0.0, offset: int = 0) -> None:
        self.scale, self.dropout = scale, dropout
        self.seen = {"causal": causal, **({"offset": offset} if offset else {})}  # kernels without one know no offset

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        dtype = same_dtype(self, q, k, v)
        fit = all(t.ndim == 4 for t in (q, k, v)) and q.shape[:2] == k.shape[:2] and v.shape[:3] == k.shape[:3]
        if not fit or q.shape[3] != k.shape[3] or not q.shape[3]:
            raise self.error(f"query {q.shape}, key {k.shape} and value {v.shape} do not fit; "
                             "expected (n, heads, t, d), (n, heads, s, d) and (n, heads, s, e), d at least 1")
        if any(m.dtype not in ("int64", "bool") or m.shape != (k.shape[0], k.shape[2]) for m in mask):
            raise self.error(f"the mask is {mask[0].dtype} {mask[0].shape}; "
                             f"expected bool or int64 {(k.shape[0], k.shape[2])}, False or 0 for padding; "
                             f"causal=True hides later keys")
        self.q, self.k, self.v = q, k, v
        self.factor = 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale
        y = self.out([*q.shape[:3], v.shape[3]], dtype)
        self.numbers: dict[str, Any] = {}
        self.counter: list[Tensor] = []
        if self.dropout:
            counter, key = next_draw()
            self.counter, self.numbers = [counter], {"rate": self.dropout, **key}
        self.flash, self.mask = self._flash(q, k, v), list(mask)
        self.kept = [y, self.out(q.shape[:3], dtype)] if self.flash else [self.out([*q.shape[:3], k.shape[2]], dtype)]
        kernel = "flash_attention" if self.flash else "attention_dropout" if self.dropout else "attention"
        self.call(kernel, [q, k, v, *mask, *self.counter], self.kept if self.flash else [y, *self.kept],
                  scale=self.factor, **self.seen, **self.numbers)
        return y

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the gradient computes the probabilities again, as flash_attention's kernels permit. Causal ones skip
        half of the scores: that they win from a fifth of the scores on was measured."""
        t, s = q.shape[2], k.shape[2]
        scores = t * s * (5 if self.seen["causal"] and not self.dropout else 1)
        return scores > tapes.current().device.most_scores and v.shape[3] > 0 and not (self.dropout and s % 4)

    def output_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        grads = [self.grad(t) for t in (self.q, self.k, self.v)]
        kept = [self.q, self.k, self.v, *self.kept]
        if self.flash:
            self.call("flash_attention_grad", [*kept, dy, *self.mask, *self.counter], grads, scale=self.factor,
                      **self.seen, **self.numbers)
        else:
            self.call("attention_dropout_grad" if self.dropout else "attention_grad", [*kept, *self.counter, dy], grads,
                      scale=self.factor, **self.numbers)
        return {i: grads[i] for i in wanted}

    weight_grad = output_grad


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False,
              scale: float | None = None, dropout: float = 0.0, offset: int = 0) -> Tensor:
    """softmax(q k^T scale) v for q (n, h, t, d), k (n, h, s, d), v (n, h, s, e) -> (n, h, t, e); `scale` is 1/sqrt(d)
    if not given.

    `causal`: query i sees keys 0..i + offset; `offset`: how many keys come before the first query's. `mask`
    (n, s), int64 or bool: 0 where a key is padding. Both may be given; a query that sees no key gives zeros. `dropout`:
    the rate at which probabilities are dropped, in [0, 1). Raises ValueError for an offset that is negative, or that
    has no effect.
    """
    check_rate(dropout)
    if offset < 0 or (offset and not causal):
        raise ValueError(f"attention: the offset is {offset}; it must be at least 0, and is for causal attention")
    if scale is not None and not scale > 0:  # kernels hide a key by minus infinity, which they multiply by the scale
        q, scale = mul(q, scale), 1.0
    return Attention(causal, scale, dropout, offset)(q, k, v, *(() if mask is None else (mask,)))
