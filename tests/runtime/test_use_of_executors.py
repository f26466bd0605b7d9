"""The uses of an executor that hurt: two threads, a close and the end of the process while another thread steps, on
native and on Python lanes. No case may hang, and every step that ended has the bits of the oracle.

`-m campaign` has 1,000 of them at random times, with steps within a step and interrupts too; a failure names its seed.
In the default run what happens during a step waits until steps run, and tests/runtime/test_guard.py has the others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from helpers import PATIENCE, Case, bits, deadline

import minidl as ml
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import SequentialExecutor, StreamExecutor

STEPS = 6
CASES = int(os.environ.get("MINIDL_USES", 950))  #: of the campaign
NET = Case(("linear", "relu", "tied", "swap", "tied", "gain"), width=6, micro_batches=2)  #: all state has a name


@cache
def reference() -> list[bytes]:
    """What training leaves after 0, 1, 2 ... steps on the first batch, with the losses of the last one."""
    model, opt, step = NET.make()
    (batch,) = NET.batches(1)
    run = SequentialExecutor(ml.record(step, *batch))
    found = [NET.state(model, opt)]
    for _ in range(4 * STEPS):
        losses = run(*batch)
        found.append(bits(*losses) + NET.state(model, opt))
    return found


class Play:
    """A network, an executor of it on random lanes, and the number of steps that have ended. `at_random`: what hits the
    steps does so at a random time, else as soon as the first one has begun."""

    def __init__(self, draw: random.Random, at_random: bool) -> None:
        self.draw, self.steps, self.at_random, self.began = draw, 0, at_random, threading.Event()
        self.model, self.opt, step = NET.make()
        (self.batch,) = NET.batches(1)
        graph = ml.record(step, *self.batch)
        schedule = random_schedule(graph, draw.randint(1, 4), np.random.default_rng(draw.randrange(1 << 30)))
        self.run, self.losses = StreamExecutor(graph, schedule), ()

    def step(self) -> None:
        self.losses = self.run(*self.batch)
        self.steps += 1

    def check(self) -> None:
        """The bits are those of the oracle after as many steps."""
        assert bits(*self.losses) + NET.state(self.model, self.opt) == reference()[self.steps]

    def moment(self) -> float:
        """Seconds, from the first microseconds of a step to some steps later."""
        return float(10 ** self.draw.uniform(-5.3, -2.7))

    def wait(self) -> None:
        """Until the steps of another thread run, or for a random time."""
        if self.at_random:
            time.sleep(self.moment())
        else:
            assert self.began.wait(PATIENCE)


def refused(call: Callable[[], Any], says: str = "this executor is") -> bool:
    try:
        call()
    except RuntimeError as error:
        if not str(error).startswith(says):
            raise
        return True
    return False


@contextmanager
def alarm(seconds: float, handler: Callable[[], Any]) -> Iterator[None]:
    """Calls a function from a signal handler after a while, again and again."""
    before = signal.signal(signal.SIGVTALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def stepping(play: Play, step: Callable[[], bool]) -> Iterator[None]:
    """Another thread steps until `step` returns True; within, its first step has begun."""
    def work() -> None:
        play.began.set()
        while not step():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    play.wait()
    yield
    thread.join()


def reentered(play: Play) -> None:
    """A signal handler calls, settles and closes the executor whose step runs."""
    def handler() -> None:
        if play.run._guard._entry:
            assert refused(play.run.close)
            assert refused(lambda: play.run(*play.batch))

    with alarm(play.moment(), handler):
        for _ in range(STEPS):
            play.step()
    play.check()
    play.run.close()


def threads(play: Play) -> None:
    """Threads call one executor; each call is a step or is refused."""
    ended: list[Any] = []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(STEPS * play.draw.randint(2, 4)):
            pool.submit(refused, lambda: ended.append(play.run(*play.batch)))
    state = NET.state(play.model, play.opt)
    assert state == reference()[len(ended)][-len(state) :]
    play.run.close()


def closed(play: Play) -> None:
    """One thread steps, another closes: refused while a step runs; later steps are refused, and it can close again."""
    with stepping(play, lambda: play.steps == 4 * STEPS or refused(play.step)):
        while refused(play.run.close):
            pass
        assert refused(play.step, "this executor is closed; make another one")
        play.run.close()
    play.check()


def stopped(play: Play) -> None:
    """The workers are stopped in a step, as at the end of the process: the thread that steps gets an error."""
    with stepping(play, lambda: refused(lambda: play.run(*play.batch))):
        play.run._body[0].lanes.close()
        while len(play.run.schedule.lanes) == 1 and refused(play.run.close):  # there was no worker to stop
            pass


def interrupted(play: Play) -> None:
    """An interrupt at a random time: the executor runs again, from what the parameters were before."""
    tensors = [t for _, t in (*play.model.named_tensors(), *play.opt.named_tensors())]
    before = [t.numpy().copy() for t in tensors]

    def handler() -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), alarm(play.moment(), handler):
        for _ in range(STEPS):
            play.step()
    for tensor, value in zip(tensors, before, strict=True):
        tensor.assign(value)
    play.steps = 0
    for _ in range(2):
        play.step()
        play.check()
    play.run.close()
    assert refused(play.step)


OF_THREADS, AT_ANY_TIME = (threads, closed, stopped), (threads, closed, stopped, reentered, interrupted)


@pytest.mark.parametrize(("uses", "count", "at_random"), [
    (OF_THREADS, 6, False), pytest.param(AT_ANY_TIME, CASES, True, marks=pytest.mark.campaign)])
def test_no_use_hangs_or_changes_a_bit(uses: tuple[Callable[[Play], None], ...], count: int, at_random: bool,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    reference()
    for seed in range(count):
        draw = random.Random(seed)
        use, lanes = uses[seed % len(uses)], ("native", "python")[seed // len(uses) % 2]
        if lanes == "native" and ml.devices.device.no_native_lanes():
            continue
        monkeypatch.setenv("MINIDL_LANES", lanes)
        try:
            with deadline(PATIENCE):
                use(Play(draw, at_random))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {use.__name__} on {lanes} lanes: "
                                 f"{type(error).__name__}: {error}") from error


EXITS = """
import os, random, sys, threading, time
import numpy as np
import minidl as ml
from minidl.runtime.checking import random_schedule
from helpers import SMALL

