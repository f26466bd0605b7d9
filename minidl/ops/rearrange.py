"""Elements in another order, repeated, padded or left out: no arithmetic. They are made of indices, joins and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd.arguments import Size
from ..autograd.tensor import ShapeError, Tensor, array
from .index import chosen, index
from .join import concat, cut
from .masks import where
from .names import with_dim
from .reduce import axes_of, broadcast_to
from .shape import axis_of, reshape, transpose

#: torch's modes of `pad` that choose elements -> NumPy's
MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def take(x: Tensor, places: Any, axis: int) -> Tensor:
    """The elements at these places along one axis."""
    return index(x, (slice(None),) * axis + (places,))


def flip(x: Tensor, *dims: Any) -> Tensor:
    """x backwards along these axes: `flip(x, 0, 1)` or `flip(x, [0, 1])`. Raises TypeError without an axis."""
    if not dims:
        raise TypeError("flip: the axes are missing, as in x.flip(0)")
    for axis in axes_of(x, dims if isinstance(dims[0], int) else dims[0], "flip"):
        x = take(x, np.arange(x.shape[axis])[::-1], axis)
    return x


def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """x moved on by so many places along these axes, the last elements first; without axes, as one flat row."""
    if dims is None:
        return reshape(roll(reshape(x, [-1]), shifts, 0), x.shape)
    many = [shifts] if isinstance(shifts, int) else list(shifts)
    axes = [dims] if isinstance(dims, int) else list(dims)
    if len(many) != len(axes):
        raise ShapeError(f"roll: {len(many)} shifts and {len(axes)} axes; one for each is needed")
    for shift, given in zip(many, axes, strict=True):
        axis = axis_of(x, given, "roll")
        if x.shape[axis] and (first := shift % x.shape[axis]):
            before = (slice(None),) * axis
            x = concat([cut(x, (*before, slice(x.shape[axis] - first, None))),
                        cut(x, (*before, slice(0, x.shape[axis] - first)))], axis)
    return x


def tile(x: Tensor, *counts: Any) -> Tensor:
    """x repeated as a whole, so often along each of the last axes: `tile(x, 2, 1)` or `tile(x, (2, 1))`."""
    given = tuple(counts[0]) if len(counts) == 1 and not isinstance(counts[0], int) else counts
    ndim = max(x.ndim, len(given))
    shape = (1,) * (ndim - x.ndim) + x.shape
    many = (1,) * (ndim - len(given)) + given
    apart = [n for length in shape for n in (1, length)]
    spread = broadcast_to(reshape(x, apart), [n for pair in zip(many, shape, strict=True) for n in pair])
    return reshape(spread, [m * n for m, n in zip(many, shape, strict=True)])


@with_dim
def repeat_interleave(x: Tensor, repeats: int, axis: int | None = None) -> Tensor:
    """Each element `repeats` times in a row, along one axis or of the flattened x."""
    if axis is None:
        return repeat_interleave(reshape(x, [-1]), repeats, 0)
    axis = axis_of(x, axis, "repeat_interleave")
    return take(x, np.repeat(np.arange(x.shape[axis]), repeats), axis)


def _triangle(name: str, x: Tensor, kept: Any, diagonal: int) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"{name}: shape {x.shape} has no rows and columns")
    return where(array(kept(np.ones(x.shape[-2:], bool), diagonal)), x, 0)


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """x with 0 above a diagonal of its last two axes: 0 is the main one, 1 the one above it."""
    return _triangle("tril", x, np.tril, diagonal)


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """x with 0 below a diagonal of its last two axes."""
    return _triangle("triu", x, np.triu, diagonal)


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The elements of x (..., i, ..., i + offset, ...), i counted along two axes: a copy, with i as its last axis."""
    first, second = axis_of(x, dim1, "diagonal"), axis_of(x, dim2, "diagonal")
    if first == second:
        raise ShapeError(f"diagonal: dim1 {dim1} and dim2 {dim2} are one axis of shape {x.shape}")
    rest = [a for a in range(x.ndim) if a not in (first, second)]
    below, above = max(-offset, 0), max(offset, 0)
    places = np.arange(max(min(x.shape[first] - below, x.shape[second] - above), 0))
    return movedim(index(transpose(x, [first, second, *rest]), (places + below, places + above)), 0, -1)


