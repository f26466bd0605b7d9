"""The examples of docs/extend run as they are, and on the command line; and one registry has every scheduler."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_agree import agree, draw
from helpers import PATIENCE, ROOT

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.autograd.tensor import Tensor
from minidl.cli import main
from minidl.core.graph import GraphBuilder, Role
from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.core.tasks import Kind
from minidl.passes import every
from minidl.passes.draft import Draft
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline, planner
from minidl.system.loading import function_of

EXTEND = ROOT / "docs" / "extend"
MODEL = ["--model", "mlp", "--model-arg", "hidden=32", "--batch-size", "8", "--costs", "analytic"]


@pytest.mark.few(1)
@pytest.mark.parametrize("path", sorted(EXTEND.glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_run(path: Path) -> None:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_kernels_forms_agree(dtype: str) -> None:
    function_of(f"{EXTEND / 'op.py'}:softplus")
    x, dy = draw((5, 12), 1, dtype), draw((5, 12), 2, dtype)
    agree("softplus", [x])
    agree("softplus_grad", [x, dy])


def test_the_ops_gradient_is_that_of_finite_differences() -> None:
    softplus: Any = function_of(f"{EXTEND / 'op.py'}:softplus")
    x = ml.Parameter(np.linspace(-3, 3, 7))
    softplus(x).sum().backward()
    h = 1e-6
    wanted = (np.logaddexp(0, x.numpy() + h) - np.logaddexp(0, x.numpy() - h)) / (2 * h)
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-8)


@pytest.mark.slow
def test_own_schedulers_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*argv: Any) -> dict[str, Any]:
        assert main([*map(str, argv), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    apart = f"{EXTEND / 'single.py'}:updates_apart"
    planned = run("plan", *MODEL, "--scheduler", apart, "--scheduler-arg", "lanes=3", "--save", tmp_path / "p.csv")
    assert planned["waits"] > 0
    assert run("check", tmp_path / "p.csv", *MODEL[:-2])["valid"]
    assert run("compare", *MODEL, "--steps", "2", "--schedulers", f"in_order,{apart}")["bit_identical"]
    ranks = ["--parallel", "data", "--ranks", "2", "--scheduler", f"{EXTEND / 'data_parallel.py'}:last_first"]
    assert run("plan", *MODEL, *ranks, "--save", tmp_path / "d.csv")["period"] > 0
    assert run("check", tmp_path / "d.csv", *MODEL[:-2], *ranks)["valid"]
    stages = ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4", "--scheduler",
              f"{EXTEND / 'pipeline.py'}:lifo"]
    assert run("plan", *MODEL, *stages)["peak_activations"] == [4.0, 4.0]
    both = [*MODEL, *stages[:-2], "--steps", "2", "--schedulers", f"gpipe,{stages[-1]}"]
    assert run("compare", *both)["bit_identical"]
    times = ["--ranks", "4", "--micro-batches", "8", "--scheduler", stages[-1]]
    assert run("simulate", *times)["beside"]["equals"] == []
    assert stages[-1] in {row["scheduler"] for row in run("simulate", *times, "--table")["policies"]}
    assert run("train", "--model", f"{EXTEND / 'network.py'}:wide", "--model-arg", "width=8", "--steps",
               "2")["steps"] == (2)


def test_a_pass_of_ones_own_is_a_line_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: Any = function_of(f"{EXTEND / 'own_pass.py'}:averaged")
    x, y = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32), np.array([0, 1, 2, 3])

    def recorded() -> Any:
        ml.seed(0)
        model = models.mlp(8, 16, 16, 4)
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> None:
            for i in range(2):
                with ml.micro_batch(i):
                    nn.cross_entropy(model(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]).backward()
            opt.step()

        return ml.record(step, x, y)

    def averages(run: Any) -> dict[str, bytes]:
        for _ in range(3):
            run(x, y)
        return {s.name: Tensor(s.live).numpy().tobytes() for s in run.program.graph.storages
                if s.name.endswith("average")}

    graph = averaged(Draft.of(recorded())).graph
    alone = averages(ml.StreamExecutor(graph, schedulers.in_order(graph)))
    line = averaged, every.STAGES, lambda draft, choices: True
    monkeypatch.setattr(planner, "BEFORE_THE_ORDER", (line, *every.BEFORE_THE_ORDER))
    for policy in ("zb_h1", "gpipe"):
        plans = [ml.plan(recorded(), policy, machine=ml.Machine(ranks=2)) for _ in range(2)]
        of_each = run_ranks(2, lambda comm, plans=plans: averages(
            DistributedExecutor(*plans[comm.rank].with_messages, comm)))
        assert len(alone) == 6
        assert of_each[0] | of_each[1] == alone


def test_data_and_a_network_of_ones_own_learn(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", f"{EXTEND / 'data.py'}:small", "--data", f"{EXTEND / 'data.py'}:rings", "--costs", "analytic"]
    assert main(["train", *own, "--epochs", "10", "--lr", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0.95


BAD = """
from minidl.core.schedule import Lane, Schedule

def failing(graph, cost, machine):
    return 1 / 0

def backwards(graph, cost, machine):
    return Schedule.of(graph, {Lane(0): range(len(graph))[::-1]})

