"""The fusion rule for updates: many parameters in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.columns import grouped
from ..core.graph import Launch, View
from .draft import Draft

UPDATES = ("sgd", "adam", "nadam", "rmsprop")


def updates(draft: Draft) -> None:
    """Merges all updates into one task, with one launch for each kind. It waits for every weight gradient."""
    tasks = [i for i, e in draft.numbered() if any(launch.kernel in UPDATES for launch in e.launches)
             and all(launch.kernel in (*UPDATES, "mul") for launch in e.launches)]
    tasks = [i for i in tasks if i == tasks[-1] or draft.moves(i, tasks[-1])]
    if len(tasks) < 2:
        return
    launches = [launch for i in tasks for launch in draft[i].launches]
    alike = grouped(((launch.kernel, len(launch.writes), _shared(launch), launch.constants), launch)
                    for launch in launches if launch.kernel in UPDATES)
    many = [draft.launch(*_many(same), **dict(same[0].constants), count=len(same)) for same in alike.values()]
    rest = [launch for launch in launches if launch.kernel not in UPDATES]
    draft.merge(tasks[-1], tasks[:-1], [*rest, *(launch for launch, _ in many)], [],
                [b for _, buffers in many for b in buffers])
    draft.units.append("updates")
    draft[tasks[-1]].unit = len(draft.units) - 1


def _shared(launch: Launch) -> tuple[View, ...]:
    """The operands that all parameters share: lr, powers and skip. sgd reads (p, g, lr, v..., skip...), the others
    read (p, g, states..., lr, powers..., skip...)."""
    return tuple(v for v in launch.reads if v not in _own(launch))


def _own(launch: Launch) -> tuple[View, ...]:
    """The parameter, its gradient and its states."""
    first = 3 if launch.kernel == "sgd" else 2
    return (*launch.reads[:2], *launch.reads[first : first + len(launch.writes) - 1])


def _many(launches: Sequence[Launch]) -> tuple[str, tuple[View, ...], tuple[View, ...]]:
    """Kernel, reads and writes of one launch for all of these: each parameter's own operands, then shared ones."""
    return (f"{launches[0].kernel}_many", tuple(v for launch in launches for v in _own(launch)) + _shared(launches[0]),
            tuple(v for launch in launches for v in launch.writes))
