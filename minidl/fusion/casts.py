"""The fusion rule for mixed precision: one launch rounds all parameters, and the 16-bit gradients of products go to the
updates, or to the division by the loss scale, without a cast. The bits stay the same."""

from __future__ import annotations

from ..core.columns import grouped
from ..core.graph import Launch, Role, View
from ..core.tasks import Kind
from ..kernels.update import RULES
from .draft import Draft


def casts(draft: Draft) -> None:
    """Rounds all parameters at once, before the first one is used, and widens no gradient for an update."""
    alike = grouped((launch.writes[0].dtype, (i, launch)) for i, entry in draft.numbered() if draft.kind(i) == Kind.F
                    for launch in entry.launches if _rounds(draft, i, launch))
    for dtype, group in alike.items():
        first, launches = group[0][0], [launch for _, launch in group]
        for i, launch in group:
            draft.merge(i, [other for other in draft[i].launches if other is not launch])
        many = draft.launch("cast_many", [launch.reads[0] for launch in launches],
                            [launch.writes[0] for launch in launches], dtype=dtype)
        draft.merge(first, [many, *draft[first].launches])
    for i, entry in draft.numbered():
        for cast in [launch for launch in entry.launches if launch.kernel == "cast"]:
            (low,), (wide,) = cast.reads, cast.writes
            if draft.kind(i) == Kind.W and draft.passed_on(low) is not None and wide.dense and low.dense:
                _read_it_low(draft, i, cast, low, wide)


def _rounds(draft: Draft, i: int, launch: Launch) -> bool:
    """Whether the launch rounds a whole parameter that no earlier task changes."""
    if launch.kernel != "cast" or draft.passed_on(launch.writes[0]) is None:
        return False
    p = launch.reads[0]
    return (draft.graph.storages[p.storage].role == Role.PARAMETER and p.dense
            and all(task > i for b in draft.buffers(p) for task in draft.writers(b)))


def _read_it_low(draft: Draft, i: int, cast: Launch, low: View, wide: View) -> None:
    """Removes the cast if every reader of its result can read `low` instead."""
    buffer = draft.buffer(wide)
    if buffer is None or buffer in draft.kept:
        return
    readers = [t for t in draft.readers(buffer) if t != i]
    takers = [t for t in readers if any(launch.kernel == "unscale" for launch in draft[t].launches)][:1] or readers
    if any(t < takers[0] for t in readers) or (takers is readers and len(draft.writers(buffer)) > 1):
        return  # the tasks after an unscale need what it has written
    others = [launch for launch in draft[i].launches if launch is not cast]
    if any(wide in (*launch.reads, *launch.writes) for launch in others) or not all(
            launch.kernel == "unscale" or (launch.kernel in RULES and launch.reads[1] == wide)
            for t in takers for launch in draft[t].launches if wide in launch.reads):
        return
    draft.read(takers, wide, low)
    draft.merge(i, others)
