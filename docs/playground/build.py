"""Builds docs/playground.html, one static page: `python docs/playground/build.py`.

The page holds the plans of all synchronous policies for a range of numbers. Orders that depend on the times come from
policies.js, but for those that take a search (`SEARCHED`); proofs and figures of edited plans from simulator.js. Tests
compare both with Python. Run it again after a change to a policy. Takes a minute.
"""

from __future__ import annotations

import base64
import gzip
import json
import shlex
import sys
from pathlib import Path
from string import Template
from typing import Any

import minidl as ml
from minidl.cli.data_parallel_plans import SHOWN
from minidl.cli.parser import parse
from minidl.cli.planning import planned
from minidl.core.draw import PALETTE, group_of
from minidl.core.schedule import Schedule
from minidl.core.tasks import Kind, unpack
from minidl.core.timeline import Timeline
from minidl.passes import hide
from minidl.passes.sweeps import BACKWARD
from minidl.plans.plan import Plan
from minidl.schedulers import find, layup, names, pipeline
from minidl.views.page import ASSETS, Shown

HERE = Path(__file__).parent
PARTS = ("simulator.js", "policies.js", "coach.js", "hint.js", "challenges.js", "page.js", "block.js",
         "vary.js")
PAGE = HERE.with_suffix(".html")
RANKS, MICRO_BATCHES, CHUNKS = (2, 3, 4, 6, 8), (2, 3, 4, 6, 8, 12, 16), (1, 2, 4)
#: playable policies whose order comes from a search on the times; policies.js has the others that depend on them
SEARCHED = ("zb_auto", "zb_v", "v_half", "v_min", "fast_forward_push_released")
GALLERY = (4, 8)  #: ranks and micro-batches
MLP = "--model mlp --model-arg layers=6 --model-arg hidden="
GPT = "--model gpt --model-arg preset=tiny --model-arg layers="
LANES, LINK = "--scheduler multi_stream --streams 16", "--parallel data --ranks 4 --latency 1 --bandwidth 10GB"
MOE = f"--model moe_gpt --model-arg preset=tiny {LINK.replace('10GB', '200MB')} --experts-over data --scheduler barrier"
#: what is no pipeline, and computes something else than the recorded step or has its own lanes of messages -> its flags
METHODS = {
    "pd_asgd": f"{MLP}64 --micro-batches 8 --scheduler pd_asgd",
    "partime": f"{MLP}64 --scheduler partime --scheduler-arg stages=4",
    "layup": f"{MLP}64 {LINK} --micro-batches 8 --scheduler layup --slow 0=4",
    "delayed_update": f"{MLP}64 {LINK} --micro-batches 2 --scheduler delayed_update",
    "acco": f"{MLP}64 {LINK} --micro-batches 2 --scheduler acco",
    "hide": f"{MOE} --scheduler-arg hide=weights",
    "hide, two batches": f"{MOE} --micro-batches 2 --scheduler-arg hide=two_batches",
    "jacobi": f"{MLP}64 --backward jacobi --sweeps 2 {LANES}",
    "jacobi, blocks of two (Gauss-Seidel)": f"{MLP}64 --backward jacobi --sweeps 2 --block 2 {LANES}",
    "highway": f"{GPT}4 --backward highway --sweeps 1 {LANES}",
    "deeppcr": f"{MLP}16 --backward deeppcr {LANES}"}


def playable(name: str) -> bool:
    """Whether the policy's tasks are equal stages of whole micro-batches, each stage on one rank in one version of the
    weights, and it searches for no optimum."""
    policy = find(name).staged
    return not (policy.stale or policy.sliced or policy.parted or policy.arranges or "time_limit" in policy.options)


def order(name: str, ranks: int, micro_batches: int, chunks: int) -> str | None:
    """The policy's order, ranks separated by `|`; None where it does not accept the numbers."""
    try:
        schedule = ml.plan(ml.Pipeline(micro_batches), name, machine=ml.Machine(ranks), chunks=chunks).schedule
    except pipeline.PipelineError:
        return None
    return row(schedule)


def row(schedule: Schedule) -> str:
    """The names of all actions, ranks separated by `|`."""
    return "|".join(" ".join(schedule.names(lane)) for lane in range(len(schedule.lanes)))


def plans() -> dict[str, dict[str, str]]:
    """policy -> "ranks,micro-batches,stages per rank" -> order."""
    found: dict[str, dict[str, str]] = {}
    for name in filter(playable, names("pipeline")):
        policy = find(name).staged
        for ranks in RANKS:
            for micro_batches in MICRO_BATCHES:
                for chunks in (policy.chunks,) if policy.chunks_fixed else CHUNKS:
                    if (made := order(name, ranks, micro_batches, chunks)) is not None:
                        found.setdefault(name, {})[f"{ranks},{micro_batches},{chunks}"] = made
    return found


