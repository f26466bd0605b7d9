"""A deep recurrent network for text: the RNN of 16 stacked cells that the pipeline experiments of out-of-order backprop
train. Reconstructed: its source could not be read, so sizes, gates and shortcuts may differ.

The same network models language and translates: for a translation the source, a separator and the target are one row of
tokens, and only the target's tokens count in the loss.
"""

from __future__ import annotations

from typing import Any

from .. import nn
from .registry import model

CELLS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class _Cell(nn.Module):
    """A recurrent layer over the whole row, added to its input."""

    def __init__(self, cell: str, width: int, dropout: float) -> None:
        self.cell, self.dropout = CELLS[cell](width, width, batch_first=True), nn.Dropout(dropout)

    def forward(self, x: Any, past: Any = None) -> Any:
        y, state = self.cell(x, past and past.state(self))
        if past is not None:
            past.keep(self, state)
        return x + self.dropout(y)


class RNN(nn.Module):
    """Tokens (n, t) int64 -> the logits of the token that follows each (n, t, vocabulary). With `past`, an `nn.Past`,
    the tokens are the slice that follows those which it has read."""

    input_dtype, objective, sliceable = "int64", "next_token", True

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, cell: str, dropout: float) -> None:
        if cell not in CELLS:
            raise ValueError(f"rnn: unknown cell {cell!r}; known: {', '.join(CELLS)}")
        self.input_shape, self.classes = (length,), vocabulary
        self.embedding, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.cells = nn.Sequential(*(_Cell(cell, width, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Any, past: Any = None) -> Any:
        return self.head(self.norm(self.cells(self.dropout(self.embedding(ids)), past)))


@model(tiny={"vocabulary": 256, "length": 12, "width": 16, "layers": 4},
       small={"vocabulary": 256, "length": 64, "width": 128, "layers": 4})
def rnn(vocabulary: int = 32000, length: int = 64, width: int = 1024, layers: int = 16, cell: str = "lstm",
        dropout: float = 0.1) -> RNN:
    """Tokens (n, length) -> logits (n, length, vocabulary). `cell`: rnn, gru or lstm."""
    return RNN(vocabulary, length, width, layers, cell, dropout)
