"""A recurrent network that goes through the pixels of an image and predicts each before it reads it.

Song, Meng, Liao, Ermon (2002.03629), whose backward pass through time goes in sweeps. Each time step has tasks of its
own, under the number of a micro-batch.
"""

from __future__ import annotations

from typing import Any

from .. import nn, ops
from ..autograd.tape import micro_batch


class Pixels(nn.Module):
    """x (n, pixels) -> the mean over samples and pixels of the squared error of the predictions. The state h is 0
    before the first pixel, h = softplus(W_h h + W_x x + b) after each; the prediction is W_o h + b_o. All weights are
    N(0, .1^2)."""

    def __init__(self, pixels: int = 64, hidden: int = 32) -> None:
        self.pixels = pixels
        self.hidden, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        self.read = nn.Linear(1, hidden, bias=False)
        for layer in (self.hidden, self.read, self.out):
            nn.init.normal_(layer.weight, 0.0, 0.1)
        for layer in (self.hidden, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Any) -> Any:
        h: Any = ops.zeros(x.shape[0], self.hidden.bias.size, dtype=x.dtype)
        loss: Any = None
        for t in range(self.pixels):
            with micro_batch(t, follows=t > 0):
                if t:
                    h = ops.softplus(self.hidden(h) + self.read(x[:, t - 1 : t]))
                apart = self.out(h) - x[:, t : t + 1]
                own = (apart * apart).mean() * (1 / self.pixels)
                loss = own if loss is None else loss + own
        return loss
