"""Experts: which rows of a batch go to which expert, and one product for each expert over its rows.

A router gives each of T tokens a score for each of E experts; the k largest are its pairs (token, slot). `place` (T, k)
has the row of each pair among the rows that are sorted by expert and, within an expert, by token; -1 for a pair that
its expert has no room for. `counts` (S, E) says how many rows each expert has from each of S sources. Rows are laid
source by source, and within a source expert by expert; rows after the last one are zeros.

An expert's product is one for each source, and its weight gradient the sum of such products in the order of the
sources: as the products of S micro-batches, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .cuda import FLAG, Call, Grid, Zeros, c_type, each, each_row
from .gelu import gelu_tanh, gelu_tanh_grad, gelu_tanh_grad_rows, gelu_tanh_rows
from .group import in_turn
from .linear import group_tiles
from .registry import Thunk, kernel, loop, regrouped, ufunc

TILE = 32  #: rows and columns of a product that a CUDA block computes


# --------------------------------------------------------------------------------------------------------------- router
@kernel("route", flops=lambda reads, writes: float(reads[0].size))
def route(xp: Any, p: Any, bias: Any = None, *, top_k: int, capacity: int, normalize: bool) -> Any:
    """p (T, E) and bias (E,), which counts for the choice alone -> gate (T, k), choice (T, k), place (T, k), counts
    (1, E) and load (E,), which also counts pairs without room. Equal scores go to the lowest expert. `capacity`:
    how many rows an expert takes, in the order of the pairs; 0: all. Raises ValueError for NaN."""
    if bool(xp.isnan(p).any()):
        raise ValueError(NAN)
    experts = p.shape[1]
    choice = xp.argsort(-(p if bias is None else p + bias), axis=1, kind="stable")[:, :top_k]
    gate = xp.take_along_axis(p, choice, axis=1)
    if normalize:
        gate = gate / gate.sum(axis=1, keepdims=True)
    chosen = xp.arange(experts) == choice.reshape(-1, 1)
    place = (xp.cumsum(chosen, axis=0) * chosen).sum(axis=1) - 1
    load = chosen.sum(axis=0)
    counts = xp.minimum(load, capacity) if capacity else load
    begins = xp.cumsum(counts) - counts
    kept = place < counts[choice.reshape(-1)]
    place = xp.where(kept, place + begins[choice.reshape(-1)], -1)
    return gate, choice, place.reshape(choice.shape), counts.reshape(1, experts), load


NAN = "scores of a router are not numbers (NaN), as its input was: lower --lr, or clip gradients (--clip)"


@route.cpu
def _(p: Any, *rest: Any, top_k: int, capacity: int, normalize: bool) -> Any:
    *bias, gate, choice, place, counts, load = rest
    return [loop(_route, p, bias[0] if bias else np.zeros(p.shape[1], p.dtype), capacity, normalize, gate, choice,
                 place, counts.reshape(-1), load)]


@route.cuda()
def _(p: Any, *rest: Any, top_k: int, capacity: int, normalize: bool) -> Any:
    """Instead of an error for NaN, the flag of gradients that are not finite."""
    *bias, gate, choice, place, counts, load = rest
    (tokens, experts), name = p.shape, c_type(p)
    return [*each("experts.cu", f"route_choose<{name}>", tokens, p, *(bias or [p]), gate, choice, experts, top_k,
                  bool(bias), normalize, FLAG, tokens),
            *each("experts.cu", "route_count", 32 * experts, choice, place, counts, load, choice.size, capacity,
                  experts),
            *each("experts.cu", "route_place", choice.size, choice, counts, place, choice.size)]


def _route(p, bias, capacity, normalize, gate, choice, place, counts, load):  # type: ignore[no-untyped-def]
    tokens, experts = p.shape
    k = choice.shape[1]
    for e in range(experts):
        counts[e] = load[e] = 0
    for t in range(tokens):
        for e in range(experts):
            if np.isnan(p[t, e]):
                raise ValueError(NAN)
        for j in range(k):
            best = -1
            for e in range(experts):
                free = True
                for i in range(j):
                    free = free and choice[t, i] != e
                if free and (best < 0 or p[t, e] + bias[e] > p[t, best] + bias[best]):
                    best = e
            choice[t, j], gate[t, j] = best, p[t, best]
            load[best] += 1
            if capacity == 0 or counts[best] < capacity:
                place[t, j] = counts[best]
                counts[best] += 1
            else:
                place[t, j] = -1
        if normalize:
            total = gate[t, 0]
            for j in range(1, k):
                total += gate[t, j]
            for j in range(k):
                gate[t, j] /= total
    begin = 0
    for e in range(experts):
        begin += counts[e]
        load[e], counts[e] = begin - counts[e], load[e]  # where its rows begin, for the next loop
    for t in range(tokens):
        for j in range(k):
            if place[t, j] >= 0:
                place[t, j] += load[choice[t, j]]
    for e in range(experts):
        end = load[e + 1] if e + 1 < experts else begin
        load[e], counts[e] = counts[e], end - load[e]


@kernel("route_grad", flops=lambda reads, writes: float(writes[0].size))
def route_grad(xp: Any, p: Any, gate: Any, choice: Any, dgate: Any, *, normalize: bool) -> Any:
    """dp (T, E): 0 at experts that were not chosen."""
    if normalize:
        total = xp.take_along_axis(p, choice, axis=1).sum(axis=1, keepdims=True)
        dgate = (dgate - (dgate * gate).sum(axis=1, keepdims=True)) / total
    chosen = xp.arange(p.shape[1]) == choice[:, :, None]
    return (chosen * dgate[:, :, None]).sum(axis=1)


@route_grad.cpu
def _(p: Any, gate: Any, choice: Any, dgate: Any, dp: Any, *, normalize: bool) -> Any:
    return [loop(_route_grad, p, gate, choice, dgate, normalize, dp)]


@route_grad.cuda()
def _(p: Any, gate: Any, choice: Any, dgate: Any, dp: Any, *, normalize: bool) -> Any:
    return each("experts.cu", f"route_grad<{c_type(p)}>", dp.size, p, gate, choice, dgate, dp, *dp.shape[1:],
                choice.shape[1], normalize, dp.size)


def _route_grad(p, gate, choice, dgate, normalize, dp):  # type: ignore[no-untyped-def]
    for t in range(p.shape[0]):
        for e in range(p.shape[1]):
            dp[t, e] = 0
        total, along = p[t, choice[t, 0]], dgate[t, 0] * gate[t, 0]
        for j in range(1, choice.shape[1]):
            total += p[t, choice[t, j]]
            along += dgate[t, j] * gate[t, j]
        for j in range(choice.shape[1]):
            dp[t, choice[t, j]] = (dgate[t, j] - along) / total if normalize else dgate[t, j]


@kernel("count_load")
def count_load(xp: Any, load: Any, counts: Any, total: Any) -> Any:
    """total (2, E): of each expert how many pairs chose it, and for how many of them it had no room, of all batches."""
    return total + xp.stack([load, load - counts.reshape(-1)])


@count_load.cpu
def _(load: Any, counts: Any, before: Any, total: Any) -> Any:
    return [loop(_count_load, load, counts.reshape(-1), before, total)]


@count_load.cuda()
def _(load: Any, counts: Any, before: Any, total: Any) -> Any:
    return each("experts.cu", "count_load", load.size, load, counts, before, total, load.size)


def _count_load(load, counts, before, total):  # type: ignore[no-untyped-def]
    for e in range(load.size):
        total[0, e] = before[0, e] + load[e]
        total[1, e] = before[1, e] + load[e] - counts[e]


@kernel("move_bias")
def move_bias(xp: Any, load: Any, bias: Any, *, rate: float) -> Any:
    """bias (E,) up by `rate` for experts with less than the mean load, down for those with more."""
    return bias + bias.dtype.type(rate) * xp.sign(load.sum() - load * load.size).astype(bias.dtype)


@move_bias.cpu
def _(load: Any, before: Any, bias: Any, *, rate: float) -> Any:
    return [loop(_move_bias, load, before, before.dtype.type(rate), bias)]


@move_bias.cuda()
def _(load: Any, before: Any, bias: Any, *, rate: float) -> Any:
    return each("experts.cu", f"move_bias<{c_type(bias)}>", load.size, load, before, bias, rate, load.size)


def _move_bias(load, before, rate, bias):  # type: ignore[no-untyped-def]
    total = load.sum()
    for e in range(load.size):
        bias[e] = before[e] + rate * np.sign(total - load[e] * load.size)


# ------------------------------------------------------------------------------------------------- tokens to rows, back
@kernel("dispatch", flops=lambda reads, writes: float(writes[0].size))
def dispatch(xp: Any, x: Any, place: Any, gate: Any = None) -> Any:
    """rows (T k, width): row place[t, j] is x[t], times gate[t, j] if there are gates; others are zeros."""
    k = place.shape[1]
    rows = xp.zeros((place.size + 1, x.shape[1]), x.dtype)  # the last one takes the pairs without room
    rows[place.reshape(-1)] = xp.repeat(x, k, axis=0) if gate is None else xp.repeat(x, k, axis=0) * gate.reshape(-1, 1)
    rows[-1] = 0
    return rows[:-1]


@dispatch.cpu
def _(x: Any, place: Any, *rest: Any) -> Any:
    *gate, rows = rest
    return [loop(_dispatch, x, place, *(gate or [x]), bool(gate), rows)]


@dispatch.cuda()
def _(x: Any, place: Any, *rest: Any) -> Any:
    *gate, rows = rest
    return [*[Zeros(rows)][: rows.size], *each_row(
        "experts.cu", f"dispatch<{c_type(x)}>", place.size, x.shape[1], x, place, *(gate or [x]), rows, place.shape[1],
        bool(gate), place.size, x.shape[1])]


def _dispatch(x, place, gate, gated, rows):  # type: ignore[no-untyped-def]
    used = 0
    for t in range(x.shape[0]):
        for j in range(place.shape[1]):
            row = place[t, j]
            if row >= 0:
                used += 1
                by = gate[t, j] if gated else x.dtype.type(1)  # a product with 1 is exact
                for c in range(x.shape[1]):
                    rows[row, c] = x[t, c] * by
    rows[used:] = 0


@kernel("combine", flops=lambda reads, writes: 2.0 * reads[0].size)
def combine(xp: Any, rows: Any, place: Any, gate: Any = None) -> Any:
    """y (T, width): the sum of the rows of each token in the order of its slots, times their gates if there are any."""
    y, begun = xp.zeros((len(place), rows.shape[1]), rows.dtype), xp.zeros((len(place), 1), bool)
    for j in range(place.shape[1]):
        there, row = place[:, j : j + 1] >= 0, rows[xp.maximum(place[:, j], 0)]
        row = row if gate is None else row * gate[:, j : j + 1]
        y = xp.where(there, xp.where(begun, y + row, row), y)
        begun = begun | there
    return y


@combine.cpu
def _(rows: Any, place: Any, *rest: Any) -> Any:
    *gate, y = rest
    return [loop(_combine, rows, place, *(gate or [rows]), bool(gate), y)]


@combine.cuda()
def _(rows: Any, place: Any, *rest: Any) -> Any:
    *gate, y = rest
    return each("experts.cu", f"combine<{c_type(y)}>", y.size, rows, place, *(gate or [rows]), y, place.shape[1],
                bool(gate), y.shape[1], y.size)


def _combine(rows, place, gate, gated, y):  # type: ignore[no-untyped-def]
    for t in range(y.shape[0]):
        begun = False
        for j in range(place.shape[1]):
            row = place[t, j]
            if row >= 0:
                by = gate[t, j] if gated else y.dtype.type(1)  # a product with 1 is exact
                if begun:
                    for c in range(y.shape[1]):
                        y[t, c] += rows[row, c] * by
                else:
                    for c in range(y.shape[1]):
                        y[t, c] = rows[row, c] * by
                begun = True
        if not begun:
            y[t] = 0


@kernel("gate_grad", flops=lambda reads, writes: 2.0 * reads[1].size)
def gate_grad(xp: Any, dy: Any, rows: Any, place: Any) -> Any:
    """dgate (T, k): dy[t] times row place[t, j]; 0 for a pair without room."""
    products = (rows[xp.maximum(place, 0)] * dy[:, None, :]).sum(axis=2)
    return xp.where(place >= 0, products, dy.dtype.type(0))


@gate_grad.cpu
def _(dy: Any, rows: Any, place: Any, dgate: Any) -> Any:
    return [loop(_gate_grad, dy, rows, place, dgate)]


@gate_grad.cuda()
def _(dy: Any, rows: Any, place: Any, dgate: Any) -> Any:
    return each_row("experts.cu", f"gate_grad<{c_type(dy)}>", place.size, dy.shape[1], dy, rows, place, dgate,
                    place.shape[1], place.size, dy.shape[1])


@regrouped
def _gate_grad(dy, rows, place, dgate):  # type: ignore[no-untyped-def]
    for t in range(dy.shape[0]):
        for j in range(place.shape[1]):
            row, total = place[t, j], dy.dtype.type(0)
            if row >= 0:
                for c in range(dy.shape[1]):
                    total += dy[t, c] * rows[row, c]
            dgate[t, j] = total


# ----------------------------------------------------------------------------------------------------- grouped products
def grouped_products(counts: Any, group: int, a: Any, b: Any, out: Any, summed: bool, others: range) -> None:
    """A product of a group's rows r, of which there are counts[group], after the ones of the groups before it:
    out[r] = a[r] b; or with `summed`, over its rows, out = a[:, r] b[r], zeros if it has none. Nothing for numbers of
    rows of which another call takes care. Native lanes have the same (`minidl.devices.native.calls`)."""
    begin, n = int(counts[:group].sum()), int(counts[group])
    rows = slice(begin, begin + n)
    if n in others:
        return
    if n and summed:
        np.dot(a[:, rows], b[rows], out)
    elif n:
        np.dot(a[rows], b, out[rows])
    elif summed:
        out.fill(0)


def _product(counts: Any, group: int, a: Any, b: Any, out: Any, summed: bool, *bias: Any) -> list[Thunk]:
    """A group's product, by tiles where a dense layer with as many rows has them, so that the bits are equal."""
    tiles, sizes = group_tiles(counts, group, a, b, out, summed, *bias)
    return [partial(grouped_products, counts, group, a, b, out, summed, sizes), *tiles,
            *(loop(_add_bias, counts, group, out, one, sizes.start, sizes.stop) for one in bias)]


