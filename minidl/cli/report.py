"""`report`: where the time of a run went, from our traces or from PyTorch's profiler's."""

from __future__ import annotations

from html import escape
from typing import Any

from ..core.draw import timelines_svg
from ..core.report import compare, summary
from ..core.timeline import Timeline
from ..core.torch_trace import load_torch
from ..system.files import write_atomic
from . import show
from .flags import UsageError


def run(arguments: Any) -> int:
    """Prints busy time, waits, transfers and the critical path of the traces, and how another trace differs."""
    show.check_outputs(arguments)
    timelines = [("trace", _load(arguments.traces))]
    if arguments.against:
        timelines.append(("against", _load([arguments.against])))
    text = "\n\n".join(t.report(show.width()) for _, t in timelines)
    if len(timelines) > 1:
        text += f"\n\n{compare(timelines[0][1], timelines[1][1])}"
    if arguments.html:
        title = escape(f"report: {', '.join(arguments.traces)}")
        picture = timelines_svg(timelines)
        write_atomic(arguments.html, f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
                                     f'<meta name="viewport" content="width=device-width">\n<style>body {{ font: 14px '
                                     f'system-ui; margin: 1em }} pre, div {{ overflow-x: auto }}</style>\n'
                                     f'<h1>{title}</h1>\n<pre>{escape(text)}</pre>\n<div>{picture}</div>\n</html>\n')
    record = summary(timelines[0][1]) | ({"against": summary(timelines[1][1])} if len(timelines) > 1 else {})
    return show.emit(arguments, record, text)


def _load(paths: list[str]) -> Timeline:
    """One trace of minidl, or traces of PyTorch's profiler, one of each rank. Raises UsageError."""
    if len(paths) == 1:
        try:
            return Timeline.load(paths[0])
        except ValueError:
            pass  # it is not ours
    try:
        return load_torch(paths)
    except ValueError as error:
        several = "; several traces must be of PyTorch's profiler, one of each rank" if len(paths) > 1 else ""
        raise UsageError(f"{error}{several}") from None
