"""The fusion rule for both gradients of a batch norm: the sums that are the parameters' gradient are made in the task
of the gradient toward the input, which needs them, by one launch of `kernels/norm_both.py`. An addition of another
gradient to the latter joins them. Nothing waits longer: the sums are on the chain of output gradients anyway."""

from __future__ import annotations

from ..core.graph import Launch, View
from ..core.tasks import strides_of
from .draft import Draft

SUMS = ("batch_norm_weight_grad", "batch_norm_act_weight_grad")
INPUTS = ("batch_norm_input_grad", "batch_norm_act_input_grad")


def batch_norm_grad(draft: Draft) -> None:
    """Makes the sums of each batch norm in the task of its gradient toward the input."""
    for i, entry in list(draft.numbered()):
        if entry.only is not None and entry.only.kernel in SUMS:
            _join(draft, i, entry.only)


def _join(draft: Draft, i: int, sums: Launch) -> None:
    dw, db, *ds = sums.writes
    readers = draft.readers(dw_buffer) if (dw_buffer := draft.buffer(dw)) is not None else []
    found = [t for t in readers if draft[t].launches[0].kernel in INPUTS and _same(sums, draft[t].launches[0])]
    if len(found) != 1:
        return
    t, (first, *rest) = found[0], draft[found[0]].launches
    into = t if draft.moves(i, t) else i
    if into == i and not draft.moves(t, i):
        return
    (dx,), more = first.writes, None
    if rest and (more := _added(rest[0], dx)) is not None:
        del rest[0]
    act = dict(sums.constants).get("act", "none")
    x, mean, rstd, *own = sums.reads
    reads = [x, mean, rstd, *(own if act != "none" else (first.reads[3], first.reads[3], *own))]
    launch, work = draft.launch("batch_norm_grad", [*reads, *([] if more is None else [more])], [dw, db, *ds, dx],
                                act=act, kept=bool(ds), add=more is not None)
    made = [b for b in draft.buffers(dw, db, *ds) if not any(v in other.reads for other in rest for v in (dw, db, *ds))]
    draft.merge(into, [i if into == t else t], [launch, *rest], [], work, as_task=t, reads_not=made)


def _same(sums: Launch, inputs: Launch) -> bool:
    """Whether these are the two gradients of one batch norm, from the same gradient of its output."""
    seen = sums.writes[2] if len(sums.writes) == 3 else sums.reads[3 if sums.kernel == SUMS[0] else 5]
    return (inputs.reads[:3] == sums.reads[:3] and inputs.reads[-3:] == (*sums.writes[:2], seen)
            and (len(sums.writes) == 3 or SUMS.index(sums.kernel) == INPUTS.index(inputs.kernel)))


def _added(add: Launch, dx: View) -> View | None:
    """The other operand of an addition to dx in place; None for any other launch."""
    if add.kernel != "add" or add.writes != (dx,) or dx not in add.reads or add.reads[0] == add.reads[1]:
        return None
    (more,) = (v for v in add.reads if v != dx)
    apart = more.strides[-2] if len(more.shape) > 1 else more.shape[-1]  # elements from pixel to pixel
    rows = tuple(apart * s for s in strides_of(more.shape[:-1]))
    return more if (more.shape, more.strides, more.dtype) == (dx.shape, (*rows, 1), dx.dtype) else None
