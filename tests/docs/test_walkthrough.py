"""docs/walkthrough.md: what it names is in the file that the section is about, a step runs through few files, and a
plan goes through the files of its list, in their order."""

import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT

import minidl as ml
from minidl import data, device, models, nn, optim, schedulers

MOST = 20  #: files whose functions run in a step
IN_ALL = 34  #: from the eager call over record, schedule and executor to the step, with Python's lanes
DOCS = ROOT / "docs"
TEXT = (DOCS / "walkthrough.md").read_text()
#: of each road, the files with the text about each
ROADS = {title: re.findall(r"^\d+\. \[([^\]]*)\]\(\.\./\1\)(.*?)(?=^\d+\. |\n\n)", text, re.M | re.S)
         for title, text in re.findall(r"^### ([^\n]*)\n(.*?)(?=^##)", TEXT, re.M | re.S)}
#: the rooms that the roads do not count, as the page lists them
QUIET = tuple(re.findall(r"`([\w/.]+)`", re.findall(r"The lists leave out (.*?)\.\s", TEXT, re.S)[0]))
SECTIONS = re.findall(r"^## \d\. [^\n]*\n\n\[[^\]]*\]\(([^)]+)\)(.*?)(?=^## )", TEXT, re.M | re.S)


def test_names_are_in_their_files():
    assert len(SECTIONS) == 6
    for path, text in SECTIONS:
        source = (DOCS / path).read_text()
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
            if name != "minidl.record":
                assert re.search(rf"\b{name.split('.')[-1]}\b", source), f"{path} has no {name}"


def usual_step():
    model = models.create("mlp", preset="tiny")
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_what_it_says_of_the_task():
    step = usual_step()
    graph = ml.record(step, *next(data.digits(batch_size=64)))
    task = graph.index("3W0")
    assert {graph.name(p) for p in graph.preds[task]} == {"2F0", "4O0"}
    assert "3U0" in {graph.name(s) for s in graph.succs[task]}
    assert [launch.kernel for launch in graph["3W0"].launches] == ["linear_weight_grad"]
    schedule = schedulers.multi_stream(graph)
    assert "3W0" in schedule.names([lane.name for lane in schedule.lanes].index("sub"))
    assert [graph.name(source) for waiter, source in schedule.waits(graph) if waiter == task] == ["4O0"]


def files(call: Callable[[], Any]) -> dict[str, None]:
    """Those of ours whose functions run in a call, on any thread that it starts, in the order of their first entry."""
    seen: dict[str, None] = {}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.setdefault(frame.f_code.co_filename)

    gc.collect()
    gc.disable()  # a collection would run the finalizers of other tests' executors
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    paths = [path.resolve() for path in map(Path, list(seen)) if path.is_absolute()]
    ours = [path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)]
    return {str(path): None for path in ours if path.parts[0] != "tests"}


def test_a_step_runs_through_few_files_and_the_six_are_among_them():
    step = usual_step()
    x, y = next(data.digits(batch_size=64))
    python = device.CPU()
    python.set_lanes("python")
    graph = ml.record(step, x, y)
    ml.StreamExecutor(graph, schedulers.multi_stream(graph), device=python)(x, y)  # what is made once is made
    step(x, y)
    made = {}
    eager = {*files(lambda: step(x, y))}
    whole = eager | {*files(lambda: made.update(graph=ml.record(step, x, y)))}
    whole |= {*files(lambda: made.update(schedule=schedulers.multi_stream(made["graph"])))}
    whole |= {*files(lambda: made.update(run=ml.StreamExecutor(made["graph"], made["schedule"], device=python)))}
    recorded = {*files(lambda: made["run"](x, y))}
    whole |= recorded
    assert 0 < len(eager) <= MOST, sorted(eager)
    assert 0 < len(recorded) <= MOST, sorted(recorded)
    assert len(whole) <= IN_ALL, sorted(whole)
    assert {path.removeprefix("../") for path, _ in SECTIONS} <= whole


def small_graph(micro_batches: int) -> ml.TaskGraph:
    """A step of four linear layers, in so many micro-batches."""
    model = models.mlp(16, 16, 16, 16, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        n = len(x) // micro_batches
        for i in range(micro_batches):
            with ml.micro_batch(i):
                part = slice(i * n, (i + 1) * n)
                (nn.cross_entropy(model(x[part]), y[part]) * (1 / micro_batches)).backward()
        optimizer.step()

    return ml.record(step, np.zeros((8, 16), np.float32), np.zeros(8, np.int64))


@pytest.mark.parametrize(("title", "micro_batches", "policy", "ranks"), [
    ("A pipeline on two ranks", 4, "zb_h1", 2), ("One device", 1, "multi_stream", 1)])
def test_a_plan_enters_the_files_of_its_road_in_their_order(title, micro_batches, policy, ranks):
    """A file that is entered and not on the page is in a room that the page says it leaves out."""
    assert QUIET[-1] == "minidl/pricing/cost.py"
    assert all((ROOT / room).exists() for room in QUIET)
    graph, machine = small_graph(micro_batches), ml.Machine(ranks=ranks)
    ml.plan(graph, policy, machine=machine)  # what is imported or kept once is there
    entered = [path for path in files(lambda: ml.plan(graph, policy, machine=machine)) if not path.startswith(QUIET)]
    assert entered == [path for path, _ in ROADS[title]]


def test_names_on_a_road_are_in_their_files():
    for path, text in (entry for road in ROADS.values() for entry in road):
        source = (ROOT / path).read_text()
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
            assert re.search(rf"\b{name.split('.')[-1]}\b", source), f"{path} has no {name}"
