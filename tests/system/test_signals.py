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
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count as count_from
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT
from launcher import MPIEXEC

SEED = int(os.environ.get("MINIDL_SIGNALS_SEED", 1))
OVER = "over before it was hit"
MARK = "MINIDL_TEST_MARK"  #: a variable that every process of a run inherits
#: seconds that ranks may be silent, and may take to start: generous, as on a busy machine both take long
SILENCE, START = (os.environ.get(name, default)
                  for name, default in (("MINIDL_MPI_SILENT_SECONDS", "15"), ("MINIDL_MPI_START_SECONDS", "60")))

MLP = ["--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=4", "--json"]
SINGLE = {
    "train": ["train", *MLP, "--costs", "analytic", "--scheduler", "multi_stream", "--epochs", "12"],
    "compare": ["compare", *MLP, "--costs", "analytic", "--steps", "150"],
    "plan": ["plan", "--model", "densenet121", "--model-arg", "preset=tiny", "--batch-size", "4", "--costs", "analytic",
             "--json", "--scheduler", "multi_region", "--memory-limit", "100MB"],
    "measure": ["plan", "--model", "lenet", "--batch-size", "16", "--scheduler", "multi_region", "--json"],
    "table": ["simulate", "--ranks", "4", "--micro-batches", "8", "--table", "--json"],
    "models": ["models", "--json"],
    "fuzz": ["fuzz", "--cases", "3", "--json"],
}
EPOCHS = 12
RANKS = {"data": ["--scheduler", "priority"], "pipeline": ["--scheduler", "one_f_one_b", "--micro-batches", "4"]}


def count(runs: int) -> int:
    """The size of a campaign; MINIDL_SIGNALS changes it."""
    return int(os.environ.get("MINIDL_SIGNALS", runs))


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


