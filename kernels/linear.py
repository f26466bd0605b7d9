"""Matrix products: one GEMM per launch, and the linear layer with its two separate gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .cuda import STRIDES, THREADS, WAVES, Call, Grid, Product, Struct, Zeros, c_type, elements, pointer, steps, strides
from .registry import KERNELS, Thunk, kernel, loop, ufunc
from .row_products import cuda_row_products, cuda_row_products_work
from .small_product import fits
from .sums import cuda_row_sums, cuda_row_sums_work
from .taps import LANES, LEAST_TILES

one_thread = True  #: whether products on the CPU have one thread each; a device with several sets it
SMALL = 1 << 25  #: the most operations of a small product: larger ones fill a GPU, and a CPU for long


def small(rows: int, m: int, n: int) -> bool:
    """Whether the product of a (rows, m) and b (rows, n) is small; never without elements."""
    return 0 < 2 * rows * m * n <= SMALL


def alike(a: Any, m: int, n: int) -> str:
    """Which products may be one launch: small ones of the same type. `a`: (..., m), one of the two."""
    rows = int(np.prod(a.shape[:-1], dtype=np.int64))
    return f"products of {a.dtype}" if small(rows, m, n) else ""


def _gemm_flops(reads: Any, writes: Any) -> float:
    return float(2 * writes[0].size * reads[0].shape[-1])


def gemm(a: Any, b: Any, out: Any) -> Thunk:
    """out = a @ b, by tiles of ours where these are faster. For dense matrices `np.dot`: half the call cost of
    `np.matmul`, but it copies strided ones."""
    if own := _tiles(a, b, out):
        return own
    if a.ndim == b.ndim == out.ndim == 2 and a.shape[1] == 1:  # NumPy's matmul, as lanes call it, takes 5 times as long
        return loop(_outer, a[:, 0], b[0], out)
    if a.ndim == b.ndim == out.ndim == 2 and out.flags.c_contiguous and a.flags.forc and b.flags.forc:
        return partial(np.dot, a, b, out)
    return ufunc(np.matmul, a, b, out)


def _outer(a, b, y):  # type: ignore[no-untyped-def]
    for i in range(a.size):
        for j in range(b.size):
            y[i, j] = a[i] * b[j]


def gemm_add(a: Any, b: Any, more: Any, out: Any, work: Any) -> list[Thunk]:
    """out = more + a @ b, of which `more` may be `out`. Tiles add while they are in registers; else `work` has the
    product."""
    if own := _tiles(a, b, out, more):
        return [own]
    return [gemm(a, b, work), ufunc(np.add, more, work, out)]


def _tiles(a: Any, b: Any, out: Any, more: Any = None, low: float = -np.inf) -> Thunk | None:
    """The product of `tiles`, if it is faster for these matrices and each product has one thread."""
    alike = out.ndim == a.ndim == b.ndim and out.shape[:-2] == a.shape[:-2] == b.shape[:-2]
    if not alike or out.ndim not in (2, 4) or out.dtype != np.float32 or not one_thread or (
            a.shape[-2] * a.shape[-1] * b.shape[-1] < LEAST_TILES):
        return None
    from .tiles import product  # it imports numba

    return product(a, b, out, more, low)


def again_work(times: int, b: Any, transposed: bool = False) -> list[Any]:
    """The scratch array of `gemm_again` for so many products, if these are a few, with b (k, n), or with its
    transpose."""
    k, n = b.shape[::-1] if transposed else b.shape
    return [((k * (n + 2 * LANES),), b.dtype)] * (times > 3)


def gemm_again(m: int, b: Any, work: Sequence[Any]) -> tuple[list[Thunk], Callable[[Any, Any], Thunk]]:
    """For some products of a (m, k) with one b (k, n): the calls that prepare b, if there is memory for that, and
    `gemm(a, out)`. Tiles pack b once. BLAS reads rows faster than columns, which gains more than a copy of b."""
    if work and one_thread and b.dtype == np.float32:
        from .tiles import packed_product

        if own := packed_product(m, b, *work):
            return own
    if work and b.strides[-1] > b.itemsize:
        rows = work[0][: b.size].reshape(b.shape)
        return [ufunc(np.positive, b, rows)], lambda a, out: gemm(a, rows, out)
    return [], lambda a, out: gemm(a, b, out)


def group_tiles(counts: Any, group: int, a: Any, b: Any, out: Any, summed: bool, bias: Any = None
                ) -> tuple[list[Thunk], range]:
    """The call of `tiles.group_product`, and for which numbers of rows it is used."""
    if out.dtype != np.float32 or not one_thread:
        return [], range(0)
    from .tiles import group_product

    return group_product(counts, group, a, b, out, summed, bias)


# ------------------------------------------------------------------------------------------------- products on CUDA
def _steps(array: Any) -> list[int]:
    """Strides in elements, of an array (whose strides are bytes) or of a tensor (whose strides are elements)."""
    unit = getattr(array, "itemsize", 1)
    return [s // unit for s in array.strides]


def layout(a: Any) -> tuple[bool, int, int, int] | None:
    """The BLAS layout of matrices (..., r, c): (transposed, leading dimension, number of matrices, elements from one to
    the next). `transposed`: whether a column is contiguous. None for strides that a BLAS does not support.

    An axis of length 1 may have any step. All leading axes together must have a single step, 0 if they repeat.
    """
    *lead, r, c = zip(a.shape, _steps(a), strict=True)
    lead = [(n, s) for n, s in lead if n != 1]
    if any(s != next_n * next_s for (_, s), (next_n, next_s) in zip(lead, lead[1:], strict=False)):
        return None
    count, apart = int(np.prod([n for n, _ in lead], dtype=np.int64)), lead[-1][1] if lead else 0
    for transposed, (outer, outer_step), (inner, inner_step) in ((False, r, c), (True, c, r)):
        leading = max(inner, 1) if outer == 1 else outer_step
        if (inner == 1 or inner_step == 1) and leading >= inner:
            return transposed, leading, count, apart
    return None


def _unfit(a: Any) -> bool:
    """Whether a product cannot use these matrices, or this bias, without a copy."""
    return a.size > 1 and (_steps(a)[0] != 1 if a.ndim == 1 else layout(a) is None)


def dense_work(*arrays: Any) -> list[Any]:
    """The scratch arrays that `dense` needs."""
    return [(a.shape, a.dtype) for a in arrays if _unfit(a)]


def dense(arrays: Sequence[Any], work: Sequence[Any]) -> tuple[list[Any], list[Call]]:
    """Matrices and biases in a form that products support: as they are, or copied to `work`; and the launch that makes
    all copies."""
    spare = list(work)
    found = [spare.pop(0) if _unfit(a) else a for a in arrays]
    return found, dense_copies([(a, f) for a, f in zip(arrays, found, strict=True) if a is not f])


def dense_copies(pairs: Sequence[tuple[Any, Any]]) -> list[Call]:
    """One launch that copies at most four arrays of one type and of any strides to contiguous ones of their shapes."""
    pairs = [(a, to) for a, to in pairs if to.size]
    if not pairs:
        return []
    table, blocks = _DenseCopies(), 1
    for k, (a, to) in enumerate(pairs):
        vector = 1 if to.shape[-1] % 4 else 4
        table.source[k], table.to[k] = pointer(a), pointer(to)
        table.at[k][:] = strides(a.shape, steps(a, a.shape), vector=vector).content
        blocks = max(blocks, min(-(-to.size // (vector * THREADS)), 132 * WAVES))
    kernel = f"make_dense<{c_type(pairs[0][1])}>"
    return [Grid("linear.cu", kernel, (blocks, len(pairs)), (THREADS,), (Struct("DenseCopies", bytes(table)),))]


class _DenseCopies(ctypes.Structure):
    """`DenseCopies` of linear.cu."""

    _fields_ = [("source", ctypes.c_void_p * 4), ("to", ctypes.c_void_p * 4),
                ("at", ctypes.c_ubyte * STRIDES.itemsize * 4)]


def apart(p: Product) -> list[Any]:
    """A product as a library's that every version has, followed by the launches for everything else that belongs to
    it. cuBLASLt promises no epilogues for float64."""
    if p.seen is None and (str(p.out.dtype) != "float64" or (p.bias is None and not p.act)):
        calls: list[Any] = [replace(p, sums=None, work=None)]
    else:
        added = [] if p.bias is None else elements("elementwise.cu", f"add<{c_type(p.out)}>", [p.out, p.bias], p.out)
        calls = [Product(p.a, p.b, p.out, accumulate=p.accumulate), *added, *_act(p.act, p.out, p.seen)]
    work = [] if p.work is None else [p.work]
    return [*calls, *([] if p.sums is None else cuda_row_sums(p.a.T, p.sums, *work))]


def inside(p: Product) -> bool:
    """Whether cuBLASLt has an epilogue for what `apart` leaves to other launches: the sums of a's rows beside a plain
    product, or GELU's slope (its tanh form)."""
    if str(p.out.dtype) == "float64" or p.out.ndim > 2 or p.bias is not None or not p.out.size or not p.a.shape[-1]:
        return False
    slope = (p.act == "gelu_tanh_grad" and p.seen.strides == p.out.strides and p.out.shape[1] % 8 == 0
             and p.out.flags.c_contiguous and pointer(p.seen) % 16 == 0 and not p.accumulate)
    return slope if p.sums is None else not p.act and p.sums.dtype == p.out.dtype


