"""RMS norm (Zhang, Sennrich 2019)."""

from __future__ import annotations

import numpy as np

from ..autograd.tensor import Tensor
from .layer_norm import LayerNorm


class RMSNorm(LayerNorm):
    """Divides by the root mean square over the last axes: a layer norm whose mean is 0."""

    name = "rms_norm"
    first = 1


def rms_norm(x: Tensor, weight: Tensor | None = None, *, axes: int = 1, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over its last `axes` axes, times `weight`, which has their shape. `eps`: by default
    the machine epsilon of x's type, as in torch; float32's if x has 16 bits."""
    wide = x.dtype if x.dtype == "float64" else "float32"
    return RMSNorm(axes, float(np.finfo(wide).eps) if eps is None else eps)(x, *(() if weight is None else (weight,)))
