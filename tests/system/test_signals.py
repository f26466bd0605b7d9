"""Signals at random times: whatever is hit ends with one line and an exit code, leaves no process, and its
checkpoint goes on.

They run under the marker `campaign`; tests/system/test_interrupts.py interrupts at chosen places, with no luck.
Each is drawn from a seed, which a failure names:
`MINIDL_SIGNALS=1 MINIDL_SIGNALS_SEED=17 python -m pytest -m campaign tests/system/test_signals.py` repeats one, as
far as time repeats; `MINIDL_SIGNALS=1000` draws more.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count as count_from
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, interruptible
from launcher import MPIEXEC
from marked import MARK, processes

from minidl import checkpoint

SEED = int(os.environ.get("MINIDL_SIGNALS_SEED", 1))
OVER = "over before it was hit"
#: seconds that ranks may be silent, and may take to start: generous, as on a busy machine both take long
SILENCE, START = (os.environ.get(name, default)
                  for name, default in (("MINIDL_MPI_SILENT_SECONDS", "15"), ("MINIDL_MPI_START_SECONDS", "60")))

MLP = ["--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=4", "--json"]
RUN = ["train", *MLP, "--costs", "analytic", "--epochs", "12"]
#: what is interrupted: a command in one process; or ranks, with the micro-batches with which one process goes on
SINGLE = {
    "train": [*RUN, "--scheduler", "multi_stream"],
    "compare": ["compare", *MLP, "--costs", "analytic", "--steps", "150"],
    "plan": ["plan", "--model", "densenet121", "--model-arg", "preset=tiny", "--batch-size", "4", "--costs", "analytic",
             "--json", "--scheduler", "multi_region", "--memory-limit", "100MB"],
    "measure": ["plan", "--model", "lenet", "--batch-size", "16", "--scheduler", "multi_region", "--json"],
    "table": ["simulate", "--ranks", "4", "--micro-batches", "8", "--table", "--json"],
    "models": ["models", "--json"],
    "fuzz": ["fuzz", "--cases", "3", "--json"],
}
RANKS = {"data": ["--scheduler", "priority"], "pipeline": ["--scheduler", "one_f_one_b", "--micro-batches", "4"]}


@dataclass
class Ended:
    """What is left of a run: exit code, output, and seconds from the signal until every process of it was gone."""

    code: int
    out: str
    err: str
    seconds: float
    left: str = ""  #: processes that had to be killed, since they did not end

    @property
    def lines(self) -> list[str]:
        """What the program says of its end; its notes and the launcher's words are others."""
        return [line for line in self.err.splitlines() if line.startswith("minidl:")]

    @property
    def result(self) -> dict | None:
        """The record, where the run came to its end before it was hit."""
        try:
            return json.loads(next(line for line in self.out.splitlines() if line.startswith("{")))
        except (StopIteration, ValueError):
            return None

    @property
    def before_us(self) -> bool:
        """Whether Python itself was hit, before it came to this project's first line."""
        return not self.out.startswith("{") and not self.lines and "/minidl/" not in self.err

    def __str__(self) -> str:
        return f"{self.left}exit code {self.code} after {self.seconds:.1f} s; {self.out[-300:]!r}\n{self.err[-3000:]}"


def hit(command: list[str], delay: float, number: signal.Signals, rank: int | None = None) -> Ended:
    """Runs a command and sends a signal to it, or to one of its ranks, after a delay."""
    mark = uuid.uuid4().hex
    run = interruptible(command, start_new_session=True, env={
        **os.environ, MARK: mark, "MINIDL_MPI_SILENT_SECONDS": SILENCE, "MINIDL_MPI_START_SECONDS": START})
    time.sleep(delay)
    if rank is None:
        run.send_signal(number)
    else:
        victims: list[int] = []
        while not victims and run.poll() is None:
            victims = [p for p, variables in processes(mark).items() if variables.get("PMI_RANK") == str(rank)
                       and "minidl\0train" in variables[""]]
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, number)
    begin = time.monotonic()
    try:
        out, err = run.communicate(timeout=PATIENCE)
        while processes(mark):
            assert time.monotonic() < begin + PATIENCE, f"left: {processes(mark)}"
            time.sleep(0.01)
    except (subprocess.TimeoutExpired, AssertionError) as error:
        left = processes(mark)
        for process in left:
            os.kill(process, signal.SIGKILL)
        out, err = run.communicate()
        return Ended(run.returncode, out, err, time.monotonic() - begin, f"{error}: {[v[''] for v in left.values()]}")
    return Ended(run.returncode, out, err, time.monotonic() - begin)


def program(*argv: object) -> list[str]:
    return [sys.executable, "-m", "minidl", *map(str, argv)]


