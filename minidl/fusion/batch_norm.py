"""The fusion rule for batch norm with the sum and activation after it; `kernels/norm_act.py` defines the launches."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.graph import Launch, View
from ..core.tasks import Kind, strides_of
from .draft import Draft, DraftTask

#: activations that a batch norm can end with, and whether their gradient reads the output (else the input)
ACTIVATIONS = {"relu": True, "relu6": True, "hardswish": False}


def batch_norm_act(draft: Draft) -> None:
    """Fuses a batch norm with the activation after it, and a sum between the two, if any; forward and backward."""
    for i, entry in list(draft.numbered()):
        if entry.only is not None and entry.only.kernel == "batch_norm":
            _end_batch_norm(draft, i)


def _end_batch_norm(draft: Draft, i: int) -> None:
    """Fuses a batch norm with its tail, forward and backward, if all of it can be fused."""
    first = draft[i].launches[0]
    tail = _tail(draft, first.writes[0])
    if tail is None or not draft.moves(i, tail.forward[-1], tail.forward):
        return
    into, last = tail.forward[-1], draft[tail.forward[-1]].launches[0]
    constants = {**dict(first.constants), "act": tail.act}
    if (tail.gradient is not None and not _end_gradient(draft, first, last.writes[0], tail)
        and not ACTIVATIONS[tail.act]):
        return  # its gradient needs a value that would no longer exist
    gone = [draft.passed_on(draft[t].launches[0].writes[0]) for t in (i, *tail.forward[:-1])]
    launch, work = draft.launch("batch_norm_act", [*first.reads, *tail.added],
                                [last.writes[0], *first.writes[1:]], **constants)
    draft.merge(into, [i, *tail.forward[:-1]], [launch], [b for b in gone if b is not None], work, as_task=i)


def _end_gradient(draft: Draft, norm: Launch, y: View, tail: Tail) -> bool:
    """Fuses the backward half; False if that is not possible."""
    assert tail.gradient is not None
    g = draft[tail.gradient].launches[0]
    seen, dy, ds = g.reads[0], g.reads[1], g.writes[0]
    passed = draft.passed_on(ds)
    if passed is None or len(draft[tail.gradient].launches) > 1:
        return False
    readers = draft.readers(passed)
    sums = [t for t in readers if _is(draft[t], "batch_norm_weight_grad", norm.writes[1], ds)]
    inputs = [t for t in readers if _is(draft[t], "batch_norm_input_grad", norm.writes[1], ds, others=True)]
    if len(sums) != 1 or len(inputs) > 1 or (not tail.added and len(readers) != len(sums) + len(inputs)):
        return False
    x, mean, rstd, w, b = norm.reads[0], *norm.writes[1:3], *norm.reads[1:3]
    given = draft[tail.gradient].reads - {draft.buffer(seen)}  # the buffers of dy
    old = draft[sums[0]].launches[0]
    if tail.added:
        launch, work = draft.launch("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy, y],
                                    [*old.writes, ds], act=tail.act)
        draft.merge(tail.gradient, sums, [launch], [], work, as_task=sums[0],
                    reads=draft.buffers(w, b), reads_not=[passed])
        return True
    if any(not draft.moves(tail.gradient, t, (*sums, *inputs)) for t in inputs):
        return False
    for t in inputs:
        o, *others = draft[t].launches
        launch, work = draft.launch("batch_norm_act_input_grad", [x, mean, rstd, w, b, *o.reads[4:6], dy],
                                    o.writes, act=tail.act)
        draft.merge(t, [], [launch, *others], [passed], work, reads=[*given, *draft.buffers(w, b)])
    launch, work = draft.launch("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy], old.writes, act=tail.act)
    unread = [s for s in draft.buffers(seen) if s not in given]
    draft.merge(tail.gradient, sums, [launch], [passed], work, as_task=sums[0],
                reads=draft.buffers(w, b), reads_not=unread)
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
            if z.shape != y.shape or z.strides != strides_of(z.shape):
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
