"""Pictures: a schedule's grid and a timeline as SVG, and colour for grids in a terminal.

One palette for all of them: Okabe and Ito's, whose colours differ for every kind of colour vision. An SVG needs no
other file and follows the reader's light or dark mode. Slices that are too thin to see are merged with their
neighbours, so that ten thousand tasks still make a small picture. This module knows no costs and measures nothing.
"""

from __future__ import annotations

import html  # not xml.sax.saxutils, which imports what opens pages of the web
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from .columns import Ints
from .report import count_of, labelled, readable_unit
from .tasks import COMMUNICATION, NAME, Kind, What, task_name, unpack

if TYPE_CHECKING:
    from .schedule import Lane, Schedule
    from .timeline import Timeline

escape = partial(html.escape, quote=False)
#: group of slices -> its colour and its name in the legend; black text is readable on all of them
PALETTE = {
    "F": ("#56b4e9", "forward"),
    "O": ("#e69f00", "output gradient"),
    "W": ("#009e73", "weight gradient"),
    "B": ("#d55e00", "backward"),
    "U": ("#cc79a7", "update"),
    "R": ("#b3a2e6", "recompute"),
    "Q": ("#e8a0c8", "quantise"),
    "D": ("#8fd0c4", "copy out"),
    "H": ("#c5c96a", "copy back"),
    "communication": ("#f0e442", "communication"),
    "transfer": ("#c29b72", "transfer"),
    "wait": ("#9aa1a9", "wait"),
}
WIDTH = 1200  #: the width of a timeline in pixels; a grid is as wide as its cells need, at most 1.5 times this
_CHARACTER = 0.61 * 10.5  # the advance of common monospaced fonts of 10.5 pixels
_THIN = 1.5  # pixels below which slices merge
_STYLE = """
text{font:10.5px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}
.card{fill:#fff}.ink{fill:#1f2328}.soft{fill:#59636e}.track{fill:#eceff2}.on{fill:#000;text-anchor:middle}
.line{stroke:#59636e;stroke-opacity:.25}.mid{text-anchor:middle}
@media(prefers-color-scheme:dark){.card{fill:#0d1117}.ink{fill:#f0f6fc}.soft{fill:#9198a1}.track{fill:#1d232c}}
"""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A rectangle from `begin` to `end` in row `row`, over the share `low..high` of the row's height."""

    row: int
    begin: float
    end: float
    group: str
    low: float = 0.0
    high: float = 1.0
    texts: tuple[str, ...] = ()  # the first one that fits is drawn
    second: str = ""
    tip: str = ""
    mixed: tuple[tuple[str, float, float], ...] = ()  # merged slices: (group, low, high) each


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    lanes: tuple[Lane, ...]
    slices: list[_Slice]


def schedule_svg(schedule: Schedule) -> str:
    """The grid: lanes as rows, unit times as columns, gaps visible; a pair shares its cell. Without slots (`validate`)
    the plain order of each lane."""
    task, lanes, first = _drawer((), None, schedule.keys), schedule.lane_of_each(), np.flatnonzero(~schedule.second)
    slots_of = (schedule.place if schedule.slots is None else schedule.slots)[first]
    sizes = np.diff(np.append(first, len(schedule)))
    slices = [task(lane, slot, slot + 1, key, (i, size), f"slot {slot}") for entry, lane, slot, size in
              zip(first.tolist(), lanes[first].tolist(), slots_of.tolist(), sizes.tolist(), strict=True)
              for i, key in enumerate(schedule.keys[entry : entry + size].tolist())]
    slots = max((s.end for s in slices), default=1)
    cell = max((len(s.texts[0]) for s in slices), default=1) * _CHARACTER + 7
    title = ", ".join([count_of(len(schedule), "task"), count_of(len(schedule.lanes), "lane"),
                       count_of(int(slots), "slot")])
    return _svg([_Panel(title, schedule.lanes, slices)], "slot", False, min(1.5 * WIDTH, cell * slots), slots)


