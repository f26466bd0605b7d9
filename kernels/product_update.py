"""The gradient of a linear layer's weight and the weight's update, by rows of the weight: the gradient of some rows is
used while it is in a core's cache, and never stored. Two kernels write and read all of it once more, which holds back
small batches, whose steps pass over weights most of the time.

An element's update has the arithmetic of the two kernels. Its bits differ from theirs only if the library's product of
some rows has other bits than the product of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .linear import again_work, gemm_again, linear_weight_grad, sum_rows
from .registry import KERNELS, kernel

SIZE = 1 << 16  #: about so many elements of a gradient at once
FEW = 64  #: samples, at most, for which a step gains: a product of more takes much longer than passes over its result,
#: and products of some rows read and pack all samples each time


def _rows(x: Any, dy: Any) -> int:
    """The rows of the weight whose gradient is made at once, of about equal numbers."""
    rows, columns = dy.shape[1], max(x.shape[1], 1)
    return -(-rows // -(-rows * columns // SIZE)) if rows * columns else 1


def _work(x: Any, dy: Any) -> list[Any]:
    """Scratch arrays for the gradient of some rows, and for x, which all their products read."""
    rows = _rows(x, dy)
    return [((rows, x.shape[1]), x.dtype), *again_work(-(-dy.shape[1] // max(rows, 1)), x)]


def _axes(reads: Any, *, bias: bool, **constants: Any) -> str:
    """The rows of the weight and of its states may be cut."""
    w = reads[2]
    states = [a.shape == w.shape for a in reads[3:]]
    given = ",".join(["mI,mo,oI", *("oI" if own else "*" for own in states)])
    return f"{given}->{','.join(['oI'] * (1 + sum(states)) + ['o'] * bias)}"


@kernel("linear_weight_update", axes=_axes,
        flops=lambda reads, writes: 2.0 * reads[2].size * reads[0].shape[0],
        work=lambda reads, writes, **constants: _work(*reads[:2]))
def linear_weight_update(xp: Any, x: Any, dy: Any, w: Any, *rest: Any, rule: str, bias: bool, **constants: Any) -> Any:
    """x (n, i), dy (n, o), w (o, i) and what the kernel `rule` reads after the gradient -> what it writes, and with
    `bias` the sum of dy's rows."""
    found = KERNELS[rule].reference(xp, w, xp.matmul(dy.T, x), *rest, **constants)
    return (*(found if isinstance(found, tuple) else (found,)), *([dy.sum(axis=0)] if bias else []))


def _split(w: Any, arrays: Sequence[Any], bias: bool) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """The arrays that the rule reads after the gradient, those it writes, and the sum of the rows of dy, if any."""
    written = 1 + sum(a.shape == w.shape for a in arrays) // 2  # the weight, and states, which are read and written
    first = len(arrays) - written - bias
    return arrays[:first], arrays[first : first + written], arrays[first + written :]


@linear_weight_update.cpu
def _(x: Any, dy: Any, w: Any, *rest: Any, rule: str, bias: bool, **constants: Any) -> Any:
    scratch = len(_work(x, dy))
    g, *work = rest[-scratch:]
    reads, writes, sums = _split(w, rest[:-scratch], bias)
    calls, times = gemm_again(len(g), x, work)
    step = max(len(g), 1)
    for begin in range(0, len(w), step):
        rows = slice(begin, min(begin + step, len(w)))

        def part(a: Any, rows: slice = rows) -> Any:
            return a[rows] if a.shape == w.shape else a

        own = g[: rows.stop - begin]
        calls += [times(dy.T[rows], own),
                  *KERNELS[rule].bind([w[rows], own, *map(part, reads)], list(map(part, writes)), [], constants)]
    return [*calls, *(sum_rows(dy, db) for db in sums)]


def _cuda_work(reads: Any, writes: Any, *, bias: bool, **constants: Any) -> list[Any]:
    x, dy, w = reads[:3]
    assert linear_weight_grad.cuda_work is not None
    return [(w.shape, w.dtype), *linear_weight_grad.cuda_work([x, dy], [w], bias=bias)]


@linear_weight_update.cuda(work=_cuda_work)
def _(x: Any, dy: Any, w: Any, *rest: Any, rule: str, bias: bool, **constants: Any) -> Any:
    """The whole gradient, then the update: fusion makes no such launch there."""
    scratch = len(_cuda_work([x, dy, w], [], bias=bias))
    reads, writes, sums = _split(w, rest[:-scratch], bias)
    g, *work = rest[-scratch:]
    return [*linear_weight_grad.cuda_calls([x, dy], [g, *sums], work, {"bias": bias}),
            *KERNELS[rule].cuda_calls([w, g, *reads], writes, [], constants)]
