"""Waits for messages are filled by W and R: what no other rank needs runs while one waits for a gradient.

A joined backward B sends its output gradient when its weight gradients have been made as well, and a stage computes its
activations again when the gradient for them has come. With `fill`, a stage makes its output gradient first, sends it,
and then makes its weight gradients ("W"); and it computes again (a task R of the stage) just before the task that needs
it, so while its gradient is on the way ("R"); "W+R" does both. Seen in Megatron-LM #4268 and PaddleFleet #1845. Each
rank keeps its order else, so no task is later than before, and bits are equal.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.machine import PlanError, shorten
from ..core.placement import Refused
from ..core.tasks import Kind, repack, unpack
from .backward import backwards_apart
from .draft import Draft


def again_apart(fill: str | None) -> bool:
    """Whether a stage computes again in tasks of its own. Raises PlanError for another choice than W, R and W+R."""
    kinds = fill.split("+") if isinstance(fill, str) else ()
    if fill is not None and (not {*kinds} <= {"W", "R"} or not 1 <= len({*kinds}) == len(kinds)):
        raise PlanError(f"fill is {shorten(fill)}; it must be W, R or W+R")
    return "R" in kinds


def waits_filled(draft: Draft, fill: str | None = None) -> Draft:
    """The order with O and W in the place of each B, and with each R before the first task that needs it. Raises
    Refused for W in an order without B, and for an order that says which weights tasks read or has forwards apart."""
    again, order = again_apart(fill), draft.order
    if draft.stale or draft.placement.apart:
        raise Refused("fill", f"{draft.name} " + ("orders tasks by the weights that they read" if draft.stale else
                                                  "runs forwards on other ranks"), "leave fill out")
    if fill != "R":
        if not (unpack(order.keys).kind == Kind.B).any():
            raise Refused("fill", f"{draft.name} has no backward task with both gradients", "leave W out of fill")
        draft = backwards_apart(draft)
    return _with_again(draft) if again else draft


def _with_again(draft: Draft) -> Draft:
    """The order with each R of a stage just before the action with the first task that needs it: its O, B or W; with a
    remark if there is none."""
    order, own = draft.order, unpack(draft.order.keys)
    needs = np.flatnonzero(np.isin(own.kind, (Kind.O, Kind.B, Kind.W)))
    again, first = np.unique(repack(own.key[needs], kind=Kind.R, part=0), return_index=True)
    known = draft.graph.find(again) >= 0
    if not known.any():
        return replace(draft, remarks=(*draft.remarks, "fill: nothing is computed again, so no R fills a wait"))
    again, place = again[known], order.first[needs[first[known]]]
    return replace(draft, schedule=replace(
        order, ptr=order.ptr + np.searchsorted(np.sort(place), order.ptr), keys=np.insert(order.keys, place, again),
        joined=None if order.joined is None else np.insert(order.second, place, False), slots=None))
