"""Inputs and schedules that do not fit are refused before anything runs."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Case, bits, planned, recorded

import minidl as ml
import minidl.nn.functional as F
from minidl import nn, ops, optim
from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.core.tasks import GraphError
from minidl.plans.memory import MemoryLimitError
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import CheckingExecutor, SequentialExecutor, StreamExecutor, TaskError
from minidl.schedulers import multi_region


def executors_of(graph):
    schedule = Schedule.of(graph, {Lane(0): range(len(graph))})
    return SequentialExecutor(graph), StreamExecutor(graph, schedule), CheckingExecutor(graph, schedule)


@pytest.mark.parametrize("label", [-1, 3, 2**40])
def test_labels_out_of_range_are_refused_before_anything_runs(label):
    case = Case(("linear",), micro_batches=2)
    model, opt, step = case.make()
    (values,) = case.batches(1)
    bad = [v.copy() for v in values]
    bad[3][2] = label
    before = case.state(model, opt)
    for run in executors_of(ml.record(step, *values)):
        with pytest.raises(ValueError,
                           match=f"label {label} of sample 2 is out of range: the model has classes 0 to 2"):
            run(*bad)
    assert case.state(model, opt) == before
    with pytest.raises(ValueError, match=f"label {label} of sample 2"):
        step(*map(ml.array, bad))


def test_a_label_that_is_ignored_is_in_range():
    linear = nn.Linear(3, 3)
    for ignored in (-100, 2):
        x, y = np.ones((4, 3), np.float32), np.array([0, 1, 2, 1])
        graph = ml.record(lambda x, y, at=ignored: nn.cross_entropy(linear(x), y, ignore_index=at), x, y)
        for run in executors_of(graph):
            for y[1] in (1, ignored, 0):
                assert np.isfinite(run(x, y).numpy())
            y[1] = 3
            with pytest.raises(ValueError, match="label 3 of sample 1 is out of range: the model has classes 0 to 2"):
                run(x, y)


TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)
#: what takes whole numbers n from 0 to 3, which the step computes
COMPUTED = {
    "a row": lambda n: ops.embedding(ml.Parameter(TABLE), n),
    "an element": lambda n: ml.array(TABLE)[n, ml.array([1, 1])],
    "gather": lambda n: ml.array(TABLE).gather(0, n.unsqueeze(1)),
    "index_add": lambda n: ml.array(TABLE).index_add(0, n, ml.ones(2, 3)),
    "scatter": lambda n: ml.array(TABLE).scatter(0, n.unsqueeze(1), 1.0),
    "bincount": lambda n: ml.bincount(n, minlength=4).float(),
    "one_hot": lambda n: F.one_hot(n, 4).float(),
    "a label": lambda n: F.cross_entropy(ml.ones(2, 4), n),
    "a weighed label": lambda n: F.cross_entropy(ml.ones(2, 4), n, weight=ml.ones(4)),
    "the largest": lambda n: F.embedding_bag(n.unsqueeze(1), ml.Parameter(TABLE), mode="max"),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_numbers_out_of_range_that_a_step_computes_end_the_run_before_any_update(what):
    p = ml.Parameter(np.ones(2, np.float32))
    opt = optim.SGD([p], 0.1)

    def step(x):
        (p * x).sum().backward()
        found = COMPUTED[what]((x * 10.0).long())
        opt.step()
        return found

    def eager(x):
        return COMPUTED[what]((ml.array(x) * 10.0).long()).numpy()

    good, graph = np.array([0.1, 0.3], np.float32), ml.record(step, np.ones(2, np.float32))
    for run in executors_of(graph):
        for bad in (0.4, -0.1, 1e9, -1e9):
            with pytest.raises((TaskError, ValueError, IndexError), match="that the step has computed is out of range"):
                run(np.array([0.1, bad], np.float32))
        assert p.numpy().tolist() == [1.0, 1.0]
        assert np.array_equal(run(good).numpy(), eager(good))
        p.assign(1.0)
    assert ml.measure(graph, seconds=0.0).tasks


class Other(np.ndarray):
    """Another type of array."""


def test_inputs_that_do_not_fit_are_refused_before_anything_runs_and_others_come_as_they_are():
    case = Case(("linear",))
    model, opt, step = case.make()
    (x, y), = case.batches(1)
    before = case.state(model, opt)
    for run in executors_of(ml.record(step, x, y)):
        for values, message in (((x,), "takes 2 inputs, not 1"), ((x, y, y), "not 3"),
                                ((x[:2], y), r"input 0 is float32 \(2, 5\)"),
                                ((x.astype(np.float64), y), "input 0 is float64"),
                                ((x.astype(x.dtype.newbyteorder()), y), "input 0 is >f4|input 0 is <f4"),
                                ((x, y.astype(np.int32)), "input 1 is int32"), ((x, y[:, None]), "input 1"),
                                ((x.tolist(), y), "input 0 is float64")):
            with pytest.raises(ml.ShapeError, match=message) as caught:
                run(*values)
            assert "\n" not in str(caught.value)
    assert case.state(model, opt) == before
    unaligned = np.frombuffer(b"0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    graph = ml.record(lambda x, y: nn.cross_entropy(model(x), y), x, y)
    for run in executors_of(graph):
        assert len({bits(run(values, np.repeat(y, 2)[::2])) for values in (
            x, np.asfortranarray(x), np.repeat(x, 2, 0)[::2], x.view(Other), ml.array(x), unaligned)}) == 1


def test_masked_elements_of_an_input_are_refused_by_a_run_as_by_a_tensor():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    graph = ml.record(lambda x: x * 2.0, x)
    for run in executors_of(graph):
        with pytest.raises(ml.ShapeError, match=r"some of these are masked; fill them first: value.filled\(0\)"):
            run(np.ma.masked_greater(x, 3))
        assert np.array_equal(run(np.ma.array(x)).numpy(), 2 * x)


def _given():
    linear = nn.Linear(3, 2)
    graph = ml.record(linear, np.ones((4, 3), np.float32))
    return graph, ml.plan(graph, "in_order"), ml.CostModel.analytic()


WRONG = {
    r"^schedule is <Plan in_order: .*>?; it must be a Schedule; take its schedule$": [
        lambda g, p, c: ml.simulate(g, p, c), lambda g, p, c: StreamExecutor(g, p), lambda g, p, c: ml.lower(g, p),
        lambda g, p, c: CheckingExecutor(g, p), lambda g, p, c: ml.GraphExecutor(g, p),
        lambda g, p, c: ml.plan_memory(g, p)],
    r"^graph is <Plan in_order: .*>?; it must be a TaskGraph; take its graph$": [
        lambda g, p, c: StreamExecutor(p, g), lambda g, p, c: SequentialExecutor(p), lambda g, p, c: ml.measure(p),
        lambda g, p, c: ml.simulate(p, g, c), lambda g, p, c: StreamExecutor(p, p), lambda g, p, c: ml.unroll(p, 2),
        lambda g, p, c: ml.rename(p), lambda g, p, c: ml.cross_boundary(p, [0]), lambda g, p, c: multi_region(p),
        lambda g, p, c: p.schedule.validate(p), lambda g, p, c: p.schedule.waits(p),
        lambda g, p, c: ml.plan_memory(p, p.schedule)],
    r"^program is <Plan in_order: .*>?; it must be a Program; take its program$": [lambda g, p, c: ml.Runtime(p)],
    r"^schedule is 'in_order'; it must be a Schedule$": [lambda g, p, c: StreamExecutor(g, "in_order")],
    r"^schedule is array.*; it must be a Schedule$": [lambda g, p, c: StreamExecutor(g, np.zeros((9, 9)))],
    r"^graph is <Schedule of .*>; it must be a TaskGraph$": [lambda g, p, c: ml.simulate(p.schedule, g, c)],
    r"^graph is <function .*; it must be a TaskGraph$": [
        lambda g, p, c: ml.measure(_given), lambda g, p, c: multi_region(_given)],
    r"^cost is Machine.*; it must be a CostModel$": [lambda g, p, c: ml.simulate(g, p.schedule, ml.Machine())],
}


@pytest.mark.parametrize(("says", "call"), [(says, call) for says, calls in WRONG.items() for call in calls])
def test_arguments_of_another_kind_are_named_with_the_part_to_take(says, call):
    with pytest.raises(TypeError, match=says):
        call(*_given())


def test_a_plan_without_kernels_does_not_run():
    graph = planned(("0F0", "", "a"), ("0W0", "a", "b"))
    schedule = Schedule.of(graph, {Lane(0): [0, 1]})
    for make in (lambda: SequentialExecutor(graph), lambda: StreamExecutor(graph, schedule),
                 lambda: CheckingExecutor(graph, schedule)):
        with pytest.raises(GraphError, match=r"has no kernels"):
            make()


def test_a_device_is_given_by_its_name_or_itself_and_nothing_else_is_one():
    graph = recorded()
    schedule = random_schedule(graph, 1, np.random.default_rng(0))
    for use in (SequentialExecutor, lambda *given, **more: StreamExecutor(given[0], schedule, **more),
                lambda *given, **more: CheckingExecutor(given[0], schedule, **more), ml.measure):
        for device in ("cpu", ml.device.cpu()):
            use(graph, device=device)
        for wrong in (schedule, "gpu"):
            with pytest.raises(ValueError, match=r"unknown device .*; known: cpu, cuda, cuda:N"):
                use(graph, device=wrong)


def test_a_schedule_that_is_not_valid_is_refused_with_the_culprit():
    graph = recorded()
    good = random_schedule(graph, 2, np.random.default_rng(0))
    with pytest.raises(ScheduleError, match=r"unknown task 99F0"):
        StreamExecutor(graph, Schedule.from_names({Lane(0): ["99F0"]}))
    with pytest.raises(ScheduleError, match=r"is missing"):
        StreamExecutor(graph, Schedule(good.lanes, np.minimum(good.ptr, len(good) - 1), good.keys[:-1]))
    two = Schedule((Lane(0), Lane(1)), good.ptr, good.keys)
    with pytest.raises(ScheduleError, match=r"2 ranks; one device can run only one"):
        StreamExecutor(graph, two)
    with pytest.raises(MemoryLimitError, match=r"more than the limit of 1,000"):
        ml.plan(graph, good, machine=ml.Machine(memory_limit=1000))
