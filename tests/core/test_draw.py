"""Pictures are valid XML, hold every task where it belongs, and stay small."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from random_plans import Plan, plans

from minidl.cli import main
from minidl.core.draw import PALETTE, ansi, schedule_svg, timeline_svg
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind, What, pack, parse_task, task_name, unpack
from minidl.core.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Drawn:
    tip: str
    x: float
    y: float
    width: float
    height: float
    colour: str
    texts: list[str]


def drawn(svg: str) -> Iterator[Drawn]:
    """The slices of a picture, after a look at what any SVG of ours must be."""
    root = ET.fromstring(svg)
    wide, tall = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {wide:.0f} {tall:.0f}"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "nothing from elsewhere"
    assert not re.search(r"@import|@font-face|url\(|<script|<image", svg)
    assert "prefers-color-scheme:dark" in svg
    for rect in root.iter(SVG + "rect"):
        assert float(rect.get("x", 0)) >= 0
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= wide + 0.5
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= tall
    for text in root.iter(SVG + "text"):
        assert -1 <= float(text.get("x")) <= wide
        assert 0 < float(text.get("y")) <= tall
    for group in root.iter(SVG + "g"):
        rect, *more = group.findall(SVG + "rect")
        for other in (rect, *more):
            assert other.get("fill") in {colour for colour, _ in PALETTE.values()}
            assert (other.get("x"), other.get("width")) == (rect.get("x"), rect.get("width"))
        texts = group.findall(SVG + "text")
        for text in texts:
            x, y, width, height = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
            assert len(text.text) * 6 <= width + 1, "a label stays inside"
            assert float(text.get("x")) == pytest.approx(x + width / 2, abs=0.5)
            assert y < float(text.get("y")) <= y + height
        yield Drawn(group.find(SVG + "title").text, *(float(rect.get(k)) for k in ("x", "y", "width")),
                    round(sum(float(r.get("height")) for r in (rect, *more)), 1), rect.get("fill"),
                    [text.text for text in texts])


def never_overlap(slices: list[Drawn]) -> None:
    rows: dict[tuple[float, float], list[Drawn]] = {}
    for s in slices:
        rows.setdefault((s.y, s.height), []).append(s)
    for row in rows.values():
        for one, other in pairwise(sorted(row, key=lambda s: s.x)):
            assert one.x + one.width <= other.x + 0.35


@given(plans(pairs=True))
def test_grid_of_random_schedules(plan: Plan):
    """Every task once, in its lane's row and its slot's column."""
    schedule = plan.schedule.validate(plan.graph)
    svg = schedule_svg(schedule)
    slices = list(drawn(svg))
    never_overlap(slices)
    by_name = {re.split("[ ,]", s.tip)[0]: s for s in slices}
    assert len(slices) == len(by_name) == len(plan.graph)
    tracks = [r for r in ET.fromstring(svg).iter(SVG + "rect") if r.get("class") == "track"]
    slots = max(int(s.tip.split()[-1]) for s in slices) + 1
    for lane, track in enumerate(tracks):
        left, top, width, height = (float(track.get(k)) for k in ("x", "y", "width", "height"))
        slot = -1
        for entry in range(schedule.ptr[lane], schedule.ptr[lane + 1]):
            pair = schedule.joined is not None and schedule.joined[entry]
            slot = slot if pair else int(schedule.slots[entry])
            s = by_name[task_name(schedule.keys[entry])]
            assert s.x == pytest.approx(left + slot * width / slots, abs=0.2)
            assert top <= s.y < s.y + s.height <= top + height


@given(plans(latency=True, pairs=True))
def test_timeline_of_random_plans(plan: Plan):
    t = plan.timeline.without_free_messages()
    slices = list(drawn(timeline_svg(t)))
    tasks = [s for s in slices if not s.tip.startswith(("wait", "transfer"))]
    never_overlap(tasks)
    scale = 1200 / t.makespan if t.makespan else 0
    for r in t.tasks:
        if (t.end[r] - t.start[r]) * scale < 1.5:
            continue  # may be merged with its neighbours
        s = next(s for s in tasks if re.split(r"[ ,]", s.tip)[0] == t.name(r))
        assert s.width == pytest.approx((t.end[r] - t.start[r]) * scale, abs=1)
        kind = Kind(unpack(int(t.key[r])).kind).name
        assert s.colour == PALETTE["communication" if kind in ("A", "SF") else kind][0]
    for what, word in ((What.WAIT, "wait for"), (What.TRANSFER, "transfer for")):
        seen = [r for r in np.flatnonzero(t.what == what) if (t.end[r] - t.start[r]) * scale >= 1.5]
        assert sum(s.tip.startswith(word) for s in slices) == len(seen)


def test_cells_show_what_fits_and_pairs_share_theirs():
    schedule = Schedule.from_names({Lane(0): ["0F0", "(0F1;1B0)", "1B1"], Lane(1): ["1F0", "1W0#3"]})
    slices = {s.tip.split(",")[0]: s for s in drawn(schedule_svg(schedule))}
    assert slices["0F0"].texts == ["0F0"]
    assert slices["1W0#3"].texts == ["1W0#3"]
    up, down = slices["0F1"], slices["1B0"]
    assert (up.x, up.width) == (down.x, down.width)
    assert (up.y + up.height, up.height, down.height) == (down.y, 12, 12)
    narrow = [s.texts for s in drawn(schedule_svg(Schedule.from_names({Lane(0): [f"12F{i}" for i in range(100)]})))]
    assert narrow[7] == ["F7"]
    narrower = [s.texts for s in drawn(schedule_svg(Schedule.from_names({Lane(0): [f"12F{i}" for i in range(180)]})))]
    assert narrower[7] == ["7"]
    assert narrower[170] == []


def test_legend_and_lanes_are_named():
    schedule = Schedule.from_names({Lane(0): ["0F0", "0O0"], Lane(1, "grads"): ["0W0", "0A0", "0SO0>1"]})
    texts = [t.text for t in ET.fromstring(schedule_svg(schedule)).iter(SVG + "text")]
    assert {"0/main", "1/grads", "forward", "output gradient", "weight gradient", "communication"} <= set(texts)
    assert "update" not in texts


def test_versions_and_layers_are_shown():
    schedule = Schedule.from_names({Lane(0): ["0F0", "0F1", "0B0"]})
    versions = {parse_task("0F0"): 0, parse_task("0B0"): 7}
    timeline = Timeline.of_tasks([Lane(0)], schedule.keys, [0] * 3, [0, 1, 2], [1, 2, 3], labels=("layers.0",))
    svg = timeline_svg(timeline, versions=versions)
    assert [s.texts for s in drawn(svg)] == [["0F0", "v0"], ["0F1"], ["0B0", "v7"]]
    assert "0B0 layers.0, weights v7, 2 to 3 us" in svg


def test_two_timelines_share_a_scale():
    def one(length: float, unit: str, predicted: bool) -> Timeline:
        return Timeline.of_tasks([Lane(0)], [parse_task("0F0")], [0], [0.0], [length], unit=unit, predicted=predicted)

    left, right = drawn(timeline_svg(one(30000, "us", True), one(15, "ms", False)))
    assert left.width == pytest.approx(2 * right.width, abs=1)
    assert left.x == right.x
    assert left.y + left.height < right.y
    svg = timeline_svg(one(30000, "us", True), one(15, "ms", False))
    assert ">predicted: makespan 30 ms<" in svg
    assert ">measured: makespan 15 ms<" in svg
    with pytest.raises(ValueError, match="cannot compare times"):
        timeline_svg(one(1, "us", True), one(1, "", False))


@pytest.mark.parametrize("length", [1.0, 7.0, 30.0, 999.0, 12_345.0])
def test_ticks_are_at_round_times_and_not_too_dense(length: float):
    """80 to 200 pixels apart, since the next round number is at most 2.5 times as large."""
    timeline = Timeline.of_tasks([Lane(0)], [parse_task("0F0")], [0], [0.0], [length], unit="us")
    texts = ET.fromstring(timeline_svg(timeline)).iter(SVG + "text")
    marks = [text for text in texts if text.get("class") == "soft mid"]
    times, places = ([float(mark.text or "") for mark in marks], [float(mark.get("x", "")) for mark in marks])
    assert times == pytest.approx([i * times[1] for i in range(len(times))])
    assert f"{times[1]:e}"[0] in "125"
    assert all(79 < gap < 201 for gap in np.diff(places))


@pytest.mark.parametrize("tasks", [0, 1, 10_000])
def test_size(tasks: int):
    """Ten thousand tasks make a picture of less than a megabyte in which all are accounted for."""
    keys = pack(np.arange(tasks) % 50, np.arange(tasks) % 5, np.arange(tasks) // 50)
    timeline = Timeline.of_tasks([Lane(r) for r in range(4)], keys, np.arange(tasks) * 4 // max(tasks, 1),
                                 np.arange(tasks) % 2500 * 3.0, np.arange(tasks) % 2500 * 3.0 + 2.9)
    schedule = Schedule(timeline.lanes, np.arange(5) * tasks // 4, keys)
    for svg in (timeline_svg(timeline), schedule_svg(schedule)):
        assert len(svg) < 1_000_000
        slices = list(drawn(svg))
        never_overlap(slices)
        assert sum(int(m[1]) if (m := re.match(r"(\d+) tasks, from", s.tip)) else 1 for s in slices) == tasks
        assert all(s.width >= 0.3 for s in slices)


def test_thin_slices_merge_only_with_neighbours():
    """At one pixel a unit: two that touch become one; a gap that can be seen, or another lane, keeps them apart."""
    names = ["0F0", "1F0", "2F0", "3F0", "4F0"]
    start = np.array([0.0, 0.5, 2.2, 1199.5, 0.0])
    t = Timeline.of_tasks([Lane(0), Lane(1)], [parse_task(n) for n in names], [0, 0, 0, 0, 1], start, start + 0.5)
    tips = [s.tip for s in drawn(timeline_svg(t))]
    assert [tip.split(",")[0] for tip in tips] == ["2 tasks", "2F0", "3F0", "4F0"]
    assert "from 0F0, 0 to 0.5 us to 1F0, 0.5 to 1 us" in tips[0]


def test_merged_slices_show_their_mixture():
    names = [parse_task(f"0{kind}{i}") for i in range(500) for kind in "FOWW"]
    place = np.arange(len(names))
    t = Timeline.of_tasks([Lane(0)], names, place * 0, place * 1.0, place + 1.0)
    for group in ET.fromstring(timeline_svg(t)).iter(SVG + "g"):
        heights = {r.get("fill"): float(r.get("height")) for r in group.iter(SVG + "rect")}
        assert sum(heights.values()) == pytest.approx(24, abs=0.2)
        if group.find(SVG + "title").text.startswith("4 tasks"):
            assert heights == {PALETTE["F"][0]: 6, PALETTE["O"][0]: 6, PALETTE["W"][0]: 12}


def test_names_with_odd_characters():
    t = Timeline.of_tasks([Lane(0, 'a<b>&"\x00\x1b')], [parse_task("0F0")], [0], [0.0], [1.0], labels=("<&\x07>",))
    assert next(drawn(timeline_svg(t))).tip.startswith("0F0 <&\ufffd>")
    schedule = Schedule.from_names({Lane(0, "<\x00"): ["0F0"]})
    assert len(list(drawn(schedule_svg(schedule)))) == 1


def test_colours_differ_and_black_is_readable_on_each():
    """WCAG's contrast of at least 4.5."""
    assert len({colour for colour, _ in PALETTE.values()}) == len(PALETTE)
    for colour, _ in PALETTE.values():
        linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4
                  for c in bytes.fromhex(colour[1:])]
        assert (np.dot(linear, [0.2126, 0.7152, 0.0722]) + 0.05) / 0.05 >= 4.5


