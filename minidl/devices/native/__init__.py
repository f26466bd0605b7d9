"""Native lanes: on the CPU a lane is an array of (address, block) that compiled code walks, without the interpreter.

`code` has the machine code, `calls` turns bound calls of kernels into (address, block), `lanes` runs them, `stamps`
tells when tasks ran, `machines` what differs between machines. They import numba, so they are imported where native
lanes are wanted.
"""

from __future__ import annotations

import platform
import sys

MACHINES = ("x86_64", "aarch64")


def no_native_lanes() -> str:
    """Why native lanes do not work on this machine; empty if they do."""
    if sys.platform != "linux" or platform.machine() not in MACHINES or sys.maxsize < 2**32:
        return f"native lanes need Linux on x86-64 or aarch64, not {platform.system()} on {platform.machine()}"
    return ""
