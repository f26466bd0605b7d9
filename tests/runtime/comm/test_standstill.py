"""Runs that stand still: all ranks' files together name the reason. core/test_verdicts.py has given states."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_hangs
from helpers import IMPORTABLE, PATIENCE, ROOT, deadline, recorded_classifier, until
from launcher import MPIEXEC, under_mpi

import minidl as ml
from minidl import models, optim
from minidl.cli import main
from minidl.core import standstill
from minidl.core.schedule import Lane, Schedule
from minidl.core.standstill import Doing, Found, verdict
from minidl.core.tasks import SENDS
from minidl.plans.program import lower
from minidl.runtime import runtime as runtimes
from minidl.runtime.comm import RankError, Standstill
from minidl.runtime.comm.loopback import LoopBack, run_ranks
from minidl.runtime.runtime import Runtime
from minidl.runtime.standstill import Watcher
from minidl.system import interrupts

LOOK = 0.1  #: seconds of patience


@contextmanager
def gated(monkeypatch: Any, task: str, rank: int = 0) -> Iterator[threading.Event]:
    """Runtimes made inside stop at this task, on this rank, until the event is set."""
    gate, made, turn = threading.Event(), runtimes._Ready.__init__, threading.Lock()  # ranks are threads

    def init(self: Any, runtime: Any, part: Any, *more: Any) -> None:
        def of(bound: Any, debug: int) -> Callable[[int, Any], list[Any]]:
            return lambda t, stream: [*([lambda: gate.wait(PATIENCE)] if bound.graph.name(t) == task
                                        and runtime.program.rank == rank else []), *bound.thunks(t, stream)]

        with turn, monkeypatch.context() as patch:
            patch.setattr(runtimes, "_calls_of", of)
            made(self, runtime, part, *more)

    monkeypatch.setattr(runtimes._Ready, "__init__", init)
    try:
        yield gate
    finally:
        gate.set()


def judged_once(folder: Path, ranks: int, kind: str, words: str = "") -> Found:
    """The files' content once so many ranks have answered one call, and the verdict has this kind and these words."""
    seen: list[Found] = []

    def answered() -> bool:
        try:
            seen.append(standstill.read(folder))
        except (OSError, ValueError):
            return False
        judged = verdict(seen[-1])
        return (len(seen[-1].states) >= ranks and (kind == "silent" or not seen[-1].silent) and judged.kind == kind
                and words in judged.text)

    until(answered, f"{ranks} ranks have answered: {kind}")
    return seen[-1]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def recorded() -> Any:
    ml.seed(1)
    model = models.mlp(12, 16, 16, 5)
    return recorded_classifier(model, optim.SGD(model.parameters(), 0.05), 8, 12)


INPUTS = np.ones((8, 12), np.float32), np.arange(8) % 5


def test_a_lane_that_hangs_is_named_with_its_task(monkeypatch: Any, tmp_path: Path, both_lanes: str) -> None:
    with gated(monkeypatch, "2W0") as gate:
        graph = recorded()
        names = [graph.name(t) for t in range(len(graph))]
        late = [n for n in names if "W" in n or "U" in n]
        schedule = Schedule.from_names({Lane(0): [n for n in names if n not in late], Lane(0, "side"): late})
        run = Runtime(lower(graph, schedule), watched=True)
        with Watcher(tmp_path, LOOK, lambda: run, None):
            thread, ended = in_thread(lambda: run(*INPUTS))
            seen = judged_once(tmp_path, 1, "slow")
            gate.set()
            thread.join()
    doing = seen.states[0].doing
    main, side = doing.lanes
    assert (side.state, side.task, main.state) == ("runs", "2W0", "ended")
    assert (doing.step, doing.order["0/side"][-1]) == (1, "2W0")  # type: ignore[index]
    assert doing.last[-1].end is None or doing.last[-1].task != "2W0"
    assert (judged := verdict(seen)).kind == "slow"
    assert "rank 0 runs 2W0 (the weight gradient of" in judged.text
    assert "on lane 0/side" in judged.text
    assert not isinstance(ended[0], BaseException), ended


