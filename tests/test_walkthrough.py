"""docs/walkthrough.md: what it names is in the file that the section is about, and a step runs through few files."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minidl as ml
from minidl import data, models, nn, optim, schedulers

ROOT = Path(__file__).resolve().parent.parent
MOST = 20  #: files whose functions run in a step
DOCS = Path(__file__).resolve().parent.parent / "docs"
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

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = {path.resolve() for path in map(Path, seen) if path.is_absolute()}
    return {str(path.relative_to(ROOT)) for path in ours if path.is_relative_to(ROOT) and "tests" not in path.parts}


def test_a_step_runs_through_few_files_and_the_six_are_among_them():
    step = usual_step()
    x, y = next(data.digits(batch_size=64))
    eager = files(lambda: step(x, y))
    whole = set(eager)
    made = {}
    whole |= files(lambda: made.update(graph=ml.record(step, x, y)))
    whole |= files(lambda: made.update(schedule=schedulers.multi_stream(made["graph"])))
    whole |= files(lambda: made.update(run=ml.StreamExecutor(made["graph"], made["schedule"])))
    recorded = files(lambda: made["run"](x, y))
    assert 0 < len(eager) <= MOST, sorted(eager)
    assert 0 < len(recorded) <= MOST, sorted(recorded)
    assert {path.removeprefix("../") for path, _ in SECTIONS} <= whole | recorded