def endless(run, batch, stepped):
    while True:
        run(*batch)
        stepped.set()

for seed in range({count}):
    sys.stdout.flush()
    child = os.fork()
    if not child:  # it ends as a program does
        draw = random.Random(seed)
        os.environ["MINIDL_LANES"] = ("native", "python")[seed % 2]
        for _ in range(draw.randint(1, 2)):
            _, _, step = SMALL.make()
            (batch,) = SMALL.batches(1)
            graph = ml.record(step, *batch)
            run = ml.StreamExecutor(graph, random_schedule(graph, draw.randint(1, 4), np.random.default_rng(seed)))
            stepped = threading.Event()
            threading.Thread(target=endless, args=(run, batch, stepped), daemon=True).start()
            if not {at_random}:
                stepped.wait()
        if {at_random}:
            time.sleep(10 ** draw.uniform(-4, -2))
        break
    end = time.monotonic() + {patience}
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            print("case", seed, "did not end")
            break
        time.sleep(0.002)
else:
    print("all ended")
"""


@pytest.mark.parametrize(("count", "at_random"), [
    (1, False), pytest.param(3, False, marks=pytest.mark.wide),
    pytest.param(-(-CASES // 19), True, marks=pytest.mark.campaign)])
def test_a_process_ends_although_a_daemon_thread_steps(count: int, at_random: bool) -> None:
    code = EXITS.format(count=count, at_random=at_random, patience=PATIENCE)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True,
                          timeout=PATIENCE * (count + 2),
                          env={**os.environ, "PYTHONPATH": str(Path(helpers.__file__).parent)})
    assert (done.returncode, done.stdout) == (0, "all ended\n"), done.stderr[-2000:]
