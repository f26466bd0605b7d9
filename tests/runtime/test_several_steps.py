"""Several steps in one launch: the same bits as single steps, on every kind of lanes, and the same errors."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import several
from helpers import bits, late_schedule, refuses
from several import BATCHES

import minidl as ml
from minidl import nn, schedulers
from minidl.autograd.tape import Tape, use
from minidl.autograd.tensor import ShapeError
from minidl.core.tasks import Kind
from minidl.devices.lanes import LaneError
from minidl.passes.boundary import must_stay
from minidl.plans.program import lower
from minidl.runtime.checking import random_schedule
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import GraphExecutor, Runtime, StreamExecutor


class Job(several.Recorded):
    def __init__(self, device: Any = None) -> None:
        super().__init__(device or ml.device.cpu())

    def executor(self, at_once: int = 1, lanes: int = 1, seed: int = 0) -> Any:
        schedule = (schedulers.in_order(self.graph) if lanes == 1
                    else random_schedule(self.graph, lanes, np.random.default_rng(seed)))
        kind = GraphExecutor if self.device.captures else StreamExecutor
        return kind(self.graph, schedule, device=self.device, at_once=at_once)


def same(job: Job, found: list[Any]) -> None:
    """Several steps in one call leave the bits that single steps leave."""
    alone = Job()
    run = alone.executor()
    wanted = [tuple(t.numpy() for t in run(*batch)) for batch in BATCHES]
    assert bits(*(a for step in found for a in step)) == bits(*(a for step in wanted for a in step))
    assert job.weights() == alone.weights()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("at_once", [2, 4, 7])
def test_bits_are_those_of_single_steps(both_lanes, at_once, lanes):
    job = Job()
    run, found = job.executor(at_once, lanes, at_once), []
    for first in range(0, len(BATCHES), at_once):
        found += run.steps(BATCHES[first : first + at_once])()
    same(job, found)


def test_single_steps_and_launches_take_turns(both_lanes):
    job = Job()
    run = job.executor(3)
    found = [*run.steps(BATCHES[:3])(), tuple(t.numpy() for t in run(*BATCHES[3])), *run.steps(BATCHES[4:])()]
    same(job, found)


def test_a_wrong_batch_is_found_before_anything_runs(both_lanes):
    job = Job()
    run, before = job.executor(4), job.weights()
    with pytest.raises(ShapeError, match="input 0"):
        run.steps([BATCHES[0], (BATCHES[0][0][:4], BATCHES[0][1])])
    refuses((lambda: run.steps([BATCHES[0], (BATCHES[1][0], np.array([0, 1, 9, 0, 0]))]), "label 9 of sample 2"),
            (lambda: run.steps(BATCHES[:5]), "5 steps in a launch of this executor, which has room for 4"),
            (lambda: run.steps([]), "0 steps"), error=ValueError)
    assert job.weights() == before


def test_what_has_no_launches_of_several_steps():
    graph = Job().graph
    with pytest.raises(ValueError, match="2 steps a launch need one device"):
        run_ranks(1, lambda communicator: Runtime(lower(graph, schedulers.in_order(graph)), transport=communicator,
                                                  at_once=2))


def test_an_output_within_a_larger_array_is_refused():
    with use(Tape(ml.device.cpu())):
        layer = nn.Linear(6, 4)
        graph = ml.record(lambda x: layer(x)[:, 1:3], BATCHES[0][0])
    if all(v.strides == (2, 1) for v in graph.outputs):
        pytest.skip("the slice was copied")
    with pytest.raises(ValueError, match="is a part of a larger array"):
        StreamExecutor(graph, schedulers.in_order(graph), at_once=2)


def test_a_signal_ends_a_launch_between_two_calls(both_lanes):
    """Its handler's error is raised soon, however many steps are left, and the executor runs again."""
    job, many = Job(), 2_000
    run = job.executor(many)
    part = run._body[0]
    for i in range(many):
        part.ring.put(i, BATCHES[i % 7])

    def handler(*_: Any) -> None:
        raise TimeoutError("enough")

    old = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises((TimeoutError, LaneError), match="enough"):
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # in here, since a busy machine may take that long to come here
            while True:  # a fast machine needs several launches
                part.lanes.several(many)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(run.steps(BATCHES)()) == 7


def test_a_step_with_late_tasks_is_launched_alone(both_lanes):
    job = Job()
    late = [t for t in np.flatnonzero(~must_stay(job.graph)).tolist() if job.graph.kind[t] in (Kind.W, Kind.U)]
    run = StreamExecutor(job.graph, late_schedule(job.graph, late, schedulers.multi_stream), device=job.device)
    found = [step for batch in BATCHES for step in run.steps([batch])()]
    assert late
    same(job, found)