def gallery() -> list[dict[str, Any]]:
    """Every policy with its source and closed form, its figures and the rectangles of its timeline."""
    found = []
    ranks, micro_batches = GALLERY
    for name in names("pipeline"):
        policy = find(name).staged
        entry: dict[str, Any] = {"name": name, "about": find(name).about, "stale": policy.stale,
                                 "chunks": policy.chunks,
                                 "bubble": None, "peak": None, "tasks": []}
        if "time_limit" not in policy.options:  # a search for an optimum takes its time
            plan = ml.plan(ml.Pipeline(micro_batches), name, machine=ml.Machine(ranks))
            price, t = pipeline.price(plan), plan.timeline
            first, _, size = t.actions
            for begin, count in zip(first.tolist(), size.tolist(), strict=True):
                entry["tasks"] += [[t.lanes[t.lane[r]].rank, round(float(t.start[r]), 4), round(float(t.end[r]), 4),
                                    Kind(unpack(int(t.key[r])).kind).name, part, count]
                                   for part, r in enumerate(t.tasks[begin : begin + count].tolist())]
            entry |= {"bubble": round(price.bubble_rate, 6), "peak": max(price.peak_activations)}
        found.append(entry)
    return found


def methods() -> list[dict[str, Any]]:
    """Every other approximate or asynchronous method with its source, a command, and the rectangles of the timeline
    that it predicts: lanes of one device, lanes of a rank over some steps or, of LayUp, ranks."""
    found = []
    for name, flags in METHODS.items():
        method = name.partition(",")[0]
        command = f"plan {flags} --batch-size 64 --costs analytic"
        arguments = parse(shlex.split(command))
        made = planned(arguments)
        if method == "layup":
            tasks = on_ranks(made, arguments.slow)
        else:
            tasks = on_lanes(Shown.of(made, iterations=SHOWN if arguments.parallel == "data" else 1).timeline)
        found.append({"name": name, "about": about(method), "command": f"minidl {command}", "tasks": tasks,
                      "step": round(1000 * made.predicted_step_ms, 1)})
    return found


def about(method: str) -> str:
    """The sentences of another method, on one line: its module's, or its policy's."""
    module = hide if method == "hide" else sys.modules[BACKWARD[method].__module__] if method in BACKWARD else None
    return " ".join((module.__doc__ or "").split("\n\n")[1].split() if module else find(method).about.split())


def on_lanes(t: Timeline) -> list[list[Any]]:
    """The rectangles of a timeline, row by row of the lanes that have tasks."""
    row = {lane: i for i, lane in enumerate(sorted({*t.lane[t.tasks].tolist()}))}
    return [[row[int(t.lane[r])], round(float(t.start[r]), 2), round(float(t.end[r]), 2),
             group_of(Kind(unpack(int(t.key[r])).kind)), 0, 1] for r in t.tasks.tolist()]


def on_ranks(plan: Plan, slow: list[tuple[int, float]]) -> list[list[Any]]:
    """The rectangles of ranks that never wait: each runs its tasks one after another, at its own speed."""
    machine, time, now = ml.Machine(4), plan.cost.durations(plan.graph), [0.0] * 4
    factor, found = dict.fromkeys(range(4), 1.0) | dict(slow), list[list[Any]]()
    for rank, task, arrives in layup.moments(plan.graph, plan.cost, machine, slow):
        if not arrives:
            end = now[rank] + float(time[task]) * factor[rank]
            found.append([rank, round(now[rank], 2), round(end, 2), group_of(Kind(int(plan.graph.kind[task]))), 0, 1])
            now[rank] = end
    return found


def build() -> str:
    """The page as text, equal for equal policies."""
    packed = gzip.compress(json.dumps(plans(), separators=(",", ":")).encode(), 9, mtime=0)
    data = {"searched": SEARCHED, "palette": {name: list(look) for name, look in PALETTE.items()}, "gallery": gallery(),
            "methods": methods(), "plans": base64.b64encode(packed).decode()}
    text = {name: (HERE / name).read_text(encoding="utf-8")
            for name in ("page.html", "page.css", *PARTS)}
    style = (ASSETS / "page.css").read_text(encoding="utf-8") + text["page.css"]
    return Template(text["page.html"]).substitute(
        style=style, **{part.removesuffix(".js"): text[part] for part in PARTS},
        gallery_ranks=GALLERY[0], gallery_micros=GALLERY[1],
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size:,} bytes")
