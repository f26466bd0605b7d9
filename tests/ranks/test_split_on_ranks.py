"""Tasks in parts on ranks, data-parallel and in pipelines: each part runs on its own lane of the rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from command_line import reported
from helpers import recorded_classifier
from rank_runs import Run, alone, on_ranks, planned, recorded

import minidl as ml
from minidl import models, optim
from minidl.core.graph import TaskGraph
from minidl.core.machine import Machine
from minidl.core.placement import Refused
from minidl.core.schedule import Lane, ScheduleError
from minidl.core.tasks import SENDS, Kind, repack, task_name, unpack
from minidl.devices.device import LANES
from minidl.runtime.checking import random_schedule
from minidl.runtime.communication import Meetings

POLICIES = ("no_overlap", "barrier", "buckets", "fifo", "priority", "dear", "reverse_first_k")
MACHINE = Machine(2, collective=lambda sizes: 5 + 1e-3 * sum(sizes.values()))
COST = ml.CostModel.analytic(flops_per_us=2e3)
NETWORK = ["--model", "mlp", "--batch-size", "32", "--steps", "4", "--costs", "analytic", "--parallel", "data",
           "--ranks", "2"]


@pytest.fixture(scope="module")
def mlp() -> TaskGraph:
    model = models.mlp(64, 128, 128, 10)
    opt = optim.SGD(model.parameters(), lr=0.1)
    return recorded_classifier(model, opt, 64, 64)


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


def trained(capsys: Any, *flags: str) -> dict[str, Any]:
    return reported(capsys, "train", *NETWORK, *flags)


@pytest.mark.few(1)
@pytest.mark.parametrize(("policies", "more"), [
    (("no_overlap", "barrier", "priority", "dear"), []),
    (("buckets", "reverse_first_k"), ["--clip", "0.1", "--momentum", "0.9"]),
])
def test_ranks_with_lanes_have_the_bits_of_every_order(capsys: Any, policies: tuple[str, ...], more: list[str]):
    found = [trained(capsys, "--scheduler", policy, "--split", "2", *more) for policy in policies]
    assert len({one["params_sha256"] for one in found}) == 1
    assert found[0]["loss_last"] == pytest.approx(trained(capsys, "--scheduler", "barrier", *more)["loss_last"], 1e-5)


def test_shares_of_updates_are_refused(mlp: TaskGraph):
    with pytest.raises(Refused, match="parts of an update change other elements than a rank's share"):
        ml.plan(mlp, "barrier", COST, MACHINE, split=2, shard=1)


# ------------------------------------------------------------------------------------------------------------ pipelines
STAGES = {"network": "odd widths"}  #: a network whose micro-batches are cut into stages


def plan_of(policy: Any, split: Any) -> ml.Plan:
    return ml.plan(recorded(**STAGES)[1], policy, COST, Machine(2), split=split)


@pytest.mark.few(1)
@pytest.mark.parametrize("split", [2, 3])
def test_all_orders_of_stages_in_parts_have_the_bits_of_one_lane(split: int):
    found = []
    for policy in ("gpipe", "zb_h1"):
        settings = {**STAGES, "split": split, "scheduler": policy}
        found.append(on_ranks(settings).tensors)
        for seed in (None, 5):
            run = Run(settings)
            graph = planned(run.recorded(), settings).graph
            execute = ml.SequentialExecutor(graph) if seed is None else ml.CheckingExecutor(
                graph, random_schedule(graph, 3, np.random.default_rng(seed)), seed=seed)
            for parts in run.batches():
                execute(*parts)
            found.append(run.tensors())
    assert all(tensors == found[0] for tensors in found)
    for name, bits in alone(STAGES).tensors.items():
        np.testing.assert_allclose(np.frombuffer(found[0][name], np.float32), np.frombuffer(bits, np.float32),
                                   rtol=1e-4, atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["gpipe", "zb_h1", "interleaved", "dualpipe_v"])
def test_a_rank_of_a_pipeline_has_a_lane_for_each_part(policy: str):
    whole, parted = (plan_of(policy, split) for split in (1, 2))
    own = unpack(parted.graph.keys)
    assert {lane.name for lane in parted.schedule.lanes} == {"main", "sub1"}
    assert not np.isin(own.kind[own.part > 0], (Kind.B, Kind.U)).any()
    for i, lane in enumerate(parted.schedule.lanes):
        keys = parted.schedule.order(i)
        assert ((unpack(keys).part > 1) == (lane.name == "sub1")).all()
        if lane.name == "sub1":  # in the order of the first parts
            main = parted.schedule.order(parted.schedule.lanes.index(Lane(lane.rank, "main")))
            wide = repack(keys, part=1)
            assert wide.tolist() == main[np.isin(main, wide)].tolist()
    assert parted.step < whole.step
    _, talking = parted.with_messages  # one message for all parts of a task
    messages = talking.keys[np.isin(unpack(talking.keys).kind, SENDS)]
    assert len(messages) == len(np.unique(messages)) == sum(
        np.isin(unpack(whole.with_messages[1].keys).kind, SENDS))


def test_parts_of_a_stage_in_another_order_are_refused():
    graph, made = recorded(**STAGES)[1], plan_of("zb_h1", 2)
    lane = [made.schedule.order(i).tolist() for i in range(4)]
    at = [lane.name for lane in made.schedule.lanes].index("sub1")
    lane[at][:2] = lane[at][1::-1]
    other = replace(made.schedule, keys=np.concatenate(lane), slots=None)
    with pytest.raises(ScheduleError, match="second parts of tasks must be on lanes of their own, in the order of"):
        ml.plan(graph, other, COST, Machine(2))


def test_a_search_for_parts_of_stages_is_refused():
    with pytest.raises(Refused, match="parts of a stage have no measured costs; give a number of parts"):
        plan_of("zb_h1", "auto")


@pytest.mark.parametrize("kind", LANES)
@pytest.mark.parametrize("task", ["0W0/2", "0W0/1"])
def test_a_lane_that_fails_ends_the_other_lanes_and_ranks(task: str, kind: str, monkeypatch: Any):
    """The other lane of the rank waits for messages then, which never come."""
    def fails() -> None:
        raise ZeroDivisionError("spoiled")

    def calls(self: Meetings, t: int, stream: Any) -> Any:
        return [fails] if task_name(self._keys[t]) == task else made(self, t, stream)

    made = Meetings.calls
    monkeypatch.setenv("MINIDL_LANES", kind)
    monkeypatch.setattr(Meetings, "calls", calls)
    with pytest.raises(Exception, match="spoiled"):
        on_ranks({**STAGES, "split": 2})
