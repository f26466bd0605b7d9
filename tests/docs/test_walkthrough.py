"""docs/walkthrough.md: what it names is in the file that the section is about, and a step runs through few files."""

import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import ROOT

import minidl as ml
from minidl import data, device, models, nn, optim, schedulers

MOST = 20  #: files whose functions run in a step
IN_ALL = 31  #: from the eager call over record, schedule and executor to the step, with Python's lanes
DOCS = ROOT / "docs"
TEXT = (DOCS / "walkthrough.md").read_text()
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


def files(call: Callable[[], Any]) -> set[str]:
    """Those of ours whose functions run in a call, on any thread that it starts."""
    seen: set[str] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

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
    paths = {path.resolve() for path in map(Path, list(seen)) if path.is_absolute()}
    ours = {path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)}
    return {str(path) for path in ours if path.parts[0] != "tests"}


def test_a_step_runs_through_few_files_and_the_six_are_among_them():
    step = usual_step()
    x, y = next(data.digits(batch_size=64))
    python = device.CPU()
    python.set_lanes("python")
    graph = ml.record(step, x, y)
    ml.StreamExecutor(graph, schedulers.multi_stream(graph), device=python)(x, y)  # what is made once is made
    step(x, y)
    made = {}
    eager = files(lambda: step(x, y))
    whole = eager | files(lambda: made.update(graph=ml.record(step, x, y)))
    whole |= files(lambda: made.update(schedule=schedulers.multi_stream(made["graph"])))
    whole |= files(lambda: made.update(run=ml.StreamExecutor(made["graph"], made["schedule"], device=python)))
    recorded = files(lambda: made["run"](x, y))
    whole |= recorded
    assert 0 < len(eager) <= MOST, sorted(eager)
    assert 0 < len(recorded) <= MOST, sorted(recorded)
    assert len(whole) <= IN_ALL, sorted(whole)
    assert {path.removeprefix("../") for path, _ in SECTIONS} <= whole
