"""Supervised runs: whatever is killed, a run ends bit-identical to a run without kills; a full disk costs only the
steps since the last checkpoint.

`MINIDL_KILLS=1 MINIDL_SIGNALS_SEED=17 python -m pytest -m campaign tests/system/test_restarts.py` repeats one run, as
far as time repeats.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from command_line import refusal, reported
from helpers import PATIENCE, interruptible, until
from launcher import MPIEXEC, printed
from marked import MARK, processes

from minidl import checkpoint
from minidl.cli import main, parser, restarts
from minidl.system import launcher

SEED = int(os.environ.get("MINIDL_SIGNALS_SEED", 1))
RUN = ["train", "--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=4", "--costs", "analytic",
       "--json"]
DATA = ["--parallel", "data", "--scheduler", "priority", "--batch-size", "64"]
PIPELINE = ["--parallel", "pipeline", "--scheduler", "one_f_one_b", "--micro-batches", "4"]
SUPERVISED = ["--max-restarts", "3"]
MPI = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")]
UNDER_MPI = ["--launch", f"{MPIEXEC}"]
KINDS = {"one process": [], "data": [*DATA, "--ranks", "2"], "pipeline": [*PIPELINE, "--ranks", "3"]}


def command(*flags: object) -> list[str]:
    return [sys.executable, "-m", "minidl", *RUN, *map(str, flags)]


def started(*flags: object) -> tuple[subprocess.Popen[str], str]:
    """A run, and the mark of all its processes."""
    mark = uuid.uuid4().hex
    run = interruptible(command(*flags), env={**os.environ, MARK: mark, "MINIDL_MPI_SILENT_SECONDS": "15"})
    return run, mark


def ended(run: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = run.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(run.args, run.returncode, out, err)


def record(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(next(line for line in printed(done).splitlines() if line.startswith("{")))
    return found


@cache
def undisturbed(*flags: str) -> tuple[dict[str, Any], float]:
    begin = time.monotonic()
    return record(ended(started(*flags)[0])), time.monotonic() - begin


def children(run: subprocess.Popen[str], mark: str) -> list[int]:
    """The processes of the attempt that runs now: ranks and their launcher. Helpers are not among them: if MPICH's own
    is killed, mpiexec waits for ever; if a rank's is killed, nothing ends a rank whose MPI does not start."""
    return [pid for pid, about in processes(mark).items() if pid != run.pid and "minidl\0train" in about[""]]


# ----------------------------------------------------------------------------------------------------------- the rules
def supervised(monkeypatch: Any, folder: Path, attempts: list[tuple[int, int | None]], *flags: str
               ) -> tuple[int, list[list[str]]]:
    """The exit code and the commands of a supervised run. `attempts`: for each one its exit code, and the step of the
    checkpoint that it leaves (None: no new one)."""
    commands: list[list[str]] = []
    step: list[int | None] = [None]

    def attempt(command: list[str]) -> int:
        code, after = attempts[len(commands)]
        commands.append(command)
        step[0] = step[0] if after is None else after
        return code

    monkeypatch.setattr(restarts, "_attempt", attempt)
    monkeypatch.setattr(restarts, "_step", lambda arguments: step[0])
    return main([*RUN, "--checkpoint", str(folder), *flags]), commands


def test_a_run_is_started_again_as_often_as_allowed(monkeypatch: Any, tmp_path: Path) -> None:
    code, commands = supervised(monkeypatch, tmp_path, [(137, 5), (1, 9), (137, 10), (0, 11)], "--max-restarts", "2")
    assert code == 137
    assert len(commands) == 3
    code, commands = supervised(monkeypatch, tmp_path, [(137, None), (0, 11)], "--max-restarts", "2", "--resume",
                                "auto")
    assert code == 0
    first, second = commands
    assert first[:3] == [sys.executable, "-m", "minidl"]
    again = parser.parse(second[3:])
    assert (again.max_restarts, again.resume) == (0, False)  # nothing is saved yet, so it begins anew
    assert second[-2:] == ["--resume", "auto"]


def test_a_run_that_cannot_begin_is_not_started_again(monkeypatch: Any, tmp_path: Path) -> None:
    assert supervised(monkeypatch, tmp_path, [(2, None), (0, 1)], "--max-restarts", "3")[0] == 2


