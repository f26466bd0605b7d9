"""Parameters that several stages use: every rank that does has a copy, and the bits are those of one process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pipelines
import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT, deadline
from launcher import MPIEXEC

import minidl as ml
from minidl import nn, ops
from minidl.autograd.tape import Tape, use
from minidl.core.tasks import RECEIVES, SENDS, Kind, unpack
from minidl.models.registry import model
from minidl.pricing.cost import CostModel, Link
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor
from minidl.schedulers import pipeline
from minidl.testing.replay import Replay
from minidl.training import checkpoint
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, params_sha256

STEPS, MICRO_BATCHES = 3, 4


class Block(nn.Module):
    """tanh(x w^T + b) with a weight of its own, or with one that other blocks use too."""

    def __init__(self, inputs: int, outputs: int, weight: Any = None) -> None:
        self.linear = nn.Linear(inputs, outputs)
        if weight is not None:
            self.linear.weight = weight

    def forward(self, x):
        return ops.tanh(self.linear(x))


class Back(nn.Module):
    """x w: the transpose of another block's weight, as the head of a language model uses that of its embedding."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def forward(self, x):
        return ops.matmul(x, self.weight)


class Network(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        self.input_shape, self.classes = (8, 8, 1), 64
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = x.reshape(x.shape[0], 64)
        for block in self.blocks:
            x = block(x)
        return x


@model()
def tied():
    """The first block's weight is the last one's, transposed."""
    first = Block(64, 48)
    return Network(first, *(Block(48, 48) for _ in range(6)), Back(first.linear.weight))


@model()
def everywhere():
    """One weight in every second block, and another one in two blocks within."""
    one, two = Block(64, 64), Block(64, 64)
    return Network(Block(64, 64), one, Block(64, 64), Block(64, 64, one.linear.weight), two,
                   Block(64, 64, one.linear.weight), Block(64, 64, two.linear.weight),
                   Block(64, 64, one.linear.weight))


def job(name: str, scheduler: str, **options: Any) -> Job:
    return Job(model=name, scheduler=scheduler, parallel="none" if scheduler == "in_order" else "pipeline",
               batch_size=16, micro_batches=MICRO_BATCHES, **{"lr": 0.05} | options)


@dataclass(frozen=True)
class Found:
    """What a run left: losses, parameters, and every state of the optimizer."""

    losses: list[float]
    parameters: str
    states: dict[str, bytes]

    @classmethod
    def of(cls, trainer: Trainer) -> Found:
        states = {name: t.numpy().tobytes() for name, t in trainer.recorded.optimizer.named_tensors()}
        return cls(trainer.losses, trainer.params_sha256(), states)


@functools.cache
def alone(name: str, **options: Any) -> Found:
    """Of one process."""
    trainer = Trainer(Recorded(job(name, "in_order", **options)), CostModel.analytic())
    for _ in range(STEPS):
        trainer.step()
    trainer.settle()
    return Found.of(trainer)


def on_a_rank(communicator, recorded: Recorded) -> tuple[Found, PipelineTrainer]:
    trainer = PipelineTrainer(recorded, CostModel.analytic(), communicator, Link(50.0, 1e3))
    for _ in range(STEPS):
        trainer.step()
    trainer.finish()
    return Found.of(trainer), trainer


def together(name: str, ranks: int, scheduler: str, **options: Any) -> list[tuple[Found, PipelineTrainer]]:
    """Of each of so many loop-back ranks."""
    own = [Recorded(job(name, scheduler, **options)) for _ in range(ranks)]
    with deadline():
        return run_ranks(ranks, lambda communicator: on_a_rank(communicator, own[communicator.rank]))


OPTIMIZERS = {"sgd": {"optimizer": "sgd"}, "adam": {"optimizer": "adam", "lr": 0.01},
              "adamw, clipped": {"optimizer": "adamw", "lr": 0.01, "clip": 0.05},
              "sgd, clipped": {"optimizer": "sgd", "clip": 0.05}}


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("scheduler", "ranks"), [
    ("gpipe", 2), ("gpipe", 4), ("one_f_one_b", 2), ("one_f_one_b", 3), ("zb_h1", 2), ("zb_h1", 4),
    ("interleaved", 2), ("interleaved", 4), ("fast_forward", 2), ("fast_forward", 3), ("chimera", 2)])
def test_tied_weights_leave_the_bits_of_one_process(scheduler, ranks, optimizer):
    options = OPTIMIZERS[optimizer] | {"groups": pipelines.groups(scheduler)}
    for found, _ in together("tied", ranks, scheduler, **options):
        assert found == alone("tied", **options)
    if "clip" in options:
        assert alone("tied", **options).parameters != alone("tied", **options | {"clip": None}).parameters


