"""Data parallelism times a pipeline as one plan: all-reduces of stages beside messages between stages."""

from __future__ import annotations

import numpy as np
import pytest
from test_pipeline_ranks import recorded

import minidl as ml
from minidl.passes.messages import check_rendezvous
from minidl.pricing.cost import CostModel, Link
from minidl.pricing.simulation import simulate
from minidl.program import lower
from minidl.schedule import Schedule
from minidl.schedulers.pipeline import add_all_reduces, add_communication
from minidl.tasks import COLLECTIVE, COMMUNICATION, RECEIVES, SENDS, GraphError, Kind

LINK = Link(2.0, 100.0)


def both(name: str, ranks: int, part_bytes: int | None = None):
    """The plan of one replica, and its graph and schedule with all-reduces and messages."""
    plan = ml.plan(recorded()[1], name, CostModel.analytic(), ml.Machine(ranks))
    return plan, *add_communication(*add_all_reduces(plan.graph, plan.schedule, part_bytes))


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("part_bytes", [None, 700])
def test_all_reduces_stand_beside_messages(name, part_bytes):
    plan, graph, schedule = both(name, 2, part_bytes)
    assert len(np.unique(graph.keys)) == len(graph) == len(schedule)
    schedule.validate(graph, schedule.waits(graph))
    check_rendezvous(graph, schedule)
    rank = {t: lane.rank for i, lane in enumerate(schedule.lanes) for t in schedule.names(i)}
    for t in graph:
        if t.kind in COLLECTIVE:
            assert rank[t.name] == rank[f"{t.unit}U0"], "the gradients are where the stage is"
            before, after = ({int(k) for k in graph.kind[rows[t.index]]} for rows in (graph.preds, graph.succs))
            assert before <= {Kind.W, Kind.B}, "when the last micro-batch has added its share"
            assert after == {Kind.U}
    parts = [t.part for t in graph if t.kind in COLLECTIVE and t.unit == 0]
    assert parts == list(range(len(parts)))
    assert (len(parts) > 1) == (part_bytes is not None)
    # without all-reduces it is the plan that it was
    lanes = {lane: schedule.names(i) for i, lane in enumerate(schedule.lanes) if lane.name != "comm"}
    assert Schedule.from_names(lanes).to_csv() == add_communication(plan.graph, plan.schedule)[1].to_csv()
    assert Schedule.from_csv(schedule.to_csv()).to_csv() == schedule.to_csv()


def test_an_all_reduce_takes_its_time_beside_the_other_stage_s_work():
    """One F or B takes 1, and a message next to nothing. In gpipe the last stage is done first, so its
    all-reduce hides."""
    plan, graph, schedule = both("gpipe", 2)
    cost = CostModel(kinds={"F": 1.0, "B": 1.0, "O": 1.0, "W": 1.0, "U": 0.25}
                           | dict.fromkeys(("SF", "RF", "SO", "RO"), 0.0) | {"A": 0.0})
    ends = {}
    for each in (0.0, 1.0, 5.0):
        line = simulate(graph, schedule, CostModel(kinds=dict(cost.kinds) | {"A": each}))
        ends[each] = {line.name(i): (line.start[i], line.end[i]) for i in line.tasks.tolist()}
    m = int(plan.graph.micro_batch.max()) + 1
    for each, found in ends.items():
        done = {stage: max(end for name, (_, end) in found.items() if name[0] == stage and name[1] in "BOW")
                for stage in "01"}
        assert (done["0"], done["1"]) == (2 * m + 2, 2 * m + 1)
        for stage in "01":
            assert found[f"{stage}A0"] == (done[stage], done[stage] + each)
            assert found[f"{stage}U0"] == (done[stage] + each, done[stage] + each + 0.25)


def test_a_rank_s_program_has_its_all_reduce_and_its_messages():
    _, graph, schedule = both("one_f_one_b", 2)
    for rank in range(2):
        program = lower(graph, schedule, ranks=2, rank=rank)
        kinds = [Kind(k) for k in program.graph.kind]
        assert kinds.count(Kind.A) == 1
        assert set(kinds) & set(COMMUNICATION) == {Kind.A, *((Kind.SF, Kind.RO) if rank == 0 else (Kind.RF, Kind.SO))}
        for t in program.graph:
            if t.kind in (*COLLECTIVE, *SENDS, *RECEIVES):
                assert t.launches


def test_all_reduces_are_added_once():
    plan = ml.plan(recorded()[1], "gpipe", CostModel.analytic(), ml.Machine(2))
    with pytest.raises(GraphError, match="synchronised already"):
        add_all_reduces(*add_all_reduces(plan.graph, plan.schedule))


def test_the_whole_is_priced_on_links():
    _, graph, schedule = both("one_f_one_b", 2)
    cost = CostModel(kinds={"F": 1.0, "B": 2.0, "O": 1.0, "W": 1.0, "U": 0.5}, link=LINK)
    line = simulate(graph, schedule, cost)
    took = {line.name(i): line.end[i] - line.start[i] for i in line.tasks.tolist()}
    for t in graph:
        if t.kind == Kind.A:
            assert took[t.name] == pytest.approx(LINK.time(t.bytes))