def masked_select(x: Tensor, mask: Any) -> Tensor:
    """The elements of x where the mask is true, in one row; the two broadcast. How many they are depends on the mask's
    values, so a mask that a recorded step computes raises RuntimeError: `where(mask, x, 0)` has a known shape."""
    mask = mask if isinstance(mask, Tensor) else array(mask)
    if mask.dtype != "bool":
        raise ShapeError(f"masked_select: the mask is {mask.dtype}, not bool; x != 0 makes a mask")
    try:
        shape = np.broadcast_shapes(x.shape, mask.shape)
    except ValueError:
        raise ShapeError(f"masked_select: x {x.shape} and mask {mask.shape} do not broadcast") from None
    (places,) = chosen(mask if mask.storage.recorded else np.broadcast_to(mask.numpy(), shape).reshape(-1))
    return take(reshape(broadcast_to(x, shape), [-1]), places, 0)


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """x with further elements: `pad` has (before, after) of the last axis, then of the one before it, and so on, as in
    torch. `mode`: constant (`value`), reflect, replicate or circular. A number below 0 cuts; what is cut from one
    side is still reflected or replicated on the other, as in torch. Raises ShapeError if they do not fit; and for two
    axes of an image, whose last axis are its channels here."""
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ShapeError(f"pad: {len(pad)} numbers do not fit shape {x.shape}; two for each axis are needed")
    if x.ndim == 4 and len(pad) == 4:
        raise ShapeError(f"pad: an image has its channels last, so {tuple(pad)} would pad columns and channels; write "
                         f"(0, 0, left, right, top, bottom), or (left, right, top, bottom, 0, 0, 0, 0) for other data")
    if mode != "constant" and mode not in MODES:
        raise ValueError(f"pad: the mode is {mode!r}; it must be constant, {', '.join(MODES)}")
    for i in range(0, len(pad), 2):
        x = _padded(x, x.ndim - 1 - i // 2, int(pad[i]), int(pad[i + 1]), mode, value)
    return x


def _padded(x: Tensor, axis: int, before: int, after: int, mode: str, value: float) -> Tensor:
    n = x.shape[axis]
    whole = mode in ("reflect", "replicate") and max(before, after) > 0  # all of x is seen
    if n + before + after < 0 or (max(-before, -after) > n and not whole):
        raise ShapeError(f"pad: axis {axis} has {n} elements; {before} before and {after} after leave fewer than none")
    if min(before, after) < 0 and not whole:
        x = cut(x, (slice(None),) * axis + (slice(max(-before, 0), n - max(-after, 0)),))
        before, after, n = max(before, 0), max(after, 0), x.shape[axis]
    if not before and not after:
        return x
    if mode == "constant":
        def filled(length: int) -> list[Tensor]:
            shape = [length if a == axis else m for a, m in enumerate(x.shape)]
            return [broadcast_to(array(np.full((), value, x.dtype)), shape)] if length else []

        return concat([*filled(before), x, *filled(after)], axis)
    most = n - 1 if mode == "reflect" else n if mode == "circular" else max(before, after) * bool(n)
    if max(before, after) > most:
        raise ShapeError(f"pad: axis {axis} has {n} elements; {mode} can add at most {most} on each side")
    places = np.pad(np.arange(n), (max(before, 0), max(after, 0)), MODES[mode])  # type: ignore[call-overload]
    return take(x, places[max(-before, 0) : len(places) - max(-after, 0)], axis)


def pixel_shuffle(x: Tensor, upscale_factor: Size) -> Tensor:
    """Channels as pixels, in torch's order: (n, h, w, c r r) -> (n, h r, w r, c), r the `upscale_factor`. Raises
    ShapeError if the channels are not a multiple of r r."""
    factor = upscale_factor
    if x.ndim != 4 or factor < 1 or x.shape[3] % factor**2:
        raise ShapeError(f"pixel_shuffle: {x.shape} is not an image (n, h, w, c) whose channels are a multiple of "
                         f"{factor} x {factor}")
    n, h, w, c = x.shape
    apart = transpose(reshape(x, [n, h, w, c // factor**2, factor, factor]), [0, 1, 4, 2, 5, 3])
    return reshape(apart, [n, h * factor, w * factor, c // factor**2])


@with_dim
def unbind(x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along one axis; views."""
    axis = axis_of(x, axis, "unbind")
    return tuple(cut(x, (slice(None),) * axis + (i,)) for i in range(x.shape[axis]))


def movedim(x: Tensor, source: int, destination: int) -> Tensor:
    """x with one axis at another place; a view."""
    order = list(range(x.ndim))
    order.insert(axis_of(x, destination, "movedim"), order.pop(axis_of(x, source, "movedim")))
    return transpose(x, order)
