"""The fusion rules for batch norm: with the sum and activation after it, and both of its gradients as one launch.

`kernels/norm_act.py` and `kernels/norm_both.py` define the launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.graph import Launch, View
from ..core.tasks import Kind, strides_of
from .draft import Draft, DraftTask, addend

#: activations that a batch norm can end with, and whether their gradient reads the output (else the input)
ACTIVATIONS = {"relu": True, "relu6": True, "hardswish": False}
SUMS = ("batch_norm_weight_grad", "batch_norm_act_weight_grad")
INPUTS = ("batch_norm_input_grad", "batch_norm_act_input_grad")


def batch_norm_act(draft: Draft) -> None:
    """Fuses a batch norm with the activation after it, and a sum between the two, if any; forward and backward."""
    for i, first in draft.alone("batch_norm"):
        _end_batch_norm(draft, i, first)


def _end_batch_norm(draft: Draft, i: int, first: Launch) -> None:
    """Fuses a batch norm with its tail, forward and backward, if all of it can be fused."""
    tail = _tail(draft, first.writes[0])
    if tail is None or not draft.moves(i, tail.forward[-1], tail.forward):
        return
    into, last = tail.forward[-1], draft[tail.forward[-1]].launches[0]
    if (tail.gradient is not None and not _end_gradient(draft, first, last.writes[0], tail)
        and not ACTIVATIONS[tail.act]):
        return  # its gradient needs a value that would no longer exist
    launch = draft.launch("batch_norm_act", [*first.reads, *tail.added], [last.writes[0], *first.writes[1:]],
                          **dict(first.constants), act=tail.act)
    draft.merge(into, [launch], [i, *tail.forward[:-1]], as_task=i)


def _end_gradient(draft: Draft, norm: Launch, y: View, tail: Tail) -> bool:
    """Fuses the backward half; False if that is not possible."""
    assert tail.gradient is not None
    g = draft[tail.gradient].launches[0]
    seen, dy, ds = g.reads[0], g.reads[1], g.writes[0]
    passed = draft.passed_on(ds)
    if passed is None or len(draft[tail.gradient].launches) > 1:
        return False
    readers = draft.readers(passed)
    sums = [t for t in readers if _is(draft[t], SUMS[0], norm.writes[1], ds)]
    inputs = [t for t in readers if _is(draft[t], INPUTS[0], norm.writes[1], ds, others=True)]
    if len(sums) != 1 or len(inputs) > 1 or (not tail.added and (len(readers) != 1 + len(inputs) or any(
            not draft.moves(tail.gradient, t, (*sums, *inputs)) for t in inputs))):
        return False
    own = [norm.reads[0], *norm.writes[1:3], *norm.reads[1:3]]  # x, mean, rstd, w, b
    old, of_dy = draft[sums[0]].launches[0], draft[tail.gradient].reads - {draft.buffer(seen)}
    for t in inputs if not tail.added else ():
        first, *others = draft[t].launches
        draft.merge(t, [draft.launch(INPUTS[1], [*own, *first.reads[4:6], dy], first.writes, act=tail.act), *others],
                    reads=of_dy)
    more, kept = ([y], [ds]) if tail.added else ([], [])
    launch = draft.launch(SUMS[1], [*own, dy, *more], [*old.writes, *kept], act=tail.act)
    draft.merge(tail.gradient, [launch], sums, as_task=sums[0])
    return True


def _is(entry: DraftTask, kernel: str, mean: View, ds: View, others: bool = False) -> bool:
    """Whether the first launch of a task is this gradient of the batch norm that made `mean`. It must be the only
    launch; with `others`, more launches are allowed if they do not read ds."""
    first, *rest = entry.launches
    return (first.kernel == kernel and first.reads[1] == mean and first.reads[-1] == ds
            and all(others and ds not in launch.reads for launch in rest))


@dataclass(frozen=True)
class Tail:
    """The tail of a batch norm: the forward tasks up to the activation, the views added before it, the activation, and
    the task of its gradient, if there is one."""

    forward: list[int]
    added: list[View]
    act: str
    gradient: int | None


def _tail(draft: Draft, y: View) -> Tail | None:
    """The tail after output y; None if there is nothing to fuse."""
    forward: list[int] = []
    added: list[View] = []
    while True:
        buffer = draft.passed_on(y)
        readers = [] if buffer is None else draft.readers(buffer)
        after = [t for t in readers if draft.kind(t) == Kind.F]
        launch = draft[after[0]].only if len(after) == 1 else None
        if launch is None or y not in launch.reads or (added and launch.kernel not in ACTIVATIONS):
            return Tail(forward, added, "none", None) if added else None
        forward.append(after[0])
        rest = [t for t in readers if t != after[0]]
        if launch.kernel == "add" and not added and not rest and launch.reads[0] != launch.reads[1]:
            (z,) = (v for v in launch.reads if v != y)
            if z.shape != y.shape or not z.dense:
                return None
            added, y = [z], launch.writes[0]
            continue
        if launch.kernel not in ACTIVATIONS:
            return None
        if added and not ACTIVATIONS[launch.kernel]:
            return Tail(forward[:-1], added, "none", None)
        seen = launch.writes[0] if ACTIVATIONS[launch.kernel] else y
        of_seen = draft.buffer(seen)
        gradient = [] if of_seen is None else [t for t in draft.readers(of_seen) if any(
            g.kernel == f"{launch.kernel}_grad" and g.reads[0] == seen for g in draft[t].launches)]
        if len(gradient) > 1 or any(t not in gradient for t in rest):
            return None
        return Tail(forward, added, launch.kernel, gradient[0] if gradient else None)


def batch_norm_grad(draft: Draft) -> None:
    """Makes the sums that are the parameters' gradient in the task of the gradient toward the input, which needs them.
    An addition of another gradient to the latter joins them. Nothing waits longer: the sums are on the chain of output
    gradients anyway."""
    for i, sums in draft.alone(*SUMS):
        _join(draft, i, sums)


def _join(draft: Draft, i: int, sums: Launch) -> None:
    dw, db, *ds = sums.writes
    readers = draft.readers(dw_buffer) if (dw_buffer := draft.buffer(dw)) is not None else []
    found = [t for t in readers if draft[t].launches[0].kernel in INPUTS and _same(sums, draft[t].launches[0])]
    if len(found) != 1:
        return
    t, (first, *rest) = found[0], draft[found[0]].launches
    into, gone = (t, i) if draft.moves(i, t) else (i, t)
    if into == i and not draft.moves(t, i):
        return
    (dx,), more = first.writes, None
    if rest and (more := _added(rest[0], dx)) is not None:
        del rest[0]
    act = dict(sums.constants).get("act", "none")
    x, mean, rstd, *own = sums.reads
    reads = [x, mean, rstd, *(own if act != "none" else (first.reads[3], first.reads[3], *own))]
    launch = draft.launch("batch_norm_grad", [*reads, *([] if more is None else [more])], [dw, db, *ds, dx],
                          act=act, kept=bool(ds), add=more is not None)
    draft.merge(into, [launch, *rest], [gone], as_task=t)


def _same(sums: Launch, inputs: Launch) -> bool:
    """Whether these are the two gradients of one batch norm, from the same gradient of its output."""
    seen = sums.writes[2] if len(sums.writes) == 3 else sums.reads[3 if sums.kernel == SUMS[0] else 5]
    return (inputs.reads[:3] == sums.reads[:3] and inputs.reads[-3:] == (*sums.writes[:2], seen)
            and (len(sums.writes) == 3 or SUMS.index(sums.kernel) == INPUTS.index(inputs.kernel)))


def _added(add: Launch, dx: View) -> View | None:
    """The gradient that a launch adds to dx in place, dense or with gaps between pixels; None for any other launch."""
    if (more := addend(add, dx)) is None:
        return None
    apart = more.strides[-2] if len(more.shape) > 1 else more.shape[-1]  # elements from pixel to pixel
    rows = tuple(apart * s for s in strides_of(more.shape[:-1]))
    return more if (more.shape, more.strides, more.dtype) == (dx.shape, (*rows, 1), dx.dtype) else None
