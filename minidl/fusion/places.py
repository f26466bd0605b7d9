"""The fusion rule for results that are written over what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.graph import Launch, View
from ..kernels import KERNELS
from .draft import Draft


def in_place(draft: Draft) -> None:
    """Writes a result over something that its launch reads, if the kernel may and nobody needs that afterwards: on a
    CPU, memory that nothing has read need not come into the cache. All bits stay. Not for steps that are cut in stages:
    both may be on other ranks."""
    for i, entry in draft.numbered():
        for at in range(0 if draft.device.captures else len(entry.launches)):
            launch = entry.launches[at]
            pairs = ((launch.writes[result], launch.reads[read]) for result, read in KERNELS[launch.kernel].over
                     if result < len(launch.writes) and read < len(launch.reads))
            if pair := next((pair for pair in pairs if _may(draft, i, at, *pair)), None):
                draft.moved(*pair)


def _may(draft: Draft, i: int, at: int, y: View, x: View) -> bool:
    """Whether launch `at` of task i may write y over x: it makes all of y, and nothing reads x later."""
    def place(view: View) -> tuple[Any, ...]:
        return view.shape, view.strides, view.offset, view.dtype, draft.storages[view.storage].bytes

    def uses(view: View, launches: Sequence[Launch]) -> list[View]:
        return [v for launch in launches for v in launch.views if v.storage == view.storage]

    launches = draft[i].launches
    return (place(x) == place(y) and uses(x, launches[at:]) == [x] and not uses(y, launches[:at])
            and y.storage not in {v.storage for v in launches[at].reads} and draft.passed_on(y) is not None
            and draft.spent(x, i))
