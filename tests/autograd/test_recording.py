"""Recording: what it costs besides the step's own code."""

from __future__ import annotations

import gc
import threading

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
