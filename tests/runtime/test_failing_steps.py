"""A step that fails says in which task, never hangs, and the executor runs again."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import PATIENCE, SMALL, deadline, in_stages

import minidl as ml
from minidl import nn, optim
from minidl.autograd.op import Op
from minidl.core.schedule import Lane, Schedule
from minidl.kernels import kernel
from minidl.plans.memory import plan_memory
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import SequentialExecutor, StreamExecutor, TaskError


class Broken(RuntimeError):
    """What the failing kernel raises."""


FAULT: dict[str, object] = {"in": None, "raise": None}


@contextmanager
def failing(place, error=Broken):
    """Within, the task of this place raises what a call of `error` returns."""
    FAULT.update({"in": place, "raise": error})
    try:
        yield
    finally:
        FAULT["in"] = None


def at(graph, place):
    """The task of a place."""
    return next(t for t in graph for launch in t.launches if ("name", place) in launch.constants)


@kernel("faulty_for_tests")
def faulty(xp, x, *, name):
    return x + 0


@faulty.cpu
def _(x, y, *, name):
    def this_line_fails():
        np.copyto(y, x)
        if FAULT["in"] == name:
            raise FAULT["raise"]()

    return [this_line_fails]


class Faulty(Op):
    """Copies; fails where FAULT says so: in `name` forward, or in `name grad` backward."""

    name = "faulty"

    def __init__(self, name):
        self.where = name

    def forward(self, x):
        self.x, y = x, self.out(x.shape, x.dtype)
        self.call("faulty_for_tests", [x], [y], name=self.where)
        return y

    def input_grad(self, i, dy):
        dx = self.grad(self.x)
        self.call("faulty_for_tests", [dy], [dx], name=f"{self.where} grad")
        return dx


@pytest.fixture
def faulty_step(both_lanes):
    """A step of two branches that can fail in either, forward or backward."""
    ml.seed(0)
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    opt = optim.SGD([*left.parameters(), *right.parameters()], 0.1)

    def step(x):
        loss = (Faulty("left")(left(x)) + Faulty("right")(right(x)) * 2.0).sum()
        loss.backward()
        opt.step()
        return loss

    return step


X = np.ones((3, 4), np.float32)


def lanes_of(graph, lanes):
    """Each branch on its own lane; on one lane everything."""
    where = {Lane(0, f"l{i}") if i else Lane(0): [] for i in range(lanes)}
    queues = list(where.values())
    for t in graph:
        queues[t.unit % lanes].append(t.index)
    return Schedule.of(graph, where)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("place", ["left", "right", "left grad", "right grad"])
def test_a_failing_kernel_reaches_the_caller_with_its_task_and_traceback_and_the_executor_runs_again(faulty_step,
                                                                                                     lanes, place):
    graph = ml.record(faulty_step, X)
    run = StreamExecutor(graph, lanes_of(graph, lanes), trace=True)
    task = at(graph, place)
    with deadline():
        for _ in range(3):
            with (failing(place, lambda: Broken("no luck")),
                  pytest.raises(TaskError, match=r"Broken: no luck") as caught):
                run(X)
            assert caught.value.task == task.name
            assert task.label in str(caught.value)
            assert "on lane 0/" in str(caught.value)
            assert "\n" not in str(caught.value)
            assert isinstance(caught.value.__cause__, Broken)
            lines = traceback.extract_tb(caught.value.__cause__.__traceback__)
            assert lines[-1].name == "this_line_fails"
            assert run.timeline is None, "some tasks have not run, or only in an earlier step"
            before = run(X)
            assert run.timeline is not None
        assert np.isfinite(float(before))
    run.close()


def test_after_a_failure_before_any_update_the_next_steps_are_those_of_the_oracle(faulty_step):
    graph = ml.record(faulty_step, X)
    run = StreamExecutor(graph, lanes_of(graph, 3))
    oracle = SequentialExecutor(graph)
    with deadline():
        with failing("left"), pytest.raises(TaskError):
            run(X)
        # parameters are shared, so each step moves the next: compare losses at the same parameters
        live = [s.live for s in graph.storages if s.live is not None]
        saved = [s.data.copy() for s in live]
        streamed = [float(run(X)) for _ in range(3)]
        for s, data in zip(live, saved, strict=True):
            s.data[...] = data
        assert streamed == [float(oracle(X)) for _ in range(3)]


def test_two_tasks_that_fail_at_once_are_reported_as_one_of_them(faulty_step):
    """Whichever is reported, name and cause belong together."""
    graph = ml.record(faulty_step, X)
    left, right = at(graph, "left"), at(graph, "right")
    rest = [t for t in range(len(graph)) if t not in (left.index, right.index)]
    schedule = Schedule.of(graph, {Lane(0): rest, Lane(0, "a"): [left.index], Lane(0, "b"): [right.index]})
    run = StreamExecutor(graph, schedule)
    names = {"left": left.name, "right": right.name}

    class Here:
        """Equal to both names; both tasks meet before they fail."""

        def __init__(self):
            self.barrier = threading.Barrier(2)
            self.local = threading.local()

        def __eq__(self, other):
            self.local.name = other
            return other in names

        __hash__ = None

    with deadline():
        for _ in range(100):
            here = Here()

            def both(here=here):
                here.barrier.wait(PATIENCE / 2)
                return Broken(here.local.name)

            with failing(here, both), pytest.raises(TaskError) as caught:
                run(X)
            assert caught.value.task == names[str(caught.value.__cause__)], str(caught.value)
    run.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", ["left", "right"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_what_is_no_exception_reaches_the_caller_as_itself(faulty_step, lanes, place, error):
    graph = ml.record(faulty_step, X)
    run = StreamExecutor(graph, lanes_of(graph, lanes))
    with deadline():
        with failing(place, error), pytest.raises(error):
            run(X)
        assert np.isfinite(float(run(X)))
    run.close()


class Signals:
    """A fault in `left` that sends the caller a signal when the caller has run `right` and waits for another lane; it
    fails when the caller has handled the signal."""

    def __init__(self, number, error):
        self.handled, self.waits, caller = threading.Event(), threading.Event(), threading.get_ident()

        def handler(*_):
            if not self.handled.is_set():
                self.handled.set()
                raise error

        def fault():
            assert self.waits.wait(PATIENCE)
            while not self.handled.wait(0.01):  # one that comes just before the caller blocks does not wake it
                signal.pthread_kill(caller, number)
            return Broken("too late")

        self.number, self.fault, self.before = number, fault, signal.signal(number, handler)

    def __call__(self, run):
        self.handled.clear()
        self.waits.clear()
        with failing(self, self.fault):
            run(X)

    def __eq__(self, place):
        if place == "right":
            self.waits.set()
        return place == "left"

    __hash__ = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        signal.signal(self.number, self.before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, TimeoutError)],
                         ids=["interrupt", "handler's error"])
def test_a_signal_while_the_caller_waits_for_a_lane_ends_the_step_and_the_executor_runs_again(
        faulty_step, number, error):
    """Whatever the handler raises is not a task's fault, though the task fails too."""
    graph = ml.record(faulty_step, X)
    slow = at(graph, "left").index
    after = {slow}  # everything that needs the slow task is on its lane, so that the caller only joins
    for t in range(len(graph)):
        if after & set(graph.preds[t].tolist()):
            after.add(t)
    schedule = Schedule.of(graph,
                           {Lane(0): [t for t in range(len(graph)) if t not in after], Lane(0, "sub"): sorted(after)})
    run = StreamExecutor(graph, schedule)
    with deadline(), Signals(number, error) as step_with_a_signal:
        for _ in range(3):
            with pytest.raises(error):
                step_with_a_signal(run)
            for _ in range(3):
                assert np.isfinite(float(run(X)))
    run.close()