def half(graph, cost, machine):
    return Schedule.of(graph, {Lane(0): range(len(graph) // 2)})

def nothing(graph, cost, machine):
    pass

def told(graph, cost, machine, width: int = 2):
    return Schedule.of(graph, {Lane(0): range(len(graph))})
"""


@pytest.mark.parametrize(("name", "more", "code", "says"), [
    ("own.py:failing", [], 2, "scheduler own.py:failing failed: ZeroDivisionError: division by zero"),
    ("own.py:backwards", [], 2, "needs it"), ("own.py:half", [], 2, "missing"),
    ("own.py:nothing", [], 2, "returned a NoneType, not a Schedule or an Ordered (own.py, line 13)"),
    ("own.py:told", ["--scheduler-arg", "width=x"], 2, "width is 'x'; it must be a whole number"),
    ("own.py:told", ["--scheduler-arg", "depth=1"], 2, "takes no argument 'depth'; it takes: width"),
    ("own.py:missing", [], 2, "has no function missing"), ("none.py:told", [], 2, "none.py: no such file"),
    ("no.module:told", [], 2, "no.module: ModuleNotFoundError"), ("own.py:", [], 2, "is not the name of a function"),
    ("gpipe", [], 2, "scheduler gpipe is for a pipeline, not for one device"),
    ("multi_streem", [], 2, "similar names: multi_stream")])
def test_what_is_wrong_with_a_scheduler_is_said(name: str, more: list[str], code: int, says: str, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(BAD)
    assert main(["plan", *MODEL, "--scheduler", name, *more]) == code
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("minidl: ")
    assert says in first


def chain(count: int) -> Any:
    """A step of layers with parameters, without launches."""
    builder = GraphBuilder()
    x = [builder.buffer(f"x{i}", 8, Role.ACTIVATION if i else Role.INPUT) for i in range(count + 1)]
    w = [builder.buffer(f"w{i}", 8, Role.PARAMETER) for i in range(count)]
    for i in range(count):
        builder.task(i, Kind.F, reads=[x[i], w[i]], writes=[x[i + 1]])
    return builder.build()


def test_one_door_for_names_functions_and_schedules() -> None:
    graph = chain(3)
    made = ml.plan(graph, "in_order")
    assert (made.scheduler, made.waits, made.ranks) == ("in_order", 0, 1)
    assert made.peak_bytes == (made.programs[0].peak_bytes,)
    assert ml.plan(graph, schedulers.in_order).schedule.to_csv() == made.schedule.to_csv()
    assert ml.plan(graph, made.schedule).as_json() == made.as_json()
    with pytest.raises(ScheduleError, match="missing"):
        ml.plan(graph, Schedule.of(graph, {Lane(0): [0, 1]}))
    with pytest.raises(ml.MemoryLimitError, match="more than the limit of 1"):
        ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=1))


def test_every_scheduler_has_a_place_and_takes_graph_costs_and_machine_or_a_problem() -> None:
    assert set(schedulers.SCHEDULERS) == {n for kind in ("none", "data", "pipeline") for n in schedulers.names(kind)}
    for scheduler in schedulers.SCHEDULERS.values():
        first = (["problem"] if isinstance(scheduler.function, pipeline.Policy) else ["graph", "cost", "machine"])
        function = getattr(scheduler.function, "order", scheduler.function)
        assert list(inspect.signature(function).parameters)[: len(first)] == first, scheduler.name
        assert scheduler.known(**dict.fromkeys(scheduler.options, 1)) == dict.fromkeys(scheduler.options, 1)


def test_a_program_is_printed_and_saved(tmp_path: Path) -> None:
    plan = ml.plan(chain(3), "in_order")
    (program,) = plan.programs
    assert "1F0" in str(program)
    program.save(tmp_path / "program.json")
    saved = json.loads((tmp_path / "program.json").read_text())
    assert saved == program.as_json()
    assert saved["body"]["lanes"] == {"0/main": ["0F0", "1F0", "2F0"]}
    assert saved["peak_bytes"] == plan.peak_bytes[0]


def test_a_schedule_of_ones_own_may_have_several_ranks() -> None:
    graph = chain(3)
    with pytest.raises(ScheduleError, match="the schedule has 2 ranks"):
        ml.plan(graph, Schedule.of(graph, {Lane(0): [0, 1], Lane(1): [2]}))
    step = ml.record(lambda x, w: (x @ w) @ w, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    apart = Schedule.of(step, {Lane(0): [0], Lane(1): [1]})
    made = ml.plan(step, apart, machine=ml.Machine(ranks=2))
    assert made.peak_bytes == tuple(program.peak_bytes for program in made.programs)
    assert made.waits == 2  # of the send for its result, of the reader for its receive
    assert made.timeline.makespan > 0
    assert made.period > 0


def test_limits_hold_whatever_a_policy_makes_of_them() -> None:
    def careless(graph: Any, cost: Any, machine: Any) -> Any:
        return schedulers.Ordered(schedulers.in_order(graph), {"machine": replace(machine, memory_limit=None)})

    assert ml.plan(chain(3), careless).peak_bytes
    with pytest.raises(ml.MemoryLimitError, match="more than the limit of 1"):
        ml.plan(chain(3), careless, machine=ml.Machine(memory_limit=1))


def test_a_flag_that_ones_own_scheduler_does_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    own = f"{EXTEND / 'data_parallel.py'}:last_first"
    assert main(["plan", *MODEL, "--parallel", "data", "--ranks", "2", "--scheduler", own, "--k", "2"]) == 2
    assert "--k has no effect here; it goes with --scheduler reverse_first_k" in capsys.readouterr().err
