"""What an executor cannot do ends with an error: a step in a forked child, two steps at once."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import PATIENCE, SMALL, bits, deadline

import minidl as ml
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import SequentialExecutor, StreamExecutor, executor

FORKED = """
import os, sys
import numpy as np
import minidl as ml
from minidl import models, nn, schedulers
from minidl import optim
from minidl.runtime.executors import SequentialExecutor, executor

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
run = {make}
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


@pytest.mark.parametrize("make", ["executor(graph, schedulers.multi_stream(graph, streams=2))",
                                  "executor(graph, schedulers.multi_stream(ml.cross_boundary(graph, [t.index for t in "
                                  "graph if t.kind in (ml.Kind.W, ml.Kind.U)]).body[0]))"])
def test_a_step_in_a_forked_child_says_that_its_threads_stayed_behind(make):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED.format(make=make)], capture_output=True,
                          text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this executor was made before the process was forked")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("make", ["SequentialExecutor(graph)", "executor(graph, schedulers.in_order(graph))"])
def test_a_step_in_a_forked_child_runs_where_no_thread_is_needed(make):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED.format(make=make)], capture_output=True,
                          text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize("kind", ["sequential", "one lane", "three lanes"])
def test_two_threads_on_one_executor_are_an_error_in_the_second_and_change_nothing_in_the_first(kind):
    make = {"sequential": SequentialExecutor,
            "one lane": lambda g: StreamExecutor(g, random_schedule(g, 1, np.random.default_rng(0))),
            "three lanes": lambda g: executor(g, random_schedule(g, 3, np.random.default_rng(0)))}[kind]
    wanted = SMALL.trained(SequentialExecutor, 3)
    model, opt, step = SMALL.make()
    batches = SMALL.batches(3)
    run = make(ml.record(step, *batches[0]))
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        """An input that takes its time."""

        def __array__(self, *_, **__):
            inside.set()
            assert go_on.wait(PATIENCE)
            return batches[0][0]

    losses = []
    with deadline():
        first = threading.Thread(target=lambda: losses.append(run(Slow(), *batches[0][1:])), name="the first")
        first.start()
        assert inside.wait(PATIENCE)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="running a step in thread 'the first'"):
                run(*batches[1])
        go_on.set()
        first.join()
        losses += [run(*b) for b in batches[1:]]
    assert bits(*(t for pair in losses for t in pair)) + b"#" + SMALL.state(model, opt) == wanted
    if hasattr(run, "close"):
        run.close()
