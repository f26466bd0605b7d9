"""What tests share without wanting to is put back after each of them, so that none depends on the ones before it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDERS = "minidl-tests-"  #: so begin the names of the folders of runs, then come their processes
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


#: of what users' code adds to, a test for their entries: modules that are loaded from files, kernels, networks
_OF_USERS: tuple[Callable[[str, Any], bool], ...] = (
    lambda name, module: name.startswith("/"),
    lambda name, kernel: not kernel.reference.__module__.startswith("minidl."),
    lambda name, entry: not entry.build.__module__.startswith("minidl."))


def _tables() -> tuple[dict[str, Any], ...]:
    """The tables of these; only loaded parts of the engine are looked at, since a test may be about what is loaded."""
    kernels, models = (sys.modules.get(f"minidl.{room}.registry") for room in ("kernels", "models"))
    return sys.modules, kernels.KERNELS if kernels else {}, models._MODELS if models else {}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # pytest changes it


def _begin_anew() -> None:
    """This thread makes tensors on the CPU, from seed 0, and notes are printed that were printed before, as at the
    start of a process. The peaks of a device are measured in few, small calls, since no test needs the right number."""
    if tape := sys.modules.get("minidl.autograd.tape"):
        tape.unsettled.clear()
        tape._current.tape = tape.Tape()
    if random := sys.modules.get("minidl.autograd.random"):
        random._Thread.seed, random._thread.state = 0, random.State()
    if catalogue := sys.modules.get("minidl.data.catalogue"):
        catalogue.say.cache_clear()
    if kernel_times := sys.modules.get("minidl.measuring.kernel_times"):
        kernel_times.SECONDS, kernel_times.SIDE = 0.0, 64
    if work := sys.modules.get("minidl.measuring.work"):
        work.SIZES = work.SIZES[:2]


@contextmanager
def no_trace() -> Iterator[None]:
    """Before and after it, seeds begin anew. At the end the environment, the working folder, the import path, handlers
    of signals, and the tables that users' code adds to are as before."""
    environment, folder, path, tables = _environment(), os.getcwd(), sys.path[:], [set(table) for table in _tables()]
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    _begin_anew()
    yield
    if (now := _environment()) != environment:
        for name in now.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if now.get(name) != value})
    os.chdir(folder)
    sys.path[:] = path
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    _begin_anew()  # no tape holds a device any more
    for table, known, of_users in zip(_tables(), tables, _OF_USERS, strict=True):
        for name in table.keys() - known:
            if of_users(name, table[name]):
                del table[name]


def own_folder() -> str:
    """A new folder of this run. Those of killed runs go."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-*"):
        process = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if process.isdecimal() and not _runs(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{FOLDERS}{os.getpid()}-")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's, or no process of this system
        return True
    return True
