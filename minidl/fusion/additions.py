"""The fusion rule for sums of gradients, as at the end of a residual branch: the product that makes the gradient toward
an input adds it to the other one in place. Readers of the sum then read it there."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ..core.graph import Launch, View
from ..core.tasks import Kind, strides_of
from ..kernels.conv_cuda import way
from .draft import Draft


def additions(draft: Draft) -> None:
    """Lets products add to a gradient that nobody needs afterwards."""
    for i, entry in list(draft.numbered()):
        if len(entry.launches) > 1 and entry.launches[1].kernel == "add":
            _add_in_place(draft, i, *entry.launches)


def _add_in_place(draft: Draft, i: int, first: Launch, add: Launch, *rest: Launch) -> None:
    product, dx = _matrices(first, draft.device.captures), first.writes[0]
    if product is None or add.writes != (dx,) or dx not in add.reads or add.reads[0] == add.reads[1]:
        return
    (more,) = (v for v in add.reads if v != dx)
    own, other = draft.passed_on(dx), _spent(draft, more, i)
    if (own is None or other is None or (more.shape, more.strides, more.dtype) != (dx.shape, dx.strides, dx.dtype)
        or any(dx in launch.reads or more in launch.reads for launch in (first, *rest))):
        return
    a, b = product
    out = _matrix(more, *dx.shape[-1:])
    launch, work = draft.launch("matmul_add", [a, b, out], [out])
    readers = [t for t in draft.readers(own) if t != i]
    draft.merge(i, [], [launch, *rest], [own], [other, *work])
    for t in readers:
        launches = [replace(old, reads=tuple(replace(v, storage=more.storage) if v.storage == dx.storage else v
                                             for v in old.reads)) for old in draft[t].launches]
        draft.merge(t, [], launches, [own], [], reads=[other])


def _spent(draft: Draft, view: View, i: int) -> int | None:
    """The buffer of a gradient that the tasks make, which task i may overwrite: all others that touch it come before,
    and none is a weight gradient, whose delay would be in the way. Else None."""
    buffer = draft.buffer(view)
    if buffer is None or buffer in draft.kept or draft.graph.storages[view.storage].live is not None:
        return None
    made, read = draft.writers(buffer), [t for t in draft.readers(buffer) if t != i]
    return buffer if made and all(t < i and draft.kind(t) != Kind.W for t in (*made, *read)) else None


def _matrices(launch: Launch, pointwise: bool) -> tuple[View, View] | None:
    """The operands of a product of two matrices, or of a gradient that is one, if `pointwise` ones are products on the
    device; None for any other launch."""
    if not launch.reads or any(v.strides != strides_of(v.shape) for v in (*launch.reads[:2], *launch.writes)):
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
