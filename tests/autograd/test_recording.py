"""Recording: what it costs besides the step's own code."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import minidl as ml
from minidl.system.process import paused


def test_no_garbage_is_collected_while_a_step_is_recorded():
    seen = []

    def step(x):
        seen.append(gc.isenabled())
        return x * 2.0

    ml.record(step, np.ones(3, np.float32))
    with pytest.raises(ZeroDivisionError):
        ml.record(lambda x: 1 / 0, np.ones(3, np.float32))
    assert seen == [False]
    assert gc.isenabled()


def test_the_collector_goes_on_after_the_last_thread_that_paused_it():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with paused:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with paused:
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with paused:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_recording_makes_goes_without_the_collector():
    """Tensors, ops and tasks refer to each other in circles, also through views that no task reads."""
    made = []
    w = ml.nn.Parameter(np.ones((4, 3), np.float32))

    def step(x):
        middle = ml.tanh(ml.transpose(ml.reshape(x @ w, (3, 4))))
        loss = (middle * middle).mean()
        loss.backward()
        w.grad = None
        made.extend([weakref.ref(middle), weakref.ref(loss), weakref.ref(ml.autograd.tape.current())])
        return loss

    gc.disable()
    try:
        graph = ml.record(step, np.ones((4, 4), np.float32))
    finally:
        gc.enable()
    assert len(graph) > 5
    assert [ref() for ref in made] == [None] * 3
