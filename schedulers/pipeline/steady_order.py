"""The order of a pipeline that never drains: a policy orders several steps in a row, and one in the middle is the body.

On each rank the body goes from its first task of one step to its first task of the next. The tasks of the step before
are late there (`minidl.passes.steady`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...core.tasks import as_recorded, repack, unpack
from ...passes.steady import STEPS
from ..ordered import Ordered
from .policy import Policy
from .problem import Problem


def steady_order(chosen: Policy, problem: Problem, options: Mapping[str, Any]) -> Ordered:
    """The order of a body, in which a policy's tasks of the step before are late, and the weight versions that tasks
    read, counted from the start of their own step: version -1 is one update before it. Raises PipelineError for a
    policy whose order or versions differ from step to step, or which works on more than two steps at a time."""
    name, several = chosen.name, int(options.get("mini_batches", 1))
    count = problem.micro_batches * several
    if "mini_batches" in chosen.options:
        options = {**options, "mini_batches": several * STEPS}
    else:
        problem = replace(problem, micro_batches=count * STEPS)
    made = chosen(problem, **options)
    schedule, versions = made.schedule, made.versions
    if versions is None:
        raise PipelineError(f"{name} never drains, so it must give the weight versions that its tasks read (`Ordered`)")
    if (idle := np.flatnonzero(np.diff(schedule.ptr) == 0)).size:
        raise PipelineError(f"{name} leaves rank {schedule.lanes[idle[0]].rank} without a task; take fewer ranks")
    keys, read = [], []
    for i, lane in enumerate(schedule.lanes):
        own = unpack(schedule.order(i))
        step = own.micro_batch // count
        since = versions.read[schedule.ptr[i] : schedule.ptr[i + 1]] - step * (count // versions.every)
        first, begin, end = (int(np.argmax(np.append(step >= k, True))) for k in (1, STEPS - 2, STEPS - 1))
        late = STEPS - 2 - step[begin:end]
        if ((late < 0) | (late > 1)).any() or end - begin != np.count_nonzero(step == 1):
            raise PipelineError(f"{name} works on micro-batches of more than two steps of {count} at a time on rank "
                                f"{lane.rank}; take more micro-batches")
        keys.append(repack(schedule.order(i)[begin:end], micro_batch=own.micro_batch[begin:end] % count, late=late))
        read.append(since[begin:end])
        if not (np.array_equal(schedule.order(i)[:first], as_recorded(keys[-1][late == 0]))
                and np.array_equal(np.maximum(since[:first], 0), np.maximum(read[-1][late == 0], 0))):
            raise PipelineError(f"{name} does not repeat on rank {lane.rank}: its first step differs from the later "
                                f"ones by more than what is left of the step before")
    body = Schedule.of_keys(schedule.lanes, keys)
    return replace(made, schedule=body, versions=replace(versions, read=np.concatenate(read)))
