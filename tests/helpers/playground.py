"""docs/playground.html in a real browser: plans to show, and what a test reads and moves on the page."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pipelines
import pytest
from helpers import ROOT

from minidl.core.schedule import Schedule, ScheduleError
from minidl.schedulers import pipeline

PAGE = ROOT / "docs" / "playground.html"
sys.path.insert(0, str(ROOT / "docs" / "playground"))
build = pytest.importorskip("build", reason="docs/playground is not part of this copy")
sys.path.pop(0)
NAMES = [name for name in pipelines.POLICIES if build.playable(name)]


def written(rows: list[list[list[str]]]) -> Schedule:
    lines = ["rank,lane,task", *(f"{rank},main,{'(' + ';'.join(a) + ')' if len(a) > 1 else a[0]}"
                                 for rank, row in enumerate(rows) for a in row)]
    return Schedule.from_csv("\n".join(lines))


def actions(schedule: Schedule) -> list[list[list[str]]]:
    rows: list[list[list[str]]] = [[] for _ in range(schedule.ranks)]
    for i, lane in enumerate(schedule.lanes):
        rows[lane.rank] = [name.strip("()").split(";") for name in schedule.names(i)]
    return rows


def ours(schedule: Schedule, ranks: int, micro_batches: int, times: tuple[float, ...]) -> dict[str, Any]:
    """The verdict of `minidl check` and the figures of `minidl simulate`."""
    try:
        plan = pipelines.read_plan(schedule, ranks, micro_batches)
    except ScheduleError as error:
        return {"error": error.message, "tasks": list(error.tasks)}
    return pipeline.price(plan, pipeline.costs(plan.placement, *times)).as_json()


def figure(tab: Any, name: str) -> str:
    return tab.inner_text(f"[data-figure={name}] b")


def middle(tab: Any, task: str) -> tuple[float, float]:
    box = tab.locator(f'[data-task="{task}"]').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def ours_of(name: str, ranks: int, micro_batches: int, times: tuple[float, ...]) -> dict[str, Any]:
    return ours(replace(pipelines.plan(name, ranks, micro_batches).schedule, slots=None), ranks, micro_batches, times)


def drag(tab: Any, task: str, to: tuple[float, float]) -> None:
    tab.mouse.move(*middle(tab, task))
    tab.mouse.down()
    tab.mouse.move(*to, steps=5)
    tab.mouse.up()


def beside(tab: Any, task: str, pixels: float) -> tuple[float, float]:
    x, y = middle(tab, task)
    return x + pixels, y


def show(tab: Any, order: str) -> None:
    tab.evaluate("(order) => { playground.state.plan = playground.planOf(order); playground.update(); }", order)


def middle_of(tab: Any, task: str) -> tuple[float, float]:
    tab.locator("#block").scroll_into_view_if_needed()
    box = tab.locator(f"#block [data-block='{task}']").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