def processes(mark: str) -> dict[int, dict[str, str]]:
    """The environment of every process of a run, by its id; those that have ended are not counted."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes().decode(errors="replace")
            if mark in text and "\nState:\tZ" not in (folder / "status").read_text():
                found[int(folder.name)] = (dict(pair.partition("=")[::2] for pair in text.split("\0"))
                                           | {"": (folder / "cmdline").read_text()})
        except OSError:
            continue
    return found


def hit(command: list[str], delay: float, number: signal.Signals, rank: int | None = None) -> Ended:
    """Runs a command and sends a signal to it, or to one of its ranks, after a delay."""
    mark = uuid.uuid4().hex
    # that of the tests may be ignored, which is inherited
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           start_new_session=True, env={**os.environ, MARK: mark, "MINIDL_MPI_SILENT_SECONDS": SILENCE,
                                                        "MINIDL_MPI_START_SECONDS": START})
    signal.signal(signal.SIGINT, before)
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
    kept = {p.name for p in folder.iterdir()} if folder.exists() else set()
    if "checkpoint.safetensors" not in kept:
        return ""
    done = subprocess.run(program("train", *MLP, "--costs", "analytic", "--checkpoint", folder, "--epochs", EPOCHS,
                                  "--resume", *flags), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if "already has" in done.stderr:
        return ""
    if done.returncode:
        return f"the checkpoint cannot be resumed: {done.stderr}"
    found = json.loads(done.stdout)["params_sha256"]
    return "" if found == wanted else f"resumed to {found}, not {wanted}"


def seeds(runs: int, seen: dict[str, list[float]]) -> Iterator[int]:
    """One for each run, until so many have been hit before they were over."""
    for seed in count_from(SEED):
        if sum(len(seconds) for what, seconds in seen.items() if what != OVER) >= runs:
            return
        yield seed


def report(failures: list[str], seen: dict[str, list[float]]) -> None:
    """`seen`: of each way to end, the seconds until all was gone."""
    print("\n" + ", ".join(f"{what}: {len(seconds)}, gone after {max(seconds):.2f} s at most"
                           for what, seconds in seen.items()))
    assert not failures, f"{len(failures)} of {sum(map(len, seen.values()))} runs:\n" + "\n\n".join(failures)


@pytest.mark.campaign
def test_interrupts_at_random_times(tmp_path):
    runs = count(300)
    undisturbed = cache(lambda name: whole(program(*SINGLE[name])))
    failures, seen = [], defaultdict(list)
    for seed in seeds(runs, seen):
        draw = random.Random(seed)
        name = draw.choice(list(SINGLE))
        record, seconds = undisturbed(name)
        delay = draw.uniform(0, seconds)
        folder = tmp_path / str(seed)
        ended = hit(program(*SINGLE[name], *(["--checkpoint", folder] if name == "train" else [])),
                    delay, signal.SIGINT)
        wrong = "it hangs" if ended.left else ""
        if wrong:
            seen["hangs"].append(ended.seconds)
        elif ended.result is not None:
            seen[OVER].append(ended.seconds)
            wrong = ("a result, and yet no success" if ended.code or ended.lines
                     else "the interrupt was lost" if "Traceback" in ended.err or "ignored" in ended.err else "")
        elif ended.before_us:
            seen["Python's own start was hit"].append(ended.seconds)
            wrong = "" if ended.code else "no result, and yet exit code 0"
        else:
            seen[name].append(ended.seconds)
            if ((ended.code, ended.lines) != (130, ["minidl: stopped by SIGINT"])
                or "Traceback" in ended.err or "ignored" in ended.err or ended.out):
                wrong = "not one line and exit code 130"
            elif name == "train":
                wrong = goes_on(folder, record["params_sha256"], "--scheduler", "multi_stream")
        if wrong:
            failures.append(f"seed {seed}, {name} after {delay:.3f} s: {wrong}; {ended}")
    report(failures, seen)


@pytest.mark.campaign
@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
@pytest.mark.parametrize("parallel", RANKS)
def test_signals_to_ranks_at_random_times(parallel, tmp_path):
    runs = count(100)
    command = program("train", *MLP, "--costs", "analytic", "--parallel", parallel,
                      *RANKS[parallel], "--epochs", EPOCHS)
    launch = {n: [str(MPIEXEC), "-n", str(n), *command] for n in (2, 4)}
    undisturbed = cache(lambda ranks: whole(launch[ranks]))
    failures, seen = [], defaultdict(list)
    for seed in seeds(runs, seen):
        draw = random.Random(seed)
        ranks = draw.choice([2, 4])
        number = draw.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT])
        rank = draw.randrange(ranks)
        record, seconds = undisturbed(ranks)
        delay = draw.uniform(0, seconds)
        folder = tmp_path / str(seed)
        ended = hit([*launch[ranks], "--checkpoint", str(folder)], delay, number, rank)
        wrong = "it hangs" if ended.left else ""
        if wrong:
            seen["hangs"].append(ended.seconds)
        elif ended.code == 0:
            seen[OVER].append(ended.seconds)
            if ended.result is None or ended.result["params_sha256"] != record["params_sha256"] or ended.lines:
                wrong = "exit code 0 without the right result"
        else:
            seen[number.name].append(ended.seconds)
            early = ended.before_us and number != signal.SIGSTOP
            allowed = {signal.SIGKILL: r"", signal.SIGSTOP: r"minidl: (rank \d waits for rank \d|MPI has not "
                                                            r"started|this job has not ended).*\n"}
            pattern = "" if early else allowed.get(number, rf"minidl: rank {rank}: stopped by {number.name}\n")
            if (not re.fullmatch(pattern, "".join(f"{line}\n" for line in ended.lines))
                or ("Traceback" in ended.err and not early)):
                wrong = "not one line"
            else:
                wrong = goes_on(folder, record["params_sha256"], "--micro-batches", ranks if parallel == "data" else 4)
        if wrong:
            failures.append(f"seed {seed}, {number.name} to rank {rank} of {ranks} after "
                            f"{delay:.3f} s: {wrong}; {ended}")
    report(failures, seen)
