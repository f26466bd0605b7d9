"""docs/playground.html in a real browser: plans to show, and what a test reads and moves on the page."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pipelines
import pytest
from helpers import ROOT

from minidl.core.schedule import Schedule, ScheduleError
from minidl.runtime.checking import random_schedule
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.stages import stage_graph

PAGE = ROOT / "docs" / "playground.html"
sys.path.insert(0, str(ROOT / "docs" / "playground"))
build = pytest.importorskip("build", reason="docs/playground is not part of this copy")
sys.path.pop(0)
NAMES = [name for name in pipelines.POLICIES if build.playable(name)]


def legal(rng: random.Random) -> tuple[Schedule, int, int]:
    """A random order that the edges allow, of a random placement: O and W apart, joined, or some of each."""
    ranks, micro_batches, chunks = rng.randint(1, 4), rng.randint(1, 5), rng.choice([1, 1, 2, 3])
    table = rng.sample([stage % ranks for stage in range(ranks * chunks)], ranks * chunks)
    stages = ranks * chunks
    fused = np.array([[rng.random() < 0.3 for _ in range(micro_batches)] for _ in range(stages)])
    graph = stage_graph(stages, micro_batches, rng.choice([fused, True, False]))
    rows: list[list[str]] = [[] for _ in range(ranks)]
    for task in random_schedule(graph, 1, np.random.default_rng(rng.randrange(2**32))).ids(graph).tolist():
        rows[table[int(graph.unit[task])]].append(graph.name(task))
    return written([[[name] for name in row] for row in rows]), ranks, micro_batches


def written(rows: list[list[list[str]]]) -> Schedule:
    lines = ["rank,lane,task", *(f"{rank},main,{'(' + ';'.join(a) + ')' if len(a) > 1 else a[0]}"
                                 for rank, row in enumerate(rows) for a in row)]
    return Schedule.from_csv("\n".join(lines))


def actions(schedule: Schedule) -> list[list[list[str]]]:
    rows: list[list[list[str]]] = [[] for _ in range(schedule.ranks)]
    for i, lane in enumerate(schedule.lanes):
        rows[lane.rank] = [name.strip("()").split(";") for name in schedule.names(i)]
    return rows


def edited(rng: random.Random, schedule: Schedule) -> Schedule:
    """The plan after one or two moves, swaps, losses, doublings or pairings."""
    rows = actions(schedule)
    for _ in range(rng.randint(1, 2)):
        row = rng.choice([r for r in rows if r])
        at = rng.randrange(len(row))
        match rng.choice(["move", "move", "stray", "swap", "lose", "double", "pair", "rename"]):
            case "move":
                row.insert(rng.randrange(len(row)), row.pop(at))
            case "stray":
                rng.choice(rows).append(row.pop(at))
            case "swap":
                other = rng.randrange(len(row))
                row[at], row[other] = row[other], row[at]
            case "lose":
                row.pop(at)
            case "double":
                row.insert(rng.randrange(len(row)), list(row[at]))
            case "pair" if at and len(row[at]) == len(row[at - 1]) == 1:
                row[at - 1 : at + 1] = [row[at - 1] + row[at]]
            case "rename":
                row[at] = [re.sub(r"[FOWB]", lambda found: rng.choice("FOWB"), row[at][0])]
        if not any(rows):
            return schedule
    while rows and not rows[-1]:
        rows.pop()
    return written(rows)


def random_plans(count: int, seed: int = 0) -> list[tuple[Schedule, int, int]]:
    """Plans of policies and random orders, half each; a third of them are edited, and then mostly not valid."""
    rng, found = random.Random(seed), list[tuple[Schedule, int, int]]()
    while len(found) < count:
        if rng.random() < 0.5:
            ranks, micro_batches = rng.choice([2, 4]), rng.choice([2, 4, 8])
            name = rng.choice([n for n in NAMES if n not in ("zb_v", "v_half", "v_min", "zb_auto")])  # these are slow
            try:
                plan = pipelines.plan(name, ranks, micro_batches)
            except pipeline.PipelineError:
                continue
            schedule = replace(plan.schedule, slots=None)
        else:
            schedule, ranks, micro_batches = legal(rng)
        found.append((edited(rng, schedule) if rng.random() < 0.33 else schedule, ranks, micro_batches))
    return found


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
