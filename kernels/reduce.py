"""Sums, means and maxima over axes, their gradients, and where maxima are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .cuda import Call, Grid, Struct, c_type, each, elements, steps, strides
from .registry import flat, kernel, like, loop, ufunc

THREADS = 256  #: threads of a CUDA block
ALONE = 16  #: the least number of elements per thread before the work is cut into parts
#: blocks that leave a device partly idle, and that fill it (2 and 8 for each of 132 multiprocessors)
FEW, MANY = 264, 1056


class Fold(NamedTuple):
    """How CUDA reduces. `lanes`: threads per output; `along`: whether neighbouring threads are along the reduced axes,
    or at neighbouring outputs; `parts`: how many parts a second launch joins."""

    lanes: int
    along: bool
    blocks: int
    parts: int

    def launch(self, kernel: str, arrays: Sequence[Any], kept: Struct, over: Struct, *numbers: Any) -> Grid:
        shares = Struct("Shares", np.array([self.lanes, self.along], np.int32).tobytes())
        return Grid("reduce.cu", kernel, (self.blocks, self.parts), (THREADS,), (*arrays, kept, over, shares, *numbers))


def _power(n: int, most: int) -> int:
    """The smallest power of two that is at least n, up to `most`."""
    return min(1 << max(n - 1, 0).bit_length(), most)


def _fold(outputs: int, inputs: int, along: bool, across: int = 32) -> Fold:
    """The plan for `outputs` reductions of `inputs` elements each, with up to `across` outputs per block. It depends
    only on shapes."""
    lanes = _power(-(-inputs // 4), THREADS) if along else _power(inputs, THREADS // _power(outputs, across))
    blocks = -(-outputs * lanes // THREADS)
    parts = min(-(-inputs // (lanes * ALONE)), -(-MANY // max(blocks, 1))) if blocks < FEW else 1
    return Fold(lanes, along, blocks, max(parts, 1))


def _plan(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, Fold]:
    """(the number of outputs, how they are computed)."""
    outputs = math.prod(n for a, n in enumerate(shape) if a not in axes)
    last = max((a for a, n in enumerate(shape) if n != 1), default=-1)
    return outputs, _fold(outputs, math.prod(shape[a] for a in axes), last in axes)


def _parts(shape: Sequence[int], axes: Sequence[int]) -> list[Any]:
    """The scratch array of the parts that a second launch joins, if there is one."""
    outputs, fold = _plan(shape, axes)
    return [((fold.parts, outputs), "float64")] if outputs and fold.parts > 1 else []


def _reduce(kernels: tuple[str, str, str], axes: Sequence[int], x: Any, whole: Sequence[Any], extra: Sequence[Any],
            y: Any, parts: Sequence[Any], *numbers: Any) -> list[Call]:
    """x -> y over `axes` by the first kernel; or x -> parts by the second and parts -> y by the third. Kernels that
    read x get `whole`; kernels that write y get `extra` and `numbers`. These arrays and y have the reduced shape."""
    outputs, fold = _plan(x.shape, axes)
    if not outputs:
        return []
    kept = [a for a in range(x.ndim) if a not in axes]
    step = steps(x, x.shape)
    rows = [[steps(e, y.shape)[a] for a in kept] for e in (*extra, y)]
    lengths = [x.shape[a] for a in kept]
    at, over = (strides(lengths, [step[a] for a in kept], *rows),
                strides([x.shape[a] for a in axes], [step[a] for a in axes]))
    names = [f"{k}<{c_type(y)}>" for k in kernels]
    if not parts:
        return [fold.launch(names[0], (x, *whole, *extra, y), at, over, *numbers)]
    inner = steps(parts[0].reshape(fold.parts, *lengths), (fold.parts, *lengths))[1:]
    last = _fold(outputs, fold.parts, along=False, across=8)._replace(parts=1)
    return [fold.launch(names[1], (x, *whole, parts[0]), at, over),
            last.launch(names[2], (parts[0], *extra, y), strides(lengths, inner, *rows),
                        strides([fold.parts], [outputs]), *numbers)]


def _reads(reads: Any, writes: Any) -> float:
    return float(reads[0].size)


@kernel("sum", axes="...->...", flops=_reads)
def sum_(xp: Any, x: Any, *, axes: tuple[int, ...], factor: float = 1.0) -> Any:
    """The sum over `axes`, which are kept with length 1, times `factor` (1/n gives the mean)."""
    total = xp.sum(x, axis=axes, keepdims=True)
    return total if factor == 1.0 else total * x.dtype.type(factor)


@sum_.cpu
def _(x: Any, y: Any, *, axes: tuple[int, ...], factor: float = 1.0) -> Any:
    thunks = [partial(np.add.reduce, x, axis=axes, out=y, keepdims=True)]
    return thunks if factor == 1.0 else [*thunks, ufunc(np.multiply, y, like(y, factor), y)]


@sum_.cuda(lambda reads, writes, axes, factor=1.0: _parts(reads[0].shape, axes))
def _(x: Any, y: Any, *parts: Any, axes: tuple[int, ...], factor: float = 1.0) -> Any:
    return _reduce(("sum_", "sum_parts", "sum_of_parts"), axes, x, (), (), y, parts, factor)


@kernel("spread", axes="...,...->...", flops=lambda reads, writes: float(writes[0].size))
def spread(xp: Any, dy: Any, x: Any, *, factor: float = 1.0) -> Any:
    """dy broadcast to x's shape, times `factor`: the gradient of `sum`."""
    return xp.broadcast_to(dy * dy.dtype.type(factor), x.shape)


