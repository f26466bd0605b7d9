"""Processes that a benchmark starts and ends: one that hangs, dies or poisons its GPU harms nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

GRACE = 10.0  #: seconds that a process has to end when asked


def end(process: subprocess.Popen[bytes], grace: float | None = None) -> None:
    """Ends all processes of its group: SIGTERM first, then, after `grace` seconds (GRACE), SIGKILL. One that a driver
    holds even then is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE if grace is None else grace)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
