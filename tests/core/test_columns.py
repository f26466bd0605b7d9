"""Nobody can change the columns of a graph, a schedule or a program, however these were made."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import recorded

import minidl as ml
from minidl.cli import main
from minidl.core import columns
from minidl.core.columns import Rows
from minidl.core.graph import TaskGraph
from minidl.core.schedule import Lane, Schedule
from minidl.passes.rewrite import unroll
from minidl.plans.program import lower
from minidl.runtime.checking import random_schedule

ROOMS = ("minidl.core.columns", "minidl.core.graph", "minidl.core.schedule", "minidl.plans.program",
         "minidl.passes.boundary", "minidl.plans.memory", "minidl.plans.plan")


def arrays(value: Any, name: str = "it", seen: set[int] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Every array within an object, with its name, also those that are computed when somebody asks for them."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple | list):
        for i, each in enumerate(value):
            yield from arrays(each, f"{name}[{i}]", seen)
    elif type(value).__module__ in ROOMS and hasattr(value, "__dict__"):
        for own in {*vars(value), *(k for k, v in vars(type(value)).items() if hasattr(v, "attrname"))}:
            if own.startswith("storage_") and not value.storages:
                continue  # a graph of stages alone
            yield from arrays(getattr(value, own), f"{name}.{own}", seen)


def schedules() -> dict[str, Any]:
    graph = recorded()
    schedule = random_schedule(graph, 3, np.random.default_rng(0))
    border = ml.cross_boundary(graph, [t.index for t in graph if t.kind in (ml.Kind.W, ml.Kind.U)])
    return {
        "recorded": graph, "taken": graph.take(np.arange(5)), "compact": graph.take(np.arange(5)).compact(),
        "replaced": replace(graph, keys=graph.keys.copy()), "unrolled": unroll(graph, 2),
        "of many": border, "rows": Rows.of([[1, 2], [3]]), "pairs": Rows.from_pairs(np.array([0]), np.array([1]), 1),
        "schedule": schedule, "proved": schedule.validate(graph), "read": Schedule.from_csv(schedule.to_csv()),
        "named": Schedule.from_names({Lane(0): ["(0F0;0F1)", "0W0"]}), "clocks": schedule.clocks(graph),
        "of lists": Schedule((Lane(0),), [0, 1], graph.keys[:1].tolist(), [False], [0]),
        "repeated": schedule.repeated(2), "program": lower(graph, schedule),
        "plan": ml.plan(graph, "multi_stream"),
        "pipeline": ml.plan(graph, "gpipe", machine=ml.Machine(2)),
    }


ALL = schedules()


#: live memory and functions cannot be pickled
LIVE = ("program", "plan", "pipeline", "recorded", "of many")


@pytest.mark.parametrize(("name", "how"), [
    (name, how) for name in ALL for how in ("as made", "copied", "copied deeply", "pickled")
    if how != "pickled" or name not in LIVE])
def test_no_array_can_be_written(name: str, how: str) -> None:
    made = ALL[name]
    value = {"as made": lambda v: v, "copied": copy.copy, "copied deeply": copy.deepcopy,
             "pickled": lambda v: pickle.loads(pickle.dumps(v))}[how](made)
    found = dict(arrays(value))
    assert found
    assert [where for where, array in found.items() if array.flags.writeable] == []
    for where, array in arrays(made):
        np.testing.assert_array_equal(found.get(where, array), array)


CHANGES = {
    "a column": "graph.keys[0] = 1", "a computed column": "graph.kind[:] = 0", "edges": "graph.preds.ids[:] = 0",
    "a row": "graph.reads[1][:] = 0", "in place": "graph.buffer_storage.sort()",
    "an order": "s.keys[:2] = s.keys[1::-1]",
    "its lanes": "s.ptr += 1", "a flag": "graph.preds[1].flags.writeable = True"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_policy_that_changes_columns_is_named_with_its_line(change: str, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from minidl import schedulers\n\ndef own(graph, cost, machine):\n"
                    f"    s = schedulers.in_order(graph)\n    {CHANGES[change]}\n    return s\n")
    graph = recorded()
    with pytest.raises(ValueError, match=r"^scheduler .*own\.py:own failed: ValueError: .*\(own\.py, line 5\)$"):
        ml.plan(graph, f"{file}:own")
    assert main(["plan", "--model", "mlp", "--model-arg", "hidden=8", "--batch-size", "4", "--costs", "analytic",
                 "--scheduler", f"{file}:own"]) == 2
    assert "(own.py, line 5)" in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize("code", ["Schedule.of(graph, {'0/main': range(len(graph))})",
                                  "Schedule(('main',), [0, len(graph)], graph.keys)",
                                  "Schedule.of(graph, {Lane('0'): range(len(graph))})",
                                  "Schedule.of(graph, {Lane(-1): range(len(graph))})",
                                  "Schedule.from_names({0: ['0F0']})"])
def test_lanes_of_another_type_are_said_with_the_line(code: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from minidl.core.schedule import Lane, Schedule\n\n"
                    f"def own(graph, cost, machine):\n    return {code}\n")
    with pytest.raises(ValueError, match=r"failed: a lane is Lane\(RANK, NAME\), as in Lane\(0, 'main'\), not .*"
                                         r"\(own.py, line 4\)$"):
        ml.plan(recorded(), f"{file}:own")


def test_long_loops_take_read_only_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled loops see one kind of array, so that read-only columns cost no second compilation."""
    graph: TaskGraph = recorded()
    wanted = graph.preds
    monkeypatch.setattr(columns, "LONG", 1)
    found = replace(graph, reads=Rows(graph.reads.ptr, graph.reads.ids)).preds
    np.testing.assert_array_equal(found.ids, wanted.ids)
    compiled = columns._compiled(ml.core.graph._derive)
    before = len(compiled.signatures)
    replace(graph, reads=Rows(graph.reads.ptr.copy(), graph.reads.ids.copy())).preds  # noqa: B018
    assert len(compiled.signatures) == before


def test_a_loop_that_runs_often_is_compiled_and_prepared_lists_stay_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(column: Any) -> None:
        given.append(type(column))

    given: list[type] = []
    monkeypatch.setattr(columns, "LONG", 10)
    monkeypatch.setattr(columns, "_compiled", lambda function: function)
    for _ in range(columns.RUNS):
        columns.run_loop(loop, 9, np.zeros(1))
        columns.run_loop(loop, 9, [0.0])
    assert set(given) == {list}
    for _ in range(columns.RUNS):
        columns.run_loop(loop, 9, np.zeros(1))
    columns.run_loop(loop, 9, [0.0])
    assert given[-2:] == [np.ndarray, list]