def test_ansi_colours_tasks_and_changes_nothing_else():
    schedule = Schedule.from_names({Lane(0): ["0F0", "(0F1;1B0)", "0SF0>1"], Lane(1, "2F2"): ["1W0#3", "1AG0"]})
    grid = schedule.grid(mark=[parse_task("0F0")])
    painted = ansi(grid, color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == grid
    found = dict(re.findall(r"\x1b\[38;5;16;48;5;(\d+)m(.*?)\x1b\[0m", painted)[i][::-1] for i in range(6))
    assert list(found) == ["0F0", "0F1", "1B0", "0SF0>1", "1W0#3", "1AG0"]
    assert found["0F0"] == found["0F1"] != found["1B0"]
    assert found["0SF0>1"] == found["1AG0"]
    assert len({ansi(f"1{kind}2", color=True).split("m")[0] for kind in "FOWBURA"}) == 7


@pytest.mark.parametrize(("terminal", "no_color", "kind"), [
    (True, "", "xterm"), (True, "1", "xterm"), (False, "", "xterm"), (True, "", "dumb")])
def test_a_terminal_gets_a_coloured_grid(monkeypatch: pytest.MonkeyPatch, capsys: Any, terminal: bool, no_color: str,
                                         kind: str):
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert main(["plan", "--model", "mlp", "--model-arg", "preset=tiny", "--costs", "analytic"]) == 0
    assert ("m2F0\x1b[0m" in capsys.readouterr().out) == (terminal and not no_color and kind != "dumb")