def _act(act: str, out: Any, seen: Any = None) -> list[Call]:
    if not act:
        return []
    return list(KERNELS[act].cuda_calls([out] if seen is None else [seen, out], [out], [], {}))


def product(a: Any, b: Any, out: Any, bias: Any = None, accumulate: bool = False, act: str = "", sums: Any = None,
            work: Any = None, seen: Any = None) -> list[Call]:
    """out (..., m, n) = `act` of (a (..., m, k) @ b (..., k, n) + bias (n,)), leading axes broadcast, in as few
    products as possible. `sums` (m,): also the sums of a's rows; `work`: their scratch, see `cuda_row_sums_work`.
    `seen`: as for `Product`.

    `layout` must support the operands (`dense` copies others). Where leading axes cannot be merged into one, there is a
    product for each index of the shortest. A small product stays whole, and the device takes it apart or does not.
    """
    if sums is not None and not (fits(given := Product(a, b, out, bias, sums=sums)) or inside(given)):
        own = cuda_row_sums(a.T, sums, *([] if work is None else [work]))
        return [*product(a, b, out, bias, accumulate, act), *own]
    if not out.size:
        return []
    if not a.shape[-1]:
        if accumulate:
            return []
        empty = [Zeros(out)] if bias is None else dense_copies([(np.broadcast_to(bias, out.shape), out)])
        return [*empty, *_act(act, out, seen)]
    if out.ndim > 2 and b.size == b.shape[-2] * b.shape[-1] and a.flags.c_contiguous and out.flags.c_contiguous:
        # one taller matrix
        a, b, out = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:]), out.reshape(-1, out.shape[-1])
    if out.ndim > 2:
        a, b = (np.broadcast_to(x, (*out.shape[:-2], *x.shape[-2:])) for x in (a, b))
    if any(layout(x) is None for x in (a, b, out)):
        axes = [(n, axis) for axis, n in enumerate(out.shape[:-2]) if n > 1]
        if len(axes) < 2:
            raise ValueError(f"a product does not support operands with strides {a.strides}, {b.strides} and "
                             f"{out.strides}; copy them first")
        n, axis = min(axes)
        every = [(*(slice(None),) * axis, i) for i in range(n)]
        return [call for i in every for call in product(a[i], b[i], out[i], bias, accumulate, act)]
    whole = Product(a, b, out, bias, accumulate, act, sums, work, seen)
    return [whole] if fits(whole) or inside(whole) else apart(whole)