def timeline_svg(*timelines: Timeline, titles: Sequence[str] = (), versions: Mapping[int, int] | None = None) -> str:
    """Lanes as rows over time, without messages that take no time. Several timelines are below each other on one scale.

    `titles`: by default, whether they are predicted or measured; `versions`: the weight version of tasks, by key.
    Raises ValueError for units that cannot be compared.
    """
    unit = readable_unit(timelines[0])
    same = [t.in_unit(unit).without_free_messages() for t in timelines]
    titles = titles or ["predicted" if t.predicted else "measured" for t in same]
    panels = [_Panel(f"{title}: makespan {t.makespan:.5g} {t.unit}".rstrip(), t.lanes, list(_of_timeline(t, versions)))
              for title, t in zip(titles, same, strict=False)]
    return _svg(panels, unit, versions is not None, WIDTH, max(t.makespan for t in same) or 1.0)


def curve_svg(points: Sequence[tuple[float, float, str]], x: str, y: str) -> str:
    """Points (x, y, text) as a falling staircase: whoever allows more of `x` gets the `y` of the last point below."""
    left, top, width, height = 24 + max(10, len(y)) * _CHARACTER, 34.0, 560.0, 260.0
    span = [(min(values), max(values)) for values in list(zip(*points, strict=True))[:2]]

    def at(value: float, axis: int) -> float:
        low, high = span[axis]
        share = (value - low) / (high - low) if high > low else 0.5
        return left + share * width if axis == 0 else top + height - share * height

    out = [_text(left, 18, f"{y} against {x}", "ink", "font-weight:bold"),
           f'<path class="line" fill="none" d="M{left:.1f} {top:.1f}V{top + height:.1f}H{left + width:.1f}"/>']
    for axis, name in enumerate((x, y)):
        for value in dict.fromkeys(span[axis]):
            out.append(_text(at(value, 0), top + height + 16, f"{value:.5g}", "soft mid") if axis == 0
                       else _text(left - 8, at(value, 1) + 4, f"{value:.5g}", "soft", "text-anchor:end"))
        out.append(_text(left + width / 2, top + height + 16, name, "soft mid") if axis == 0
                   else _text(left - 8, top + height / 2, name, "soft", "text-anchor:end"))
    steps = "".join(f"H{at(a, 0):.1f}V{at(b, 1):.1f}" for a, b, _ in points[1:])
    out.append(f'<path fill="none" stroke="{PALETTE["F"][0]}" stroke-width="1.5" '
               f'd="M{at(points[0][0], 0):.1f} {at(points[0][1], 1):.1f}{steps}"/>')
    for a, b, text in points:
        out.append(f'<circle cx="{at(a, 0):.1f}" cy="{at(b, 1):.1f}" r="4" fill="{PALETTE["F"][0]}">'
                   f"<title>{escape(_clean(text))}</title></circle>")
    whole, high = left + width + 50, top + height + 30
    return _picture(whole, high, f"{y} against {x}", out)


def _picture(width: float, height: float, title: str, out: Iterable[str]) -> str:
    """The whole SVG of these elements."""
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
                      f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">', f"<title>{title}</title>",
                      f"<style>{_STYLE}</style>",
                      f'<rect class="card" width="{width:.0f}" height="{height:.0f}" rx="6"/>', *out, "</svg>"]) + "\n"


def _of_timeline(t: Timeline, versions: Mapping[int, int] | None) -> Iterator[_Slice]:
    begin, task = t.begin, _drawer(t.labels, versions, t.key)
    first, _, size = t.actions
    for a, count in zip(first.tolist(), size.tolist(), strict=True):
        for i, record in enumerate(t.tasks[a : a + count].tolist()):
            when = f"{t.start[record] - begin:.6g} to {t.end[record] - begin:.6g} {t.unit}".rstrip()
            yield task(int(t.lane[record]), t.start[record] - begin, t.end[record] - begin, int(t.key[record]),
                       (i, count), when)
    for what, group, low, high in ((What.WAIT, "wait", 0.44, 0.56), (What.TRANSFER, "transfer", 0.36, 0.64)):
        for record in (t.what == what).nonzero()[0].tolist():
            tip = f"{group} for {t.name(record)}, {t.end[record] - t.start[record]:.6g} {t.unit}".rstrip()
            yield _Slice(int(t.lane[record]), t.start[record] - begin, t.end[record] - begin, group, low, high, tip=tip)


