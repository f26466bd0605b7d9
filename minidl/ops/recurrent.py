"""Recurrent layers over a whole sequence.

The input's part of the gates is one `linear` over all steps; the ops here compute the recurrence from step to step. So
a layer has two units. The output gradient task goes back through time and keeps the gates' gradients; the weight
gradient over all steps is then one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from .join import cut


@dataclass(frozen=True)
class Cell:
    """A kind of cell: how many gates it has, how many states go from step to step, and whether the gradients toward its
    gates' recurrent products are others than toward the inputs' products."""

    gates: int
    states: int = 1
    inner: bool = False


CELLS = {"rnn": Cell(1), "gru": Cell(3, inner=True), "lstm": Cell(4, states=2)}


class Recurrent(Op):
    """gx (T, n, gates * d), initial states (n, d), w_hh (gates * d, d), b_hh (gates * d,) -> outputs (T, n, d). An LSTM
    has one more row, the last cell: at the end, with `reverse` at the start."""

    output_first = True
    precision = "low"

    def __init__(self, name: str, reverse: bool, **constants: Any) -> None:
        self.name, self.cell = name, CELLS[name]
        self.reverse, self.constants = reverse, {"reverse": reverse, **constants}
        self.dy: Tensor | None = None

    def forward(self, gx: Tensor, *rest: Tensor) -> Tensor:
        dtype, (gates, states) = same_dtype(self, gx, *rest), (self.cell.gates, self.cell.states)
        initial, (self.w, *bias) = rest[:states], rest[states:]
        d = self.w.shape[-1] if self.w.ndim == 2 else -1
        if gx.ndim != 3 or self.w.shape != (gx.shape[-1], d) or gx.shape[-1] != gates * d or not gx.shape[0]:
            raise self.error(f"gates {gx.shape} do not fit weight {self.w.shape}; "
                             f"expected (steps, n, {gates} d) and ({gates} d, d)")
        if any(t.shape != (gx.shape[1], d) for t in initial) or any(b.shape != gx.shape[-1:] for b in bias):
            raise self.error(f"states {[t.shape for t in initial]} or bias {[b.shape for b in bias]} do not fit "
                             f"gates {gx.shape}")
        self.gx, self.initial, self.bias = gx, initial, bias
        self.steps, self.n, self.d = gx.shape[0], gx.shape[1], d
        self.outputs = self.out([self.steps + states, self.n, d], dtype)
        kept: dict[str, list[tuple[int, ...]]] = {
            "rnn": [], "gru": [(self.steps, self.n, 4 * d)], "lstm": [(self.steps + 1, self.n, d), gx.shape]}
        self.saved = [self.out(shape, dtype) for shape in kept[self.name]]
        self.call(self.name, [gx, *initial, self.w, *bias], [self.outputs, *self.saved], **self.constants)
        return self._rows(int(not self.reverse), self.steps + states - 1)

    def _rows(self, begin: int, count: int) -> Tensor:
        return self.outputs.seen([count, self.n, self.d], begin=begin * self.n * self.d)

    def _back(self, dy: Tensor) -> None:
        """Computes the gradients back through time, once for each incoming gradient dy."""
        if self.dy is not dy:
            self.dy, self.grads = dy, {1 + i: self.grad(t) for i, t in enumerate(self.initial)}
            toward = [self.grad(self.gx) for _ in range(1 + self.cell.inner)]
            reads = [dy, self.w, *([] if self.name == "lstm" else [self.outputs]), *self.saved]
            self.call(f"{self.name}_grad", reads, [*toward, *self.grads.values()], **self.constants)
            self.grads[0], self.kept = toward[0], toward[-1:]

    def weight_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        self._back(dy)  # does nothing in W if O has done it
        found = {i: self.grads[i] for i in wanted if i <= self.cell.states}
        if len(found) < len(wanted):
            grads = [self.grad(t) for t in (self.w, *self.bias)]
            before = self._rows(self.cell.states if self.reverse else 0, self.steps)
            flat = [t.seen([self.steps * self.n, t.shape[-1]]) for t in (before, self.kept[0])]
            self.call("linear_weight_grad", flat, grads, bias=len(grads) > 1)
            found |= dict(enumerate(grads, 1 + self.cell.states))
        return found

    output_grad = weight_grad


def _last(y: Tensor, reverse: bool) -> Tensor:
    return cut(y, 0 if reverse else -1)


def rnn(gx: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor | None = None, *, relu: bool = False,
        reverse: bool = False) -> tuple[Tensor, Tensor]:
    """h' = tanh(gx + w_hh h + b_hh) at each step (relu instead of tanh if asked for): gx (T, n, d), h0 (n, d), w_hh
    (d, d), b_hh (d,) -> outputs (T, n, d) and the last state (n, d). `reverse` goes from the last step to the first."""
    y = Recurrent("rnn", reverse, relu=relu)(gx, h0, w_hh, *(() if b_hh is None else (b_hh,)))
    return y, _last(y, reverse)


def gru(gx: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor | None = None, *,
        reverse: bool = False) -> tuple[Tensor, Tensor]:
    """gx (T, n, 3d), gates r, z, n as in torch -> outputs (T, n, d) and the last state (n, d)."""
    y = Recurrent("gru", reverse)(gx, h0, w_hh, *(() if b_hh is None else (b_hh,)))
    return y, _last(y, reverse)


def lstm(gx: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, b_hh: Tensor | None = None, *,
         reverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """gx (T, n, 4d), gates i, f, g, o as in torch -> outputs (T, n, d), the last state and the last cell (n, d)."""
    both = Recurrent("lstm", reverse)(gx, h0, c0, w_hh, *(() if b_hh is None else (b_hh,)))
    steps = gx.shape[0]
    y = cut(both, slice(1, None) if reverse else slice(0, steps))
    return y, _last(y, reverse), cut(both, 0 if reverse else steps)