def test_lanes_say_that_they_have_ended(both_lanes: str) -> None:
    graph = recorded()
    run = Runtime(lower(graph, Schedule.of(graph, {Lane(0): range(len(graph))})), watched=True)
    assert run.doing() == Doing()
    run(*INPUTS)
    for _ in range(2):
        run(*INPUTS)
        ready = run._present
        assert ready is not None
        assert ready.lanes.where()[0][0] == 3 * len(graph)
        assert [lane.state for lane in run.doing().lanes] == ["ended"]
    assert run.timeline is None
    run.close()


@contextmanager
def watched_on(folder: Path, communicator: Any, own: list[Any]) -> Iterator[tuple[list[Any], Runtime]]:
    """A rank's batches and runtime, under a watcher."""
    network, plan = own[communicator.rank]
    program = lower(*plan.with_messages, ranks=len(own), rank=communicator.rank)
    run = Runtime(program, transport=communicator, watched=True)
    with Watcher(folder, LOOK, lambda: run, communicator):
        yield network.batches(), run


def lose(monkeypatch: Any, sender: int, message: int, seconds: float) -> None:
    """Nobody gets this message of a rank; waits end after so many seconds."""
    sends = LoopBack._send

    def send(self: LoopBack, array: Any, peer: int, number: int) -> Any:
        real = sends(self, array, peer, number)
        return (lambda: iter(())) if (self.rank, number) == (sender, message) else real

    monkeypatch.setattr(LoopBack, "_send", send)
    monkeypatch.setattr(LoopBack, "wait_seconds", seconds)


def on_ranks(tmp_path: Path, kind: str, act: Callable[[], None] = lambda: None) -> tuple[Found, list[Any]]:
    """The files of a pipeline's two ranks that stand still, and the run's end after `act`, which lets it go on."""
    own = test_hangs.planned("one_f_one_b", 2, 3)

    def work(communicator: Any) -> Any:
        with watched_on(tmp_path, communicator, own) as (batches, run):
            for parts in batches:
                run(*parts)
            run.close()
            return run.doing()

    thread, ended = in_thread(lambda: run_ranks(2, work))
    seen = judged_once(tmp_path, 2, kind)
    act()
    with deadline():
        thread.join()
    return seen, ended


def test_a_rank_that_computes_while_the_other_waits_is_named_and_the_run_goes_on(monkeypatch: Any,
                                                                               tmp_path: Path) -> None:
    with gated(monkeypatch, "1F1", rank=1) as gate:
        seen, ended = on_ranks(tmp_path, "slow", gate.set)
    judged = verdict(seen)
    assert (judged.kind, judged.ranks) == ("slow", (1,))
    assert "rank 1 runs 1F1 (the forward of" in judged.text
    assert "rank 0 waits for 1RO" in judged.text
    assert "from rank 1" in judged.text
    for doing in ended[0]:  # of both ranks: all that was sent came, in all steps
        assert {t.kind: t.count for t in doing.traffic} == {"sent": 9, "received": 9}
        assert {t.bytes for t in doing.traffic} == {9 * 8192}
    assert {s.call for s in standstill.read(tmp_path).states.values()} == {max(
        s.call for s in standstill.read(tmp_path).states.values())}


def test_a_message_that_is_lost_is_named_also_after_the_run_has_ended(monkeypatch: Any, tmp_path: Path) -> None:
    lose(monkeypatch, 0, 2, 1.0)
    seen, ended = on_ranks(tmp_path, "lost")
    assert isinstance(ended[0], Standstill)
    for files in (seen, standstill.read(tmp_path)):
        judged = verdict(files)
        assert (judged.kind, judged.ranks) == ("lost", (1, 0))
        assert "rank 1 waits for 0RF1>1 (the receive of the activation of" in judged.text
        assert "; message 2) from rank 0, which has sent it (0SF1>1 has ended there)" in judged.text
    assert all(s.error and not s.own for s in standstill.read(tmp_path).states.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "hanayo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_message_of_a_pipeline_that_is_lost_is_named(monkeypatch: Any, tmp_path: Path, name: str, ranks: int
                                                         ) -> None:
    own = test_hangs.planned(name, ranks, 4)
    parts = [lower(*own[rank][1].with_messages, ranks=ranks, rank=rank).body[0].graph for rank in range(ranks)]
    messages = [(rank, graph.name(t), dict(graph.launches[t][0].constants)["message"])
                for rank, graph in enumerate(parts) for t in range(len(graph)) if graph.kind[t] in SENDS]
    sender, task, message = random.Random(name).choice(messages)
    lose(monkeypatch, sender, message, 0.7)

    def work(communicator: Any) -> None:
        with watched_on(tmp_path, communicator, own) as (batches, run):
            run(*batches[0])
            communicator.gather(None)  # as after training: no rank ends before the others

    with deadline(), pytest.raises(RankError):
        run_ranks(ranks, work)
    judged = verdict(standstill.read(tmp_path))
    assert (judged.kind, judged.ranks[1:]) == ("lost", (sender,)), judged
    assert f"({task} has ended there)" in judged.text


