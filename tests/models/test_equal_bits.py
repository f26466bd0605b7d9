"""The small networks that the project promises to train: whatever the scheduler, a short run leaves the same bits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pipelines
import pytest
from helpers import together

import minidl as ml
from minidl import schedulers
from minidl.core.graph import View
from minidl.core.tasks import strides_of
from minidl.pricing.cost import Link
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, params_sha256

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"data": "pydoc", "optimizer": "adamw", "lr": 0.001, "batch_size": 4},
    "bert": {"data": "pydoc", "optimizer": "adamw", "lr": 0.01, "batch_size": 8},
    "rnn": {"data": "pydoc", "optimizer": "adamw", "lr": 0.01, "batch_size": 8},
    "mobilenet_v3_large": {"data": "digits", "batch_size": 16},
    "densenet121": {"data": "digits", "batch_size": 8},
    "resnet20": {"data": "digits", "batch_size": 32},
}
LANGUAGE = ("gpt", "bert", "rnn")
TIED = ("gpt", "bert")  #: the head uses the embedding's weight
COST = ml.CostModel.analytic()
STEPS, MICRO_BATCHES, RANKS = 2, 4, 2
ALONE = [name for name, s in schedulers.SCHEDULERS.items() if s.parallel == "none" and s.exact]
DATA = schedulers.names("data", exact=True)
#: without those that change the training, search for an optimum, or plan slices
PIPELINES = [n for n, p in pipelines.POLICIES.items() if not p.stale and n not in ("optimal", "seq1f1b")]


def cases(kind: Iterable[str], quick: Mapping[str, Sequence[str]], slow: Mapping[str, Iterable[str]]) -> list[Any]:
    """Pairs (network, scheduler): quick ones by default, more if slow tests run, all of them in a campaign."""
    return [pytest.param(name, scheduler, marks=[] if scheduler in quick.get(name, ()) else
                         pytest.mark.slow if scheduler in slow.get(name, ()) else pytest.mark.campaign)
            for name in SMALL for scheduler in kind]


def job(name: str, parallel: str, groups: int) -> Job:
    """Of data-parallel ranks, each has its share of the micro-batches."""
    preset = "tiny" if name in ("bert", "rnn", "resnet20") else "small"
    return Job(model=name, model_args={"preset": preset}, parallel=parallel, clip=1.0, groups=groups,
               micro_batches=MICRO_BATCHES // (RANKS if parallel == "data" else 1),
               **SMALL[name])


def arrays(recorded: Recorded) -> list[Any]:
    """All that stays from step to step: parameters, states, counters."""
    return [recorded.device.array(spec.live.data, View(0, spec.shape, strides_of(spec.shape), 0, spec.dtype))
            for spec in recorded.graph.storages if spec.live is not None]


class Runs:
    """One recording for each rank, which every run takes from its beginning."""

    def __init__(self, one: Job, ranks: int = 1) -> None:
        self.ranks = ranks
        places = [(r, ranks) if one.parallel == "data" else (0, 1) for r in range(ranks)]
        self.recorded = [Recorded(one, *place) for place in places]
        self.begin = [[np.array(a) for a in arrays(recorded)] for recorded in self.recorded]

    def again(self, rank: int, scheduler: str) -> Recorded:
        recorded = self.recorded[rank]
        for a, begin in zip(arrays(recorded), self.begin[rank], strict=True):
            a[...] = begin
        recorded.train_data.restore({"position": 0})
        recorded.job = replace(recorded.job, scheduler=scheduler)
        return recorded

    def alone(self, scheduler: str) -> tuple[list[float], str]:
        trainer = Trainer(self.again(0, scheduler), COST)
        for _ in range(STEPS):
            trainer.step()
        trainer.settle()
        return trainer.losses, trainer.params_sha256()

    def together(self, scheduler: str, make: Any) -> list[tuple[list[float], str]]:
        """Losses and the digest of the parameters of each rank."""
        own = [self.again(rank, scheduler) for rank in range(self.ranks)]

        def work(communicator: Any) -> Any:
            trainer = make(own[communicator.rank], communicator)
            for _ in range(STEPS):
                trainer.step()
            trainer.finish()
            return trainer.losses, params_sha256(trainer.recorded.model)

        return together(self.ranks, work)


def piped(recorded: Recorded, communicator: Any) -> Any:
    return PipelineTrainer(recorded, COST, communicator, Link(50.0, 1e3))


def shared(recorded: Recorded, communicator: Any) -> Any:
    k = 3 if recorded.job.scheduler == "reverse_first_k" else None
    return RankTrainer(recorded, COST, communicator, (50.0, 1e-3), k=k)


@pytest.fixture(scope="module")
def runs() -> Any:
    @functools.cache
    def made(name: str, parallel: str, groups: int) -> Runs:
        return Runs(job(name, parallel, groups), 1 if parallel == "none" else RANKS)

    return made


@pytest.fixture(scope="module")
def wanted(runs: Any) -> Any:
    """What one process leaves in order, which adds up the gradients of so many groups."""
    return functools.cache(lambda name, groups=1: runs(name, "none", groups).alone("in_order"))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "scheduler"), cases(
    ALONE, {"gpt": ["multi_region"], "bert": ["multi_stream"]},
    {name: ALONE if name in LANGUAGE else ["multi_region"] for name in SMALL}))
def test_one_device(runs: Any, wanted: Any, name: str, scheduler: str) -> None:
    assert runs(name, "none", 1).alone(scheduler) == wanted(name)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "scheduler"), cases(
    DATA, {"bert": ["priority"], "rnn": ["barrier"]},
    {"gpt": ["priority", "reverse_first_k", "dear"], "bert": DATA, "rnn": DATA,
     "mobilenet_v3_large": ["reverse_first_k"]}))
def test_data_parallel_ranks(runs: Any, wanted: Any, name: str, scheduler: str) -> None:
    """Ranks have the losses and parameters of one process that adds up as many groups; of a tied weight, a rank adds
    up both uses first, so there they have those of each other."""
    (losses, parameters), other = runs(name, "data", 1).together(scheduler, shared)
    assert other[1] == parameters
    if name in TIED:
        assert parameters == reference(runs, name)
        assert losses == pytest.approx(wanted(name, RANKS)[0], rel=1e-5)
    else:
        assert parameters == wanted(name, RANKS)[1]


@functools.cache
def reference(runs: Any, name: str) -> str:
    """The parameters that ranks leave where nothing overlaps."""
    return str(runs(name, "data", 1).together("no_overlap", shared)[0][1])


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "scheduler"), cases(
    PIPELINES, {"gpt": ["modulo"], "rnn": ["gpipe"], "bert": ["zb_h1"]},
    {"gpt": PIPELINES[::5], "bert": PIPELINES, "rnn": PIPELINES[::3], "mobilenet_v3_large": ["zb_h1"],
     "resnet20": ["roundpipe", "chimera", "dualpipe"]}))
def test_pipelines(runs: Any, wanted: Any, name: str, scheduler: str) -> None:
    groups = pipelines.groups(scheduler)
    first, other = runs(name, "pipeline", groups).together(scheduler, piped)
    assert first == other == wanted(name, groups)
