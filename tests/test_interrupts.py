"""Interrupts of the program: exit code 130 and one line, wherever one falls and whatever becomes of it there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE

ROOT = Path(__file__).parent.parent
TRAIN = ["train", "--model", "mlp", "--model-arg", "hidden=16", "--costs", "analytic", "--steps", "2000", "--json"]

#: interrupts the program in its third step by `interrupt()`, which each test gives
IN_A_STEP = """
import ctypes, os, signal, sys, time
from minidl.training import trainer as training

def me(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(0.01)

{interrupt}

step = training.Trainer.step
def interrupted(self):
    if len(self.seconds) == 3:
        interrupt()
    return step(self)
training.Trainer.step = interrupted
from minidl.__main__ import run
run()
"""


def run(code, *argv, **options):
    """The program in a process of its own, whose SIGINT is not ignored although that of the tests may be."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.run([sys.executable, "-c", code, *(argv or TRAIN)], cwd=ROOT, capture_output=True, text=True,
                              timeout=PATIENCE, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def stopped(done, name="SIGINT"):
    assert done.stderr == f"minidl: stopped by {name}\n"
    assert done.stdout == ""
    assert done.returncode == 128 + signal.Signals[name]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_in_a_step(name):
    stopped(run(IN_A_STEP.format(interrupt=f"def interrupt(): me(signal.{name})")), name)


def test_an_interrupt_that_a_library_catches_is_found_by_the_loop():
    stopped(run(IN_A_STEP.format(interrupt="""
def interrupt():
    try:
        me()
    except BaseException:
        pass
""")))


def test_an_interrupt_in_a_callback_of_compiled_code_is_found_by_the_loop():
    """ctypes prints what a callback raises, and goes on."""
    stopped(run(IN_A_STEP.format(interrupt="interrupt = ctypes.CFUNCTYPE(None)(me)")))


def test_an_interrupt_in_a_destructor_is_found_by_the_loop():
    stopped(run(IN_A_STEP.format(interrupt="""
class Interrupt:
    def __del__(self):
        me()
interrupt = Interrupt
""")))


def test_an_interrupt_of_which_a_library_makes_an_error():
    stopped(run(IN_A_STEP.format(interrupt="""
def interrupt():
    try:
        me()
    except BaseException:
        raise AssertionError("what was that?")
""")))


def test_an_interrupt_during_a_long_call_of_compiled_code():
    """The main thread comes back to Python much later: the process ends before."""
    stopped(run(IN_A_STEP.format(interrupt="""
import threading
import numba

@numba.njit(nogil=True)
def minutes(n):
    x = 1
    for i in range(n):
        x = x * 1664525 + i ^ x >> 3
    return x

def interrupt():
    minutes(1)
    threading.Timer(0.1, me).start()
    minutes(10**15)
""")))


@pytest.mark.parametrize("module", ["numpy", "minidl.cli", "numba", "minidl.ops.linear"])
def test_an_interrupt_during_imports(module):
    stopped(run(f"""
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from minidl.__main__ import run
run()
"""))


def test_an_ignored_interrupt_stays_ignored():
    """As under nohup."""
    done = run(IN_A_STEP.format(interrupt="interrupt = me").replace("import ctypes", "import signal; signal.signal(2, "
                                                                                     "signal.SIG_IGN); import ctypes"),
               *(a.replace("2000", "5") for a in TRAIN))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_library_leaves_signals_alone():
    done = run("""
import signal
before = [signal.getsignal(s) for s in signal.valid_signals()]
import minidl.cli, minidl.interrupts, minidl.training.trainer, minidl.__main__
assert [signal.getsignal(s) for s in signal.valid_signals()] == before
assert signal.set_wakeup_fd(-1) == -1
""")
    assert done.returncode == 0, done.stderr


def test_a_finished_run_is_not_interrupted():
    """Its result is printed: the interpreter's own end is nobody's to stop."""
    code = """
import atexit, os, signal
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from minidl.__main__ import run
run()
"""
    done = run(code, *(a.replace("2000", "5") for a in TRAIN))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("}\n")