def test_a_task_that_fails_is_the_reason(monkeypatch: Any, tmp_path: Path) -> None:
    with gated(monkeypatch, "1F1", rank=1) as gate:
        def boom(seconds: float) -> None:
            until(lambda: len(list(tmp_path.glob("*.json"))) == 2, "files")
            raise ValueError("boom")

        gate.wait = boom  # type: ignore[assignment,method-assign]
        _, ended = on_ranks(tmp_path, "failed")
    assert isinstance(ended[0], runtimes.TaskError)
    judged = verdict(standstill.read(tmp_path))
    assert (judged.kind, judged.ranks) == ("failed", (1,))
    assert "boom" in judged.text


def test_messages_in_a_circle_without_a_runtime(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(LoopBack, "wait_seconds", 1.0)

    def work(communicator: Any) -> None:
        with Watcher(tmp_path, LOOK, lambda: None, communicator):
            test_hangs.receives(communicator, 1 - communicator.rank, f"{communicator.rank}RF7")

    thread, ended = in_thread(lambda: run_ranks(2, work))
    judged = verdict(judged_once(tmp_path, 2, "cycle"))
    assert (judged.kind, set(judged.ranks)) == ("cycle", {0, 1})
    with deadline():
        thread.join()
    assert isinstance(ended[0], RankError)


TRAIN = ["train", "--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=4", "--costs", "analytic",
         "--json"]
DATA = ["--parallel", "data", "--batch-size", "64", "--ranks", "2", "--scheduler"]
PIPELINE = ["--parallel", "pipeline", "--micro-batches", "4", "--ranks", "2", "--scheduler"]


def test_a_rank_that_awaits_the_sums_of_its_last_step_says_so(monkeypatch: Any, tmp_path: Path) -> None:
    """They run beside the next step, which has another graph than the first one."""
    with gated(monkeypatch, "1W0", rank=1) as gate:
        thread, ended = in_thread(lambda: main([*TRAIN, *DATA, "priority", "--steps", "3", "--patience",
                                                f"{LOOK},{tmp_path}"]))
        seen = judged_once(tmp_path, 2, "slow", "rank 0 waits for")
        gate.set()
        with deadline():
            thread.join()
    assert ended == [0]
    doing = seen.states[0].doing
    assert (doing.step, [lane.state for lane in doing.lanes]) == (1, ["ended"])
    assert seen.states[0].wait.what in {t.task for t in doing.transfers if t.under_way}  # type: ignore[union-attr]
    assert verdict(seen).ranks == (1,)


@pytest.mark.few(2)
@pytest.mark.parametrize("flags", [
    ["--scheduler", "multi_stream"], ["--scheduler", "pd_asgd", "--scheduler-arg", "clock=real"], [*DATA, "priority"],
    [*DATA, "priority", "--order", "hint"], [*DATA, "layup"], [*DATA, "barrier", "--shard", "3"], [*PIPELINE, "zb_h1"],
    [*PIPELINE, "one_f_one_b", "--order", "hint"], [*PIPELINE, "pipedream_2bw"]],
    ids=lambda flags: "-".join(word for word in flags if not word.startswith("--")))
@pytest.mark.parametrize("lanes", ["native", "python"])
def test_a_look_at_a_run_never_fails(flags: list[str], lanes: str, monkeypatch: Any, tmp_path: Path) -> None:
    failed, looks = list[BaseException](), list[int]()

    def work(watcher: Watcher) -> None:
        while not watcher._over.wait(1e-5):
            try:
                watcher.state("a look")
                getattr(watcher._run(), "progress", lambda: None)()
                looks.append(watcher.rank)
            except BaseException as error:
                failed.append(error)

    monkeypatch.setattr(Watcher, "_work", work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert main([*TRAIN, *flags, "--lanes", lanes, "--steps", "20", "--patience", f"1000,{tmp_path}"]) == 0
    finally:
        sys.setswitchinterval(interval)
    assert looks
    assert not failed


def test_a_run_that_makes_progress_writes_nothing_unless_asked(monkeypatch: Any, tmp_path: Path) -> None:
    looks: list[int] = []

    class Running:
        def progress(self) -> int:
            looks.append(len(looks))
            return len(looks)

    with Watcher(tmp_path, 0.04, lambda: Running(), None):
        until(lambda: len(looks) > 20, "the watcher looks")
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr(interrupts, "asked", interrupts.asked + 1)
        judged_once(tmp_path, 1, "none")


UNDER_MPI = """
import os, signal, sys
from minidl.runtime import runtime
made, kind = runtime._Ready.__init__, sys.argv.pop(1)

def init(self, program, part, *more):
    def of(bound, debug):
        def calls(task, stream):
            def bad():
                if program.program.rank == 1 and program._present is not None and program._present.runs == 3:
                    if kind == "endless":
                        while True: pass
                    os.kill(os.getpid(), signal.SIGSTOP)
            return [*([bad] if bound.graph.name(task) == "1F1" else []), *bound.thunks(task, stream)]
        return calls
    runtime._calls_of = of
    made(self, program, part, *more)

runtime._Ready.__init__ = init
from minidl.__main__ import run
run()
"""


@contextmanager
def on_mpi(code: list[str], folder: Path, patience: int, *flags: str) -> Iterator[None]:
    """A training on two ranks of MPI, by this code and its own arguments; it is killed at the end."""
    train = ["train", "--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--costs", "analytic"]
    job = subprocess.Popen(
        [str(MPIEXEC), "-n", "2", sys.executable, "-c", *code, *train, *flags, "--patience", f"{patience},{folder}"],
        cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": IMPORTABLE, "MINIDL_MPI_SILENT_SECONDS": "100"})
    try:
        yield
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


@under_mpi
def test_a_signal_to_one_rank_of_mpi_asks_all(tmp_path: Path) -> None:
    folder, told = tmp_path / "files", tmp_path / "status"
    code = (f"import os; from minidl.system import launcher; "
            f"open(f'{tmp_path}/{{launcher.rank()}}', 'w').write(str(os.getpid()))\n"
            "from minidl.__main__ import run; run()")
    with on_mpi([code], folder, 1000, "--parallel", "data", "--steps", "10000000", "--status", str(told)):
        until(lambda: told.exists() and '"loss"' in told.read_text(), "steps")  # after the folder was emptied
        asking, ended = int((tmp_path / "1").read_text()), threading.Event()

        def ask() -> None:  # again and again: on a busy machine one rank may be asked while it waits for the other
            while not ended.is_set():
                os.kill(asking, signal.SIGUSR2)
                ended.wait(10)

        asks, _ = in_thread(ask)
        try:
            judged_once(folder, 2, "none")
        finally:
            ended.set()
            asks.join()


@under_mpi
@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "expected"), [("stop", "silent"), ("endless", "slow")])
def test_ranks_of_mpi(tmp_path: Path, kind: str, expected: str) -> None:
    folder = tmp_path / "files"
    with on_mpi([UNDER_MPI, kind], folder, 1, "--micro-batches", "4", "--parallel", "pipeline", "--steps", "100"):
        until(lambda: standstill.path_of(folder, 0).exists(), "rank 0 has written")
        words = "rank 0 waits for 1RO"
        assert verdict(judged_once(folder, 2 if expected == "slow" else 1, expected, words)).ranks == (1,)
