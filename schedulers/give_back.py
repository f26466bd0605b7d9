"""Gives overlap back for memory, step by step: from the wanted arrangement to one that needs little memory.

First, delayed items run as soon as they can, those that hold memory longest before the others. Then weight gradients
leave the second stream: either from the highest layer down, since most memory is alive at the end of the forward pass,
or from the lowest up, whose own tensors are the largest. In the end one stream runs every weight gradient and its
update as soon as possible, so that no gradient waits for the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .movable import MAIN, SUB, Place, Places, Step

LEVELS = 8  #: the number of steps


def given_back(step: Step, places: Places) -> Iterator[tuple[str, Places]]:
    """(name, places), from more memory to less."""
    order = sorted(places, key=lambda i: (places[i].late, places[i].before - step.items[i].release, i))
    for level in reversed(range(LEVELS)):
        kept = set(order[: len(order) * level // LEVELS])
        yield (f"{level}/{LEVELS} delayed",
               _consistent(step, {i: p if i in kept else _at_once(step, i, p.lane) for i, p in places.items()}))
    highest = sorted((i for i, p in places.items() if p.lane == SUB), key=lambda i: (step.items[i].release, i))
    for name, beside in ("lowest", highest[::-1]), ("highest", highest):
        for level, found in zip(reversed(range(LEVELS + 1)), partly_beside(step, beside), strict=True):
            yield (f"the {name} {level}/{LEVELS} on {SUB}" if level else "all on one stream"), found


def partly_beside(step: Step, order: Sequence[int]) -> Iterator[Places]:
    """Arrangements in which everything runs as soon as it can: all items of `order` on the second stream, then fewer
    and fewer; the first items of `order` stay there longest."""
    for level in reversed(range(LEVELS + 1)):
        beside = set(order[: len(order) * level // LEVELS])
        yield {i: _at_once(step, i, SUB if i in beside else MAIN) for i in range(len(step.items))}


def _at_once(step: Step, i: int, lane: str) -> Place:
    return Place(lane, step.items[i].release)


def _consistent(step: Step, places: dict[int, Place]) -> Places:
    """The same places, but an item also runs as soon as it can if one that waits for it no longer comes after it."""
    while bad := [i for i in places if step.number(places, i) > step.bounds(places, i, True)[1]]:
        places |= {i: _at_once(step, i, places[i].lane) for i in bad}
    return places
