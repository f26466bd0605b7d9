"""Draws capture.svg: how a step becomes a CUDA graph. The graph is a captured one, of the machine that stands for a
GPU in the tests.

    python docs/pictures/capture.py [FILE.svg]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "cuda" / "stand_ins")]

import cuda_runtime
import numpy as np

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.autograd.tape import Tape, use
from minidl.core.draw import PALETTE
from minidl.devices.cuda.lanes import issue_order
from minidl.runtime.executors import GraphExecutor

LEFT, TOP, STEP, HIGH, GAP = 96, 64, 78, 34, 96  #: pixels: margins, from task to task, of a task, from lane to lane
STYLE = """
text{font:12px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}
.card{fill:#fff}.ink{fill:#1f2328}.soft{fill:#59636e}.mid{text-anchor:middle}.on{fill:#000;text-anchor:middle}
.rail{stroke:#59636e;stroke-opacity:.25;stroke-width:2}.edge{stroke:#59636e;fill:none;stroke-width:1.6}
.event{stroke:#0072b2;fill:none;stroke-width:1.8}.dash{stroke-dasharray:5 4}.mark{fill:#0072b2}.tip{fill:#59636e}
.proof{stroke:#d55e00;fill:none;stroke-width:3}.prove{fill:#d55e00}
@media(prefers-color-scheme:dark){.card{fill:#0d1117}.ink{fill:#f0f6fc}.soft{fill:#9198a1}.edge{stroke:#9198a1}.tip{fill:#9198a1}
.event{stroke:#56b4e9}.mark{fill:#56b4e9}.proof{stroke:#e69f00}.prove{fill:#e69f00}}
"""


@dataclass
class Capture:
    """What was seen of a capture: tasks in the order of issue with their lanes, the waits of the schedule, and the
    graph: the task of each node, and edges between nodes."""

    lanes: list[str] = field(default_factory=list)
    order: list[tuple[str, int]] = field(default_factory=list)
    waits: list[tuple[str, str]] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


def captured() -> Capture:
    """Of a small network's step under multi_stream."""
    device, seen = cuda_runtime.device(), Capture()
    driver, capture = device.driver, device.captured
    frontier, dependencies = driver.frontier, driver.dependencies

    def note_work(work: Any, trace: bool = False) -> Any:
        order = issue_order(work)
        seen.lanes, seen.order = list(work.names), [(work.name(task), lane) for task, lane in order]
        seen.waits = [(work.name(source), work.name(waiter)) for waiter, source in work.waits]
        return capture(replace(work, feed=None), trace)  # the upload of inputs is not shown

    def note_task(stream: Any) -> Any:
        """Called behind each task: the nodes since the last one are its."""
        nodes, done = len(driver.machine.captures[-1].calls), len(dict.fromkeys(seen.tasks))
        seen.tasks += [seen.order[done][0]] * (nodes - len(seen.tasks))
        return frontier(stream)

    def note_graph(graph: Any) -> Any:
        nodes, seen.edges = dependencies(graph)
        return nodes, seen.edges

    device.captured, driver.frontier, driver.dependencies = note_work, note_task, note_graph
    with use(Tape(device)):
        ml.seed(0)
        model = models.mlp(6, 6, 4)
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            loss = nn.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        graph = ml.record(step, np.zeros((8, 6), np.float32), np.zeros(8, np.int64))
    GraphExecutor(graph, schedulers.multi_stream(graph), device=device).close()
    return seen


class Picture:
    """SVG, written from top to bottom."""

    def __init__(self, seen: Capture) -> None:
        self.seen, self.lines = seen, list[str]()
        self.place = {task: (LEFT + STEP * (i + 1), lane) for i, (task, lane) in enumerate(seen.order)}
        self.width = LEFT + STEP * (len(seen.order) + 2) + 16

    def text(self, x: float, y: float, said: str, kind: str = "ink", more: str = "") -> None:
        self.lines.append(f'<text x="{x:g}" y="{y:g}" class="{kind}"{more}>{said}</text>')

    def path(self, points: str, kind: str, tip: str = "") -> None:
        end = f' marker-end="url(#{tip})"' if tip else ""
        self.lines.append(f'<path d="{points}" class="{kind}"{end}/>')

    def between(self, start: tuple[float, float], end: tuple[float, float], kind: str, tip: str) -> None:
        """From lane to lane, first sideways a little, then down or up."""
        (x, y), (to, below) = start, end
        bend = min(40.0, abs(to - x) * 0.6 + 8)
        self.path(f"M{x:g} {y:g}C{x + bend:g} {y + (below - y) * 0.45:g} {to - bend:g} "
                  f"{y + (below - y) * 0.55:g} {to:g} {below:g}", kind, tip)

    def panel(self, top: float, title: str) -> list[float]:
        """The title and the lanes' rails; where lanes lie."""
        self.text(16, top, title, more=' style="font-weight:bold"')
        found = [top + 40 + GAP * lane for lane in range(len(self.seen.lanes))]
        for name, y in zip(self.seen.lanes, found, strict=True):
            self.text(16, y + 4, name)
        return found

    def issued(self, top: float) -> None:
        """Calls on streams: the fork, tasks, an event for each wait, the join."""
        lanes = self.panel(top, "Issued once, while the streams are captured: launches, and events "
                                "where the schedule has waits")
        begin, end = LEFT + STEP * 0.3, self.width - STEP * 0.75
        for y in lanes:
            self.path(f"M{begin:g} {y:g}H{end:g}", "rail")
        for source, waiter in self.seen.waits:
            (x, one), (to, other) = self.place[source], self.place[waiter]
            down = 1 if other > one else -1
            self.between((x + STEP * 0.32, lanes[one] + down * HIGH / 2),
                         (to - STEP * 0.32, lanes[other] - down * HIGH / 2), "event", "mark")
        for task, (x, lane) in self.place.items():
            self.box(x, lanes[lane], task)
        for y in lanes[1:]:
            self.between((begin, lanes[0]), (begin + STEP * 0.3, y), "event dash", "mark")
            self.between((end - STEP * 0.3, y), (end, lanes[0]), "event dash", "mark")
        self.text(begin - 4, lanes[0] - 24, "fork", "mark mid")
        self.text(end, lanes[0] - 24, "join", "mark mid")
        for x in (begin, end):
            self.lines.append(f'<circle cx="{x:g}" cy="{lanes[0]:g}" r="5" class="mark"/>')

    def box(self, x: float, y: float, task: str) -> None:
        colour = PALETTE[next(c for c in task if c.isalpha())][0]
        self.lines.append(f'<rect x="{x - STEP * 0.36:g}" y="{y - HIGH / 2:g}" width="{STEP * 0.72:g}" '
                          f'height="{HIGH}" rx="5" fill="{colour}"/>')
        self.text(x, y + 4, task, "on")

    def graph(self, top: float) -> None:
        """Nodes and edges; one wait's path stands for the check."""
        lanes = self.panel(top, "The graph that is left: a node for each launch; of events there are "
                                "only the edges that they made")
        nodes = []
        for node, task in enumerate(self.seen.tasks):
            x, lane = self.place[task]
            first, count = self.seen.tasks.index(task), self.seen.tasks.count(task)
            nodes.append((x + (node - first - (count - 1) / 2) * 24, lanes[lane]))
        source, waiter = self.seen.waits[0]
        for a, b in self.seen.edges:
            (x, y), (to, below) = nodes[a], nodes[b]
            proof = (self.seen.tasks[a], self.seen.tasks[b]) == (source, waiter)
            if y == below:
                self.path(f"M{x + 9:g} {y:g}H{to - 11:g}", "edge", "tip")
            else:
                side = 1 if below > y else -1
                self.between((x + 5, y + 9 * side), (to - 4, below - 11 * side), "proof" if proof else "edge",
                             "prove" if proof else "tip")
        for (x, y), task in zip(nodes, self.seen.tasks, strict=True):
            colour = PALETTE[next(c for c in task if c.isalpha())][0]
            self.lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{colour}"><title>{task}</title></circle>')
        for task, (x, lane) in self.place.items():
            self.text(x, lanes[lane] + (-18 if lane == 0 else 26), task, "soft mid")
        self.text(16, lanes[-1] + 58, f"Checked: each wait of the schedule, and the order of each lane, is a path. "
                                      f"Here {waiter} after {source}.", "prove")

    def svg(self) -> str:
        self.issued(TOP - 32)
        below = TOP + GAP * len(self.seen.lanes)
        self.graph(below)
        height = below + 40 + GAP * (len(self.seen.lanes) - 1) + 80
        tips = "".join(f'<marker id="{kind}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="{size}" '
                       f'markerHeight="{size}" orient="auto">'
                       f'<path d="M0 0L8 4L0 8z" class="{kind}"/></marker>'
                       for kind, size in (("mark", 5), ("tip", 5), ("prove", 4)))
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" viewBox="0 0 '
                f'{self.width} {height}" role="img">\n'
                f"<title>A captured step: fork, lanes, join, check</title>\n"
                f"<style>{STYLE}</style>\n<defs>{tips}</defs>\n"
                f'<rect class="card" width="{self.width}" height="{height}" rx="6"/>\n'
                + "\n".join(self.lines) + "\n</svg>\n")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")).write_text(Picture(captured()).svg())
