"""Slips of the pen in plans: a misspelt lane is noted, and a second rank on one device says how streams are named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import SMALL, run

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.schedule import Lane, Schedule
from minidl.schedulers.saved import slips


def named(**lanes: int) -> Schedule:
    """So many tasks on each lane of rank 0."""
    return Schedule.from_names({Lane(0, name): [f"{i}F0" for i in range(n)] for name, n in lanes.items()})


@pytest.mark.parametrize(("lanes", "noted"), [
    ({"main": 9, "mian": 1}, ["mian"]), ({"main": 9, "Main": 2}, ["Main"]), ({"sub": 3, "main": 9, "su": 1}, ["su"]),
    ({"main": 9, "maim": 4}, ["maim"]), ({"main": 9, "maim": 5}, []), ({"main": 9, "sub": 1}, []),
    ({"main": 9, "comm": 1, "in": 1, "out": 1}, []), ({"stage1": 9, "stage2": 1, "stage": 1}, []),
    ({"forward": 9, "backward": 1}, []), ({"main": 9, "mian": 0}, ["mian"])])
def test_a_lane_whose_name_is_like_another_one_is_noted(lanes: dict[str, int], noted: list[str]) -> None:
    assert [note.split()[1] for note in slips(named(**lanes))] == [f"0/{name}" for name in noted]
    assert not slips(Schedule.from_names({Lane(0, "main"): ["0F0", "1F0", "2F0"], Lane(1, "mian"): ["3F0"]}))


@pytest.mark.parametrize("parallel", [[], ["--parallel", "data", "--ranks", "2"]])
def test_a_misspelt_lane_of_an_edited_plan_is_noted(parallel: list[str], capsys: Any, tmp_path: Path) -> None:
    """It was a stream of its own without a word."""
    file = tmp_path / "plan.csv"
    assert run(capsys, "plan", *SMALL, *parallel, "--save", str(file))[0] == 0
    head, row, rest = file.read_text().partition("0,main,")
    file.write_text(f"{head}0,mian,{rest}")
    words = "lane 0/mian has only 1 task, and its name is like 0/main with"
    code, _, err = run(capsys, "check", str(file), *SMALL, *parallel)
    assert code == 0
    assert words in err
    assert words in run(capsys, "plan", *SMALL, *parallel, "--scheduler", str(file))[2]


def test_a_plan_is_named_by_its_path_and_what_is_none_is_refused(tmp_path: Path) -> None:
    def step(x: Any) -> Any:
        return x * 2.0

    graph, file = ml.record(step, np.ones(2, np.float32)), tmp_path / "plan.csv"
    ml.schedulers.in_order(graph).save(file)
    assert ml.plan(graph, file).schedule.grid() == ml.plan(graph, str(file)).schedule.grid()
    with pytest.raises(PlanError, match=r"a scheduler.s name, a function or a plan.s schedule$"):
        ml.plan(graph, ml.plan(graph, "in_order"))
    for order in (ml.schedulers.in_order, ml.schedulers.multi_stream):
        with pytest.raises(TypeError, match=r"graph is <function .*; it must be a TaskGraph"):
            order(step)
    with pytest.raises(PlanError, match=r"needs 2 to 1024 streams, not '2'"):
        ml.schedulers.multi_stream(graph, streams="2")


def test_a_second_rank_on_one_device_says_how_a_stream_is_named() -> None:
    def two(graph: ml.TaskGraph, cost: Any, machine: Any) -> Schedule:
        return Schedule.of(graph, {Lane(0): range(1), Lane(1): range(1, len(graph))})

    layer = ml.nn.Linear(2, 2)
    graph = ml.record(lambda x: layer(x).sum(), np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match=r"the schedule has 2 ranks; one device can run only one: the first argument "
                                         r"of Lane .* is the rank, and a second stream .* is Lane\(0, 'side'\)$"):
        ml.plan(graph, two)


def test_a_file_is_named_by_any_kind_of_path(tmp_path: Path) -> None:
    """`os.scandir` has kinds of its own."""
    graph = ml.record(lambda x: x * 2, np.ones(3, np.float32))
    Schedule.of(graph, {Lane(0): range(len(graph))}).save(tmp_path / "plan.csv")
    [found] = os.scandir(tmp_path)
    plan = ml.plan(graph, found)
    plan.timeline.save(tmp_path / "first.json")
    for trace in [entry for entry in os.scandir(tmp_path) if entry.name == "first.json"]:
        ml.Timeline.load(trace).save(trace)
