"""Data-parallel ranks whose tasks are in parts: each part has a lane of the rank."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE, deadline

import minidl as ml
from minidl import models, nn, optim
from minidl.cli import main
from minidl.core.graph import TaskGraph
from minidl.core.machine import Machine
from minidl.core.placement import Refused

POLICIES = ("no_overlap", "barrier", "buckets", "fifo", "priority", "dear", "reverse_first_k")
MACHINE = Machine(2, collective=lambda sizes: 5 + 1e-3 * sum(sizes.values()))
COST = ml.CostModel.analytic(flops_per_us=2e3)
NETWORK = ["--model", "mlp", "--batch-size", "32", "--steps", "4", "--costs", "analytic", "--parallel", "data",
           "--ranks", "2"]


@pytest.fixture(scope="module")
def mlp() -> TaskGraph:
    model = models.mlp(64, 128, 128, 10)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return ml.record(step, np.zeros((64, 64), np.float32), np.zeros(64, np.int64))


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_have_lanes_of_their_own_and_halve_the_work(mlp: TaskGraph, policy: str):
    whole, parted = (ml.plan(mlp, policy, COST, MACHINE, split=split) for split in (1, 2))
    names = {lane.name: parted.schedule.names(i) for i, lane in enumerate(parted.schedule.lanes)}
    if policy == "no_overlap":  # its sums are on the lane that computes
        assert names.keys() == {"main"}
        return
    assert names.keys() == {"main", "comm", "sub1"}
    assert all("/2" in name for name in names["sub1"])
    assert not any("/2" in name for name in names["main"])
    assert parted.step < 0.6 * whole.step
    assert parted.period >= parted.notes["lower_bound"] - 1e-9


def test_an_order_with_such_lanes_is_read_again(mlp: TaskGraph, tmp_path: Any):
    made = ml.plan(mlp, "priority", COST, MACHINE, split=3)
    made.schedule.save(tmp_path / "plan.csv")
    read = ml.plan(mlp, str(tmp_path / "plan.csv"), COST, MACHINE)
    assert [lane.name for lane in read.schedule.lanes] == ["main", "comm", "sub1", "sub2"]
    assert [read.schedule.keys[a:b].tolist() for a, b in pairwise(read.schedule.ptr.tolist())] == [
        made.schedule.keys[a:b].tolist() for a, b in pairwise(made.schedule.ptr.tolist())]
    assert read.step == made.step


def trained(capsys: Any, *flags: str) -> dict[str, Any]:
    with deadline(PATIENCE):
        assert main(["train", *NETWORK, *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("policies", "more"), [
    (("no_overlap", "barrier", "priority", "dear"), []),
    (("buckets", "reverse_first_k"), ["--clip", "0.1", "--momentum", "0.9"]),
])
def test_ranks_with_lanes_have_the_bits_of_every_order(capsys: Any, policies: tuple[str, ...], more: list[str]):
    found = [trained(capsys, "--scheduler", policy, "--split", "2", *more) for policy in policies]
    assert len({one["params_sha256"] for one in found}) == 1
    assert found[0]["loss_last"] == pytest.approx(trained(capsys, "--scheduler", "barrier", *more)["loss_last"], 1e-5)


def test_shares_of_updates_and_pipelines_are_refused(mlp: TaskGraph):
    with pytest.raises(Refused, match="parts of an update change other elements than a rank's share"):
        ml.plan(mlp, "barrier", COST, MACHINE, split=2, shard=1)
    with pytest.raises(Refused, match="a stage is one task for a micro-batch, and runs on one lane"):
        ml.plan(mlp, "gpipe", COST, Machine(2), split=2)