def _each_group(counts: Any, calls: Callable[[Any, int, int, int], Sequence[Thunk]]) -> list[Thunk]:
    """One call that makes `calls(counts, group, expert, source)` of each group in turn: what a call leaves in the cache
    is there for the next one. An expert's weight is read once for all sources."""
    sources, experts = counts.shape
    return [partial(in_turn, [call for e in range(experts) for s in range(sources)
                              for call in calls(counts.reshape(-1), s * experts + e, e, s)])]


def _segments(counts: Any) -> Any:
    """(source, expert, begin, end) of each product, on the host."""
    end = 0
    for s in range(counts.shape[0]):
        for e in range(counts.shape[1]):
            begin, end = end, end + int(counts[s, e])
            yield s, e, begin, end


def _grouped_flops(reads: Any, writes: Any, **constants: Any) -> float:
    return float(2 * reads[1].size * writes[0].shape[-1])


@kernel("grouped_linear", flops=_grouped_flops)
def grouped_linear(xp: Any, counts: Any, x: Any, w: Any, b: Any = None, *, gelu: bool = False, rest: bool = True
                   ) -> Any:
    """counts (S, E), rows x (n, i), w (E, o, i), b (E, o) -> y (n, o) = x w[e]^T + b[e] for the rows of each expert e,
    zeros for rows after the last one. `gelu`: of GELU (the tanh form) of x, which is also a result (n, i). `rest`:
    without it rows after the last one may be left as they are, where nobody reads them."""
    y, used = xp.zeros((len(x), w.shape[1]), x.dtype), int(counts.sum())
    z = xp.zeros_like(x) if gelu else x
    if gelu:
        z[:used] = gelu_tanh.reference(xp, x[:used])
    for _, e, begin, end in _segments(counts):
        y[begin:end] = xp.matmul(z[begin:end], w[e].T)
        if b is not None:
            y[begin:end] += b[e]
    return (y, z) if gelu else y


