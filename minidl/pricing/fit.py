"""The strength of contention, fitted to the step of one schedule, to predict the steps of others.

Pairs of tasks are measured while each repeats; in a step they meet other neighbours, and colder caches. All pairs are
off in the same direction then, so one number that scales them, from one measured step, takes most of the error away.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ..core.graph import TaskGraph
from ..core.machine import is_number
from ..core.schedule import Schedule
from .cost import CostError, CostModel
from .simulation import simulate

MOST = 16.0  #: the largest strength
ROUNDS = 40  #: halvings of the strengths in question


def fitted(graph: TaskGraph, schedule: Schedule, cost: CostModel, measured: float) -> CostModel:
    """The costs with the strength of contention, from 0 to MOST, that brings the predicted makespan of `schedule`
    nearest to the measured one, in the costs' unit. `graph`, `schedule`: as they run (`minidl.plans.program.lower`), on
    several lanes, and not the schedule to be predicted.

    The makespan is assumed to grow with the strength; it may jump where tasks change neighbours. The strength stays if
    it makes no difference, as on one lane. Raises CostError for costs without pairs, and for a time not above 0.
    """
    if (corun := cost.corun) is None:
        raise CostError("these costs know no pairs of tasks, so there is no contention to fit; measure them first")
    if not (is_number(measured) and 0 < measured < inf):
        raise CostError(f"the measured time of the step is {repr(measured)[:40]}; it must be a finite number above 0")

    def scaled(strength: float) -> CostModel:
        return replace(cost, corun=replace(corun, strength=strength))

    def off(strength: float) -> float:
        return simulate(graph, schedule, scaled(strength)).makespan - measured

    low, high = 0.0, MOST
    if off(low) == off(high):
        return cost
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if off(middle) < 0 else (low, middle)
    return scaled(min((low, high), key=lambda strength: abs(off(strength))))
