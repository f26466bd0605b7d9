"""Runs that are supervised: a process that starts a run, and starts it again from its last checkpoint if it fails.

It is the parent of all that the run consists of, also of the launcher of its ranks: what started it would end it with
them. It passes the first signal on to the run, which saves and ends, and ends with the run's exit code.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from ..system import interrupts
from ..training import checkpoint
from . import show
from .flags import UsageError

LOOK = 0.05  #: seconds between two looks at the run
FREE = 10.0  #: seconds that processes of an attempt have to let go of the checkpoint
DIES_WITH_PARENT = 1  #: the request of Linux's prctl for a signal when the parent ends


def supervise(arguments: Any) -> int:
    """Runs `train` with these flags in processes of its own, again after each failure. An attempt that comes no further
    than the one before is followed by one with fewer ranks, if --least-ranks allows it. Returns the last exit code."""
    left, ranks, stuck = arguments.max_restarts, arguments.ranks, False
    while True:
        before, first = _step(arguments), left == arguments.max_restarts
        code = _attempt(_command(arguments, ranks, first))
        if interrupts.received is not None:  # of which the run has told
            interrupts.take()
            sys.stdout.flush()
            os._exit(code)
        after = _step(arguments)
        if code == 0 or left == 0 or (first and code == 2 and after == before):  # as after a wrong flag
            return code
        if after == before and stuck:
            ranks = fewer(arguments, ranks)
        stuck, left = after == before, left - 1
        _await_others(arguments)
        where = "" if ranks is None else f" on {ranks} rank{'s' * (ranks > 1)}"
        show.note(f"the run ended with exit code {code}; it starts again{where}, "
                  + (f"from step {after}" if after is not None else "from its beginning")
                  + f"; {left} more restart{'s' * (left != 1)}")


def fewer(arguments: Any, ranks: int | None) -> int | None:
    """The next smaller number of ranks that --least-ranks and the batch allow, of a pipeline 2 or more; or the same."""
    staged = arguments.parallel == "pipeline"
    fewest = max(arguments.least_ranks or ranks or 1, 1 + staged)
    return next((found for found in range((ranks or 1) - 1, fewest - 1, -1)
                 if staged or arguments.batch_size % (found * arguments.micro_batches) == 0), ranks)


def _command(arguments: Any, ranks: int | None, first: bool) -> list[str]:
    """The command of an attempt: the same one, which is not supervised, and goes on if there is a checkpoint."""
    launch = shlex.split(arguments.launch) if arguments.launch else []
    if launch:
        launch += ["-n", str(ranks * arguments.replicas)]
    more = ["--max-restarts", "0", *([] if ranks is None else ["--ranks", str(ranks)]),
            *([] if first else ["--resume", "auto"])]
    return [*launch, sys.executable, "-m", "minidl", *shlex.split(arguments.line)[1:], *more]


def _attempt(command: list[str]) -> int:
    """Runs a command to its end, in a process group of its own, so that it gets signals from here alone; it ends if
    this process is gone. Its exit code, 128 + signal if one ended it."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if prctl is not None:
            prctl(DIES_WITH_PARENT, signal.SIGTERM, 0, 0, 0)

    passed = False
    with interrupts.holding():
        try:
            run = subprocess.Popen(command, start_new_session=True, preexec_fn=begin)
        except OSError as error:
            raise UsageError(f"--launch {command[0]}: {error.strerror}") from None
        while (code := run.poll()) is None:
            if interrupts.received is not None and not passed:
                passed = True
                run.send_signal(interrupts.received)
            time.sleep(LOOK)
        with suppress(OSError):  # what a launcher that was killed has left
            os.killpg(run.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _step(arguments: Any) -> int | None:
    """The step of the last checkpoint."""
    return checkpoint.peek(arguments.checkpoint).step if checkpoint.exists(arguments.checkpoint) else None


def _await_others(arguments: Any) -> None:
    """Waits until no process of the last attempt saves any more."""
    end = time.monotonic() + FREE
    while time.monotonic() < end:
        with suppress(checkpoint.CheckpointError), checkpoint.claim(arguments.checkpoint):
            return
        time.sleep(LOOK)
