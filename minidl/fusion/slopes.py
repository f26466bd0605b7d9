"""The fusion rule for the slope of an activation: the product that makes the gradient toward its output multiplies by
it. `kernels/product_slope.py` has the launch; the weight gradient reads the result as before."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ..core.graph import View
from ..core.tasks import strides_of
from ..kernels.product_slope import SLOPES
from .draft import Draft


def slopes(draft: Draft) -> None:
    """Lets products of two matrices end with the slope of relu, or of GELU in its tanh form."""
    for i, entry in list(draft.numbered()):
        first = entry.only
        if (first is None or first.kernel != "matmul" or any(len(v.shape) != 2 for v in first.views)
            or any(v.strides != strides_of(v.shape) for v in first.views)
            or (made := draft.passed_on(first.writes[0])) is None):
            continue
        readers = draft.readers(made)
        second = draft[readers[0]].only if len(readers) == 1 else None
        if second is None or second.kernel not in SLOPES or not draft.moves(i, readers[0], readers):
            continue
        seen, dy, out = (_like(v, first.writes[0]) for v in second.views)
        if seen is None or out is None or dy != first.writes[0]:
            continue
        launch, work = draft.launch("matmul_slope", [*first.reads, seen], [out], act=second.kernel)
        draft.merge(readers[0], [i], [launch], [made], work, as_task=i)


def _like(view: View, other: View) -> View | None:
    """A dense array, which may have more axes, in the shape of another one of its size and type; else None."""
    same = prod(view.shape) == prod(other.shape) and view.dtype == other.dtype
    return replace(view, shape=other.shape, strides=other.strides) if same and (
        view.strides == strides_of(view.shape)) else None
