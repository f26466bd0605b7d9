"""Asks an entry for its order: in a process of its own, with limits, and takes nothing but text from it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from ..system import interrupts
from .problems import Task

STARTS = 120.0  #: seconds that a process may take before it loads the entry
MOST_TEXT = 1 << 24  #: bytes of an order
ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Outcome:
    """`text`: of the order, or None and `why` in one line. `seconds`: that the entry took; `walled`: whether it ran
    behind the filter of system calls."""

    text: str | None
    why: str = ""
    seconds: float = 0.0
    walled: bool = True


def ask(entry: str, task: Task, seconds: float, memory: int) -> Outcome:
    """The outcome of an entry, `file.py:function` or `package.module:function`, within these limits."""
    file, _, function = entry.rpartition(":")
    name = f"{Path(file).resolve()}:{function}" if file.endswith(".py") else entry
    told = {"entry": name, "task": asdict(task), "seconds": seconds, "memory": memory, "paths": [ROOT, os.getcwd()]}
    begun, deadline, got, over = monotonic(), monotonic() + STARTS, bytearray(), ""
    with _process(json.dumps(told).encode()) as (process, pipe), selectors.DefaultSelector() as select:
        select.register(pipe, selectors.EVENT_READ)
        while not over:
            interrupts.check()
            late = (f"still running after {seconds:g} s (--time-limit)" if got
                    else f"its process did not start within {STARTS:g} s")
            if monotonic() > deadline:
                over = late
            elif select.select(min(0.2, max(0.0, deadline - monotonic()))):
                if not (part := os.read(pipe, 1 << 16)):
                    try:
                        process.wait(max(1.0, deadline - monotonic()))
                    except subprocess.TimeoutExpired:  # it has closed the pipe
                        over = late
                    break
                if not got:
                    begun, deadline = monotonic(), monotonic() + seconds
                got += part
                if len(got) > MOST_TEXT:
                    over = f"gave more than {MOST_TEXT >> 20} MiB of text"
        took = monotonic() - begun
    head, _, rest = bytes(got).partition(b"\n")
    kind, _, text = rest.decode("utf-8", "replace").partition("\n")
    walled = head != b"ready 0"
    if over or kind not in ("order", "error"):
        return Outcome(None, over or _ended(process.returncode), took, walled)
    return Outcome(text, "", took, walled) if kind == "order" else Outcome(None, _line(text), took, walled)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit code {code}, without an order"
    names = {signal.SIGXCPU: "it took too much CPU time", signal.SIGXFSZ: "it wrote to a file"}
    return names.get(-code, f"its process ended by signal {-code}, without an order")  # type: ignore[call-overload]


def _line(text: str) -> str:
    """One line of limited length, without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text[:600].split()))[:300]


@contextmanager
def _process(told: bytes) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The entry's process in an empty folder, and the end of its pipe; all of it is gone at the end. It gets nothing of
    the environment, where secrets may be, but the folders in which Python finds its libraries."""
    reads, writes = os.pipe()
    code = (f"import sys; sys.path.insert(0, {ROOT!r}); from minidl.arena.entrant import run; run({writes})")
    plain = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
    with tempfile.TemporaryDirectory(prefix="minidl-arena-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(writes,), cwd=folder, start_new_session=True, env=plain | {"OPENBLAS_NUM_THREADS": "1"})
        os.close(writes)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which shows in its exit code
                process.stdin.write(told)
                process.stdin.close()
            yield process, reads
        finally:
            os.close(reads)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
