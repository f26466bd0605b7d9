"""When one stream is best: the rule by which multi_stream and multi_region keep all tasks on one, and its reason.

The simulator decides. A plan's streams are used if they make the step shorter than one stream does; by measured costs,
which are not exact, if they do so by more than MARGIN, and by more than it takes to wake a lane: one interruption after
which a lane sleeps would undo a smaller gain. Costs that charge nothing for a second stream, as those from
flops and bytes, always leave a policy its streams: at any moment one of them works, so the step cannot be longer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..graph import TaskGraph
from ..pricing.cost import CostModel, Cross
from ..pricing.simulation import Lanes, around, times
from ..schedule import Schedule

MARGIN = 0.02  #: the share of a step that streams must save by measured costs

#: what makes several streams slow -> the same costs without it
_WITHOUT = (
    ("they would share {cores}", {"cores": None}),
    ("tasks side by side slow each other down", {"corun": None}),
    ("what one core has touched is slow to reach from another{assumed}", {"cross": Cross()}),
    ("tasks of {typical} are too short to be handed over in {hand_over}", {"sync": 0.0, "doze": 0.0, "wake": 0.0}),
)


def why_one(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> str:
    """Why one stream is better than the streams of this schedule, in one line with the largest of the reasons; empty
    where they are worth it, or where only one of them has tasks. `graph` and `schedule`: what the simulator times."""
    streams = len(Lanes.of(graph, schedule).busy)
    one, several = float((cost.durations(graph) + cost.launch).sum()), _time(graph, schedule, cost)
    awakening = cost.sync + cost.doze + cost.wake
    least = max(MARGIN * one, awakening) if cost.source == "measured" else -1e-9 * one  # equal up to rounding
    if streams < 2 or several <= one - least:
        return ""
    gains = [several - _time(graph, schedule, replace(cost, **less)) for _, less in _WITHOUT]
    most = int(np.argmax(gains))
    why = _WITHOUT[most][0] if gains[most] > 0 else "hardly any task can run beside another"
    if several < one:
        why = ("to wake a lane once, in {hand_over}, costs more than that saves" if one - several < awakening
               else "costs are not exact enough for so small a gain")
    why = why.format(cores="one core" if cost.cores == 1 else f"{cost.cores} cores",
                     assumed=" (assumed, since it could not be measured)" if cost.cross.source == "assumed" else "",
                     typical=f"{one / len(graph):,.1f} {cost.unit}".rstrip(),
                     hand_over=f"{awakening:,.1f} {cost.unit}".rstrip())
    return (f"one stream is used, which takes {_said(one, cost)} a step; {streams} would take {_said(several, cost)}: "
            f"{why}")


def _time(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> float:
    end = times(graph, schedule, cost).end
    return float(end.max(initial=0.0)) + around(Lanes.of(graph, schedule), end, cost)


def _said(time: float, cost: CostModel) -> str:
    """The time of a step as text, in milliseconds where the costs are in microseconds."""
    return f"{time / 1000:.3g} ms" if cost.unit == "us" else f"{time:.4g} {cost.unit}".rstrip()
