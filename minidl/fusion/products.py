"""The fusion rules for products and convolutions: they can end in relu or with the slope of an activation, write into a
slab, read from one, and add to another gradient in place."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from ..core.graph import Launch, View
from ..core.tasks import Kind
from ..kernels.conv_cuda import way
from ..kernels.product_slope import SLOPES
from .draft import Draft, addend

ALIGNED = 16  #: bytes; at other addresses cuDNN offers 1 to 3 engines for a convolution instead of 16 to 22


def epilogue(draft: Draft) -> None:
    """Lets a product do the relu after it: a linear layer, and a 1x1 convolution with bias."""
    for i, first in draft.alone("linear", "conv2d"):
        if not _takes_relu(first) or (found := _then(draft, i, first)) is None:
            continue
        to, second = found
        if second.kernel == "relu" and second.reads[0] == first.writes[0]:
            launch = draft.launch(first.kernel, first.reads, second.writes, **dict(first.constants), act="relu")
            draft.merge(to, [launch], [i], as_task=i)


def _then(draft: Draft, i: int, first: Launch) -> tuple[int, Launch] | None:
    """The only task that reads the result of task i and its only launch, if this may run at the place of that one."""
    made = draft.passed_on(first.writes[0])
    readers = [] if made is None else draft.readers(made)
    second = draft[readers[0]].only if len(readers) == 1 else None
    return None if second is None or not draft.moves(i, readers[0], readers) else (readers[0], second)


def slopes(draft: Draft) -> None:
    """Lets products of two matrices that make the gradient toward the output of relu, or of GELU in its tanh form,
    multiply by the slope (`kernels/product_slope.py`). The weight gradient reads the result as before."""
    for i, first in draft.alone("matmul"):
        if (any(len(v.shape) != 2 or not v.dense for v in first.views)
            or (found := _then(draft, i, first)) is None or found[1].kernel not in SLOPES):
            continue
        to, second = found
        seen, dy, out = (_like(v, first.writes[0]) for v in second.views)
        if seen is not None and out is not None and dy == first.writes[0]:
            draft.merge(to, [draft.launch("matmul_slope", [*first.reads, seen], [out], act=second.kernel)], [i],
                        as_task=i)


def _like(view: View, other: View) -> View | None:
    """A dense array, which may have more axes, in the shape of another one of its size and type; else None."""
    same = prod(view.shape) == prod(other.shape) and view.dtype == other.dtype
    return replace(view, shape=other.shape, strides=other.strides) if same and view.dense else None


def _takes_relu(launch: Launch) -> bool:
    """Whether it is a product: a linear layer, or a 1x1 convolution."""
    geometry = dict(launch.constants).get("geometry")
    return geometry is None or (launch.reads[1].shape[1:3] == (1, 1) and geometry.groups == 1
                                and geometry.stride == (1, 1) and geometry.padding == (0, 0))


# --------------------------------------------------------------------------------------------------------------- slabs
def slabs(draft: Draft) -> None:
    """Lets a convolution write its output directly into the slab that joins it to others, and its gradients read from
    there, without copies. Only for devices whose convolutions take images with gaps between pixels."""
    if not draft.device.captures:
        return
    for i, copy in draft.alone("copy"):
        if copy.reads[0].dtype != copy.writes[0].dtype:
            continue
        if draft.kind(i) == Kind.F:
            _write_in_slab(draft, i, copy)
        elif (made := draft.passed_on(copy.writes[0])) is not None and _pixels(copy.reads[0]):
            readers = draft.readers(made)
            if all(draft.moves(i, t, readers)
                   and all(_takes(launch, copy.writes[0]) for launch in draft[t].launches) for t in readers):
                draft.read(readers, copy.writes[0], copy.reads[0], draft[i].reads)
                draft.entries[i] = None


def _write_in_slab(draft: Draft, i: int, copy: Launch) -> None:
    made = draft.passed_on(copy.reads[0])
    if made is None or draft.readers(made) != [i] or not _pixels(copy.writes[0]):
        return
    (source,) = draft.writers(made)
    first = draft[source].only
    if (first is not None and first.kernel == "conv2d" and len(first.reads) == 2 and first.writes[0] == copy.reads[0]
        and _has_gaps(first) and draft.moves(source, i, [i])):
        draft.merge(i, [draft.launch("conv2d", first.reads, copy.writes, **dict(first.constants))], [source],
                    as_task=source)


def _takes(launch: Launch, view: View) -> bool:
    """Whether a launch does not read the view, or reads it only as the gradient dy of a convolution's output."""
    if view not in launch.reads:
        return True
    at = {"conv2d_input_grad": 0, "conv2d_weight_grad": 1}.get(launch.kernel)
    return at is not None and launch.reads[at] == view != launch.reads[1 - at] and _has_gaps(launch)