def test_a_restart_that_comes_no_further_has_fewer_ranks(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    """The second attempt reaches no new checkpoint, nor does the third one, perhaps because a host is gone."""
    attempts = [(137, 5), (1, None), (1, None), (1, None), (0, 9)]
    flags = ["--max-restarts", "9", "--least-ranks", "3", "--ranks", "8", "--launch", "my-mpiexec -x"]
    code, commands = supervised(monkeypatch, tmp_path, attempts, *DATA, *flags)
    assert code == 0
    assert [c[:4] for c in commands] == [["my-mpiexec", "-x", "-n", str(n)] for n in (8, 8, 8, 4, 4)]
    assert capsys.readouterr().err.splitlines()[2] == (
        "the run ended with exit code 1; it starts again on 4 ranks, from step 5; 6 more restarts")
    _, commands = supervised(monkeypatch, tmp_path, attempts, *PIPELINE, *flags[:4], "--ranks", "4", "--launch", "m")
    assert [c[2] for c in commands] == ["4", "4", "4", "3", "3"]
    _, commands = supervised(monkeypatch, tmp_path, attempts, *PIPELINE, "--max-restarts", "9", "--least-ranks", "1",
                             "--ranks", "2", "--launch", "m")
    assert [c[2] for c in commands] == ["2"] * 5, "a pipeline has at least two ranks"


def test_under_a_launcher_one_line_says_how(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(launcher, "size", lambda: 2)
    with pytest.raises(ValueError, match="in place of mpiexec -n P, give --ranks P --launch mpiexec"):
        parser.parse([*RUN, *DATA, "--checkpoint", str(tmp_path), "--max-restarts", "1"])


def test_the_same_command_begins_and_goes_on(capsys: Any, tmp_path: Path) -> None:
    run = partial(reported, capsys, *RUN[:-1], "--steps")
    whole = run("4")
    same = ["--checkpoint", str(tmp_path / "run"), "--resume", "auto"]
    assert run("2", *same)["steps"] == 2
    assert run("4", *same)["params_sha256"] == whole["params_sha256"]
    (tmp_path / "flags.toml").write_text('resume = "auto"')
    assert run("5", "--checkpoint", str(tmp_path / "run"), "--config", str(tmp_path / "flags.toml"))["steps"] == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [*KINDS, "shards"])
def test_a_run_that_is_complete_ends_with_its_result(kind: str, capsys: Any, tmp_path: Path) -> None:
    """As one does that was killed after its last save, and is started again."""
    folder, told = tmp_path / "run", tmp_path / "told"
    more = [*KINDS["data"], "--scheduler", "buckets", "--shard", "3"] if kind == "shards" else KINDS[kind]
    flags = [*RUN, *more, "--checkpoint", str(folder), "--status", str(told), "--resume"]
    assert main([*flags, "auto", "--steps", "3"]) == 0
    whole = json.loads(capsys.readouterr().out)
    told.unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main([*flags, "auto", "--steps", "3", "--trace", str(tmp_path / "trace.json")]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "already has all 3 steps: none is left to run" in err
    assert found["steps"] == 0
    assert all(found[key] == whole[key] for key in ("params_sha256", "test", "accuracy", "ranks", "model"))
    assert json.loads(told.read_text())["trainerStatus"]["progressPercentage"] == 100
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert not (tmp_path / "trace.json").exists()
    assert main([word for word in (*flags, "auto", "--steps", "3") if word != "--json"]) == 0
    assert ": 0 steps\n" in capsys.readouterr().out
    for resume, steps in ([], "3"), (["auto"], "2"):  # plain --resume is for a run that goes on
        assert "already has 3 steps" in refusal(capsys, *flags, *resume, "--steps", steps)


# ------------------------------------------------------------------------------------------------------------ real runs
def test_a_killed_run_ends_with_the_bits_of_one_without_kills(capsys: Any, tmp_path: Path) -> None:
    flags = ["--epochs", "12"]
    run, mark = started(*flags, "--checkpoint", tmp_path, "--checkpoint-every", "20", "--max-restarts", "3")
    for _ in range(2):
        before = checkpoint.peek(tmp_path).step if checkpoint.exists(tmp_path) else 0
        until(lambda: run.poll() is not None
              or (checkpoint.exists(tmp_path) and checkpoint.peek(tmp_path).step > before), "a checkpoint")  # noqa: B023
        for pid in children(run, mark):
            os.kill(pid, signal.SIGKILL)
    done = ended(run)
    assert record(done)["params_sha256"] == reported(capsys, *RUN[:-1], *flags)["params_sha256"]
    assert "the run ended with exit code 137; it starts again, from step" in done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "kind", "more"), [
    ("SIGINT", "one process", []), ("SIGTERM", "one process", SUPERVISED),
    pytest.param("SIGINT", "pipeline", [], marks=pytest.mark.wide),
    pytest.param("SIGINT", "data", [], marks=pytest.mark.wide),
    pytest.param("SIGUSR1", "one process", SUPERVISED, marks=pytest.mark.slow),
    *(pytest.param(name, "data", [*SUPERVISED, *UNDER_MPI], marks=MPI) for name in ("SIGTERM", "SIGUSR1"))])