@grouped_linear.cpu
def _(counts: Any, x: Any, w: Any, *arrays: Any, gelu: bool = False, rest: bool = True) -> Any:
    *bias, y, z = (*arrays, *([] if gelu else [x]))

    def calls(numbers: Any, group: int, e: int, s: int) -> list[Thunk]:
        return [*([loop(gelu_tanh_rows, numbers, group, x, z)] if gelu else []),
                *_product(numbers, group, z, w[e].T, y, False, *(b[e] for b in bias))]

    return [*_each_group(counts, calls), *(loop(_clear_rest, counts, a) for a in ((y, z) if gelu else (y,)) if rest)]


@grouped_linear.cuda()
def _(counts: Any, x: Any, w: Any, *arrays: Any, gelu: bool = False, rest: bool = True) -> Any:
    *bias, y, z = (*arrays, *([] if gelu else [x]))
    own = each("experts.cu", f"gelu_rows<{c_type(x)}>", z.size, counts, x, z, counts.size, x.shape[1], z.size)
    return [*(own if gelu else []), *_grouped_rows(counts, z, w, y, True, *bias)]


def _grouped_rows(counts: Any, a: Any, b: Any, out: Any, transposed: bool, *bias: Any) -> list[Call]:
    """One launch: blocks find the expert of their tile from the counts."""
    if not out.size:
        return []
    tiles = (-(-len(a) // TILE) + counts.size, -(-out.shape[1] // TILE))
    return [Zeros(out), Grid("experts.cu", f"grouped_rows<{c_type(out)}>", tiles, (256,), (
        counts, a, b, *(bias or [b]), out, counts.size, counts.shape[1], a.shape[1], out.shape[1], transposed,
        bool(bias)))]


def _add_bias(counts, group, y, b, least, most):  # type: ignore[no-untyped-def]
    """For so many rows the bias is inside the product."""
    begin, end = counts[:group].sum(), counts[: group + 1].sum()
    if least <= counts[group] < most:
        end = begin
    for i in range(begin, end):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


def _clear_rest(counts, y):  # type: ignore[no-untyped-def]
    y[counts.sum() :] = 0


@kernel("grouped_linear_input_grad", flops=_grouped_flops)
def grouped_linear_input_grad(xp: Any, counts: Any, dy: Any, w: Any, x: Any = None, *, rest: bool = True) -> Any:
    """dx (n, i) = dy w[e] for the rows of each expert e, zeros for rows after the last one; with x (n, i), times the
    slope of GELU (the tanh form) there. `rest`: as for `grouped_linear`."""
    dx = xp.zeros((len(dy), w.shape[2]), dy.dtype)
    for _, e, begin, end in _segments(counts):
        dx[begin:end] = xp.matmul(dy[begin:end], w[e])
        if x is not None:
            dx[begin:end] = gelu_tanh_grad.reference(xp, x[begin:end], dx[begin:end])
    return dx


@grouped_linear_input_grad.cpu
def _(counts: Any, dy: Any, w: Any, *arrays: Any, rest: bool = True) -> Any:
    *seen, dx = arrays

    def calls(numbers: Any, group: int, e: int, s: int) -> list[Thunk]:
        return [*_product(numbers, group, dy, w[e], dx, False),
                *(loop(gelu_tanh_grad_rows, numbers, group, x, dx) for x in seen)]

    return [*_each_group(counts, calls), *([loop(_clear_rest, counts, dx)] if rest else [])]


@grouped_linear_input_grad.cuda()
def _(counts: Any, dy: Any, w: Any, *arrays: Any, rest: bool = True) -> Any:
    *seen, dx = arrays
    return [*_grouped_rows(counts, dy, w, dx, False),
            *(call for x in seen for call in each("experts.cu", f"gelu_grad_rows<{c_type(x)}>", dx.size, counts, x, dx,
                                                  counts.size, dx.shape[1], dx.size))]


def _sums(reads: Any, writes: Any, bias: bool) -> list[Any]:
    """Scratch for the gradients of one expert from one source, if there are several."""
    return [(w.shape[1:], w.dtype) for w in writes] if reads[0].shape[0] > 1 else []


@kernel("grouped_linear_weight_grad", work=_sums,
        flops=lambda reads, writes: 2.0 * reads[1].size * reads[2].shape[-1])
def grouped_linear_weight_grad(xp: Any, counts: Any, x: Any, dy: Any, *, bias: bool) -> Any:
    """dw (E, o, i): for each expert dy^T x over its rows, of one source after the other; with `bias` also db (E, o)."""
    experts = counts.shape[1]
    dw, db = xp.zeros((experts, dy.shape[1], x.shape[1]), x.dtype), xp.zeros((experts, dy.shape[1]), x.dtype)
    for s, e, begin, end in _segments(counts):
        of_w, of_b = xp.matmul(dy[begin:end].T, x[begin:end]), dy[begin:end].sum(axis=0)
        dw[e], db[e] = (dw[e] + of_w, db[e] + of_b) if s else (of_w, of_b)
    return (dw, db) if bias else dw


@grouped_linear_weight_grad.cpu
def _(counts: Any, x: Any, dy: Any, *arrays: Any, bias: bool) -> Any:
    whole, own = arrays[: 1 + bias], arrays[1 + bias :]

    def calls(numbers: Any, group: int, e: int, s: int) -> list[Thunk]:
        totals = [total[e] for total in whole]
        dw, *db = own if s else totals
        return [*(loop(_sum_bias, numbers, group, dy, b) for b in db),
                *_product(numbers, group, dy.T, x, dw, True),
                *(ufunc(np.add, total, part, total) for total, part in zip(totals, own, strict=False) if s)]

    return _each_group(counts, calls)


@grouped_linear_weight_grad.cuda()
def _(counts: Any, x: Any, dy: Any, dw: Any, *db: Any, bias: bool) -> Any:
    (sources, experts), name, (_, m, n) = counts.shape, c_type(dw), dw.shape
    return [Grid("experts.cu", f"grouped_sums<{name}>", (-(-m // TILE), -(-n // TILE), experts), (256,),
                 (counts, dy, x, dw, sources, experts, m, n)),
            *(call for b in db for call in each("experts.cu", f"grouped_bias<{name}>", b.size, counts, dy, b, sources,
                                                experts, m, b.size))]


def _sum_bias(counts, group, dy, total):  # type: ignore[no-untyped-def]
    for j in range(dy.shape[1]):
        total[j] = 0
    begin = counts[:group].sum()
    for i in range(begin, begin + counts[group]):
        for j in range(dy.shape[1]):
            total[j] += dy[i, j]
