"""Experts: a router sends tokens to some of E networks, whose products run together. `minidl.kernels.experts` says how
rows are laid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..autograd.op import Layer, Op, same_dtype
from ..autograd.tensor import Tensor
from ..kernels.experts import NAN


class Route(Op):
    """Chances p (T, E) -> gates (T, k). It also makes `choice`, `place` (T, k), `counts` (1, E) and `load` (E,), int64,
    and adds to `total` (2, E), a state."""

    name = "route"

    def __init__(self, top_k: int, capacity: int, normalize: bool, bias: Tensor | None, total: Tensor | None) -> None:
        self.told = {"top_k": top_k, "capacity": capacity, "normalize": normalize}
        self.bias, self.total = bias, total

    def forward(self, p: Tensor) -> Tensor:
        dtype, k = same_dtype(self, p), self.told["top_k"]
        if p.ndim != 2 or not 1 <= k <= p.shape[1]:
            raise self.error(f"top_k is {k}; scores {p.shape} must be (tokens, experts), with experts at least top_k")
        if not p.storage.recorded and np.isnan(p.numpy()).any():  # while recording: when the step runs
            raise self.error(NAN)
        self.p = self.dense(p)
        tokens, experts = p.shape
        self.gate, self.choice = self.out([tokens, k], dtype, "gate"), self.out([tokens, k], "int64", "choice")
        self.place, self.counts = self.out([tokens, k], "int64", "place"), self.out([1, experts], "int64", "counts")
        self.load = self.out([experts], "int64", "load")
        bias = () if self.bias is None else (self.bias,)
        self.call("route", [self.p, *bias], [self.gate, self.choice, self.place, self.counts, self.load], **self.told)
        if self.total is not None:
            self.call("count_load", [self.load, self.counts, self.total], [self.total])
        return self.gate

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("route_grad", [self.p, self.gate, self.choice, self.dense(dy)], self.p,
                            normalize=self.told["normalize"])


class MoveBias(Op):
    """Moves a state (E,) by `rate`, up for experts with less than the mean load (E,), down for others. In a task of its
    own, since a router that moved its bias could not run again."""

    name = "move_bias"

    def __init__(self, bias: Tensor, rate: float) -> None:
        self.bias, self.rate = bias, rate

    def forward(self, load: Tensor) -> Tensor:
        return self.call("move_bias", [load, self.bias], [self.bias], rate=self.rate)


class Dispatch(Op):
    """x (T, width) and places (T, k) -> rows (T k, width), sorted by expert; rows that no place names are zeros."""

    name = "dispatch"

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        if x.ndim != 2 or place.ndim != 2 or x.shape[0] != place.shape[0] or place.dtype != "int64":
            raise self.error(f"{place.dtype} places {place.shape} do not fit x {x.shape}; expected int64 (tokens, k)")
        self.x, self.place = self.dense(x), place
        return self.out_by("dispatch", [self.x, place], [place.size, x.shape[1]], dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("combine", [self.dense(dy), self.place], self.x)


class Combine(Op):
    """rows (T k, width), gates (T, k) and places (T, k) -> (T, width): for each token its rows times their gates, added
    in the order of its slots."""

    name = "combine"
    precision = "widest"

    def forward(self, rows: Tensor, gate: Tensor, place: Tensor) -> Tensor:
        dtype = same_dtype(self, rows, gate)
        if rows.ndim != 2 or gate.shape != place.shape or rows.shape[0] != place.size or place.dtype != "int64":
            raise self.error(f"rows {rows.shape}, gates {gate.shape} and {place.dtype} places {place.shape} do not "
                             f"fit; expected (tokens k, width) and (tokens, k) twice")
        self.rows, self.gate, self.place = self.dense(rows), self.dense(gate), place
        return self.out_by("combine", [self.rows, place, self.gate], [gate.shape[0], rows.shape[1]], dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dy = self.dense(dy)
        if i:
            return self.grad_by("gate_grad", [dy, self.rows, self.place], self.gate)
        return self.grad_by("dispatch", [dy, self.place, self.gate], self.rows)


class GroupedLinear(Layer):
    """rows x (n, i) of all experts, counts (S, E), w (E, o, i), b (E, o) -> (n, o): an expert's linear layer on each of
    its rows, zeros after the last one. `gelu`: of GELU of x."""

    name = "grouped_linear"
    precision = "low"

    def __init__(self, gelu: bool = False) -> None:
        self.gelu = gelu

    def forward(self, x: Tensor, counts: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        dtype = same_dtype(self, x, w, *bias)
        if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
            raise self.error(f"rows {x.shape} do not fit weight {w.shape}; expected (rows, "
                             f"{w.shape[-1] if w.shape else '?'}) and (experts, outputs, inputs)")
        if counts.ndim != 2 or counts.shape[1] != w.shape[0] or counts.dtype != "int64":
            raise self.error(f"{counts.dtype} counts {counts.shape} do not fit the {w.shape[0]} experts; expected "
                             f"int64 (sources, {w.shape[0]})")
        if any(b.shape != w.shape[:2] for b in bias):
            raise self.error(f"bias {bias[0].shape} does not fit weight {w.shape}")
        self.x, self.counts, self.w, self.bias = self.dense(x), counts, self.dense(w), [self.dense(b) for b in bias]
        y = self.out([x.shape[0], w.shape[1]], dtype)
        self.z = self.out(x.shape, dtype, "gelu") if self.gelu else self.x  # the input of the product
        self.call("grouped_linear", [counts, self.x, self.w, *self.bias], [y, self.z] if self.gelu else [y],
                  **({"gelu": True} if self.gelu else {}))
        return y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        reads = [self.counts, self.dense(dy), self.w, *([self.x] if self.gelu else [])]
        return self.grad_by("grouped_linear_input_grad", reads, self.x)

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        grads = [self.grad(t) for t in (self.w, *(self.bias if 3 in wanted else ()))]
        self.call("grouped_linear_weight_grad", [self.counts, self.z, self.dense(dy)], grads, bias=len(grads) > 1)
        return dict(enumerate(grads, 2))


class Routed(NamedTuple):
    """`gate` (T, k), through which gradients flow; int64: `place` (T, k), the sorted row of each pair (token, slot), -1
    without one; `counts` (1, E), the rows of each expert; `load` (E,), the pairs that chose it."""

    gate: Tensor
    place: Tensor
    counts: Tensor
    load: Tensor


def route(p: Tensor, top_k: int, capacity: int = 0, normalize: bool = True, bias: Tensor | None = None,
          total: Tensor | None = None) -> Routed:
    """The top_k experts of each token by chances p (tokens, experts), of equal ones the lowest number. `capacity`: how
    many rows an expert takes, in the order of the tokens; 0: all. `normalize`: divides the gates of a token by their
    sum. `bias` (experts,) is added for the choice alone. `total` (2, experts), a state, to which is added how many
    pairs chose each expert, and for how many it had no room. A step raises ValueError for NaN. Raises ShapeError if
    they do not fit."""
    op = Route(top_k, capacity, normalize, bias, total)
    return Routed(op(p), op.place, op.counts, op.load)


def dispatch(x: Tensor, place: Tensor) -> Tensor:
    """Tokens x (T, width) as rows (T k, width) in the places (T, k) that `route` gave them."""
    return Dispatch()(x, place)


def combine(rows: Tensor, gate: Tensor, place: Tensor) -> Tensor:
    """Rows (T k, width) back as tokens (T, width): each token's rows times their gates (T, k), added up."""
    return Combine()(rows, gate, place)


def grouped_linear(x: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None = None, *, gelu: bool = False
                   ) -> Tensor:
    """For the rows x (n, i) of each expert its own linear layer, weight (E, o, i) and bias (E, o) -> (n, o). `counts`
    (S, E) int64: how many rows each expert has, from each of S sources. `gelu`: of GELU (the tanh form) of x, for which
    rows without an expert cost nothing."""
    return GroupedLinear(gelu)(x, counts, weight, *(() if bias is None else (bias,)))
