"""docs/walkthrough.md: what it names is in the file that the section is about."""

import re
from pathlib import Path

import minidl as ml
from minidl import data, models, nn, optim, schedulers

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "walkthrough.md").read_text()
SECTIONS = re.findall(r"^## \d\. [^\n]*\]\(([^)]+)\)\n(.*?)(?=^## )", TEXT, re.M | re.S)


def test_names_are_in_their_files():
    assert len(SECTIONS) == 6
    for path, text in SECTIONS:
        source = (DOCS / path).read_text()
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
            if name != "minidl.record":
                assert re.search(rf"\b{name.split('.')[-1]}\b", source), f"{path} has no {name}"


def test_what_it_says_of_the_task():
    model = models.create("mlp", preset="tiny")
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    graph = ml.record(step, *next(data.digits(batch_size=64)))
    task = graph.index("3W0")
    assert {graph.name(p) for p in graph.preds[task]} == {"2F0", "4O0"}
    assert "3U0" in {graph.name(s) for s in graph.succs[task]}
    assert [launch.kernel for launch in graph["3W0"].launches] == ["linear_weight_grad"]
    schedule = schedulers.multi_stream(graph)
    assert "3W0" in schedule.names([lane.name for lane in schedule.lanes].index("sub"))
    assert [graph.name(source) for waiter, source in schedule.waits(graph) if waiter == task] == ["4O0"]
