"""The columns of an order that is a hint: what more memory gives, and what readiness gives."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from ..plans.plan import PipelinePlan
from ..plans.ready import Draws, draws
from . import show
from .problem import problem

COLUMNS = {"own": "the policy's order", "fixed": "the order at the hint's cap", "hint": "the hint"}


def simulated(arguments: Any, plan: PipelinePlan) -> dict[str, Any]:
    """Times of a step by column: of given times, and over the draws of --jitter, if there is one."""
    told = copy(arguments)
    told.order, told.scheduler_arg = "fixed", [(k, v) for k, v in arguments.scheduler_arg if k != "cap"]
    own = problem(told).plan()
    assert isinstance(own, PipelinePlan)
    own = own.fixed  # a file may say that its order is a hint
    found: dict[str, Any] = {"without_spread": _of(draws(own, plan, 0.0, 1), np.mean)}
    if arguments.jitter:
        drawn = draws(own, plan, arguments.jitter, arguments.draws)
        found |= {"jitter": arguments.jitter, "draws": arguments.draws, "median": _of(drawn, np.median),
                  "p10": _of(drawn, lambda x: np.percentile(x, 10)), "p90": _of(drawn, lambda x: np.percentile(x, 90)),
                  "ratio": {name: round(float(np.median(getattr(drawn, name) / drawn.own)), 4) for name in COLUMNS}}
    return found


def text(found: dict[str, Any]) -> str:
    """The columns as a table, a row each."""
    drawn = "median" in found
    rows = [(words, found["without_spread"][name], *([found[key][name] for key in ("median", "p10", "p90", "ratio")]
                                                     if drawn else [])) for name, words in COLUMNS.items()]
    head = ("step", "no spread", *(("median", "p10", "p90", "over the policy's") if drawn else ()))
    return show.table(head, rows) + (f"\n{found['draws']} draws of times, spread {found['jitter']:g}" if drawn else "")


def _of(drawn: Draws, figure: Any) -> dict[str, float]:
    return {name: round(float(figure(getattr(drawn, name))), 4) for name in COLUMNS}
