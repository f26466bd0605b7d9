"""Ranks that start with the same command and yet have other networks, data or plans: a line ends them before the first
step. Ranks that are alike never differ."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import together

import minidl as ml
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import COLLECTIVE
from minidl.pricing.cost import Link
from minidl.runtime.comm.loopback import LoopBack
from minidl.schedulers.pipeline.flush import gpipe, one_f_one_b
from minidl.training.agreement import Disagreement
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.same import identity

COST = ml.CostModel.analytic()
OWN = """
import numpy as np
import minidl as ml
from minidl import nn

class Net(nn.Module):
    input_shape, classes = (4,), 3

    def __init__(self):
        self.one, self.two, self.act = nn.Linear(4, 8), nn.Linear(8, 3), nn.ReLU()
        self.scale = nn.state(np.ones(8, "f"), "scale")
        self.moves = ml.array(np.zeros(8, "f"))

    def forward(self, x):
        return self.two(nn.functional.dropout(self.act(self.one(x)) * self.scale + self.moves, 0.5))

def data(split):
    random = np.random.default_rng(split == "test")
    return random.standard_normal((60, 4)), random.integers(0, 3, 60)
"""
#: a text of the file, the text in its place on another rank, and the message
OTHER = {
    "operation": ("nn.ReLU", "nn.Tanh", "network"), "constant": ("0.5", "0.25", "network"),
    "state": ("np.ones", "2 * np.ones", "network"), "tensor": ("np.zeros", "np.ones", "network"),
    "order of samples": ("random.integers(0, 3, 60)", "np.sort(random.integers(0, 3, 60))", "first labels"),
    "no seed": ('default_rng(split == "test")', "default_rng()", "first labels"),
}


def told(file: Path, parallel: str, rank: int = 0, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """What this file's rank compares."""
    job = Job(model=f"{file}:Net", data=f"{file}:data", parallel=parallel, batch_size=24, **more)
    return {name: value for name, value in identity(Recorded(job, rank, ranks), {}).items()
            if name not in ("the model", "the data set")}


@pytest.mark.parametrize("parallel", ["data", "pipeline"])
@pytest.mark.parametrize("what", OTHER)
def test_another_version_of_a_file_is_told(what: str, parallel: str, tmp_path: Path) -> None:
    before, after, name = OTHER[what]
    assert before in OWN
    for folder, text in (("a", OWN), ("b", OWN.replace(before, after))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(text)
    one, other = (told(tmp_path / folder / "own.py", parallel) for folder in "ab")
    (differs,) = (key for key in one if one[key] != other[key])
    assert name in differs


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_all_parts_of_a_batch_are_of_one_step(ranks: int, micro_batches: int, tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(OWN)
    found = [told(file, "data", rank, ranks, micro_batches=micro_batches) for rank in range(ranks)]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(("model", "more"), [
    ("lenet", {}), ("gpt", {"preset": "tiny"}), ("bert", {"preset": "tiny"}), ("moe_gpt", {"preset": "tiny"}),
    ("resnet20", {"width": 2}), ("rnn", {}), ("snn", {})])
def test_the_ranks_of_each_network_are_alike(model: str, more: dict[str, Any]) -> None:
    one, other = (identity(Recorded(Job(model=model, model_args=more, parallel="data", batch_size=8), rank, 2), {})
                  for rank in range(2))
    assert one == other


# ---------------------------------------------------------------------------------------------------------------- plans
def odd() -> bool:
    """Whether this is the process whose policy gives another order."""
    return threading.current_thread().name == "rank 1"


def sums(graph: Any, cost: Any, machine: Any) -> Schedule:
    talks = np.isin(graph.kind, [int(kind) for kind in COLLECTIVE])
    order = np.flatnonzero(talks)
    return Schedule.of(graph, {Lane(0): np.flatnonzero(~talks), Lane(0, "comm"): order[::-1] if odd() else order})


def lane(problem: Any) -> Any:
    return one_f_one_b(problem) if odd() else gpipe(problem)


def data_parallel(recorded: Recorded, communicator: Any) -> RankTrainer:
    return RankTrainer(recorded, COST, communicator, (1.0, 1e-3))


def staged(recorded: Recorded, communicator: Any) -> PipelineTrainer:
    return PipelineTrainer(recorded, COST, communicator, Link(50.0, 1e3))


@pytest.mark.parametrize(("parallel", "policy", "trainer"), [
    ("data", "sums", data_parallel), ("pipeline", "lane", staged)])
def test_plans_that_differ_between_processes_are_told(parallel: str, policy: str, trainer: Callable[..., Any],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of layers of one size would be mixed up in silence, and messages would be awaited in a circle."""
    monkeypatch.setattr(LoopBack, "own_process", True)
    job = Job(model="mlp", model_args={"hidden": 8, "layers": 4}, batch_size=16, parallel=parallel, micro_batches=2,
              scheduler=f"{__name__}:{policy}")
    own = [Recorded(job, *((rank, 2) if parallel == "data" else (0, 1))) for rank in range(2)]
    said = list[str]()

    def work(communicator: Any) -> None:
        with pytest.raises(Disagreement) as caught:
            trainer(own[communicator.rank], communicator)
        said.append(str(caught.value))

    together(2, work)
    assert {*said} == {f"{__name__}:{policy} orders tasks on rank 1 otherwise than on rank 0; give all ranks one plan: "
                       "minidl plan --save PLAN.csv, and --scheduler PLAN.csv"}
