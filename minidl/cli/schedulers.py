"""`schedulers`: every policy with its source, closed form and arguments."""

from __future__ import annotations

import textwrap
from inspect import Parameter
from typing import Any

from ..schedulers.registry import KINDS, SCHEDULERS, Scheduler
from . import show

WIDTH = 110
FLAGS = ("chunks", "stage_of_unit")  #: options that have a flag, or are for Python alone


def schedulers(arguments: Any) -> int:
    """Prints all policies by kind, or with --parallel those of one kind."""
    chosen = [s for s in SCHEDULERS.values() if "--parallel" not in arguments.given or s.parallel == arguments.parallel]
    record = {"schedulers": [{"scheduler": s.name, "parallel": s.parallel, "about": s.about, "arguments": _arguments(s)}
                             for s in chosen]}
    show.emit(arguments, record, lambda: _text(chosen))
    return 0


def _arguments(scheduler: Scheduler) -> dict[str, Any]:
    """The names for --scheduler-arg with their defaults; None for a default that cannot be written."""
    return {name: None if p.default is Parameter.empty or not isinstance(p.default, int | float | str | bool)
            else p.default for name, p in scheduler.options.items() if name not in FLAGS}


def _text(chosen: list[Scheduler]) -> str:
    parts = []
    for kind, title in KINDS.items():
        mine = [s for s in chosen if s.parallel == kind]
        if mine:
            shared = set.intersection(*(set(_arguments(s)) for s in mine))  # said once, not by each
            every = [f"all take: {', '.join(name for name in _arguments(mine[0]) if name in shared)}"] if shared else []
            parts.append("\n\n".join([title.removeprefix("for ").upper(), *every, *(_entry(s, shared) for s in mine)]))
    parts.append("Arguments are given as --scheduler-arg name=value. Of pipelines: p ranks, m micro-batches, v chunks "
                 "a rank; F, O, W the times of a stage, c a link's; peaks in live activations of a full stage.\n"
                 "`minidl simulate --ranks 4 --micro-batches 8 --table` prices all pipelines side by side.")
    return "\n\n".join(parts)


def _entry(scheduler: Scheduler, shared: set[str]) -> str:
    lines = textwrap.wrap(scheduler.about, WIDTH, initial_indent="    ", subsequent_indent="    ")
    told = ", ".join(name if value is None else f"{name}={value}"
                     for name, value in _arguments(scheduler).items() if name not in shared)
    if told:
        lines += textwrap.wrap(f"takes: {told}", WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([scheduler.name, *lines])