@spread.cpu
def _(dy: Any, x: Any, dx: Any, *, factor: float = 1.0) -> Any:
    return [ufunc(np.multiply, np.broadcast_to(dy, dx.shape), like(dx, factor), dx)]


@spread.cuda()
def _(dy: Any, x: Any, dx: Any, *, factor: float = 1.0) -> Any:
    return elements("elementwise.cu", f"scale<{c_type(dx)}>", [dy], dx, factor)


@kernel("max", axes="...->...", flops=_reads)
def max_(xp: Any, x: Any, *, axes: tuple[int, ...]) -> Any:
    """The maximum over `axes`, which are kept with length 1."""
    return xp.max(x, axis=axes, keepdims=True)


@max_.cpu
def _(x: Any, y: Any, *, axes: tuple[int, ...]) -> Any:
    return [partial(np.maximum.reduce, x, axis=axes, out=y, keepdims=True)]


@max_.cuda(lambda reads, writes, axes: _parts(reads[0].shape, axes))
def _(x: Any, y: Any, *parts: Any, axes: tuple[int, ...]) -> Any:
    return _reduce(("max_", "max_parts", "max_of_parts"), axes, x, (), (), y, parts)


@kernel("max_grad", axes=lambda reads, *, axes: "n*,n*,n*->n*" if min(axes, default=0) else "", flops=_reads,
        work=lambda reads, writes, axes: [(writes[0].shape, "bool"), (reads[1].shape, reads[1].dtype)])
def max_grad(xp: Any, x: Any, y: Any, dy: Any, *, axes: tuple[int, ...]) -> Any:
    """dy, shared evenly among the elements that equal the maximum."""
    mask = x == y
    return mask * (dy / mask.sum(axis=axes, keepdims=True, dtype=x.dtype))


@max_grad.cpu
def _(x: Any, y: Any, dy: Any, dx: Any, mask: Any, share: Any, *, axes: tuple[int, ...]) -> Any:
    return [ufunc(np.equal, x, y, mask),
            partial(np.add.reduce, mask, axis=axes, dtype=share.dtype, out=share, keepdims=True),
            ufunc(np.divide, dy, share, share), ufunc(np.multiply, mask, share, dx)]


@max_grad.cuda(lambda reads, writes, axes: [(reads[1].shape, reads[1].dtype), *_parts(reads[0].shape, axes)])
def _(x: Any, y: Any, dy: Any, dx: Any, share: Any, *parts: Any, axes: tuple[int, ...]) -> Any:
    shares = _reduce(("tie_share", "tie_parts", "tie_share_of_parts"), axes, x, (flat(y),), (dy,), share, parts)
    return [*shares, *elements("reduce.cu", f"max_grad<{c_type(dx)}>", [x, y, share], dx)]


@kernel("argmax", axes=lambda reads, *, axis: "n*->n*" if axis else "", flops=_reads)
def argmax(xp: Any, x: Any, *, axis: int) -> Any:
    """Where along `axis`, which is kept with length 1, the maximum is: the first of equal ones; NaN counts as the
    largest."""
    return xp.argmax(x, axis=axis, keepdims=True)


@argmax.cpu
def _(x: Any, y: Any, *, axis: int) -> Any:
    inner = math.prod(x.shape[axis + 1 :])
    return [loop(_argmax, flat(x), flat(y), x.shape[axis], inner)]


@argmax.cuda()
def _(x: Any, y: Any, *, axis: int) -> Any:
    inner = math.prod(x.shape[axis + 1 :])
    return each("reduce.cu", f"argmax<{c_type(x)}>", y.size, flat(x), flat(y), x.shape[axis], inner, y.size)


def _argmax(x, y, n, inner):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        start = i // inner * n * inner + i % inner
        best, where = x[start], 0
        for k in range(1, n):
            v = x[start + k * inner]
            if (v > best) | ((v != v) & (best == best)):
                best, where = v, k
        y[i] = where
