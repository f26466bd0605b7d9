"""What tests share without wanting to is put back after each of them, so that none depends on the ones before it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


def _tables() -> dict[str, dict[str, Any]]:
    """What users' code adds to: kernels, networks, and modules that were loaded from files. Only loaded parts of the
    engine are looked at: a test may be about what is loaded."""
    found = {"modules": {name: module for name, module in list(sys.modules.items()) if name.startswith("/")}}
    if registry := sys.modules.get("minidl.kernels.registry"):
        found["kernels"] = {name: kernel for name, kernel in registry.KERNELS.items()
                            if not kernel.reference.__module__.startswith("minidl.")}
    if registry := sys.modules.get("minidl.models.registry"):
        found["models"] = {name: entry for name, entry in registry._MODELS.items()
                           if not entry.build.__module__.startswith("minidl.")}
    return found


def _table(name: str) -> dict[str, Any]:
    if name == "modules":
        return sys.modules
    registry = sys.modules[f"minidl.{name}.registry"]
    table: dict[str, Any] = registry.KERNELS if name == "kernels" else registry._MODELS
    return table


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # pytest changes it


def _begin_anew() -> None:
    """This thread makes tensors on the CPU, from seed 0, and notes are printed that were printed before, as at the
    start of a process."""
    if tape := sys.modules.get("minidl.autograd.tape"):
        tape.unsettled.clear()
        tape._current.tape = tape.Tape()
    if random := sys.modules.get("minidl.autograd.random"):
        random._Thread.seed, random._thread.state = 0, random.State()
    if catalogue := sys.modules.get("minidl.data.catalogue"):
        catalogue._say.cache_clear()


@contextmanager
def no_trace() -> Iterator[None]:
    """Before and after it, seeds begin anew. At the end the environment, the working folder, the import path, handlers
    of signals, and the tables that users' code adds to are as before."""
    environment, folder, path, tables = _environment(), os.getcwd(), sys.path[:], _tables()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    _begin_anew()
    yield
    for name in _environment().keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    os.chdir(folder)
    sys.path[:] = path
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    _begin_anew()  # no tape holds a device any more
    for name, now in _tables().items():
        for key in now.keys() - tables.get(name, {}).keys():
            del _table(name)[key]
