"""An executor cannot step in a forked child, twice at once, within a step, or after it is closed."""

from __future__ import annotations

import contextlib
import copy
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import PATIENCE, SMALL, bits, deadline, recorded

import minidl as ml
from minidl.runtime.checking import CheckingExecutor, random_schedule
from minidl.runtime.executors import SequentialExecutor, executor

FORKED = """
import os, sys
import numpy as np
import minidl as ml
from minidl import models, nn, schedulers
from minidl import optim
from minidl.runtime.executors import executor

ml.seed(0)
model = models.create("mlp", preset="tiny")
opt = optim.SGD(model.parameters(), 0.1)
def step(x, y):
    loss = nn.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss
x, y = np.ones((4, *model.input_shape), np.float32), np.arange(4) % model.classes
graph = ml.record(step, x, y)
run = executor(graph, schedulers.multi_stream({make}))
for _ in range(3):
    run(x, y)
child = os.fork()
if not child:
    try:
        loss = run(x, y)
    except RuntimeError as error:
        print(error, flush=True)
    else:
        print("ran", flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert np.isfinite(run(x, y).numpy())
"""


LATE = "ml.cross_boundary(graph, [t.index for t in graph if t.kind in (ml.Kind.W, ml.Kind.U)]).body[0]"


@pytest.mark.few(1)
@pytest.mark.parametrize("make", ["graph, streams=2", LATE])
def test_a_step_in_a_forked_child_says_that_its_threads_stayed_behind(make):
    """One that needs no thread runs: tests/devices/native/test_native_lanes.py."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED.format(make=make)], capture_output=True,
                          text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this executor was made before the process was forked")
    assert len(done.stdout.splitlines()) == 1


def lanes(count):
    """Makes an executor of a random schedule on so many lanes."""
    return lambda graph: executor(graph, random_schedule(graph, count, np.random.default_rng(0)))


EXECUTORS = {"sequential": SequentialExecutor, "one lane": lanes(1), "three lanes": lanes(3),
             "checking": lambda g: CheckingExecutor(g, random_schedule(g, 2, np.random.default_rng(0)))}


class Hooked:
    """An input that makes a call when a step reads it."""

    def __init__(self, values, hook):
        self.values, self.hook = values, hook

    def __array__(self, *_, **__):
        self.hook()
        return self.values


@contextlib.contextmanager
def on_signal(handler):
    before = signal.signal(signal.SIGUSR2, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_step_within_a_step_is_an_error_and_changes_nothing(kind, both_lanes):
    wanted = SMALL.trained(SequentialExecutor, 2)
    model, opt, step = SMALL.make()
    batches = SMALL.batches(2)
    run = EXECUTORS[kind](ml.record(step, *batches[0]))
    refused = []

    def again():
        with pytest.raises(RuntimeError, match=r"^this executor is running a step, and something within that step .*"
                                               r"wait until the step has ended$"):
            run(*batches[1])
        if hasattr(run, "close"):
            with pytest.raises(RuntimeError, match="^this executor is running a step"):
                run.close()
        refused.append(True)

    with deadline(), on_signal(again):
        losses = [run(Hooked(batches[0][0], again), *batches[0][1:]),
                  run(Hooked(batches[1][0], lambda: signal.raise_signal(signal.SIGUSR2)), *batches[1][1:])]
    assert len(refused) == 2
    assert bits(*(t for pair in losses for t in pair)) + b"#" + SMALL.state(model, opt) == wanted
    getattr(run, "close", int)()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_an_entry_that_an_interrupt_has_left_does_not_stop_the_next_step(kind, both_lanes):
    """Also where the traceback, and with it the frame of the interrupted step, is still held."""
    batches = SMALL.batches(2)
    run = EXECUTORS[kind](recorded())
    with pytest.MonkeyPatch.context() as patch:
        def interrupted(*_):
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(type(run._guard), "__exit__", interrupted)
        with deadline():
            try:
                run(*batches[0])
            except KeyboardInterrupt:
                assert run._guard._entry
                run(*batches[1])
            else:
                raise AssertionError("no interrupt")
    assert not run._guard._entry


def test_a_parameter_as_an_input_settles_the_executor_before_its_step():
    """Its late tasks run once, although the step reads the parameter while it takes its inputs."""
    def trained(late):
        ml.seed(0)
        weight = ml.nn.Parameter(np.ones((2, 2), np.float32))
        opt = ml.optim.SGD([weight], 0.1)

        def step(x):
            loss = (x.relu() @ weight).mean()
            loss.backward()
            opt.step()
            return loss

        x = np.eye(2, dtype=np.float32)
        graph = ml.record(step, x)
        chosen = [t.index for t in graph if t.kind in (ml.Kind.W, ml.Kind.U)] if late else []
        schedule = ml.schedulers.in_order(ml.cross_boundary(graph, chosen).body[0] if late else graph)
        run = executor(graph, schedule)
        return bits(*(run(weight) for _ in range(4)), weight)

    assert trained(late=True) == trained(late=False)


@pytest.mark.parametrize("kind", ["sequential", "one lane", "three lanes"])
def test_two_threads_on_one_executor_are_an_error_in_the_second_and_change_nothing_in_the_first(kind, both_lanes):
    """Also if the second one closes it."""
    wanted = SMALL.trained(SequentialExecutor, 3)
    model, opt, step = SMALL.make()
    batches = SMALL.batches(3)
    run = EXECUTORS[kind](ml.record(step, *batches[0]))
    inside, go_on = threading.Event(), threading.Event()

    def pause():
        inside.set()
        assert go_on.wait(PATIENCE)

    losses = []
    with deadline():
        first = threading.Thread(target=lambda: losses.append(run(Hooked(batches[0][0], pause), *batches[0][1:])),
                                 name="the first")
        first.start()
        assert inside.wait(PATIENCE)
        for use in (lambda: run(*batches[1]), getattr(run, "close", lambda: run(*batches[1]))):
            with pytest.raises(RuntimeError, match="running a step in thread 'the first'"):
                use()
        go_on.set()
        first.join()
        losses += [run(*b) for b in batches[1:]]
        getattr(run, "close", int)()
    assert bits(*(t for pair in losses for t in pair)) + b"#" + SMALL.state(model, opt) == wanted


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_an_executor_cannot_be_copied_and_says_what_can(copied):
    graph = ml.record(lambda x: x * 2, np.ones(3, np.float32))
    schedule = ml.Schedule.of(graph, {ml.Lane(0): range(len(graph))})
    for run in (SequentialExecutor(graph), ml.StreamExecutor(graph, schedule), CheckingExecutor(graph, schedule)):
        with pytest.raises(TypeError, match="^an executor cannot be .*; copy or send the graph and the schedule"):
            copied(run)