def _has_gaps(launch: Launch) -> bool:
    """Whether the output of this convolution, or its gradient, may have gaps between its pixels."""
    constants = dict(launch.constants)
    x, w = {"conv2d": launch.reads[:2], "conv2d_input_grad": (launch.writes[0], launch.reads[1]),
            "conv2d_weight_grad": (launch.reads[0], launch.writes[0])}[launch.kernel]
    return (way(x, w, constants["geometry"]) in ("pointwise", "library") and not constants.get("bias")
            and not constants.get("act"))


def _pixels(view: View) -> bool:
    """Whether channels are contiguous, pixels equally far apart, and the first one at an aligned address."""
    steps = [(n, s) for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
    aligned = view.offset * np.dtype(view.dtype).itemsize % ALIGNED == 0
    regular = all(a == b * n for (_, a), (n, b) in zip(steps, steps[1:], strict=False))
    return aligned and regular and view.strides[-1] == 1


# ----------------------------------------------------------------------------------------------------------- additions
def additions(draft: Draft) -> None:
    """Lets products that make a gradient toward an input, as at the end of a residual branch, add it in place to the
    other one, which nobody needs afterwards. Readers of the sum then read it there."""
    for i, entry in draft.numbered():
        if len(entry.launches) > 1 and entry.launches[1].kernel == "add":
            _add_in_place(draft, i, *entry.launches)


def _add_in_place(draft: Draft, i: int, first: Launch, add: Launch, *rest: Launch) -> None:
    product, dx = _matrices(first, draft.device.captures), first.writes[0]
    more = addend(add, dx)
    if (product is None or more is None or draft.passed_on(dx) is None or not draft.spent(more, i)
        or (more.shape, more.strides, more.dtype) != (dx.shape, dx.strides, dx.dtype)
        or any(dx in launch.reads or more in launch.reads for launch in (first, *rest))):
        return
    out = _matrix(more, *dx.shape[-1:])
    draft.merge(i, [draft.launch("matmul_add", [*product, out], [out]), *rest])
    draft.moved(dx, more)


def _matrices(launch: Launch, pointwise: bool) -> tuple[View, View] | None:
    """The operands of a product of two matrices, or of a gradient that is one, if `pointwise` ones are products on the
    device; None for any other launch."""
    if not launch.reads or not all(v.dense for v in (*launch.reads[:2], *launch.writes)):
        return None
    if launch.kernel == "matmul" and all(len(v.shape) == 2 for v in launch.reads):
        a, b = launch.reads
        return a, b
    if launch.kernel == "conv2d_input_grad" and pointwise:
        dy, w = launch.reads
        if way(launch.writes[0], w, dict(launch.constants)["geometry"]) == "pointwise":
            return _matrix(dy, dy.shape[-1]), _matrix(w, w.shape[-1])
    return None


def _matrix(view: View, columns: int) -> View:
    """A dense array as a matrix with so many columns."""
    return replace(view, shape=(prod(view.shape) // max(columns, 1), columns), strides=(columns, 1))