def group_of(kind: Kind) -> str:
    """The group of PALETTE to which a kind of task belongs."""
    return "communication" if kind in COMMUNICATION else kind.name


def _drawer(labels: tuple[str, ...], versions: Mapping[int, int] | None, keys: Ints) -> Callable[..., _Slice]:
    """A function that makes the slice of a task: row, begin, end, key, (its place, how many tasks) in its action, when.
    If all have one micro-batch, the short text is the unit, else the micro-batch."""
    known, by_unit = versions or {}, not unpack(keys).micro_batch.any()

    def task(row: int, begin: float, end: float, key: int, part: tuple[int, int], when: str) -> _Slice:
        own, name = unpack(key), task_name(key)
        unit, kind, micro_batch = own.unit, Kind(own.kind), own.micro_batch
        version = f"v{known[key]}" if key in known else ""
        short = (f"{unit}{kind.name}", str(unit)) if by_unit else (f"{kind.name}{micro_batch}", str(micro_batch))
        tip = ", ".join(filter(None, (labelled(labels, name, unit), version and f"weights {version}", when)))
        return _Slice(row, float(begin), float(end), group_of(kind), part[0] / part[1], (part[0] + 1) / part[1],
                      (name, *short), version, tip)

    return task


# ----------------------------------------------------------------------------------------------------------------- SVG
def _svg(panels: list[_Panel], unit: str, versions: bool, width: float, span: float) -> str:
    """Panels below each other on one scale: `span` time units are `width` pixels."""
    height, space = (14, 2) if max(len(panel.lanes) for panel in panels) > 48 else (24 + 12 * versions, 4)
    left = 24 + max((len(str(lane)) for panel in panels for lane in panel.lanes), default=0) * _CHARACTER
    groups = [g for g in PALETTE if any(s.group == g for panel in panels for s in panel.slices)]
    key_width = sum(30 + len(PALETTE[g][1]) * _CHARACTER for g in groups)
    whole = max(left + width + 24, left + key_width, left + 24 + _CHARACTER * max(len(p.title) for p in panels))
    scale = width / span
    out: list[str] = []
    top = 14.0
    for panel in panels:
        out.append(_text(left, top + 10, panel.title, "ink", "font-weight:bold"))
        top += 20
        tops = []
        for i, lane in enumerate(panel.lanes):
            top += 6 if i and lane.rank != panel.lanes[i - 1].rank and height > 14 else 0
            tops.append(top)
            out.append(f'<rect class="track" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}"/>')
            out.append(_text(12, top + height / 2 + 3.5, str(lane), "ink"))
            top += height + space
        out += _axis(left, tops[0] if tops else top, top, width, span, scale, unit)
        out += [_rect(s, left, tops[s.row], height, scale) for s in _merged(panel.slices, scale)]
        top += 36
    at = left
    for group in groups:
        colour, name = PALETTE[group]
        low, high = {"wait": (5, 2), "transfer": (3, 5)}.get(group, (0, 12))
        out.append(f'<rect x="{at:.1f}" y="{top + low - 4:.1f}" width="12" height="{high}" fill="{colour}"/>')
        out.append(_text(at + 17, top + 6, name, "soft"))
        at += 30 + len(name) * _CHARACTER
    top += 22
    return _picture(whole, top, escape(_clean("; ".join(panel.title for panel in panels))), out)


def _axis(left: float, top: float, bottom: float, width: float, span: float, scale: float, unit: str) -> list[str]:
    """A tick at round times, at most every 80 pixels."""
    least = span * 80 / max(width, 80)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= least * 0.999)
    step = max(1.0, step) if unit == "slot" else step
    out = []
    for i in range(math.floor(span / step + 1e-9) + 1):
        x = left + i * step * scale
        out.append(f'<path class="line" d="M{x:.1f} {top:.1f}V{bottom + 3:.1f}"/>')
        out.append(_text(x, bottom + 14, f"{i * step:.6g}", "soft mid"))
    out.append(_text(left - 8, bottom + 14, unit or "time", "soft", "text-anchor:end"))
    return out


