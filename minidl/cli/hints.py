"""The columns of an order that is a hint: what more memory gives, and what readiness gives; and of loads of experts."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import numpy as np

from ..plans import chosen
from ..plans.plan import PipelinePlan, Plan
from ..plans.ready import Draws, draws
from . import show
from .problem import problem

COLUMNS = {"own": "the policy's order", "fixed": "the order at the hint's cap", "hint": "the hint"}


def simulated(arguments: Any, plan: Plan) -> dict[str, Any]:
    """Times of a step by column: of given times, and over the draws of --jitter, if there is one."""
    loads = None if arguments.loads is None else np.atleast_1d(arguments.loads).tolist()
    play = partial(chosen.draws, plan, loads=loads)
    if isinstance(plan, PipelinePlan):
        told = copy(arguments)
        told.order, told.scheduler_arg = "fixed", [(k, v) for k, v in arguments.scheduler_arg if k != "cap"]
        own = problem(told).plan()
        assert isinstance(own, PipelinePlan)
        play = partial(draws, own.fixed, plan)  # a file may say that its order is a hint
    found: dict[str, Any] = {"even_loads": _of(chosen.draws(plan, 0.0, 1), np.mean)} if loads else {}
    found["without_spread"] = _of(play(0.0, 1), np.mean)
    if arguments.jitter:
        drawn = play(arguments.jitter, arguments.draws)
        found |= {"jitter": arguments.jitter, "draws": arguments.draws, "median": _of(drawn, np.median),
                  "p10": _of(drawn, lambda x: np.percentile(x, 10)), "p90": _of(drawn, lambda x: np.percentile(x, 90)),
                  "ratio": _of(drawn, lambda x: np.median(x / drawn.own))}
    return found


def text(found: dict[str, Any]) -> str:
    """The columns as a table, a row each."""
    heads = {"even_loads": "even loads", "without_spread": "these loads" if "even_loads" in found else "no spread",
             "median": "median", "p10": "p10", "p90": "p90", "ratio": "over the policy's"}
    drawn, shown = "median" in found, [key for key in heads if key in found]
    rows = [(words, *(found[key][name] for key in shown)) for name, words in COLUMNS.items()
            if name in found["without_spread"]]
    head = ("step", *(heads[key] for key in shown))
    return show.table(head, rows) + (f"\n{found['draws']} draws of times, spread {found['jitter']:g}" if drawn else "")


def _of(drawn: Draws, figure: Any) -> dict[str, float]:
    return {name: float(f"{figure(times):.8g}") for name in COLUMNS if (times := getattr(drawn, name)) is not None}
