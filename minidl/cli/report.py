"""`report`: where the time of a run went, from traces of any profiler; and who waits for whom if one stands still."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from ..core import chakra, standstill
from ..core.draw import timeline_svg
from ..core.report import compare
from ..core.timeline import Timeline
from ..core.torch_trace import load_torch
from ..system.files import write_atomic
from . import show
from .flags import UsageError


def run(arguments: Any) -> int:
    """Prints busy time, waits, transfers and the critical path of the traces, and how another trace differs."""
    if any(map(os.path.isdir, arguments.traces)):
        return _of_standstill(arguments)
    timelines = [_read(arguments.traces)]
    if arguments.against:
        timelines.append(_read([arguments.against], timelines[0].labels))
    notes = [show.line(note) for t in timelines for note in t.meta.get("notes", ())]
    show.note(*notes)
    text = "\n\n".join(t.report(show.width()) for t in timelines)
    if len(timelines) > 1:
        text += f"\n\n{compare(*timelines)}"
    if arguments.html:
        title = escape(f"report: {', '.join(arguments.traces)}")
        picture, page = timeline_svg(*timelines, titles=("trace", "against")), "\n".join([*notes, "", text])
        write_atomic(arguments.html, f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
                                     f'<meta name="viewport" content="width=device-width">\n<style>body {{ font: 14px '
                                     f'system-ui; margin: 1em }} pre, div {{ overflow-x: auto }}</style>\n'
                                     f'<h1>{title}</h1>\n<pre>{escape(page)}</pre>\n<div>{picture}</div>\n</html>\n')
    record = timelines[0].summary() | {"notes": notes}
    record |= {"against": timelines[1].summary()} if len(timelines) > 1 else {}
    return show.emit(arguments, record, text)


def _read(paths: list[str], known: Sequence[str] = ()) -> Timeline:
    """The timeline of one trace, or of one from each rank."""
    return chakra.load(paths) if all(path.endswith(show.CHAKRA) for path in paths) else load_torch(paths, known)


def _of_standstill(arguments: Any) -> int:
    """Prints who waits for whom, from the files of --patience in a folder."""
    if len(arguments.traces) > 1 or arguments.against or arguments.html:
        raise UsageError("a folder of --patience is read alone: minidl report DIR [--json]")
    found = standstill.read(arguments.traces[0])
    notes = [show.line(note) for note in found.notes]
    show.note(*notes)
    record = {"run": found.first.run, "command": found.first.command, "ranks": found.first.ranks,
              "verdict": asdict(standstill.verdict(found)), "silent": found.silent, "notes": notes,
              "states": [asdict(found.states[rank]) for rank in sorted(found.states)]}
    return show.emit(arguments, record, "\n".join(map(show.line, standstill.text(found).splitlines())))
