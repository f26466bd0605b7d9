"""Processes that a benchmark starts and ends: one that hangs, dies or poisons its GPU harms nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

GRACE = 10.0  #: seconds that a process has to end when asked


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of its group: SIGTERM first, then SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
