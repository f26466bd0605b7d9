"""Traces of PyTorch's profiler (Chrome's JSON) as timelines: calls of host threads, kernels and copies of streams.

A call within another call does not count. A kernel depends on the call that launched it (their `correlation`; all
kernels of a graph have the call that launched the graph) and on the one before it on its stream. A call that waits for
the device (`cudaStreamSynchronize`) is no task: the thread's next call waits for the last kernel that ended before.
NCCL's collectives of several ranks are matched in their order: each begins when the last rank has come, and is a wait
before. A unit is a name, and a micro-batch the number of the name's call; all kinds are F.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .schedule import Lane
from .tasks import Kind, pack
from .timeline import Timeline
from .trace import content

CALLS, DEVICE = ("cpu_op", "cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
MOST = 1 << 20  #: of one name's calls, and of names


def load_torch(paths: Sequence[str | Path]) -> Timeline:
    """The timeline of one trace, or of one from each rank. Raises ValueError for files that are no such traces, OSError
    for those that cannot be read."""
    spans: list[dict[str, Any]] = []
    edges: list[tuple[int, int, float]] = []
    for number, path in enumerate(paths):
        with content(path, "a trace of minidl or of PyTorch's profiler") as trace:
            rank = int((trace.get("distributedInfo") or {}).get("rank", number)) if len(paths) > 1 else 0
            base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
            _add(trace["traceEvents"], rank, base, spans, edges)
    if not spans:
        raise ValueError(f"{paths[0]} has no calls and no kernels; give a trace of minidl or of PyTorch's profiler")
    _meet(spans, edges)
    return _timeline(spans, edges)


def _add(events: Any, rank: int, base: float, spans: list[dict[str, Any]], edges: list[tuple[int, int, float]]) -> None:
    """Adds the spans of one trace, and the edges between them: (producer, consumer, when the result shows)."""
    slices = sorted((e for e in events if e.get("ph") == "X" and e.get("cat") in (*CALLS, *DEVICE)),
                    key=lambda e: (float(e["ts"]), -float(e.get("dur", 0))))
    outer: dict[Any, int] = {}  # of each thread, the last outermost call
    launched: dict[Any, tuple[int, float]] = {}
    waits: list[tuple[Any, float]] = []  # thread, end of a call that waits for the device
    firsts: list[int] = []
    for e in slices:
        start, args = base + float(e["ts"]), e.get("args") or {}
        end = start + float(e.get("dur", 0))
        if not np.isfinite([start, end]).all() or end < start:
            raise ValueError(f"the times of {str(e.get('name'))[:40]!r} are not valid")
        span: dict[str, Any] = {"name": str(e.get("name", "?"))[:200], "rank": rank, "start": start, "end": end}
        if e["cat"] in DEVICE:
            spans.append(span | {"lane": f"device {args.get('device', 0)} stream {args.get('stream', 0)}",
                                 "device": True, "call": args.get("correlation")})
            continue
        thread = (e.get("pid"), e.get("tid"))
        if "ynchronize" in span["name"]:
            waits.append((thread, end))
        within = thread in outer and end <= spans[outer[thread]]["end"]
        if not within and "ynchronize" not in span["name"]:
            outer[thread] = len(spans)
            firsts.append(len(spans))
            spans.append(span | {"lane": f"thread {thread[1]}", "device": False, "thread": thread})
        if "correlation" in args and thread in outer:
            launched[args["correlation"]] = (outer[thread], end)
    mine = [i for i, s in enumerate(spans) if s["rank"] == rank and s["device"]]
    for i in mine:
        if spans[i]["call"] in launched:
            call, shown = launched[spans[i]["call"]]
            edges.append((call, i, min(shown, spans[i]["start"])))
    ends = sorted((spans[i]["end"], i) for i in mine)
    at = np.array([end for end, _ in ends])
    for thread, end in waits:
        after = next((i for i in firsts if spans[i]["thread"] == thread and spans[i]["start"] >= end), None)
        before = int(np.searchsorted(at, end, side="right")) - 1
        if after is not None and before >= 0:
            edges.append((ends[before][1], after, end))


def _meet(spans: list[dict[str, Any]], edges: list[tuple[int, int, float]]) -> None:
    """Lets each collective begin when the last rank has come, which the tasks before it on that rank explain."""
    order: dict[int, list[int]] = defaultdict(list)
    for i in sorted(range(len(spans)), key=lambda i: spans[i]["start"]):
        if spans[i]["device"] and spans[i]["name"].startswith("nccl"):
            order[spans[i]["rank"]].append(i)
    if len(order) < 2 or len({s["rank"] for s in spans}) > len(order):
        return
    for together in zip(*order.values(), strict=False):
        late = max(together, key=lambda i: spans[i]["start"])
        met = spans[late]["start"]
        for i in together:
            if i != late and spans[i]["start"] < met <= spans[i]["end"]:
                before = [j for j, s in enumerate(spans) if s["rank"] == spans[late]["rank"] and s["device"]
                          and j != late and s["end"] <= met]
                spans[i]["start"] = met
                edges.extend([(max(before, key=lambda j: spans[j]["end"]), i, met)] if before else [])


def _timeline(spans: list[dict[str, Any]], edges: list[tuple[int, int, float]]) -> Timeline:
    names = list(dict.fromkeys(s["name"] for s in spans))
    unit, count, key = {name: i for i, name in enumerate(names)}, defaultdict[str, int](int), []
    if len(spans) >= MOST:
        raise ValueError(f"the traces have {len(spans):,} calls and kernels; at most {MOST - 1:,} can be read")
    for s in spans:
        key.append(int(pack(unit[s["name"]], Kind.F, count[s["name"]])))
        count[s["name"]] += 1
    lanes = sorted({Lane(s["rank"], s["lane"]) for s in spans})
    begin = min(s["start"] for s in spans)
    return Timeline.of_tasks(
        lanes, key, [lanes.index(Lane(s["rank"], s["lane"])) for s in spans], [s["start"] - begin for s in spans],
        [s["end"] - begin for s in spans], edges=[(a, b) for a, b, _ in edges],
        arrived=[when - begin for *_, when in edges], labels=tuple(names), unit="us")
