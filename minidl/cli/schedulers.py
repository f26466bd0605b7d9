"""`schedulers`: every policy with its source, closed form and arguments."""

from __future__ import annotations

import textwrap
from inspect import Parameter
from typing import Any

from ..schedulers.registry import KINDS, SCHEDULERS, Scheduler, find
from . import show

FLAGS = ("chunks", "stage_of_unit")  #: options that have a flag, or are for Python alone


def schedulers(arguments: Any) -> int:
    """Prints all policies by kind, with --parallel one kind only, or the one that is named."""
    kind = arguments.parallel if "--parallel" in arguments.given else None
    chosen = ([find(arguments.name, kind)] if arguments.name
              else [s for s in SCHEDULERS.values() if kind in (None, s.parallel)])
    record = {"schedulers": [{"scheduler": s.name, "parallel": s.parallel, "about": s.about, "arguments": _arguments(s)}
                             for s in chosen]}
    return show.emit(arguments, record, _text(chosen))


def _arguments(scheduler: Scheduler) -> dict[str, Any]:
    """The names for --scheduler-arg with their defaults; None for a default that cannot be written."""
    return {name: None if p.default is Parameter.empty or not isinstance(p.default, int | float | str | bool)
            else p.default for name, p in scheduler.options.items() if name not in FLAGS}


def _text(chosen: list[Scheduler]) -> str:
    parts = []
    for kind, title in KINDS.items():
        if mine := [s for s in chosen if s.parallel == kind]:
            shared = set.intersection(*(set(_arguments(s) if mine[1:] else ()) for s in mine))  # said once, not by each
            every = [f"all take: {', '.join(name for name in _arguments(mine[0]) if name in shared)}"] if shared else []
            parts.append("\n\n".join([title.removeprefix("for ").upper(), *every, *(_entry(s, shared) for s in mine)]))
    parts.append("Arguments are given as --scheduler-arg name=value. For pipelines: p ranks, m micro-batches, v chunks "
                 "a rank; F, O, W the times of a stage, c a link's; peaks in live activations of a full stage.\n"
                 "`minidl simulate --ranks 4 --micro-batches 8 --table` prices all pipelines side by side.")
    return "\n\n".join(parts)


def _entry(scheduler: Scheduler, shared: set[str]) -> str:
    told = ", ".join(name if value is None else f"{name}={value}"
                     for name, value in _arguments(scheduler).items() if name not in shared)
    lines = [textwrap.fill(text, show.width(), initial_indent="    ", subsequent_indent="    ")
             for text in (scheduler.about, told and f"takes: {told}") if text]
    return "\n".join([scheduler.name, *lines])
