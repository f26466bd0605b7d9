"""Native lanes: on the CPU a lane is an array of (address, block) that compiled code walks, without the interpreter.

`code` has the machine code, `calls` turns bound calls of kernels into (address, block), `lanes` runs them. Their first
lines import numba, so they are imported where native lanes are wanted.
"""

from __future__ import annotations

import platform
import sys

#: machine -> number of the system call futex, the intrinsic that tells the core that it spins, its arguments
MACHINES: dict[str, tuple[int, str, tuple[int, ...]]] = {"x86_64": (202, "llvm.x86.sse2.pause", ()),
                                                         "aarch64": (98, "llvm.aarch64.hint", (1,))}


def unavailable() -> str:
    """Why native lanes do not work on this machine; empty where they do."""
    if sys.platform != "linux" or platform.machine() not in MACHINES or sys.maxsize < 2**32:
        return f"native lanes need Linux on x86-64 or aarch64, not {platform.system()} on {platform.machine()}"
    return ""