def test_a_signal_saves_and_ends_and_the_same_command_goes_on(name: str, kind: str, more: list[str], capsys: Any,
                                                              tmp_path: Path) -> None:
    """It goes on in this process, on threads in place of ranks of MPI."""
    number, saved = signal.Signals[name], ["--checkpoint", str(tmp_path / "run"), "--resume", "auto"]
    run, mark = started(*KINDS[kind], *more, *saved, "--log", tmp_path / "log", "--log-every", "1", "--steps", "100000",
                        "--checkpoint-every", "90000")
    until(lambda: run.poll() is not None or ((tmp_path / "log").exists() and (tmp_path / "log").stat().st_size),
          "a step")
    run.send_signal(number)
    done = ended(run)
    assert done.returncode == 128 + number, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("minidl:")] == [
        f"minidl: {'rank 0: ' if '--launch' in more else ''}stopped by {name}"]
    assert f"saved {tmp_path / 'run'} before the end; continue with --resume" in done.stderr
    assert not processes(mark)
    again = partial(reported, capsys, *RUN[:-1], *KINDS[kind], "--steps",
                    str(checkpoint.peek(tmp_path / "run").step + 3))
    found = again(*saved)
    assert found["steps"] == 3
    assert found["params_sha256"] == again()["params_sha256"]


# ------------------------------------------------------------------------------------------------------------ campaigns
def killed(kind: str, seed: int, folder: Path) -> str:
    """Kills processes of a supervised run at random moments; what is wrong at its end."""
    draw, flags = random.Random(seed), [*KINDS[kind], "--epochs", "12"]
    wanted, seconds = undisturbed(*flags)
    mpi = UNDER_MPI if KINDS[kind] and MPIEXEC and draw.random() < 0.7 else []
    run, mark = started(*flags, *mpi, "--checkpoint", folder, "--checkpoint-every", draw.choice(["7", "40"]),
                        "--max-restarts", "9")
    for _ in range(draw.choice([1, 2, 3])):
        time.sleep(draw.uniform(0, seconds))
        found = children(run, mark)
        victims = found if draw.random() < 0.3 else draw.sample(found, min(1, len(found)))
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    done = ended(run)
    return _wrong(done, mark, wanted)


def full(kind: str, seed: int, folder: Path) -> str:
    """Lets the disk of a process be full from a random moment on; what is wrong then, or when the run goes on."""
    draw, flags = random.Random(seed), [*KINDS[kind], "--epochs", "12"]
    wanted, seconds = undisturbed(*flags)
    mpi = UNDER_MPI if KINDS[kind] and MPIEXEC and draw.random() < 0.7 else []
    flags = [*flags, *mpi, "--checkpoint", str(folder), "--checkpoint-every", "7", "--max-restarts", "0"]
    run, mark = started(*(flags if not mpi else ["--max-restarts", "1", *flags[:-2]]))
    time.sleep(draw.uniform(0, seconds))
    found = [pid for pid, about in processes(mark).items() if "-m\0minidl\0train" in about[""]
             and "mpiexec\0" not in about[""] and (not mpi or pid != run.pid)]
    hit = found and draw.choice(found)
    with suppress(ProcessLookupError):
        if hit:
            resource.prlimit(hit, resource.RLIMIT_FSIZE, (draw.choice([0, 3000, 20000]),) * 2)
    done = ended(run)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("minidl:")]
        if not lines or not all("File too large" in line and "unchanged" in line for line in lines):
            return f"exit code {done.returncode}, not one line: {done.stderr[-1000:]}"
        done = ended(started(*flags, "--resume", "auto")[0])
    return _wrong(done, mark, wanted)


def _wrong(done: subprocess.CompletedProcess[str], mark: str, wanted: dict[str, Any]) -> str:
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr[-2000:]}"
    if record(done)["params_sha256"] != wanted["params_sha256"]:
        return f"other bits: {done.stderr[-1000:]}"
    until(lambda: not processes(mark), "no process is left")
    return ""


@pytest.mark.campaign
@pytest.mark.parametrize(("hit_one", "runs"), [*((partial(killed, kind), 50) for kind in KINDS),
                                               *((partial(full, kind), 20) for kind in KINDS)],
                         ids=[f"{what}-{kind}" for what in ("kills", "full") for kind in KINDS])
def test_at_random_moments(hit_one: Callable[[int, Path], str], runs: int, tmp_path: Path) -> None:
    failures = []
    for seed in range(SEED, SEED + int(os.environ.get("MINIDL_KILLS", runs))):
        if wrong := hit_one(seed, tmp_path / str(seed)):
            failures.append(f"seed {seed}: {wrong}")
    assert not failures, f"{len(failures)} runs:\n" + "\n\n".join(failures)
