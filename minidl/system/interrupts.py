"""Interrupts of the program: SIGINT, SIGTERM and SIGUSR1 (a scheduler's warning) end it with one line and exit code
128 + signal, whatever it is doing.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of compiled code, in a destructor
or under a library's `except:` the exception is lost, and in a long call of compiled code it comes late. So the signal
is also kept: loops look at it (`check`), and a thread that it wakes ends the process if the main thread has not done so
within GRACE seconds.

Only the program (`minidl.__main__`) uses this; code that imports minidl as a library keeps its own handlers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from . import launcher

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ASKING = signal.SIGUSR2  #: of a rank: where are you?
GRACE = 1.0  #: seconds that the main thread has to stop by itself
LONGEST = 60.0  #: seconds that it has if it is `holding`

received: signal.Signals | None = None  #: the first of SIGNALS that came
came_to: int | None = None  #: the rank that it came to, if not this one
asked = 0  #: how often somebody has asked by ASKING what this process does
_held = 0  # how many threads want the first signal to be only noted
_counting = threading.Lock()
_ending = threading.Lock()  # held by whoever ends the process


def install() -> None:
    """Installs the handlers. A signal that is ignored already, as under nohup, stays ignored."""
    heard, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), name="interrupts", daemon=True).start()
    # of errors that Python cannot raise, as in a destructor, a callback or the import of a module
    sys.unraisablehook = lambda error: None if _lost(error.exc_type) else sys.__unraisablehook__(error)
    # of errors that nobody caught, or that compiled code prints before it raises others
    sys.excepthook = lambda kind, *rest: None if _lost(kind) else sys.__excepthook__(kind, *rest)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def answer() -> None:
    """From now on ASKING does not end the program, but is counted in `asked`, also while compiled code runs. Python
    sets handlers in the main thread alone, so it does nothing in others."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(ASKING) == signal.SIG_DFL:
        signal.signal(ASKING, lambda number, frame: None)  # _watch counts it


@contextlib.contextmanager
def holding() -> Iterator[None]:
    """Inside, a first signal is only noted in `received`, so that what has been begun can end, within LONGEST seconds;
    a second one ends the process. For code that looks at `received` itself."""
    global _held
    with _counting:
        _held += 1
    try:
        yield
    finally:
        with _counting:
            _held -= 1


def ignore() -> None:
    """Ignores the signals that have its handler from now on: the result is out, and the process is about to end.
    Python sets handlers in the main thread alone, so it does nothing in others."""
    for number in SIGNALS:
        if signal.getsignal(number) is _handle and threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raises KeyboardInterrupt if a signal has come, even if an earlier one was lost; not if it is `holding`."""
    if received is not None and not _held:
        raise KeyboardInterrupt


def share(number: int, rank: int) -> None:
    """Keeps a signal that came to another rank and ends this one too, unless this one has one of its own."""
    global received, came_to
    if received is None:
        received, came_to = signal.Signals(number), rank


def take() -> signal.Signals:
    """Makes the caller the one that ends the process. Returns the signal that came, SIGINT if none did."""
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # another thread is ending the process
    return received or signal.SIGINT


def leave(number: int) -> NoReturn:
    """Ends the process at once with exit code 128 + `number`.

    With other ranks beside it, the process kills itself instead: every launcher then ends the other ranks, while an
    exit code alone does not make it do so before MPI has started.
    """
    if launcher.size() > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + number)


def line(number: signal.Signals) -> str:
    return f"stopped by {number.name}"


def say(number: signal.Signals) -> None:
    """Prints the one line. Rank 0 goes first: before MPI connects interrupted ranks, its end ends the others."""
    rank = launcher.rank() if launcher.size() > 1 else None
    time.sleep(0.5 if rank else 0)
    with contextlib.suppress(OSError):  # nobody listens
        os.write(2, f"minidl: {'' if rank is None else f'rank {rank}: '}{line(number)}\n".encode())


def _handle(number: int, frame: Any) -> None:
    global received
    if received is None:  # a second signal would only disturb the shutdown
        received = signal.Signals(number)
        if not _held:
            raise KeyboardInterrupt


def _watch(heard: int) -> None:
    """Ends the process if the main thread does not."""
    global asked
    while (number := os.read(heard, 1)[0]) not in SIGNALS:
        asked += number == ASKING
    end = time.monotonic() + LONGEST
    while _held and time.monotonic() < end and not select.select([heard], [], [], 0.05)[0]:
        pass
    time.sleep(GRACE)
    if _ending.acquire(blocking=False):
        say(signal.Signals(number))
        leave(number)


def _lost(kind: type[BaseException]) -> bool:
    """Whether an error is a KeyboardInterrupt whose signal is kept: nobody need hear of it."""
    return received is not None and issubclass(kind, KeyboardInterrupt)
