"""Results that go to several ranks, and several that come to one: skip connections over stages leave the
bits of one process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT, arrays_left, deadline
from launcher import MPIEXEC

from minidl import nn, ops
from minidl.core.graph import TaskGraph
from minidl.core.machine import Machine
from minidl.core.tasks import RECEIVES, SENDS
from minidl.models.registry import model
from minidl.pricing.cost import CostModel, Link
from minidl.runtime.comm.loopback import LoopBack, run_ranks
from minidl.runtime.runtime import Runtime
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

STEPS, WIDTH = 3, 64  # all blocks about alike, so that each is a stage


class Block(nn.Module):
    """A layer and its activation, of one block, so that cuts lie between them."""

    def __init__(self, width: int = WIDTH, out: int = WIDTH) -> None:
        self.linear = nn.Linear(width, out)

    def forward(self, *inputs):
        return nn.relu(self.linear(functools.reduce(ops.add, inputs)))


class Skipping(nn.Module):
    """Blocks in a row, of which each reads the result before it, and those that `reads` gives: what it reads
    besides."""

    def __init__(self, blocks: int, reads: dict[int, list[int]]) -> None:
        self.input_shape, self.classes, self.reads = (8, 8, 1), 10, reads
        self.blocks = nn.ModuleList(Block(64 if i == 0 else WIDTH, WIDTH if i < blocks - 1 else 10)
                                    for i in range(blocks))

    def forward(self, x):
        made = []
        for i, block in enumerate(self.blocks):
            made.append(block(*(made[j] for j in self.reads.get(i, [])),
                              made[-1] if made else x.reshape(x.shape[0], 64)))
        return made[-1]


@model()
def over_a_stage():
    """The result of the first block goes to the second and the third."""
    return Skipping(3, {2: [0]})


@model()
def to_every_stage():
    """Every block reads the results of all before it."""
    return Skipping(4, {2: [0], 3: [0, 1]})


@model()
def within_chunks():
    """With two chunks on each of two ranks, two results of one rank come to one block of the other."""
    return Skipping(4, {3: [0, 1]})


def job(name: str, scheduler: str) -> Job:
    parallel = "none" if scheduler == "in_order" else "pipeline"
    return Job(model=name, scheduler=scheduler, parallel=parallel, batch_size=16, micro_batches=4, lr=0.05)


@functools.cache
def alone(name: str) -> tuple[list[float], str]:
    """Losses and parameters of one process."""
    trainer = Trainer(Recorded(job(name, "in_order")), CostModel.analytic())
    for _ in range(STEPS):
        trainer.step()
    trainer.settle()
    return trainer.losses, trainer.params_sha256()


def on_a_rank(communicator, recorded: Recorded) -> tuple[list[float], str, TaskGraph]:
    trainer = PipelineTrainer(recorded, CostModel.analytic(), communicator, Link(50.0, 1e3))
    for _ in range(STEPS):
        trainer.step()
    trainer.finish()
    return trainer.losses, trainer.params_sha256(), trainer.run.program.graph


def together(name: str, ranks: int, scheduler: str) -> list[tuple[list[float], str, TaskGraph]]:
    """Of each of so many loop-back ranks. All record first: the random numbers of a process are drawn
    by one at a time."""
    own = [Recorded(job(name, scheduler)) for _ in range(ranks)]
    with deadline():
        return run_ranks(ranks, lambda communicator: on_a_rank(communicator, own[communicator.rank]))


def messages(graph: TaskGraph) -> set[str]:
    """The sends and receives of the first micro-batch."""
    return {t.name for t in graph if t.kind in SENDS + RECEIVES and t.micro_batch == 0}


@pytest.mark.few(2)
@pytest.mark.parametrize("scheduler", ["gpipe", "one_f_one_b", "zb_h1", "fast_forward"])
@pytest.mark.parametrize(("name", "ranks"), [("over_a_stage", 3), ("to_every_stage", 4), ("to_every_stage", 3)])
def test_a_result_that_goes_to_several_ranks(name, ranks, scheduler):
    for losses, parameters, _ in together(name, ranks, scheduler):
        assert (losses, parameters) == alone(name)


def test_every_rank_that_reads_a_result_gets_a_message_of_its_own():
    sent, _, got = (messages(graph) for _, _, graph in together("over_a_stage", 3, "gpipe"))
    assert {"0SF0>1", "0SF0>2"} <= sent, "one result goes to two ranks"
    assert {"0RF0>2", "1RF0>2"} <= got, "two results come to one rank"


@pytest.mark.parametrize("scheduler", ["looped_bfs", "interleaved", "interleaved_zb"])
def test_two_results_of_one_rank_come_to_one_stage(scheduler):
    found = together("within_chunks", 2, scheduler)
    for losses, parameters, _ in found:
        assert (losses, parameters) == alone("within_chunks")
    assert {"0RF0>1", "2RF0>1"} <= messages(found[1][2])


UNDER_MPI = """
import test_pipeline_skips as t
from minidl.runtime.comm.mpi import MPI

comm = MPI()
for scheduler in ("one_f_one_b", "zb_h1"):
    *found, _ = t.on_a_rank(comm, t.Recorded(t.job("over_a_stage", scheduler)))
    if comm.rank == 0:
        assert tuple(found) == t.alone("over_a_stage"), scheduler
        print(scheduler, "equal", flush=True)
comm.gather(None)
comm.close()
"""


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_ranks_of_mpi_leave_the_same_bits():
    done = subprocess.run([str(MPIEXEC), "-n", "3", sys.executable, "-c", UNDER_MPI], capture_output=True, text=True,
                          timeout=PATIENCE, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": IMPORTABLE})
    assert (done.returncode, done.stdout) == (0, "one_f_one_b equal\nzb_h1 equal\n"), done.stderr


def test_arrays_of_a_message_travel_from_where_they_lie(monkeypatch):
    """Nothing is laid end to end in memory that no plan counts; the calls of native lanes are arrays too."""
    monkeypatch.setenv("MINIDL_LANES", "python")
    recorded = Recorded(job("within_chunks", "one_f_one_b"))
    plan = recorded.plan(CostModel.analytic(), Machine(2))
    programs = plan.programs
    assert any(launch.kernel == "send" and len(launch.reads) > 1
               for program in programs for launches in program.graph.launches for launch in launches)
    planned = sum(part.memory.arena_bytes for program in programs for part in program.body)
    left = arrays_left(lambda: [Runtime(program, transport=rank)
                                for program, rank in zip(programs, LoopBack.ranks(2), strict=True)])
    assert planned <= left <= planned + 2048
