"""Group norm: the layer norm of each group of channels, channels last."""

from __future__ import annotations

from ..autograd.tensor import ShapeError, Tensor
from .layer_norm import layer_norm
from .shape import reshape, transpose


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
               eps: float = 1e-5) -> Tensor:
    """x (n, ..., c): each sample's channels in `groups` equal groups, each normalised over its places and channels,
    times `weight` plus `bias` (c,). Raises ShapeError if the groups do not divide the channels."""
    if x.ndim < 2 or groups < 1 or x.shape[-1] % groups:
        raise ShapeError(f"group_norm: {groups} groups do not divide the channels of {x.shape}, which are last")
    n, c = x.shape[0], x.shape[-1]
    for t in (weight, bias):
        if t is not None and t.shape != (c,):
            raise ShapeError(f"group_norm: weight or bias {t.shape} does not fit the {c} channels of {x.shape}")
    places = x.size // (n * c) if n * c else 0
    apart = transpose(reshape(x, [n, places, groups, c // groups]), (0, 2, 1, 3))
    y = layer_norm(reshape(apart, [n, groups, places * c // groups]), eps=eps)
    together = transpose(reshape(y, [n, groups, places, c // groups]), (0, 2, 1, 3))
    y = reshape(together, x.shape)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