@pytest.mark.few(2)
@pytest.mark.parametrize("scheduler", ["one_f_one_b", "zb_h1", "modulo", "zb_v", "hanayo"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_of_many_stages_leave_the_bits_of_one_process(scheduler, ranks):
    options = {"optimizer": "adam", "lr": 0.01, "clip": 0.05}
    for found, _ in together("everywhere", ranks, scheduler, **options):
        assert found == alone("everywhere", **options)


def uses_of_weights(graph) -> set[str]:
    """The messages that updates make: gradients of copies and new weights."""
    made = {t.micro_batch for t in graph if t.kind == Kind.F}
    return {t.name for t in graph if t.kind in (*SENDS, *RECEIVES) and t.micro_batch not in made}


def test_a_copy_costs_two_messages_a_step_and_no_states():
    """Whatever the number of micro-batches: a gradient to the first stage, new weights back."""
    found = together("tied", 3, "one_f_one_b", optimizer="adam")
    first, middle, last = (trainer.run.program for _, trainer in found)
    assert uses_of_weights(first.graph) == {"2RO4>0", "0SF4>2"}
    assert uses_of_weights(middle.graph) == set()
    assert uses_of_weights(last.graph) == {"2SO4>0", "0RF4>2"}
    assert {t.micro_batch for t in first.graph if t.kind == Kind.U} <= {0, MICRO_BATCHES}, "to no sample"
    weight = found[0][1].recorded.model.blocks[0].linear.weight
    names = [s.name for s in last.graph.storages if s.shape == weight.shape and s.role.persistent]
    assert len(names) == 1, "its own copy, and neither mean nor square"


def test_with_clipping_the_square_sums_travel_in_the_message_of_the_gradient():
    found = together("tied", 2, "zb_h1", clip=0.05)
    assert uses_of_weights(found[0][1].run.program.graph) == {"1RO4>0", "0SO4>1", "0SF4>1"}


def test_both_ends_of_a_v_share_the_weight_itself():
    for found, trainer in together("tied", 2, "zb_v"):
        assert found == alone("tied")
        assert uses_of_weights(trainer.run.program.graph) == set()


STALE = {"pipedream": 1, "pipedream_2bw": 4, "paci": 2, "layerpipe": 1, "layerpipe2": 1}  # micro-batches of an update


def replayed(recorded: Recorded, trainer: PipelineTrainer) -> str:
    """What one process leaves that does what a run's log says."""
    replay = Replay(recorded.graph, pipeline.balanced(recorded.graph, CostModel.analytic(), trainer.grid.ranks))
    for i in range(STEPS):
        replay(tuple(recorded._split(*next(recorded.train_data))), [e for e in trainer.log if e.step == i])
    return params_sha256(recorded.model)


def stale(name: str, scheduler: str) -> Job:
    told = {"mini_batches": 2} if scheduler == "paci" else {}
    return job(name, scheduler, optimizer="adam", lr=0.01, update_every=STALE[scheduler], scheduler_args=told)


@pytest.mark.few(1)
@pytest.mark.parametrize("scheduler", STALE)
def test_under_a_stale_policy_both_uses_read_one_version(scheduler):
    """That of the first stage's forward, of the same micro-batch; and the bits are those of the log, replayed."""
    own = [Recorded(stale("tied", scheduler)) for _ in range(3)]
    with deadline():
        _, trainer = run_ranks(2, lambda communicator: on_a_rank(communicator, own[communicator.rank]))[0]
    read = {(e.step, unpack(e.key).micro_batch, unpack(e.key).unit): e.version for e in trainer.log
            if e.stage == 0 and unpack(e.key).kind == Kind.F}
    uses = {(step, i) for step, i, stage in read if stage}
    assert len(uses) == STEPS * MICRO_BATCHES
    for step, i in uses:
        assert {read[key] for key in read if key[:2] == (step, i)} == {read[step, i, 0]}
    assert max(read.values()) > min(read.values())
    assert replayed(own[2], trainer) == trainer.params_sha256()


def test_a_policy_of_ones_own_with_several_updates_and_fresh_weights_is_refused():
    recorded = Recorded(job("tied", "one_f_one_b", update_every=1))
    with pytest.raises(ValueError, match=r"stages on several ranks use .*weight, and the step updates it 4 times"):
        recorded.plan(CostModel.analytic(), ml.Machine(2))


def test_messages_of_weights_have_their_price():
    def period(name, ranks):
        slow = replace(CostModel.analytic(), link=Link(0.0, 1.0))
        return ml.plan(Recorded(job(name, "gpipe")).graph, "gpipe", slow, ml.Machine(ranks)).period

    assert period("tied", 2) > 2 * 48 * 64 * 4, "there and back, a byte a microsecond"


def test_an_embedding_tied_to_the_head():
    """Lookups at the bottom, logits at the top."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 30, (2, MICRO_BATCHES, 8, 6))

    def recorded():
        ml.seed(1)
        table, layers = nn.Embedding(30, 32), [nn.Linear(32, 32) for _ in range(4)]
        optimizer = ml.optim.AdamW([table.weight, *(p for layer in layers for p in layer.parameters())], 0.01)

        def step(*parts):
            for i, part in enumerate(parts):
                with ml.micro_batch(i, i * 8):
                    h = table(part)
                    for layer in layers:
                        h = ops.tanh(layer(h))
                    nn.cross_entropy(ops.linear(h, table.weight).reshape(48, 30), part.reshape(48)).backward()
            optimizer.step()

        return optimizer.parameters, ml.record(step, *tokens[0])

    wanted, graph = recorded()
    run = SequentialExecutor(graph)
    for batch in tokens:
        run(*batch)

    own = [recorded() for _ in range(2)]
    plans = [ml.plan(graph, "zb_h1", CostModel.analytic(), ml.Machine(2)) for _, graph in own]

    def work(communicator):
        run = DistributedExecutor(*plans[communicator.rank].with_messages, communicator)
        for batch in tokens:
            run(*batch)
        run.close()
        return own[communicator.rank][0][0].numpy().copy()

    with deadline():
        for table in run_ranks(2, work):
            np.testing.assert_array_equal(table, wanted[0].numpy())


def test_a_checkpoint_goes_on_on_another_number_of_ranks(tmp_path):
    trainer = together("tied", 3, "zb_h1", optimizer="adam")[-1][1]
    checkpoint.save(tmp_path, trainer.recorded.model, trainer.recorded.optimizer, step=STEPS,
                    loader=trainer.recorded.train_data)
    whole = Trainer(Recorded(job("tied", "in_order", optimizer="adam")), CostModel.analytic())
    for _ in range(2 * STEPS):
        whole.step()
    own = [Recorded(job("tied", "gpipe", optimizer="adam")) for _ in range(2)]
    for recorded in own:
        checkpoint.load(tmp_path, recorded.model, recorded.optimizer, loader=recorded.train_data)
    with deadline():
        for found, _ in run_ranks(2, lambda communicator: on_a_rank(communicator, own[communicator.rank])):
            assert found.parameters == whole.params_sha256()


def test_data_parallel_ranks_add_up_the_uses_before_they_sum():
    """So the bits are those of one process that adds what each share has added up over the uses; one that accumulates
    micro-batches adds up each use over these first."""
    flat = {"model": "tied", "batch_size": 16, "lr": 0.05}
    own = [Recorded(Job(**flat, scheduler="no_overlap", parallel="data"), rank, 2) for rank in range(2)]

    def work(communicator):
        trainer = RankTrainer(own[communicator.rank], CostModel.analytic(), communicator, (1.0, 1e-3))
        for _ in range(STEPS):
            trainer.step()
        trainer.finish()
        return trainer.params_sha256()

    with deadline():
        found, _ = run_ranks(2, work)
    alone = Recorded(Job(**flat))
    parameters = list(alone.model.parameters())
    with use(Tape()):
        for _ in range(STEPS):
            gradients = []
            for x, y in zip(*(np.split(part, 2) for part in next(alone.train_data)), strict=True):
                for p in parameters:
                    p.grad = None
                alone.objective.loss(alone.model(x), y).backward()
                gradients.append([p.grad.numpy().copy() for p in parameters])
            for p, first, second in zip(parameters, *gradients, strict=True):
                p.grad.assign((first + second) * np.float32(0.5))
            alone.optimizer.step()
    assert params_sha256(alone.model) == found


UNDER_MPI = """
import test_tied_weights as t
from minidl.runtime.comm.mpi import MPI

comm = MPI()
for scheduler in ("one_f_one_b", "zb_h1"):
    options = t.OPTIMIZERS["adamw, clipped"]
    found, _ = t.on_a_rank(comm, t.Recorded(t.job("tied", scheduler, **options)))
    if comm.rank == 0:
        assert found == t.alone("tied", **options), scheduler
        print(scheduler, "equal", flush=True)
for scheduler in ("pipedream", "layerpipe"):
    found, trainer = t.on_a_rank(comm, t.Recorded(t.stale("tied", scheduler)))
    if comm.rank == 0:
        assert t.replayed(t.Recorded(t.stale("tied", scheduler)), trainer) == found.parameters, scheduler
        print(scheduler, "equal", flush=True)
comm.gather(None)
comm.close()
"""


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_ranks_of_mpi_leave_the_same_bits():
    done = subprocess.run([str(MPIEXEC), "-n", "2", sys.executable, "-c", UNDER_MPI], capture_output=True, text=True,
                          timeout=PATIENCE, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": IMPORTABLE})
    names = ("one_f_one_b", "zb_h1", "pipedream", "layerpipe")
    assert (done.returncode, done.stdout) == (0, "".join(f"{name} equal\n" for name in names)), done.stderr
