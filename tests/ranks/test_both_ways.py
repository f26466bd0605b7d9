"""Pipelines that hold every stage twice, on ranks: their stages, messages and refusals. test_same_bits compares their
bits with one process that adds up the gradients of each half of the micro-batches apart."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from command_line import refusal, reported
from launcher import under_mpi
from rank_runs import STEPS, command, trained

import minidl as ml
from minidl import nn
from minidl.autograd.op import Op
from minidl.core.tasks import SENDS, Kind
from minidl.nn.module import state
from minidl.pricing.cost import CostModel
from minidl.schedulers.pipeline import PipelineError
from minidl.training.job import Job
from minidl.training.recorded import Recorded

NETWORK = {"model": "mlp", "model_args": {"hidden": 32, "layers": 6}, "batch_size": 32, "lr": 0.05}
FLAGS = ["--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=6", "--batch-size", "32",
         "--micro-batches", "4"]


def job(scheduler: str, micro_batches: int, **more) -> Job:
    return Job(**NETWORK, scheduler=scheduler, parallel="pipeline", micro_batches=micro_batches, groups=2, **more)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_every_rank_has_two_stages_and_a_direction_updates(name):
    plan = Recorded(job(name, 4)).plan(CostModel.analytic(), ml.Machine(2))
    for program in plan.programs:
        stages = {(t.unit, 2 * t.micro_batch >= 4) for t in program.graph if t.kind in (Kind.F, Kind.B)}
        assert stages == {(program.rank, False), (1 - program.rank, True)}
        own = {t.unit for t in program.graph if t.kind == Kind.U and t.part == 0}
        copies = {t.unit for t in program.graph if t.kind == Kind.U and t.part == 1}
        assert (own, copies) == ({program.rank}, {1 - program.rank})


def test_a_step_whose_gradients_are_added_in_one_place_is_refused():
    recorded = Recorded(replace(job("chimera", 4), groups=1))
    with pytest.raises(PipelineError, match=r"adds to the gradient of .*micro_batch\(number, group=1\)"):
        recorded.plan(CostModel.analytic(), ml.Machine(2))


def test_one_micro_batch_cannot_go_both_ways(capsys):
    said = refusal(capsys, "train", *FLAGS[:-2], "--parallel", "pipeline", "--ranks", "2", "--scheduler", "chimera")
    assert "chimera adds up the gradients of 2 groups of micro-batches; 1 do not divide into them" in said


NORMS = {"model": "resnet20", "model_args": {"width": 4, "layers": 1, "image_size": 8}}


def test_a_rank_of_the_other_direction_sends_statistics_with_the_gradients():
    """Nothing more than without batch norm: one message for each stage, and none while micro-batches run."""
    def messages(**network):
        plan = Recorded(replace(job("chimera", 4), **network)).plan(CostModel.analytic(), ml.Machine(2))
        return sorted(t.name for t in plan.with_messages[0] if t.kind in SENDS)

    assert len(messages()) > 8
    assert messages(**NORMS) == messages()


class Counting(Op):
    name = "counting"

    def forward(self, x, count):
        y = self.out(x.shape, x.dtype)
        self.call("add", [x, count], [y])
        self.call("shift", [count], [count], term=1.0)
        return y

    def input_grad(self, i, dy):
        return dy


def test_a_state_that_follows_the_micro_batches_in_another_way_is_refused():
    layers, count = [nn.Linear(4, 4) for _ in range(4)], state(np.zeros((), np.float32), "count")

    def step(*parts):
        for i in range(4):
            with ml.micro_batch(i, group=i // 2):
                x = parts[i]
                for layer in layers:
                    x = Counting()(layer(x), count)
                x.sum().backward()

    graph = ml.record(step, *np.zeros((4, 2, 4), np.float32))
    with pytest.raises(PipelineError, match="count follows the micro-batches one after another"):
        ml.plan(graph, "chimera", CostModel.analytic(), ml.Machine(2))


def test_groups_of_micro_batches_add_up_in_their_order():
    layer = nn.Linear(3, 2)
    x = np.random.default_rng(0).standard_normal((6, 4, 3)).astype(np.float32)
    for i in range(6):
        with ml.micro_batch(i, group=i % 2):
            layer(ml.array(x[i])).sum().backward()
    parts = [functools.reduce(np.add, [np.broadcast_to(b.sum(axis=0), (2, 3)).astype(np.float32) for b in x[g::2]])
             for g in range(2)]
    np.testing.assert_allclose(np.sort(layer.weight.grad.numpy().ravel()), np.sort((parts[0] + parts[1]).ravel()),
                               rtol=1e-5)
    assert sorted(layer.weight.uses) == [(0, 0), (0, 1)]


@pytest.mark.slow
@under_mpi
def test_over_mpi():
    code, record, errors = command(2, *FLAGS, "--lr", "0.05", "--parallel", "pipeline", "--scheduler", "dualpipe",
                                   "--steps", str(STEPS))
    assert code == 0, errors
    ((_, wanted),) = trained(Job(**NETWORK, micro_batches=4, groups=2))
    assert record["params_sha256"] == wanted


def summed(by_halves: bool):
    """A step of four micro-batches with one running loss, or with one for each half."""
    model = ml.models.mlp(8, 16, 16, 4)
    opt = ml.optim.SGD(model.parameters(), 0.1)

    def step(*parts):
        totals = {}
        for i in range(4):
            with ml.micro_batch(i, 2 * i, group=i // 2):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1])
                loss.backward()
                which = i // 2 if by_halves else 0
                totals[which] = loss if which not in totals else totals[which] + loss
                if i == 3:
                    total = functools.reduce(lambda a, b: a + b, totals.values())
        opt.step()
        return total

    return ml.record(step, *(v for _ in range(4) for v in (np.ones((2, 8), np.float32), np.zeros(2, np.int64))))


@pytest.mark.parametrize("scheduler", ["chimera", "dualpipe"])
def test_a_running_loss_over_both_halves_names_its_cure(scheduler):
    with pytest.raises(PipelineError, match=r"^(?=.*\(add\) reads).*opposite directions; keep a running loss for each "
                                            r"half of the micro-batches, and add both in the last micro-batch"):
        ml.plan(summed(by_halves=False), scheduler, machine=ml.Machine(2))
    assert ml.plan(summed(by_halves=True), scheduler, machine=ml.Machine(2)).ranks == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "then"), [("chimera", "gpipe"), ("gpipe", "chimera")])
def test_a_run_goes_on_only_in_the_same_order_of_addition_unless_asked(first, then, tmp_path, capsys):
    made = ["train", "--model", "mlp", "--model-arg", "hidden=8", "--model-arg", "layers=3", "--parallel", "pipeline",
            "--ranks", "2", "--micro-batches", "4", "--batch-size", "16", "--costs", "analytic",
            "--checkpoint", str(tmp_path / "saved"), "--scheduler"]
    reported(capsys, *made, first, "--steps", "2")
    said = refusal(capsys, *made, then, "--steps", "4", "--resume")
    assert "sums gradients in another order than " + then in said
    reported(capsys, *made, first, "--steps", "3", "--resume")
    assert reported(capsys, *made, then, "--steps", "4", "--resume", "--reorder-sums")["steps"] == 1
