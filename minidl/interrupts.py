"""Interrupts of the program: SIGINT and SIGTERM end it with one line and exit code 128 + signal, whatever it is doing.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of compiled code, in a destructor
or under a library's `except:` it is lost, and in a long call of compiled code it comes late. So the signal is also kept
for loops to look at (`check`), and a thread that it wakes ends the process if nobody else does so within GRACE seconds.

For the program alone (`minidl.__main__`): who imports minidl as a library keeps their own handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from . import launcher

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.0  #: seconds that the main thread has to end what it is doing

received: signal.Signals | None = None  #: the first of SIGNALS that came
_taken = threading.Lock()  # held by whoever ends the process


def install() -> None:
    """From now on signals are kept. One that is ignored, as under nohup, stays ignored."""
    heard, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), name="interrupts", daemon=True).start()
    sys.unraisablehook = _unraisable
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def ignore() -> None:
    """From now on signals change nothing: the work is done and the process about to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raises KeyboardInterrupt if a signal has come, also where one was raised before and got lost."""
    if received is not None:
        raise KeyboardInterrupt


def take() -> signal.Signals:
    """The signal that came (SIGINT for a KeyboardInterrupt that no signal made); from now on the caller
    ends the process."""
    if not _taken.acquire(blocking=False):
        time.sleep(60)  # another thread is ending the process
    return received or signal.SIGINT


def leave(number: int) -> NoReturn:
    """Ends the process at once with exit code 128 + `number`.

    Beside other ranks it dies of a signal: that is what makes any launcher end the others at any time. A mere exit code
    does not, before MPI has started.
    """
    if launcher.size() > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + number)


def line(number: signal.Signals) -> str:
    return f"stopped by {number.name}"


def say(number: signal.Signals) -> None:
    """Prints the one line. Of several ranks that are interrupted before they have met, the first one's end
    ends the others."""
    rank = launcher.rank() if launcher.size() > 1 else None
    time.sleep(0.5 if rank else 0)
    with contextlib.suppress(OSError):  # nobody listens
        os.write(2, f"minidl: {'' if rank is None else f'rank {rank}: '}{line(number)}\n".encode())


def _handle(number: int, frame: Any) -> None:
    global received
    if received is None:  # a second one would only disturb what the first has begun to end
        received = signal.Signals(number)
        raise KeyboardInterrupt


def _watch(heard: int) -> None:
    """Ends the process where the main thread does not."""
    while (number := os.read(heard, 1)[0]) not in SIGNALS:
        pass
    time.sleep(GRACE)
    if _taken.acquire(blocking=False):
        say(signal.Signals(number))
        leave(number)


def _unraisable(error: Any) -> None:
    """A KeyboardInterrupt that got lost tells nothing new: the signal is kept."""
    if received is None or not issubclass(error.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(error)
