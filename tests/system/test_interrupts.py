"""Interrupts of the program: exit code 130 and one line, wherever one falls and whatever becomes of it there."""

from __future__ import annotations

import json
import os
import signal

import pytest
from helpers import IN_AN_IMPORT, python

from minidl.system import interrupts

TRAIN = ["train", "--model", "mlp", "--model-arg", "hidden=16", "--costs", "analytic", "--steps", "2000", "--json"]

#: interrupts the program in its third step by `interrupt()`, which each test gives
IN_A_STEP = """
import ctypes, os, signal, sys
from minidl.training import trainer as training

def me(number=signal.SIGINT):
    signal.raise_signal(number)

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


def run(code, *argv):
    """The program in a process of its own, whose SIGINT is not ignored although that of the tests may be."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return python("-c", code, *(argv or TRAIN))
    finally:
        signal.signal(signal.SIGINT, before)


def stopped(done, name="SIGINT"):
    assert done.stderr == f"minidl: stopped by {name}\n"
    assert done.stdout == ""
    assert done.returncode == 128 + signal.Signals[name]


#: where an interrupt falls, or what becomes of it there -> `interrupt`; the loop finds most of them
FALLS = {
    "SIGTERM": "def interrupt(): me(signal.SIGTERM)",
    "a library catches it": """
def interrupt():
    try:
        me()
    except BaseException:
        pass
""",
    "nothing": "interrupt = me",
    "a callback of compiled code, whose errors ctypes prints": "interrupt = ctypes.CFUNCTYPE(None)(me)",
    "a destructor": """
class Interrupt:
    def __del__(self):
        me()
interrupt = Interrupt
""",
    "a library makes an error of it": """
def interrupt():
    try:
        me()
    except BaseException:
        raise AssertionError("what was that?")
""",
    "compiled code prints it before another error, as if NumPy cannot be imported": """
def interrupt():
    try:
        me()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    raise ImportError("numpy.core.multiarray failed to import")
""",
    "a long call of compiled code, which ends after the process": """
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
""",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("fall", FALLS)
def test_an_interrupt_in_a_step(fall):
    stopped(run(IN_A_STEP.format(interrupt=FALLS[fall])), "SIGTERM" if fall == "SIGTERM" else "SIGINT")


def test_an_interrupt_after_the_result_is_out_changes_nothing():
    """What the command has made is freed after it, which takes milliseconds."""
    done = run("""
import os, signal
from minidl.cli import show

out = show.emit
def interrupted(*arguments):
    out(*arguments)
    os.kill(os.getpid(), signal.SIGINT)
show.emit = interrupted
from minidl.__main__ import run
run()
""", "simulate", "--ranks", "2", "--micro-batches", "4", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


@pytest.mark.few(1)
@pytest.mark.parametrize("module", ["numpy", "minidl.cli", "numba", "minidl.ops.linear"])
def test_an_interrupt_during_imports(module):
    stopped(run(IN_AN_IMPORT, module, *TRAIN))


@pytest.mark.few(1)
@pytest.mark.parametrize("module", ["minidl.system.interrupts", "threading", "minidl.cli", "numpy"])
def test_an_interrupt_that_python_loses_in_an_import(module):
    """It falls into the callback by which Python forgets the lock of a module that has been imported. Python prints
    what a callback raises, and goes on. The first two modules are imported before there is a handler."""
    stopped(run(f"""
import os, signal, sys

def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name == "cb" and frame.f_locals.get("name") == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(watch)
from minidl.__main__ import run
run()
"""))


@pytest.mark.wide
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
import minidl.cli, minidl.system.interrupts, minidl.training.trainer, minidl.__main__
assert [signal.getsignal(s) for s in signal.valid_signals()] == before
assert signal.set_wakeup_fd(-1) == -1
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_before_there_are_handlers_waits_for_them(number):
    """It is blocked while Python starts, and let through when the handlers are there."""
    stopped(run(f"""
import _signal, os, signal
before = _signal.pthread_sigmask
def and_interrupt(how, numbers):
    mask = before(how, numbers)
    if how == signal.SIG_BLOCK:
        os.kill(os.getpid(), {int(number)})
    return mask
_signal.pthread_sigmask = and_interrupt
from minidl.__main__ import run
run()
"""), number.name)


@pytest.mark.parametrize("argv", [["--help"], pytest.param([a.replace("2000", "5") for a in TRAIN],
                                                           marks=pytest.mark.wide)], ids=lambda argv: argv[0])
def test_what_has_printed_its_result_is_not_interrupted(argv):
    """The interpreter's own end is nobody's to stop."""
    done = run("""
import atexit, os, signal
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from minidl.__main__ import run
run()
""", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: minidl" if argv == ["--help"] else "{")


@pytest.fixture
def no_signal(monkeypatch):
    """No signal has come; and the process does not end."""
    for name in ("received", "came_to"):
        monkeypatch.setattr(interrupts, name, None)
    monkeypatch.setattr(interrupts.time, "sleep", lambda seconds: None)


def test_a_signal_of_another_rank_counts_where_none_came(no_signal):
    interrupts.check()
    interrupts.share(signal.SIGTERM, 3)
    interrupts.share(signal.SIGINT, 1)  # the first one counts
    assert (interrupts.received, interrupts.came_to) == (signal.SIGTERM, 3)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    with interrupts.holding():
        interrupts.check()


def test_a_rank_that_is_not_alone_says_which_it_is_and_kills_itself(no_signal, monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(interrupts.os, "kill", lambda process, number: ends.append((process, number)))
    monkeypatch.setattr(interrupts.os, "_exit", ends.append)
    for size in (1, 2):
        monkeypatch.setattr(interrupts.launcher, "size", lambda size=size: size)
        monkeypatch.setattr(interrupts.launcher, "rank", lambda: 1)
        interrupts.say(signal.SIGINT)
        interrupts.leave(signal.SIGINT)
    assert capfd.readouterr().err == "minidl: stopped by SIGINT\nminidl: rank 1: stopped by SIGINT\n"
    assert ends == [130, (os.getpid(), signal.SIGKILL), 130]
