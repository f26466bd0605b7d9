"""Decisions of all ranks together: if one of them fails, each gets the same error at the same place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.comm import Communicator


class Disagreement(ValueError):
    """Ranks have different settings, or one cannot start or go on. The message is one line, the same on every rank."""


def together(communicator: Communicator, part: Callable[[], Any], expected: type[Exception] = Exception) -> list[Any]:
    """The results of `part` on all ranks. Raises Disagreement on every rank with the first rank's `expected` error."""
    try:
        report: tuple[Any, str | None] = part(), None
    except expected as error:
        report = None, " ".join(str(error).split()) or type(error).__name__
    reports = communicator.gather(report)
    if reasons := {rank: why for rank, (_, why) in enumerate(reports) if why is not None}:
        rank, why = next(iter(reasons.items()))
        everywhere = len(reasons) == len(reports) and len({*reasons.values()}) == 1
        raise Disagreement(why if everywhere else f"rank {rank}: {why}")
    return [found for found, _ in reports]


def agree(communicator: Communicator, prepare: Callable[[], tuple[Any, Mapping[str, Any]]]) -> Any:
    """Runs `prepare` on every rank, and returns its first result if its second, the settings, is equal on all ranks.
    Raises Disagreement on every rank with the first difference, or with the error of the first rank that failed."""
    made: Any = None

    def part() -> dict[str, Any]:
        nonlocal made
        made, settings = prepare()
        return dict(settings)

    first, *others = together(communicator, part)
    for what in first:
        for rank, other in enumerate(others, 1):
            if other.get(what) != first[what]:
                raise Disagreement(f"{what} is {other.get(what)!r} on rank {rank} but {first[what]!r} on rank "
                                   f"0; start every rank with the same command and files, and seed what these draw")
    return made
