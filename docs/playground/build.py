"""Builds docs/playground.html, one static page: `python docs/playground/build.py`.

The page holds the plans of all synchronous policies for a range of numbers. Orders that depend on the times come from
policies.js, but for those that take a search (`SEARCHED`); proofs and figures of edited plans from simulator.js. Tests
compare both with Python. Run it again after a change to a policy. Takes a minute.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from string import Template
from typing import Any

import minidl as ml
from minidl.core.draw import PALETTE
from minidl.core.schedule import Schedule
from minidl.core.tasks import Kind, unpack
from minidl.schedulers import find, names, pipeline
from minidl.views.page import ASSETS

HERE = Path(__file__).parent
PAGE = HERE.with_suffix(".html")
RANKS, MICRO_BATCHES, CHUNKS = (2, 3, 4, 6, 8), (2, 3, 4, 6, 8, 12, 16), (1, 2, 4)
#: playable policies whose order comes from a search on the times; policies.js has the others that depend on them
SEARCHED = ("zb_auto", "zb_v", "v_half", "v_min", "fast_forward_push_released")
GALLERY = (4, 8)  #: ranks and micro-batches


def playable(name: str) -> bool:
    """Whether the policy's tasks are equal stages of whole micro-batches in one version of the weights, and it searches
    for no optimum."""
    policy = find(name).staged
    return not (policy.stale or policy.sliced or policy.arranges or "time_limit" in policy.options)


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


def build() -> str:
    """The page as text, equal for equal policies."""
    packed = gzip.compress(json.dumps(plans(), separators=(",", ":")).encode(), 9, mtime=0)
    data = {"searched": SEARCHED, "palette": {name: list(look) for name, look in PALETTE.items()}, "gallery": gallery(),
            "plans": base64.b64encode(packed).decode()}
    text = {name: (HERE / name).read_text(encoding="utf-8")
            for name in ("page.html", "page.css", "page.js", "simulator.js", "policies.js", "challenges.js")}
    style = (ASSETS / "page.css").read_text(encoding="utf-8") + text["page.css"]
    return Template(text["page.html"]).substitute(
        style=style, simulator=text["simulator.js"], policies=text["policies.js"],
        challenges=text["challenges.js"], script=text["page.js"],
        gallery_ranks=GALLERY[0], gallery_micros=GALLERY[1],
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


if __name__ == "__main__":
    PAGE.write_text(build(), encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size:,} bytes")
