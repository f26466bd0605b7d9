"""Arrays whose last axis holds the channels, as kernels see them: rows, columns, scratch arrays, launches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .columns import MULTIPROCESSORS, Columns, sums_work, whole
from .cuda import Grid, c_type

ACTIVATIONS = ("none", "relu", "relu6", "hardswish")  #: as norm.cuh numbers them


def rows_of(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def lines_of(x: Any) -> tuple[Any, int]:
    """The memory of x from its first value to its last, flat, and the step from pixel to pixel in it."""
    rows = rows_of(x)
    step = rows.strides[0] // rows.itemsize
    return np.lib.stride_tricks.as_strided(rows, ((len(rows) - 1) * step + rows.shape[1],), (rows.itemsize,)), step


WIDE = 128  #: numbers that a loop on the CPU takes together if a pixel has fewer channels


def columns_of(x: Any) -> int:
    """How many columns the CPU's loops see: the channels of as many pixels as make up to WIDE of them."""
    channels, pixels = x.shape[-1], math.prod(x.shape[:-1])
    count = max(1, WIDE // max(channels, 1))
    return channels * math.gcd(pixels, 1 << count.bit_length() - 1)


def widened(x: Any, *dense: Any) -> tuple[Any, int, int, list[Any]]:
    """x as `lines_of`, but with the pixels of `columns_of` as one if they follow each other; the number of columns;
    and contiguous arrays of its shape as rows of so many."""
    lines, step = lines_of(x)
    columns = columns_of(x) if step == x.shape[-1] else x.shape[-1]
    return lines, step * columns // x.shape[-1], columns, [a.reshape(-1, columns) for a in dense]


def scratch_of(count: int) -> Any:
    """The work of a kernel of the CPU: `count` rows of columns in the type of sums, float64."""
    return lambda reads, writes, **_: [((count, columns_of(reads[0])), "float64")]


def parts_of(work: Any, columns: int, dtype: Any) -> tuple[Any, Any]:
    """The first two rows of the scratch array, and the others as rows of another type."""
    return work[:2, :columns], work[2:].view(dtype)[:, :columns]


def matrix_of(x: Any) -> tuple[int, int, int]:
    """x (..., c) as a matrix: (the step from pixel to pixel in elements, the number of pixels, channels)."""
    apart = [stride // x.itemsize for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return (apart or x.shape)[-1], math.prod(x.shape[:-1]), x.shape[-1]


def norm_grid(name: str, columns: Columns, rows: Any, step: int, *arguments: Any, source: str = "norm.cu") -> Grid:
    """A launch. `rows`: its arrays with a row per pixel; the rows of the first are `step` elements apart."""
    four = "true" if whole(rows[0].shape[-1], rows, [step]) else "false"
    return Grid(source, f"{name}<{c_type(rows[0])}, {four}>", columns.blocks, columns.threads, arguments)


def statistics_work(reads: Any, writes: Any, **_: Any) -> list[Any]:
    """Scratch of the CUDA forms that compute statistics. Every block of the second launch adds up all parts, so there
    are few."""
    return sums_work(math.prod(reads[0].shape[:-1]), reads[0].shape[-1], MULTIPROCESSORS)


def grad_sums_work(reads: Any, writes: Any, **_: Any) -> list[Any]:
    """Scratch of the CUDA forms of which a second launch adds up each part once."""
    return sums_work(math.prod(reads[0].shape[:-1]), reads[0].shape[-1])


def per_element(count: float) -> Any:
    return lambda reads, writes: count * reads[0].size


def repeat(values, to):  # type: ignore[no-untyped-def]
    for first in range(0, len(to), len(values)):
        for j in range(len(values)):
            to[np.uintp(first + j)] = values[j]
