"""Clocks of `gossip.py`: when a rank mixes in a layer that another one has sent.

The simulated clock is the order of all moments, which needs no function. The real one mixes a layer as soon as it is
there; the log of a run repeats its bits, whatever its clock was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..core.columns import grouped
from ..core.graph import TaskGraph
from .version_log import VersionRead

Event = tuple[int, int]  #: (a task of this rank, -1), or (an update, the rank that has sent its layer to this one)
#: from a step, its events by the simulated clock and a function that says which layers have arrived, to events in order
Clock = Callable[[int, list[Event], Callable[[], list[Event]]], Iterable[Event]]


def real_time(step: int, events: list[Event], arrived: Callable[[], list[Event]]) -> Iterator[Event]:
    """The clock that mixes a layer after the task during which it has arrived, or at the end of the step."""
    left = dict.fromkeys(event for event in events if event[1] >= 0)
    for event in events:
        if event[1] < 0:
            yield event
            for other in arrived():
                del left[other]
                yield other
    yield from left


def logged(entries: Iterable[VersionRead], graph: TaskGraph, name: str) -> Clock:
    """The clock of a rank's part of the log of this name, in the order in which the rank wrote it. It raises ValueError
    for a log of another run."""
    place = {int(key): t for t, key in enumerate(graph.keys)}
    steps = grouped((e.step, (place.get(e.key, -1), e.source)) for e in entries)

    def clock(step: int, events: list[Event], arrived: Callable[[], list[Event]]) -> list[Event]:
        own, found = iter([event for event in events if event[1] < 0]), list[Event]()
        for event in steps.get(step, ()):
            while event[1] < 0 and event not in found and (task := next(own, None)):  # also those without an entry
                found.append(task)
                if task == event:
                    break
            found += [event] if event[1] >= 0 else []
        found += own
        if step not in steps or sorted(found) != sorted(events):
            raise ValueError(f"{name} is the log of another run: step {step + 1} has other tasks or messages")
        return found

    return clock
