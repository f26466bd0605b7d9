"""The gradient of a slice: dy at its place among zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .cuda import LaunchError, Struct, c_type, each, steps
from .registry import flat, kernel, ufunc


@kernel("unslice", axes=lambda reads, *, shape, region: "n*->n*" if region[:1] == ((0, *shape[:1], 1),) else "")
def unslice(xp: Any, dy: Any, *, shape: tuple[int, ...], region: tuple[tuple[int, int, int], ...]) -> Any:
    """Zeros of `shape`, with dy at `region`: (start, stop, step) for each axis."""
    dx = xp.zeros(shape, dy.dtype)
    dx[tuple(slice(*r) for r in region)] = dy
    return dx


@unslice.cpu
def _(dy: Any, dx: Any, *, shape: tuple[int, ...], region: tuple[tuple[int, int, int], ...]) -> Any:
    return [partial(dx.fill, 0), ufunc(np.positive, dy, dx[*(slice(*r) for r in region), ...])]


#: `Region` of copy.cu
REGION = np.dtype([("axes", np.int32), *((name, np.int64, 6) for name in ("length", "begin", "size", "apart", "step"))],
                  align=True)


@unslice.cuda()
def _(dy: Any, dx: Any, *, shape: tuple[int, ...], region: tuple[tuple[int, int, int], ...]) -> Any:
    axes: list[tuple[int, ...]] = []  # length, begin, size, apart, step
    for n, (begin, _, apart), size, step in zip(shape, region, dy.shape, steps(dy, dy.shape), strict=True):
        if n == size == 1:
            continue
        outer = axes[-1] if axes else (0,) * 5
        # a whole axis can be merged with the one before it
        if size == n and outer[3] == 1 and (outer[2] == 1 or outer[4] == n * step):
            axes[-1] = (outer[0] * n, outer[1] * n, outer[2] * n, 1, step)
        else:
            axes.append((n, begin, size, apart, step))
    if len(axes) > 6:
        raise LaunchError(f"unslice: {region} of shape {shape} has more than six axes")
    value = np.zeros((), REGION)
    value["axes"] = len(axes)
    for a, axis in enumerate(axes):
        value["length"][a], value["begin"][a], value["size"][a], value["apart"][a], value["step"][a] = axis
    return each("copy.cu", f"unslice<{c_type(dx)}>", dx.size, dy, flat(dx), Struct("Region", value.tobytes()), dx.size)
