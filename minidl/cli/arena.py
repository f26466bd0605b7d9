"""`arena`: problems, entries, and the board of those whose orders are proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import arena as games
from ..arena import ArenaError, Entry, Task
from ..core.schedule import text_of
from ..schedulers.registry import SCHEDULERS
from ..views.page import Shown
from . import show

SECONDS, MEMORY = 10.0, 1 << 30  #: of an entry on a problem, unless the flags say others
ABOUT = """Proves, prices and ranks orders of pipelines.

PROBLEMS is a JSON file (docs/arena.md has its keys), `all` bundled problems, or some of their names with commas.
An ENTRY is FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, a function of a problem or a Policy; a CSV of an order; or
the name of a published policy. Each function runs once for each problem, in a process of its own, with limits, and
hands over nothing but the text of its order. Published policies fill the board; --alone leaves them out.

The exit code is 1 if an entry that is named has no valid order on a problem."""


def run(arguments: Any) -> int:
    """Prints the board; returns 1 if an entry that was named has no valid order on a problem. Raises ArenaError."""
    tasks, names = games.read(arguments.problems), list(dict.fromkeys(arguments.entries))
    for name in names:
        if ":" not in name and not name.endswith(".csv") and name not in SCHEDULERS:
            raise ArenaError(f"entry {name[:60]!r} is neither FILE.py:FUNCTION, a .csv file nor a published policy")
    if arguments.alone and not names:
        raise ArenaError("--alone leaves the published policies out, and no entry is given")
    seconds = float(arguments.time_limit if "--time-limit" in arguments.given else SECONDS)
    results, walls = [], list[bool]()
    with show.progress("asking", len(tasks) * len(names)) as done:
        for task in tasks:
            entries = []
            for name in names:
                entry, walled = _entered(task, name, seconds, arguments.memory_limit or MEMORY)
                entries.append(entry)
                walls.append(walled)
                done(len(walls), f"{task.name}: {name}")
            if not arguments.alone:
                entries += [e for e in games.published(task) if e.name not in names]
            results.append((task, entries))
    if not all(walls):
        show.note("this system has no filter of system calls: entries have limits of time and memory, and could touch "
                  "files; run only entries that you trust")
    record = {"problems": [_record(task, entries, names) for task, entries in results], "board": games.board(results)}
    if arguments.html:
        _page(arguments, record, results)
    return show.emit(arguments, record, lambda: _text(record),
                     int(any(problem["refused"] for problem in record["problems"])))


def _entered(task: Task, name: str, seconds: float, memory: int) -> tuple[Entry, bool]:
    """The result of an entry that is named, and whether it ran behind the filter of system calls."""
    if ":" in name:
        found = games.ask(name, task, seconds, memory)
        if found.text is None:
            return Entry(name, True, why=found.why, seconds=found.seconds), found.walled
        return games.judge(task, found.text, name, seconds=found.seconds), found.walled
    if name.endswith(".csv"):
        try:
            return games.judge(task, text_of(name), name), True
        except ValueError as error:
            return Entry(name, True, why=str(error)), True
    return next(games.published(task, [name])), True


def _record(task: Task, entries: Sequence[Entry], named: Sequence[str]) -> dict[str, Any]:
    def row(place: int, e: Entry) -> dict[str, Any]:
        assert e.price is not None
        return {"rank": place, "entry": e.name, "own": e.own, "period": e.price.period,
                "above_bound": e.price.period / task.bound - 1, "makespan": e.price.makespan,
                "max_span": e.price.max_span, "peak_activations": max(e.price.peak_activations), "bytes": e.bytes,
                "seconds": round(e.seconds, 3)}

    without = [e for e in entries if e.plan is None]
    return {"problem": task.name, "about": task.about, "unit": task.unit, "bound": task.bound, "optimum": task.optimum,
            "entries": [row(place, e) for place, e in games.ranked(entries)],
            "refused": [{"entry": e.name, "why": e.why} for e in without if e.name in named],
            "left_out": {e.name: e.why for e in without if e.name not in named}}


def _text(record: dict[str, Any]) -> str:
    parts = []
    for problem in record["problems"]:
        facts = [f"{problem['about']}; no period is below {problem['bound']:g} {problem['unit']}".strip("; ")]
        facts += [f"best {name.replace('_', ' ')} with one stage on each rank: {value:g}"
                  for name, value in problem["optimum"].items()]
        rows = [(e["rank"], e["entry"] + " <" * e["own"], f"{e['period']:.6g}", f"{e['above_bound']:.1%}",
                 f"{e['makespan']:.6g}", f"{e['peak_activations']:g}", e["bytes"]) for e in problem["entries"]]
        titles = ("#", "entry", "period", "over bound", "makespan", "peak", "bytes")
        lines = [show.table(titles, rows), *(f"{e['entry']}: {e['why']}" for e in problem["refused"])]
        if problem["left_out"]:
            lines.append(f"no order here: {', '.join(problem['left_out'])}")
        parts.append("\n".join([f"{problem['problem']}: {', '.join(facts)}", *lines]))
    total = [(f"{i}", row["entry"] + " <" * row["own"], row["solved"], row["score"])
             for i, row in enumerate(record["board"], 1)]
    count, heads = len(record["problems"]), ("#", "entry", "solved", "score")
    return "\n\n".join([*parts, f"{count} problem{'s' * (count > 1)}; score: the mean of bound / period, 0 without a "
                                f"valid order; < marks entries\n{show.table(heads, total)}"])


def _page(arguments: Any, record: dict[str, Any], results: Sequence[tuple[Task, Sequence[Entry]]]) -> None:
    """Writes the page: the board, a table for each problem, and the timeline of its best order."""
    figures: dict[str, Any] = {"board": [
        {"place": i, **row, "score": f"{row['score']:.3f}"} for i, row in enumerate(record["board"], 1)]}
    for problem in record["problems"]:
        figures[f"{problem['problem']}: {problem['about']}"] = [
            {name: f"{value:.1%}" if name == "above_bound" else value for name, value in e.items() if name != "own"}
            for e in problem["entries"]]
        if problem["refused"]:
            figures[f"{problem['problem']}: no valid order"] = problem["refused"]
    best = []
    for task, entries in results:
        for _, entry in games.ranked(entries)[:1]:
            assert entry.plan is not None
            best.append(replace(Shown.of(entry.plan), title=f"{task.name}: {entry.name}",
                                timeline=replace(entry.plan.timeline, unit=task.unit)))
    if not best:
        raise ArenaError("no entry has a valid order, so there is no timeline to show; leave --html out")
    show.write_page(arguments, figures, best)