def _merged(slices: Iterable[_Slice], scale: float) -> list[_Slice]:
    """Merges thin neighbours into one slice, in which each colour is as high as its share of the time."""
    out, run = list[_Slice](), list[_Slice]()

    def flush() -> None:
        if len(run) > 1:
            groups = {s.group for s in run}
            time = {g: sum(s.end - s.begin for s in run if s.group == g) for g in PALETTE if g in groups}
            whole = sum(time.values())
            ends = [*accumulate((spent / whole if whole else 1 / len(time) for spent in time.values()), initial=0.0)]
            mixed = tuple(zip(time, ends, ends[1:], strict=False))
            out.append(_Slice(run[0].row, run[0].begin, max(s.end for s in run), "", mixed=mixed,
                              tip=f"{len(run)} tasks, from {run[0].tip} to {run[-1].tip}"))
        else:
            out.extend(run)
        run.clear()

    for s in sorted(slices, key=lambda s: (s.row, s.group in ("wait", "transfer"), s.begin)):
        thin = (s.end - s.begin) * scale < _THIN
        if not (run and thin and s.row == run[0].row and (s.begin - run[-1].end) * scale < 1
                and (s.end - run[0].begin) * scale < 2 * _THIN):
            flush()
        if not thin:
            out.append(s)
        elif s.group not in ("wait", "transfer"):
            run.append(s)
    flush()
    return out


def _rect(s: _Slice, left: float, top: float, height: float, scale: float) -> str:
    x, y = left + s.begin * scale, top + s.low * height
    wide, tall = (s.end - s.begin) * scale, (s.high - s.low) * height
    gap = 0.75 if wide > 4 else 0.0  # so that neighbours of one colour stay apart
    text = next((t for t in s.texts if tall >= 12 and len(t) * _CHARACTER + 3 <= wide), "")
    second = s.second if text and tall >= 24 and len(s.second) * _CHARACTER + 3 <= wide else ""
    middle = y + tall / 2 + 3.5
    lines = [_text(x + wide / 2, middle - 6 * bool(second), text, "on")] if text else []
    lines += [_text(x + wide / 2, middle + 6.5, second, "on", "font-size:9px")] if second else []
    across = f'x="{x:.2f}" width="{max(wide - gap, 0.3):.2f}"'
    boxes = [f'<rect {across} y="{top + low * height:.1f}" height="{(high - low) * height:.1f}" '
             f'fill="{PALETTE[group][0]}"/>' for group, low, high in s.mixed or [(s.group, s.low, s.high)]]
    return f"<g><title>{escape(_clean(s.tip))}</title>{''.join(boxes + lines)}</g>"


def _text(x: float, y: float, text: str, style: str, css: str = "") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"{f" style={chr(34)}{css}{chr(34)}" if css else ""}>'
            f"{escape(_clean(text))}</text>")


def _clean(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


# ---------------------------------------------------------------------------------------------------------------- text
_TASK = re.compile(rf"(?<![\w/]){NAME.pattern}(?!\w)")


def painted(grid: str, paint: Callable[[str, str], str], plain: Callable[[str], str] = str) -> str:
    """A grid (`Schedule.grid`) with `paint(name, colour)` in place of each task's name, and `plain` of all else."""
    at, out = 0, list[str]()
    for match in _TASK.finditer(grid):
        out += [plain(grid[at : match.start()]), paint(match[0], PALETTE[group_of(Kind[match[2]])][0])]
        at = match.end()
    return "".join([*out, plain(grid[at:])])


def ansi(grid: str, color: bool | None = None) -> str:
    """A grid with its tasks in the palette's colours, for a terminal of 256 colours.

    `color=None`: only where standard output is a terminal that is not dumb, and `NO_COLOR` is not set.
    """
    if color is None:
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        color = not plain and sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
    if not color:
        return grid

    def paint(name: str, colour: str) -> str:
        red, green, blue = (round(int(colour[i : i + 2], 16) / 51) for i in (1, 3, 5))
        return f"\x1b[38;5;16;48;5;{16 + 36 * red + 6 * green + blue}m{name}\x1b[0m"

    return painted(grid, paint)