def whole(command: list[str]) -> tuple[dict, float]:
    """What an undisturbed run says, and its seconds."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), time.monotonic() - begin


def goes_on(folder: Path, wanted: str, *flags: object) -> str:
    """Why a run cannot go on from what is in the folder to the wanted parameters; empty where it can, or
    has to begin anew."""
    if not checkpoint.exists(folder):
        return ""
    done = subprocess.run(program(*RUN, "--checkpoint", folder, "--resume", "auto", *flags), cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        return f"the checkpoint cannot be resumed: {done.stderr}"
    found = json.loads(done.stdout)["params_sha256"]
    return "" if found == wanted else f"resumed to {found}, not {wanted}"


def one_process(draw: random.Random, folder: Path, undisturbed: Callable[..., tuple[dict, float]]) -> tuple[str, str]:
    """Interrupts a command: what was hit, and what is wrong."""
    name = draw.choice(list(SINGLE))
    command = program(*SINGLE[name])
    record, seconds = undisturbed(*command)
    ended = hit([*command, *(["--checkpoint", str(folder)] if name == "train" else [])], draw.uniform(0, seconds),
                signal.SIGINT)
    lost = "Traceback" in ended.err or "ignored" in ended.err
    if ended.left:
        return "hangs", f"it hangs; {ended}"
    if ended.result is not None:
        wrong = ("a result, and yet no success" if ended.code or ended.lines else "the interrupt was lost" * lost)
        return OVER, wrong and f"{wrong}; {ended}"
    if ended.before_us:
        return "Python's own start", "" if ended.code else f"no result, and yet exit code 0; {ended}"
    if (ended.code, ended.lines) != (130, ["minidl: stopped by SIGINT"]) or lost or ended.out:
        return name, f"not one line and exit code 130; {ended}"
    wrong = goes_on(folder, record["params_sha256"], "--scheduler", "multi_stream") if name == "train" else ""
    return name, wrong and f"{wrong}; {ended}"


def ranks(parallel: str, draw: random.Random, folder: Path, undisturbed: Callable[..., tuple[dict, float]]
          ) -> tuple[str, str]:
    """Sends a signal to one of several ranks: which signal, and what is wrong."""
    size = draw.choice([2, 4])
    number = draw.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT])
    rank = draw.randrange(size)
    command = [str(MPIEXEC), "-n", str(size), *program(*RUN, "--parallel", parallel, *RANKS[parallel])]
    record, seconds = undisturbed(*command)
    ended = hit([*command, "--checkpoint", str(folder)], draw.uniform(0, seconds), number, rank)
    what = f"{number.name} to rank {rank} of {size}"
    if ended.left:
        return "hangs", f"{what}: it hangs; {ended}"
    if ended.code == 0:
        right = ended.result is not None and ended.result["params_sha256"] == record["params_sha256"]
        return OVER, "" if right and not ended.lines else f"{what}: exit code 0 without the right result; {ended}"
    at_start = ended.before_us and number != signal.SIGSTOP
    allowed = {signal.SIGKILL: r"", signal.SIGSTOP: r"minidl: (rank \d waits for rank \d|MPI has not "
                                                    r"started|this job has not ended).*\n"}
    pattern = "" if at_start else allowed.get(number, rf"minidl: rank {rank}: stopped by {number.name}\n")
    if (not re.fullmatch(pattern, "".join(f"{line}\n" for line in ended.lines))
        or ("Traceback" in ended.err and not at_start)):
        return number.name, f"{what}: not one line; {ended}"
    wrong = goes_on(folder, record["params_sha256"], "--micro-batches", size if parallel == "data" else 4)
    return number.name, wrong and f"{what}: {wrong}; {ended}"


@pytest.mark.campaign
@pytest.mark.parametrize(("hit_one", "runs"), [(one_process, 300), *(pytest.param(
    partial(ranks, parallel), 100, marks=[pytest.mark.mpi, pytest.mark.skipif(
        MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")], id=parallel) for parallel in RANKS)])
def test_signals_at_random_times(hit_one, runs, tmp_path):
    """Until so many runs were hit before they were over."""
    runs, seen, failures = int(os.environ.get("MINIDL_SIGNALS", runs)), Counter(), []
    undisturbed = cache(lambda *command: whole([*command]))
    for seed in count_from(SEED):
        if seen.total() - seen[OVER] >= runs:
            break
        what, wrong = hit_one(random.Random(seed), tmp_path / str(seed), undisturbed)
        seen[what] += 1
        failures += [f"seed {seed}, {what}: {wrong}"] if wrong else []
    print(f"\n{dict(seen)}")
    assert not failures, f"{len(failures)} of {seen.total()} runs:\n" + "\n\n".join(failures)