def test_threads_end_with_their_executor(faulty_step):
    graph = ml.record(faulty_step, X)
    before = set(threading.enumerate())
    run = StreamExecutor(graph, lanes_of(graph, 3))
    run(X)
    with failing("left"), pytest.raises(TaskError):
        run(X)
    assert len(set(threading.enumerate()) - before) == 2
    gone = weakref.ref(run)
    with deadline():
        del run
        gc.collect()
        assert gone() is None, "something keeps the executor alive"
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert set(threading.enumerate()) <= before


def test_a_value_that_is_not_finite_is_found_with_its_layer_when_debugging(both_lanes, monkeypatch):
    """Also if its own task writes over it."""
    monkeypatch.setenv("MINIDL_DEBUG", "1")
    model, _, step = SMALL.make()
    model.tied.weight.numpy()[1, 1] = np.nan
    (values,) = SMALL.batches(1)
    graph = ml.record(step, *values)
    x = np.full(8, 1e30, np.float32)
    stage = in_stages(ml.record(lambda x: ((-(x * x)).exp() + 1.0) * 2.0 - 1.0, x), 1)
    whole = Schedule.of(stage, {Lane(0): [0]})
    assert plan_memory(stage, whole).arena_bytes == 2 * 256
    runs = StreamExecutor(graph, random_schedule(graph, 2, np.random.default_rng(0))), StreamExecutor(stage, whole)
    with deadline():
        with pytest.raises(TaskError, match=r"\(.*tied/linear\).*FloatingPointError.*not finite"):
            runs[0](*values)
        with pytest.raises(TaskError, match=r"mul wrote a value that is not finite to 0.mul"):
            runs[1](x)
    np.testing.assert_array_equal(runs[1](np.zeros(8, np.float32)).numpy(), np.full(8, 3, np.float32))
    for run in runs:
        run.close()