@kernel("matmul", axes="...mk,...ko->...mo", flops=_gemm_flops)
def matmul(xp: Any, a: Any, b: Any) -> Any:
    """(..., m, k) @ (..., k, n) -> (..., m, n)."""
    return xp.matmul(a, b)


@matmul.cpu
def _(a: Any, b: Any, y: Any) -> Any:
    return [gemm(a, b, y)]


@matmul.cuda(work=lambda reads, writes: dense_work(*reads))
def _(a: Any, b: Any, y: Any, *work: Any) -> Any:
    (a, b), copies = dense([a, b], work)
    return [*copies, *product(a, b, y)]


@kernel("linear", axes="mi,oi,o->mo", flops=_gemm_flops)
def linear(xp: Any, x: Any, w: Any, b: Any = None, *, act: str = "") -> Any:
    """x (n, i), w (o, i), b (o,) -> y (n, o) = x w^T + b, or relu of it."""
    y = xp.matmul(x, w.T)
    y = y if b is None else y + b
    return xp.maximum(y, 0) if act else y


@linear.cpu
def _(x: Any, w: Any, *rest: Any, act: str = "") -> Any:
    *bias, y = rest
    if own := _tiles(x, w.T, y, bias[0] if bias else None, 0 if act else -np.inf):
        return [own]
    return [gemm(x, w.T, y), *(loop(_add_row, y, b) for b in bias), *cpu_act(act, y)]


