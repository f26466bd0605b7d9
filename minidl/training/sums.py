"""The cost of sums between the tasks of a network, on ranks whose lanes compute and sum in turn. It is more than alone:
the tasks then find less of what they need in the caches, and ranks do not come to a sum at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from .. import schedulers
from ..autograd.tape import Storage
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..core.schedule import Lane, Schedule
from ..core.tasks import COLLECTIVE
from ..measuring.measure import transfer_time, warm_order
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from ..runtime.comm import Communicator
from ..runtime.runtime import Runtime
from ..schedulers.data_parallel import Policy
from ..schedulers.registry import Scheduler

ORDERS = 3  #: random orders
SECONDS, LEAST, MOST = 0.5, 4, 10  #: of all steps of an order, and how many of them; the first is a warm-up


def between_tasks(graph: TaskGraph, cost: CostModel, link: tuple[float, float], communicator: Communicator,
                  device: Any, progress: Callable[[float], None] | None = None) -> tuple[float, float]:
    """Microseconds (per all-reduce, per byte) of sums between tasks: `link`, measured alone, times the factor with
    which steps in random legal orders take as long as predicted, at least 1. The order to predict is never among them.

    `graph`: a recorded step of a data-parallel rank. It runs on copies, so no parameter changes. All ranks call it
    together, with the same costs. Calls `progress(share done)` after every order. Raises what the step raises.
    """
    random = np.random.Generator(np.random.Philox(0))  # so all ranks draw the same orders
    machine = Machine(communicator.size, collective=lambda sizes: link[0] + link[1] * sum(sizes.values()))

    def ordered(graph: TaskGraph, cost: CostModel, machine: Machine) -> Schedule:
        order, sums = warm_order(graph, random), np.isin(graph.kind, COLLECTIVE)
        return Schedule.of(graph, {Lane(0): [t for t in order if not sums[t]],
                                   Lane(0, "comm"): [t for t in order if sums[t]]})

    factors = []
    for i in range(ORDERS):
        plan = schedulers.plan(graph, Scheduler("random", "data", Policy(ordered)), cost, machine)
        sums = plan.cost.durations(plan.graph)[np.isin(plan.graph.kind, COLLECTIVE)].sum()
        factors.append(1 + (_step(plan, communicator, device, random) - plan.step) / float(sums))
        if progress:
            progress((i + 1) / ORDERS)
    factor = max(1.0, float(np.median(communicator.gather(factors)[0])))
    return factor * link[0], factor * link[1]


def _step(plan: Plan, communicator: Communicator, device: Any, random: np.random.Generator) -> float:
    """Microseconds of a step of the plan on copies of parameters and states."""
    program = plan.program(communicator.rank)
    own = {id(live): Storage(live.name, live.shape, live.dtype, live.role, device.duplicate(live.data))
           for spec in program.graph.storages if (live := spec.live) is not None}
    run = Runtime(program.with_live(own), device=device, transport=communicator)
    inputs, took = run.random_inputs(random), list[float]()
    for _ in range(int(np.clip(SECONDS * 1e6 / plan.step, LEAST, MOST))):
        communicator.gather(None)
        begin = perf_counter()
        run(*inputs)
        took.append((perf_counter() - begin) * 1e6)
    run.close()
    return transfer_time(np.mean(communicator.gather(took), axis=0)[1:].tolist())
