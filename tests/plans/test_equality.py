"""Values with arrays are equal if their contents are; to compare them is never an error."""

from __future__ import annotations

import pickle
from copy import copy

import numpy as np
import pytest

import minidl as ml
from minidl.core.placement import Refused
from minidl.passes.boundary import BoundaryError
from minidl.runtime.comm import RankError, Standstill


def pipeline(micro_batches: int) -> ml.Plan:
    return ml.plan(ml.Pipeline(micro_batches), "zb_h1", machine=ml.Machine(ranks=2))


def recorded(samples: int) -> ml.Plan:
    weight = ml.Parameter(np.ones((3, 3), np.float32))
    inputs = np.ones((samples, 3), np.float32)
    return ml.plan(ml.record(lambda x: (x @ weight).sum().backward(), inputs), "multi_stream")


PARTS = {
    "plan": lambda plan: plan, "schedule": lambda plan: plan.schedule, "graph": lambda plan: plan.graph,
    "timeline": lambda plan: plan.timeline, "iteration": lambda plan: plan.priced,
    "rows": lambda plan: plan.graph.preds}
OF_PIPELINES = {"placement": lambda plan: plan.placement}
OF_STEPS = {"program": lambda plan: plan.program(), "division": lambda plan: plan.division,
            "memory": lambda plan: ml.plan_memory(plan.graph, plan.schedule)}


@pytest.mark.parametrize("part", PARTS | OF_PIPELINES)
def test_pipelines_of_equal_content_are_equal(part):
    of = (PARTS | OF_PIPELINES)[part]
    one, same, other = of(pipeline(4)), of(pipeline(4)), of(pipeline(6))
    assert one is not same
    assert one == same
    assert (one != other) == (part != "placement")
    assert one in [other, same]
    assert one != 3


@pytest.mark.parametrize("part", PARTS | OF_STEPS)
def test_recorded_steps_can_be_compared(part):
    of = (PARTS | OF_STEPS)[part]
    one, other = of(recorded(2)), of(recorded(200))
    assert one == copy(one)
    assert (one != other) == (part not in ("schedule", "rows"))  # these know no sizes


def test_a_schedule_equals_the_one_that_was_read_from_its_file():
    schedule = pipeline(4).schedule
    assert ml.Schedule.from_csv(schedule.to_csv()) == schedule == pickle.loads(pickle.dumps(schedule))


@pytest.mark.parametrize("error", [
    ml.TaskError("3W0 failed", "3W0"), BoundaryError("2W0 cannot be late", 2), Refused("this", "of that", "do so"),
    RankError(1, "out of memory"), Standstill(1, "the ranks wait"), ml.ScheduleError("no", ["3W0"], "grid"),
    ml.MemoryLimitError("too large", 3)], ids=lambda error: type(error).__name__)
def test_errors_come_back_from_another_process(error):
    """A pool of `multiprocessing` waited for ever for those that could not be read there."""
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
