"""Features combine: each pair on a small network leaves the bits of one process, or is refused in one line.

    PYTHONPATH=tests/helpers python tests/ranks/test_composition.py

writes docs/composition.md, which these tests compare with.
"""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import deadline
from replays import replay_together

import minidl as ml
from minidl import nn, ops, optim, schedulers
from minidl.autograd.tape import Tape, use
from minidl.core import schedule
from minidl.core.placement import Refused
from minidl.devices.far import Mapped
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline
from minidl.testing.replay import Replay

DOC = Path(__file__).resolve().parents[2] / "docs" / "composition.md"
RANKS, MICRO_BATCHES, SHARE, STEPS, WIDTH = 2, 4, 4, 3, 12
COST = ml.CostModel.analytic()
FEATURES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "clipping by the global norm": {"clip": 0.05},
    "loss scaling": {"scaled": True},
    "tied weights": {"tied": True},
    "batch norm": {"norm": True},
    "dropout": {"drop": True},
    "dithered gradients": {"dither": 2.0},
    "recompute": {"recompute": (0,)},  # of all layers but this, up to what stages send
    "offload": {"offload": "all"},
    "weight versions (pipedream)": {"scheduler": "pipedream", "every": 1},
    "averaged weights (layerpipe2)": {"scheduler": "layerpipe2", "every": 1, "options": {"history": "average"}},
    "layers in parts (layerpipe)": {"scheduler": "layerpipe", "every": 1, "options": {"chunks": 2}},
    "two directions (chimera)": {"scheduler": "chimera", "groups": 2},
    "interleaved stages": {"scheduler": "interleaved"},
    "pairs as one action (dualpipe_v)": {"scheduler": "dualpipe_v"},
    "slices (seq1f1b)": {"scheduler": "seq1f1b", "slices": 2},
    "late updates (priority)": {"scheduler": "priority", "ranks": 1, "replicas": 2},
    "a plan from a file": {"saved": True},
    "messages earlier (overlap)": {"options": {"overlap": 100}},
    "tasks in parts (split)": {"split": 2},
    "shards over replicas": {"replicas": 2, "shard": "3,prefetch=0,keep=none"},
}
PAIRS = list(itertools.combinations(FEATURES, 2))


class Network(nn.Module):
    """Layers, with a norm and dropout after each if wanted; the last one may have the weight of the first. A slice adds
    to the output of each layer the output that the slice before it had there, `past`; the first one adds its own."""

    def __init__(self, tied: bool, norm: bool, drop: bool) -> None:
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(WIDTH) for _ in range(7)] if norm else [])
        self.drop = nn.Dropout(0.25) if drop else None
        if tied:
            self.layers[7].weight = self.layers[0].weight

    def forward(self, x: Any, past: dict[int, Any] | None = None) -> Any:
        for i, layer in enumerate(self.layers):
            x = ops.tanh(layer(x))
            if past is not None:
                past[i] = x = x + past.get(i, x)
            if len(self.norms) and i < 7:
                x = self.norms[i](x.reshape(SHARE, 1, 1, WIDTH)).reshape(SHARE, WIDTH)
            if self.drop is not None and i < 7:
                x = self.drop(x)
        return x


def batches(replica: int, micro_batches: int = MICRO_BATCHES) -> list[list[np.ndarray]]:
    random = np.random.default_rng(5 + replica)
    return [[part for _ in range(micro_batches) for part in (random.standard_normal((SHARE, WIDTH)).astype("f"),
                                                             random.integers(0, WIDTH, SHARE))] for _ in range(STEPS)]


OPTIMIZERS: dict[str, Any] = {"sgd": functools.partial(optim.SGD, lr=0.05, momentum=0.9),
                              "adam": functools.partial(optim.Adam, lr=0.01),
                              "adamw": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1)}