def cpu_act(act: str, *read: Any) -> list[Thunk]:
    """The calls after a product on the CPU: none, or an activation's kernel, which writes over the last array that it
    reads; row by row if there are gaps between rows, as in a part of a product's columns."""
    each = [read] if all(a.flags.c_contiguous for a in read) else zip(*read, strict=True)
    return [call for part in each for call in KERNELS[act].bind(part, part[-1:], [], {})] if act else []


@linear.cuda(work=lambda reads, writes, act="": dense_work(*reads))
def _(x: Any, w: Any, *rest: Any, act: str = "") -> Any:
    bias, (y, *work) = ([rest[0]], rest[1:]) if rest[0].ndim == 1 else ([], rest)
    (x, w, *bias), copies = dense([x, w, *bias], work)
    return [*copies, *product(x, w.T, y, bias[0] if bias else None, act=act)]


def _add_row(y, b):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


@kernel("linear_weight_grad", axes="mi,mo->oi,o", flops=lambda reads, writes: 2.0 * writes[0].size * reads[0].shape[0],
        alike=lambda reads, writes, bias: alike(reads[0], *writes[0].shape))
def linear_weight_grad(xp: Any, x: Any, dy: Any, *, bias: bool) -> Any:
    """dw (o, i) = dy^T x; with `bias` also db (o,) = the sum of dy's rows."""
    dw = xp.matmul(dy.T, x)
    return (dw, dy.sum(axis=0)) if bias else dw


@linear_weight_grad.cpu
def _(x: Any, dy: Any, dw: Any, *rest: Any, bias: bool) -> Any:
    return [gemm(dy.T, x, dw), *(sum_rows(dy, db) for db in rest)]


def _weight_grad_work(reads: Any, writes: Any, bias: bool) -> list[Any]:
    rows, (m, n) = reads[0].shape[0], writes[0].shape
    if small(rows, m, n):
        return cuda_row_products_work(rows, m, n, bias)
    return [*dense_work(*reads), *(cuda_row_sums_work(*reads[1].shape) if bias else [])]


@linear_weight_grad.cuda(work=_weight_grad_work)
def _(x: Any, dy: Any, dw: Any, *rest: Any, bias: bool) -> Any:
    db, work = rest[:bias], rest[bias:]
    if small(len(x), *dw.shape):
        return cuda_row_products(dy, x, dw, db[0] if bias else None, *work)
    copied = len(dense_work(x, dy))
    (x, dy), copies = dense([x, dy], work[:copied])
    return [*copies, *product(dy.T, x, dw, sums=db[0] if db else None, work=work[copied] if work[copied:] else None)]


def sum_rows(x: Any, total: Any) -> Thunk:
    """total (n,) = the sum of the rows of x (m, n), from the first to the last."""
    return loop(_sum_rows, x, total)


def _sum_rows(x, total):  # type: ignore[no-untyped-def]
    for j in range(x.shape[1]):
        total[j] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total[j] += x[i, j]

