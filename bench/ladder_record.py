"""Results from the ladder's record: ratios of rungs, their means over networks, and the comparison with the targets.

The record has the measurements of `ladder_runs` for each precision, network and run. All ratios are of medians of
neighbouring groups of one run. This module uses no device.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from common import ratio

FIRST_RUN = "first"
#: pairs of rungs; the second should be faster
STEPS = (("E0a", "E0b"), ("E1", "E2"), ("E3 in_order", "E3 multi_region"), ("E0a", "E1"), ("E1", "E3"))
TUNED = "B1 tuned"
#: torch's step as a graph or compiled
ALWAYS = ("B2 graph", "B3 reduce-overhead", "B4 max-autotune")
GRAPHS = (*ALWAYS, "B5 torchsched")  #: the last one only if it can be installed
SCHEDULER = "multi_region"  #: the out-of-order scheduler, chosen before measuring

Networks = Mapping[str, Mapping[str, Mapping[str, Any]]]  #: network -> run -> measurements


def ratios(samples: Mapping[str, list[float]], mine: str) -> dict[str, dict[str, float]]:
    """The ratios of the ladder's steps, of a rung to the same with another setting ("E3 in_order, dependent launch"),
    and of torch's rungs to `mine`, the rung that represents minidl."""
    base = [name for name in samples if "," not in name]
    pairs = [(slow, fast) for kinds in STEPS for slow in base if slow.startswith(kinds[0])
             for fast in base if fast.startswith(kinds[1])]
    pairs += [(plain, name) for name in samples if (plain := name.partition(",")[0]) in samples and plain != name]
    pairs += [(name, mine) for name in samples if name.startswith("B")]
    return {f"{slow} / {fast}": ratio(samples, slow, fast) for slow, fast in pairs}


def measured(entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The runs of a network that have times."""
    return ((name, run) for name, run in entry.items() if "step_ms" in run)


def median(entry: Mapping[str, Any], slow: str, fast: str | None = None) -> float | None:
    """How many times longer one rung takes than another, or than the rung that represents minidl."""
    for _, run in measured(entry):
        found = run["ratios"].get(f"{slow} / {fast or run['minidl']}")
        if found:
            return float(found["median"])
    return None


def fastest(entry: Mapping[str, Any], rungs: Iterable[str]) -> tuple[str, float] | None:
    """The fastest of torch's rungs relative to minidl, and how many times longer it takes than minidl."""
    found = {name: r for name in rungs if (r := median(entry, name)) is not None}
    return min(found.items(), key=lambda item: item[1]) if found else None


def over(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Geometric mean and worst."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {"geometric_mean": round(math.exp(statistics.fmean(map(math.log, known))), 4), "worst": min(known),
            "networks": len(known)}


def summary(networks: Networks) -> dict[str, dict[str, Any]]:
    """Mean and worst of each ratio, over the networks that have it; `fair`: the fastest of torch's rungs, without the
    untuned one, against minidl."""
    names = dict.fromkeys(name for entry in networks.values() for _, run in measured(entry) for name in run["ratios"])
    found = {name: over(median(entry, *name.split(" / ")) for entry in networks.values()) for name in names}
    found["fair"] = over(f[1] for entry in networks.values() if (f := fastest(entry, (TUNED, *GRAPHS))))
    return {name: value for name, value in found.items() if value}


def targets(networks: Networks, wanted: int) -> list[dict[str, Any]]:
    """The targets for one GPU, with the results; `wanted`: the number of networks of the target. `met` is None without
    a target, or while results are missing."""

    def row(what: str, target: str, seen: dict[str, Any] | None,
            met: Callable[[dict[str, Any]], bool] | None) -> dict[str, Any]:
        complete = seen is not None and min([seen["networks"], *seen.get("compared_with", {}).values()]) == wanted
        return {"what": what, "target": target, "seen": seen and {**seen, "of": wanted},
                "met": met(seen) if met and seen and complete else None}

    def steps(slow: str, fast: str) -> dict[str, Any] | None:
        return over(median(entry, f"{slow} in_order", f"{fast} {SCHEDULER}") for entry in networks.values())

    graphs = {label: found for label, entry in networks.items() if (found := fastest(entry, GRAPHS))}
    against = over(r for _, r in graphs.values())
    if against:
        against["fastest"] = dict(Counter(name for name, _ in graphs.values()))
        against["compared_with"] = {name: sum(median(entry, name) is not None for entry in networks.values())
                                    for name in ALWAYS}
    return [
        row("torch eager, tuned / minidl", ">= 2.5x", over(median(e, TUNED) for e in networks.values()),
            lambda s: s["geometric_mean"] >= 2.5),
        row("the fastest of torch's graph, reduce-overhead, max-autotune and torchsched / minidl",
            ">= 1.2x, nowhere under 1.0", against, lambda s: s["geometric_mean"] >= 1.2 and s["worst"] >= 1.0),
        row("one stream / out of order, both captured (E1 / E2)", ">= 1.10x", steps("E1", "E2"),
            lambda s: s["geometric_mean"] >= 1.1),
        row("one stream / out of order, neither captured (E0a / E0b)", "reported", steps("E0a", "E0b"), None),
        row("host cost of a replayed step, us", "one graph launch; reported", _host(networks), None),
        row("predicted / measured step, captured, one stream", "within 5 %", _predicted(networks, "in_order"),
            lambda s: s["error"] <= 0.05),
        row("predicted / measured step, captured, out of order", "within 5 %", _predicted(networks, SCHEDULER),
            lambda s: s["error"] <= 0.05)]


def errors(run: Mapping[str, Any]) -> dict[str, float]:
    """How far the prediction of each captured rung is off, as a share of the measured step."""
    return {name: ms / run["step_ms"][name]["median"] - 1 for name, ms in run.get("predicted_ms", {}).items()
            if name in run["step_ms"]}


def _predicted(networks: Networks, scheduler: str) -> dict[str, Any] | None:
    """The median size of the errors of a scheduler's rungs, and the worst one, over networks."""
    runs = [run for entry in networks.values() if "step_ms" in (run := entry.get(FIRST_RUN, {}))]
    found = [error for run in runs for name, error in errors(run).items() if name.endswith(f" {scheduler}")]
    return {"error": statistics.median(map(abs, found)), "worst_error": max(found, key=abs),
            "networks": len(runs)} if found else None


def _host(networks: Networks) -> dict[str, Any] | None:
    """Microseconds of the launch alone, and of a step with its batch; medians over networks, and the worst."""
    launches, steps = [], []
    for entry in networks.values():
        run = entry.get(FIRST_RUN, {})
        launches += [t["median"] for name, t in run.get("launch_us", {}).items() if name == "E3 in_order"]
        steps += [run["host_us"][run["minidl"]]["median"]] if "host_us" in run else []
    if not steps:
        return None
    found = {"step": statistics.median(steps), "worst_step": max(steps), "networks": len(steps)}
    return {**({"launch": statistics.median(launches), "worst_launch": max(launches)} if launches else {}), **found}