class Run:
    """One process's network and step under these settings."""

    def __init__(self, settings: dict[str, Any], replica: int = 0) -> None:
        ml.seed(1)
        self.settings, self.replica, self.count = settings, replica, settings.get("micro_batches", MICRO_BATCHES)
        self.model = settings.get("network", Network)(*(bool(settings.get(name)) for name in ("tied", "norm", "drop")))
        self.scaler = optim.GradScaler(8.0, growth_interval=2) if settings.get("scaled") else None
        self.optimizer = OPTIMIZERS[settings.get("optimizer", "sgd")](
            self.model.parameters(), max_norm=settings.get("clip"), scaler=self.scaler)

    def backward(self, i: int, parts: tuple[Any, ...]) -> None:
        """Of a micro-batch, or of a slice: the last one's is that of all."""
        half = {"group": 2 * i // self.count} if self.settings.get("groups") else {}
        slices = self.settings.get("slices", 1)
        follows = i % slices > 0
        with ml.micro_batch(i, (self.replica * self.count + i) * SHARE, **half, follows=follows):
            past = None if slices == 1 else self.past if follows else {}
            loss = nn.cross_entropy(self.model(parts[2 * i], past), parts[2 * i + 1])
            if follows:
                loss = self.loss + loss
            if (i + 1) % slices:
                self.past, self.loss = past, loss
                return
            with ml.dither(self.settings.get("dither", 0)):
                (loss * (1 / self.settings.get("every", self.count))).backward(self.scaler and self.scaler.scale)
            if self.settings.get("every"):
                self.optimizer.step()

    def step(self, *parts: Any) -> None:
        for i in range(self.count):
            self.backward(i, parts)
        if not self.settings.get("every"):
            self.optimizer.step()

    def recorded(self) -> Any:
        return ml.record(self.step, *batches(0, self.count)[0])

    def bits(self) -> dict[int, bytes]:
        return {i: p.numpy().tobytes() for i, p in enumerate(self.model.parameters())}


def planned(graph: Any, settings: dict[str, Any]) -> ml.Plan:
    name = settings.get("scheduler", "zb_h1")
    kind, replicas = schedulers.find(name).parallel, settings.get("replicas", 1)
    machine = ml.Machine(replicas) if kind == "data" else ml.Machine(settings.get("ranks", RANKS), replicas=replicas)
    if "limit" in settings:  # a share of the bytes that the plain plan needs
        most = max(ml.plan(graph, name, COST, machine, **settings.get("options", {})).peak_bytes)
        machine = replace(machine, memory_limit=int(most * settings["limit"]))
    plan = ml.plan(graph, name, COST, machine, recompute=settings.get("recompute", "none"),
                   split=settings.get("split", 1), offload=settings.get("offload", "none"),
                   shard=settings.get("shard", 0), **settings.get("options", {}))
    if not settings.get("saved"):
        return plan
    with tempfile.TemporaryDirectory() as folder:
        file, again = f"{folder}/plan.csv", {}
        if settings["saved"] == "torch":
            Path(file).write_text(pipeline.for_torch(plan))
            again = {"recompute": settings.get("recompute", "none")}
        else:
            plan.schedule.save(file)
        read = schedulers.find(file, kind)
        chunks = {} if kind == "data" else read.known(chunks=plan.placement.chunks)
        return ml.plan(graph, read, COST, machine, **again, **chunks)


def on_ranks(settings: dict[str, Any]) -> tuple[dict[int, bytes], list[Any]]:
    """The parameters that ranks leave, which are equal on all replicas, and the version log of the first replica."""
    replicas, ranks = settings.get("replicas", 1), settings.get("ranks", RANKS)
    own = []
    for rank in range(ranks * replicas):
        run = Run(settings, rank // ranks)
        own.append((run, planned(run.recorded(), settings)))

    def work(communicator: Any) -> Any:
        run, plan = own[communicator.rank]
        runs = DistributedExecutor(*plan.with_messages, communicator, logged="every" in settings)
        for parts in batches(communicator.rank // ranks, run.count):
            runs(*parts)
        runs.settle()
        parts = [part.bound for part in (*runs._body, *runs._prologue, *runs._epilogue)]
        memory = {id(m): m for bound in parts for m in (bound.arena, *bound.persistent) if not isinstance(m, Mapped)}
        assert sum(map(len, memory.values())) == runs.peak_bytes
        runs.whole(everywhere=True)
        runs.close()
        held = {id(live) for s in runs.program.graph.storages for live in (s.live, s.share_of) if live is not None}
        bits = {i: p.numpy().tobytes() for i, p in enumerate(run.model.parameters()) if id(p.storage) in held}
        return bits, runs.log.entries if "every" in settings else []

    with deadline():
        found = run_ranks(ranks * replicas, work)
    every = [functools.reduce(dict.__or__, (bits for bits, _ in reversed(found[r * ranks : (r + 1) * ranks])))
             for r in range(replicas)]
    assert all(bits == every[0] for bits in every)
    return every[0], [entry for _, log in found[:ranks] for entry in log]


def alone(settings: dict[str, Any], log: list[Any]) -> dict[int, bytes]:
    """The parameters that one process leaves: by the log of a stale run, or one share after the other."""
    replicas = settings.get("replicas", 1)
    if "every" in settings:
        runs = [Run(settings, r) for r in range(replicas)]
        stages = RANKS * settings.get("options", {}).get("chunks", 1)
        replays = [Replay(graph, pipeline.balanced(graph, COST, stages)) for graph in (run.recorded() for run in runs)]
        for step, parts in enumerate(zip(*(batches(r) for r in range(replicas)), strict=True)):
            replay_together(replays, [tuple(p) for p in parts], [e for e in log if e.step == step])
        return runs[0].bits()
    if replicas == 1:
        run = Run(settings)
        execute = ml.SequentialExecutor(run.recorded())
        for parts in batches(0):
            execute(*parts)
        return run.bits()
    with use(Tape()):
        run = Run(settings)
        counter = ml.autograd.random.dropout_counter()
        for step in range(STEPS):
            shares, began = [], np.array(counter.data)
            for run.replica in range(replicas):
                counter.data[...] = began  # all replicas are in the same step
                for p in run.model.parameters():
                    p.grad = None
                for i in range(run.count):
                    run.backward(i, tuple(batches(run.replica, run.count)[step]))
                shares.append([p.grad.numpy().copy() for p in run.model.parameters()])
            for p, *grads in zip(run.model.parameters(), *shares, strict=True):
                p.grad.assign(functools.reduce(np.add, grads) * np.float32(1 / replicas))
            run.optimizer.step()
        return run.bits()


def outcome(one: str, other: str) -> str:
    """"equal bits", or why the pair is refused; "" if it makes no sense."""
    first, second = FEATURES[one], FEATURES[other]
    if any(name in first and first[name] != value for name, value in second.items()):
        return ""
    if "every" in first and "overlap" in second.get("options", ()):
        return ""  # the order says which weights are read
    if FEATURES["late updates (priority)"] in (first, second) and "overlap" in (first | second).get("options", ()):
        return ""  # its collectives begin as early as they can
    settings = first | second
    try:
        found, log = on_ranks(settings)
    except Refused as error:
        return str(error)
    except schedule.ScheduleError as error:  # what a file says is checked, not planned
        return error.message
    return "equal bits" if found == alone(settings, log) else "other bits"


def read() -> dict[tuple[str, str], str]:
    """The page's outcomes."""
    text = DOC.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    names = [row[0].split(". ", 1)[1] for row in rows[2:]]
    return {(one, other): {"yes": "equal bits", "-": ""}.get(cell) or reasons.get(cell, "")
            for one, row in zip(names, rows[2:], strict=True)
            for other, cell in zip(names, row[1:], strict=True) if cell}


@pytest.mark.few(3)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_is_as_the_page_says(one: str, other: str) -> None:
    assert outcome(one, other) == read()[one, other]


def test_nearly_all_pairs_run() -> None:
    found = [*filter(None, read().values())]
    assert "other bits" not in found
    assert found.count("equal bits") >= 0.95 * len(found)
    assert counted(found) in DOC.read_text()


@pytest.mark.parametrize("other", [*FEATURES][-2:])
def test_parts_and_shards_combine_with_all_that_is_not_stale(other: str) -> None:
    beside = {"late updates (priority)"} if "shard" in FEATURES[other] else set()  # the next step
    assert {one for (one, with_), what in read().items() if with_ == other and what not in ("", "equal bits")} == {
        one for one in FEATURES if "every" in FEATURES[one]} | beside


@pytest.mark.parametrize("kept", [(0,), "all"])
def test_what_a_slice_computes_again_is_there_for_the_slices_after_it(kept: Any) -> None:
    """The backward pass of the last slice comes first, and reads what earlier slices have made."""
    settings = FEATURES["slices (seq1f1b)"] | {"recompute": kept}
    assert on_ranks(settings)[0] == alone(settings, [])


def counted(found: list[str]) -> str:
    run = found.count("equal bits")
    return f"Of the {len(found)} pairs that make sense, {run} run: {100 * run / len(found):.1f} %."


def page() -> str:
    names, reasons, rows, every = list(FEATURES), list[str](), [], list[str]()
    for i, one in enumerate(names):
        cells = []
        for j, other in enumerate(names):
            found = outcome(one, other) if j > i else None
            print(one, "x", other, ":", found, flush=True)
            every += [found] if found else []
            if found and found != "equal bits" and found not in reasons:
                reasons.append(found)
            cells.append("" if found is None else "-" if not found else "yes" if found == "equal bits"
                         else str(reasons.index(found) + 1))
        rows.append(f"| {i + 1}. {one} | " + " | ".join(cells) + " |")
    columns = " | ".join(str(i + 1) for i in range(len(names)))
    return "\n".join([
        "# Which features combine", "",
        "Every pair trains a small network on two ranks of a pipeline (with replicas, two times two; late updates: on",
        "two data-parallel ranks). *yes*: the parameters are bit-identical to one process; if weights are stale, that",
        "process replays the run's log of weight versions. *-*: both choose the order, or one leaves the other nothing",
        "to do. A number: minidl refuses the pair, for the reason below.", counted(every),
        "`tests/ranks/test_composition.py` makes this page, and compares each pair with it.", "",
        f"| | {columns} |", "|" + "---|" * (len(names) + 1), *rows, "",
        *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1)), ""])


if __name__ == "__main__":
    DOC.write_text(page())
