"""The machine: the versions of packages, and its memory. A program that asks for more than there is gets an error
that it can report, instead of being killed."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
PACKAGES = ("numpy", "numba", "mpi4py", "threadpoolctl", "safetensors", "rich", "cupy-cuda13x", "cupy-cuda12x",
            "nvidia-cudnn-frontend", "nvmath-python", "torch")


def versions() -> dict[str, str]:
    """The versions of minidl, Python, and every installed package that matters for a run."""
    import importlib.metadata
    import platform

    from .. import __version__

    found = {"minidl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def blas() -> str:
    """The BLAS that NumPy uses, and for which processor it picked its kernels: steps of products depend on it."""
    import numpy  # noqa: F401 - loads it
    from threadpoolctl import threadpool_info

    return ", ".join(f"{p['internal_api']} {p['version']}, kernels for {p.get('architecture', 'an unknown processor')}"
                     for p in threadpool_info() if p["user_api"] == "blas") or "unknown"


def available() -> int | None:
    """The bytes that can still be allocated, by the machine (with swap) and by the control group; None if unknown."""
    found = []
    with suppress(OSError):
        lines = dict(re.findall(r"(\w+): +(\d+) kB", (PROC / "meminfo").read_text()))
        found.append((int(lines["MemAvailable"]) + int(lines["SwapFree"])) << 10)
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # a group without a limit says "max"
            found.append(int((GROUPS / limit).read_text()) - int((GROUPS / used).read_text()))
    return max(0, min(found)) if found else None


def bound() -> None:
    """Limits the memory of this process, and of those that it starts, to what is available now."""
    free = available()
    with suppress(OSError):
        taken = re.search(r"VmData:\s+(\d+) kB", (PROC / "self" / "status").read_text())
        if free is not None and taken:
            most = free + (int(taken[1]) << 10)
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA,
                               (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
