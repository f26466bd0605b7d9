"""Recurrent layers and cells, with torch's parameters: their names, layout and order of gates.

A layer has two units: the input product over all steps, and the recurrence, whose weight gradient over all steps is one
task. A cell is one step; used repeatedly, it has one gradient per use, and these are added once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd import tape as tapes
from ..autograd.arguments import Float, Nonlinearity, Rate, Size
from ..autograd.tensor import Parameter, Tensor, array
from ..ops.recurrent import CELLS
from .module import Module

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]


class _Weights(Module):
    """The base of layers and cells: `kind`, sizes, and parameters uniform in +-1/sqrt(hidden)."""

    kind = "rnn"
    relu = False

    def _add(self, inputs: int, bias: bool, suffix: str, dtype: str) -> None:
        rows, bound = CELLS[self.kind].gates * self.hidden, 1 / math.sqrt(self.hidden)
        shapes: dict[str, Any] = {"weight_ih": (rows, inputs), "weight_hh": (rows, self.hidden)}
        shapes |= {"bias_ih": rows, "bias_hh": rows} if bias else {}
        for name, shape in shapes.items():
            setattr(self, name + suffix, Parameter(random.uniform(bound, shape, dtype)))

    def _run(self, x: Tensor, states: list[Tensor], suffix: str, reverse: bool = False) -> tuple[Tensor, ...]:
        """x (T, n, i) -> outputs and last states, with the weights w_ih, w_hh and if there are biases b_ih, b_hh."""
        names = [name + suffix for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        w_ih, w_hh, *bias = (getattr(self, name) for name in names if hasattr(self, name))
        options = {"relu": self.relu} if self.kind == "rnn" else {}
        gx = ops.linear(x, w_ih, *bias[:1])
        return getattr(ops, self.kind)(gx, *states, w_hh, *bias[1:], reverse=reverse, **options)

    def _states(self, given: Any, shape: tuple[int, ...], dtype: str) -> list[Tensor]:
        """The initial states; zeros if none are given. Raises ValueError for another number or shape."""
        count = CELLS[self.kind].states
        if given is None:
            return [array(np.zeros(shape, dtype), name="zeros")] * count
        states = list(given) if self.kind == "lstm" else [given]
        if len(states) != count or any(t.shape != shape for t in states):
            raise ValueError(f"{type(self).__name__}: the initial states are {[t.shape for t in states]}; "
                             f"expected {count} of {shape}")
        return [t if isinstance(t, Tensor) else array(t) for t in states]


class _Layers(_Weights):
    """x (T, n, inputs), or (n, T, inputs) with `batch_first`; state (layers * directions, n, hidden), a pair of them
    for LSTM, zeros if not given -> (outputs (T, n, directions * hidden), last state). `dropout` is between layers."""

    def __init__(self, input_size: Size, hidden_size: Size, num_layers: Size = 1, bias: bool = True,
                 batch_first: bool = False, dropout: Rate = 0.0, bidirectional: bool = False, *,
                 dtype: Float = "float32") -> None:
        self.inputs, self.hidden = input_size, hidden_size
        self.layers, self.batch_first, self.dropout = num_layers, batch_first, dropout
        self.directions = ("", "_reverse") if bidirectional else ("",)
        for k in range(num_layers):
            for suffix in self.directions:
                self._add(hidden_size * len(self.directions) if k else input_size, bias, f"_l{k}{suffix}", dtype)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        if x.ndim != 3 or x.shape[-1] != self.inputs or not x.shape[1 if self.batch_first else 0]:
            form = "n, steps" if self.batch_first else "steps, n"
            raise ValueError(f"{type(self).__name__}: input {x.shape}; expected ({form}, {self.inputs})")
        if self.batch_first:
            x = ops.transpose(x, (1, 0, 2))
        each = len(self.directions)
        states = self._states(state, (self.layers * each, x.shape[1], self.hidden), x.dtype)
        last = []
        for k in range(self.layers):
            sides = []
            for d, suffix in enumerate(self.directions):
                with tapes.label(f"l{k}{suffix}"):
                    y, *ends = self._run(x, [ops.cut(t, k * each + d) for t in states], f"_l{k}{suffix}", bool(d))
                    sides.append(y)
                    last.append([ops.reshape(t, (1, *t.shape)) for t in ends])
            x = ops.concat(sides, -1) if each > 1 else sides[0]
            if self.dropout and self.training and k < self.layers - 1:
                # dropout counts samples along the first axis, so that every share of a batch drops the same elements
                x = ops.transpose(ops.dropout(ops.transpose(x, (1, 0, 2)), self.dropout), (1, 0, 2))
        joined = tuple(ops.concat(t) if len(t) > 1 else t[0] for t in zip(*last, strict=True))
        y = ops.transpose(x, (1, 0, 2)) if self.batch_first else x
        return y, joined if self.kind == "lstm" else joined[0]


class RNN(_Layers):
    """h' = tanh(w_ih x + b_ih + w_hh h + b_hh), or relu."""

    def __init__(self, input_size: Size, hidden_size: Size, num_layers: Size = 1, nonlinearity: Nonlinearity = "tanh",
                 bias: bool = True, batch_first: bool = False, dropout: Rate = 0.0, bidirectional: bool = False, *,
                 dtype: Float = "float32") -> None:
        self.relu = nonlinearity == "relu"
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype=dtype)


class GRU(_Layers):
    """Gates r, z, n (Cho and others 2014, in torch's form)."""

    kind = "gru"


class LSTM(_Layers):
    """Gates i, f, g, o (Hochreiter, Schmidhuber 1997)."""

    kind = "lstm"


class _Cell(_Weights):
    def __init__(self, input_size: Size, hidden_size: Size, bias: bool = True, *, dtype: Float = "float32") -> None:
        self.inputs, self.hidden = input_size, hidden_size
        self._add(input_size, bias, "", dtype)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        if x.ndim != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"{type(self).__name__}: input {x.shape}; expected (n, {self.inputs})")
        states = self._states(state, (x.shape[0], self.hidden), x.dtype)
        _, *ends = self._run(ops.reshape(x, (1, *x.shape)), states, "")
        return tuple(ends) if self.kind == "lstm" else ends[0]


class RNNCell(_Cell):
    """One step: x (n, inputs), h (n, hidden) or None for zeros -> h'."""

    def __init__(self, input_size: Size, hidden_size: Size, bias: bool = True, nonlinearity: Nonlinearity = "tanh", *,
                 dtype: Float = "float32") -> None:
        self.relu = nonlinearity == "relu"
        super().__init__(input_size, hidden_size, bias, dtype=dtype)


class GRUCell(_Cell):
    """One step: x (n, inputs), h (n, hidden) or None for zeros -> h'."""

    kind = "gru"


class LSTMCell(_Cell):
    """One step: x (n, inputs), (h, c) each (n, hidden) or None for zeros -> (h', c')."""

    kind = "lstm"
