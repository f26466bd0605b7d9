"""Output: one JSON object or text on standard output; progress and notes on standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from ..system import interrupts, launcher

if TYPE_CHECKING:
    from ..core.timeline import Timeline
    from ..views.page import Shown

CHAKRA = ".et"  #: the suffix of execution traces


def record_alone(arguments: Any) -> AbstractContextManager[Any]:
    """Inside, with --json, what a user's code prints goes to standard error: standard output is the record's alone."""
    arguments.out = sys.stdout
    return redirect_stdout(sys.stderr) if arguments.json else nullcontext()


def emit(arguments: Any, record: dict[str, Any], text: str | Callable[[], str], code: int = 0) -> int:
    """Prints the record with --json, else the text, as the last act of a command: nothing after an interrupt, and no
    interrupt after it. The tasks in a text that a function makes are in their colours on a terminal. Returns `code`,
    the command's exit code."""
    interrupts.check()
    if arguments.json:
        print(json.dumps(record, allow_nan=False), file=arguments.out)
    elif isinstance(text, str):
        print(text)
    else:
        from ..core.draw import ansi

        print(ansi(text()))
    if launcher.size() == 1:  # else the end waits for the other ranks
        interrupts.ignore()
    return code


def check_outputs(arguments: Any) -> None:
    """Checks before the work that every output file can be written, by one flag. Raises FileError or ValueError."""
    flag_of = dict[str, str]()
    for flag in ("save", "svg", "html", "trace", "save_costs", "log_versions", "log_order", "log"):
        if path := getattr(arguments, flag):
            from ..core.trace import check_path
            from ..system.files import check_writable

            if flag == "trace" and not path.endswith(CHAKRA):
                check_path(path)
            if flag == "save" and arguments.format == "chakra":
                path = os.path.join(path, f"plan{CHAKRA}")
                os.makedirs(arguments.save, exist_ok=True)
            check_writable(path)
            if (other := flag_of.setdefault(os.path.realpath(path), flag)) != flag and path != os.devnull:
                raise ValueError(f"{path}: " + f"--{other} and --{flag} would write the same file".replace("_", "-"))
    if arguments.status:
        from ..training.status import Target

        Target.of(arguments.status)


def write_trace(timeline: Timeline, path: str, factor: float | None, ran: bool = False) -> None:
    """Writes a timeline in the form of the file's suffix; `factor`: of a Chakra trace's times; a larger one is
    taken if it is needed for a timeline that `ran`, which would be gone."""
    if path.endswith(CHAKRA):
        from ..core import chakra

        least, fits = chakra.fitting(timeline, factor)
        if ran and fits != factor:
            note(f"{path}: a task took {least:.3g} us, and Chakra has whole ones, so times are multiplied by {fits}")
            factor = fits
        chakra.save(timeline, path, factor)
    else:
        timeline.save(path)


def write_page(arguments: Any, record: Any, plans: Sequence[Shown], task: str = "", curves: Any = None) -> None:
    """Writes the page that --html asks for, with the figures of --json. `task`, `curves`: as for `page`."""
    from ..system.files import write_atomic
    from ..views.page import page

    title = " ".join(filter(None, (arguments.command, task, arguments.model)))
    title += f": {', '.join(p.title for p in plans) if len(plans) < 5 else f'{len(plans)} plans'}"
    write_atomic(arguments.html, page(title, record, plans, command=arguments.line, task=task, curves=curves))


def note(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def reason(error: BaseException) -> str:
    """The message of an error, for one line of output."""
    if isinstance(error, FileExistsError | NotADirectoryError) and error.filename:
        return f"{error.filename}: a folder is needed, and this is a file"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        said = f"there is not enough memory for this: {error}".removesuffix(": ")
        return f"{said}; take a smaller batch or network, or for a plan --costs analytic"
    if isinstance(error, OSError | ImportError) or type(error).__module__.startswith("minidl."):
        return str(error)
    from ..system.loading import foreseen, text_of

    words = text_of(error) or type(error).__name__
    return words if foreseen(error) else f"an internal error of minidl: {words}; MINIDL_DEBUG=1 shows where"


def line(text: str) -> str:
    """Text that may come from a file, as one line of limited length without control characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:1000])
    return text if len(text) < 1000 else f"{text} ..."


@contextmanager
def progress(title: str, total: float, begin: int = 0) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, if that is a terminal. Yields a function that takes how much is done and a text
    to show beside the bar, and raises KeyboardInterrupt after an interrupt."""
    if not sys.stderr.isatty():
        yield lambda done, said="": interrupts.check()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                  TimeRemainingColumn(), TextColumn("{task.fields[said]}"), console=Console(stderr=True),
                  transient=True) as bar:
        task = bar.add_task(title, total=total, completed=begin, said="")

        def update(done: float, said: str = "") -> None:
            interrupts.check()
            bar.update(task, completed=done, said=said)

        yield update


def width() -> int:
    """Columns of the terminal; 110 if there is none."""
    return max(40, get_terminal_size((110, 24)).columns)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns aligned, numbers to the right, also those that are text already. Small ones have three digits."""
    cells = [[f"{c:{'.3g' if 1e-12 < abs(c) < 0.1 else ',.3f'}}" if isinstance(c, float) else f"{c:,}"
              if isinstance(c, int) and not isinstance(c, bool) else str(c) for c in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(c[:1].isdigit() or c[:1] == "-" or not c for c in column) for column in zip(*cells, strict=True)]
    lines = (zip(row, wide, right or [False] * len(head), strict=True) for row in (head, *cells))
    return "\n".join("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in line).rstrip() for line in lines)


def order(schedule: Any, record: dict[str, Any]) -> str:
    """A schedule's grid and a record as a table."""
    return f"{schedule.grid(width())}\n\n{table(('what', 'value'), list(record.items()))}"
