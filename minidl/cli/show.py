"""Output: one JSON object or text on standard output; progress and notes on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import interrupts
from ..files import write_atomic
from ..views.draw import ansi
from ..views.page import Shown, page


def emit(arguments: Any, record: dict[str, Any], text: str | Callable[[], str]) -> None:
    """Prints the record with --json, else the text; nothing after an interrupt. The tasks in a text that a function
    makes are in their colours on a terminal."""
    interrupts.check()
    if arguments.json:
        print(json.dumps(record, allow_nan=False))
    else:
        print(text if isinstance(text, str) else ansi(text()))


def write_page(arguments: Any, record: dict[str, Any], plans: Sequence[Shown], task: str = "") -> None:
    """Writes the page that --html asks for, with the figures of --json. `task`: the one that it explains first."""
    title = " ".join(filter(None, (arguments.command, task, arguments.model)))
    title += f": {', '.join(p.title for p in plans)}"
    write_atomic(arguments.html, page(title, record, plans, command=arguments.line, task=task))


def note(line: str) -> None:
    print(line, file=sys.stderr)


def reason(error: BaseException) -> str:
    """The message of an error, for one line of output."""
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        return f"{error.filename}: a folder is needed, and this is a file"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"there is not enough memory for this: {error}".removesuffix(": ")
    return str(error) or type(error).__name__


def line(text: str) -> str:
    """Text that may come from a file, as one line of limited length without control characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:1000])
    return text if len(text) < 1000 else f"{text} ..."


def notes(lines: Iterable[str]) -> None:
    for line in lines:
        note(line)


@contextmanager
def progress(title: str, total: float, begin: int = 0) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, if that is a terminal. Yields a function that takes how much is done and a text
    to show beside the bar, and raises KeyboardInterrupt after an interrupt."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                  TimeRemainingColumn(), TextColumn("{task.fields[said]}"), console=Console(stderr=True),
                  transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total, completed=begin, said="")

        def update(done: float, said: str = "") -> None:
            interrupts.check()
            bar.update(task, completed=done, said=said)

        yield update


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns aligned, numbers to the right."""
    cells = [[f"{c:,.3f}" if isinstance(c, float) else f"{c:,}" if isinstance(c, int) and not isinstance(c, bool)
              else str(c) for c in row] for row in rows]
    width = [max(len(h), *(len(row[i]) for row in cells), 0) if cells else len(h) for i, h in enumerate(head)]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, right, strict=True)).rstrip()

    return "\n".join([line(head), *(line(row) for row in cells)])
