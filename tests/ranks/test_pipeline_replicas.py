"""Data parallelism times a pipeline: replicas of every stage sum its gradients, beside the messages between stages.
Their bits are in test_same_bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from command_line import reported, told_apart
from helpers import deadline, refuses
from launcher import under_mpi
from rank_runs import COST, command, recorded

import minidl as ml
from minidl.core.schedule import Lane, RankGrid, Schedule, ScheduleError
from minidl.core.tasks import COLLECTIVE, RECEIVES, SENDS, Kind
from minidl.passes.messages import check_collectives, check_rendezvous, check_same_order
from minidl.passes.replicas import ORDERS
from minidl.plans.program import lower
from minidl.pricing.cost import Link
from minidl.runtime.comm import Communicator
from minidl.runtime.comm.loopback import run_ranks
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError
from minidl.schedulers.pipeline.flush import gpipe
from minidl.training.agreement import Disagreement
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import TrainingError

NAMES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved"]
GRID = RankGrid(2, 2)
PLAIN = {"loss": True, "network": "mlp", "replicas": 2}


def grid_plan(name, *, ranks=2, replicas=2, cost=COST, collective=None, **options):
    return ml.plan(recorded()[1], name, cost, ml.Machine(ranks, replicas=replicas, collective=collective), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part_bytes", [None, 700])
def test_all_reduces_stand_beside_messages(name, part_bytes):
    plan, bare = grid_plan(name, part_bytes=part_bytes), grid_plan(name, replicas=1)
    graph, schedule = plan.with_messages
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
    # without all-reduces it is the plan of one replica
    lanes = {lane: schedule.names(i) for i, lane in enumerate(schedule.lanes) if lane.name != "comm"}
    assert Schedule.from_names(lanes).to_csv() == bare.with_messages[1].to_csv()
    assert Schedule.from_csv(schedule.to_csv()).to_csv() == schedule.to_csv()


def test_a_rank_of_the_grid_is_the_rank_of_a_replica():
    assert [GRID.place(r) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    plan = grid_plan("one_f_one_b")
    assert (plan.ranks, plan.schedule.ranks, len(plan.programs), len(plan.peak_bytes)) == (4, 2, 4, 2)
    assert [program.group for program in plan.programs] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    first, second = plan.programs[:2], plan.programs[2:]
    for program, twin in zip(first, second, strict=True):
        assert [task for i in range(len(program.schedule.lanes)) for task in program.schedule.names(i)] == [
            task.replace(">3", ">1").replace(">2", ">0")
            for i in range(len(twin.schedule.lanes)) for task in twin.schedule.names(i)]
        assert {lane.name for lane in twin.schedule.lanes} == {
            "main", "comm", *(f"{way}{3 - program.rank}" for way in ("send->", "recv<-"))}
        assert program.peak_bytes == twin.peak_bytes == plan.peak_bytes[program.rank]
        for t, other in zip(program.graph, twin.graph, strict=True):
            if t.kind in (*SENDS, *RECEIVES):
                here, there = (dict(x.launches[0].constants) for x in (t, other))
                assert here["peer"] in (0, 1)
                assert there["peer"] == here["peer"] + 2, "messages stay in their replica"
                assert there["message"] != here["message"]


def test_an_all_reduce_takes_its_time_beside_the_other_stage_s_work():
    """In gpipe the last stage is done first, so its all-reduce hides behind the work of the first."""
    steps = {each: grid_plan("gpipe", collective=lambda sizes, each=each: each).timeline for each in (0.0, 1.0, 5.0)}
    for each, line in steps.items():
        found = {line.name(i): (line.start[i], line.end[i]) for i in line.tasks.tolist()}
        for stage in "01":
            done = max(end for name, (_, end) in found.items() if name[0] == stage and name[1] in "BOW")
            assert found[f"{stage}A0"] == pytest.approx((done, done + each))
            assert found[f"{stage}U0"][0] == pytest.approx(done + each)
    assert steps[5.0].makespan == pytest.approx(steps[0.0].makespan + 5)


def test_without_a_time_of_their_own_all_reduces_cost_the_link_s():
    link = Link(2.0, 100.0)
    plan = grid_plan("one_f_one_b", cost=replace(COST, link=link))
    line = plan.timeline
    took = {line.name(i): line.end[i] - line.start[i] for i in line.tasks.tolist()}
    for t in plan.graph:
        if t.kind == Kind.A:
            assert took[t.name] == pytest.approx(link.time(t.bytes))


def test_orders_of_all_reduces():
    """The gradients of stages 3 and 2 are ready at 0 and 1, while 3's is summed until 4; 0's comes meanwhile, 1's
    last."""
    ready = {(0, 7): 3.0, (1, 6): 9.0, (2, 5): 1.0, (3, 4): 0.0}
    time = dict.fromkeys(ready, 4.0)
    assert [stage for stage, _ in ORDERS["fifo"](ready, time)] == [3, 2, 0, 1]
    assert [stage for stage, _ in ORDERS["priority"](ready, time)] == [3, 0, 2, 1]
    names = [plan.schedule.names([str(lane) for lane in plan.schedule.lanes].index("0/comm"))
             for plan in (grid_plan("interleaved", all_reduces=order, part_bytes=700, collective=lambda sizes: 1e3)
                          for order in ("fifo", "priority"))]
    assert sorted(names[0]) == sorted(names[1])
    units = [[int(name[0]) for name in each] for each in names]
    assert units[0] == sorted(units[0], reverse=True), "the last stage's gradients are ready first"
    assert units[1] != units[0], "but once the first stage's are there, they overtake what is left of them"


def test_weight_gradients_of_the_first_stages_wait_where_that_helps():
    """The last ones of a rank's first k stages run last, the first stage's first; k is the one of the shortest step."""
    def plan(order, each):
        return grid_plan("interleaved_zb", all_reduces=order, collective=lambda sizes: each)

    found, bare = plan("reverse_first_k", 3.0), plan("priority", 3.0)
    assert found.timeline.makespan < bare.timeline.makespan - 0.9
    graph = found.graph
    moved = 0
    for i, lane in enumerate(found.schedule.lanes):
        own, before = ([graph.index(t) for t in each.schedule.names(i)] for each in (found, bare))
        assert sorted(own) == sorted(before)
        if lane.name == "main" and own != before:
            moved += 1
            last = {int(graph.unit[t]): t for t in before if graph.kind[t] == Kind.W}
            work = [t for t in own if graph.kind[t] != Kind.U]
            assert work[-2:] in [[work[-2], last[min(last)]], [last[u] for u in sorted(last)]]
    assert moved
    for each in (0.0, 0.5):  # where nothing is gained nothing waits
        assert plan("reverse_first_k", each).schedule.to_csv() == plan("priority", each).schedule.to_csv()


ALONE = "0U0 spends gradients of its own replica; 2 replicas must sum them before"


def test_what_cannot_be_planned_is_one_line():
    plan = grid_plan("gpipe", replicas=1)
    refuses((lambda: grid_plan("gpipe", all_reduces="dear"),
             "all_reduces is 'dear'; within a pipeline it must be fifo, priority or "),
            (lambda: grid_plan("gpipe", replicas=1, all_reduces="fifo"),
             "gpipe: all_reduces is for several replicas of a pipeline; there is one"),
            (lambda: grid_plan("pipedream", all_reduces="fifo"),
             "pipedream: gradients are summed before each update, so all_reduces has no effect"), error=PipelineError)
    with pytest.raises(ScheduleError, match=ALONE):
        lower(*plan.with_messages, ranks=4, rank=1)
    with pytest.raises(ScheduleError, match="the schedule has 2 ranks; this run has 5"):
        lower(*grid_plan("gpipe").with_messages, ranks=5, rank=1)


def test_a_scheduler_of_one_s_own_sums_gradients_or_is_refused():
    """A pipeline policy does; a bare schedule does not."""
    plan = grid_plan(pipeline.Policy(gpipe, "contiguous"))
    assert plan.schedule.to_csv() == grid_plan("gpipe").schedule.to_csv()
    alone = grid_plan("gpipe", replicas=1)
    with pytest.raises(ScheduleError, match=ALONE):
        ml.plan(alone.graph, lambda graph, cost, machine: alone.schedule, alone.cost, ml.Machine(2, replicas=2))
    with pytest.raises(ValueError, match="<lambda> returned a PipelinePlan, not a Schedule or an Ordered"):
        grid_plan(lambda graph, cost, machine: alone)


def changed(schedule, change):
    """The schedule after `change(tasks)` of the names of its tasks by lane."""
    own = {lane: schedule.names(i) for i, lane in enumerate(schedule.lanes)}
    change(own)
    return Schedule.from_names(own)


def crossed(own):
    """The first two all-reduces of rank 1 in each other's place."""
    comm = own[Lane(1, "comm")]
    comm[0], comm[1] = comm[1], comm[0]


def test_crossed_orders_are_refused():
    """Ranks 1 and 3 hold one stage; where they start its two all-reduces in different orders both wait for ever."""
    plan = grid_plan("one_f_one_b", part_bytes=3000)
    orders = [program.collectives for program in plan.programs]
    check_same_order(orders, GRID)
    graph, schedule = plan.with_messages
    orders[3] = lower(graph, changed(schedule, crossed), ranks=4, rank=3).collectives
    with pytest.raises(ScheduleError, match="rank 1 starts 1A0 where rank 3 starts 1A0/1, so they would wait"):
        check_same_order(orders, GRID)
    orders[3] = orders[1][:1]
    with pytest.raises(ScheduleError, match="rank 1 starts 1A0/1 where rank 3 starts nothing more"):
        check_same_order(orders, GRID)


def test_all_reduces_of_a_rank_on_two_lanes_are_refused():
    graph, schedule = grid_plan("one_f_one_b", part_bytes=3000).with_messages
    apart = changed(schedule, lambda own: own.update({Lane(1, "more"): [own[Lane(1, "comm")].pop()]}))
    apart.validate(graph)
    message = r"1A0 is on lane 1/comm and 1A0/\d on lane 1/more: ranks 1 and 3 could start them in different orders"
    with pytest.raises(ScheduleError, match=message):
        check_collectives(graph, apart, GRID)
    with pytest.raises(ScheduleError, match=message):  # whichever rank looks
        lower(graph, apart, ranks=4, rank=0)


# ----------------------------------------------------------------------------------------------------------------- runs
def test_groups_sum_among_themselves():
    def work(communicator: Communicator):
        group = communicator.group(RankGrid(3, 2).group(communicator.rank))
        assert group is communicator.group(RankGrid(3, 2).group(communicator.rank))
        assert communicator.group(tuple(range(6))) is communicator
        return group.rank, group.size, group.gather(communicator.rank)

    assert run_ranks(6, work) == [(0, 2, [0, 3]), (0, 2, [1, 4]), (0, 2, [2, 5]),
                                  (1, 2, [0, 3]), (1, 2, [1, 4]), (1, 2, [2, 5])]


# ---------------------------------------------------------------------------------------------------------- the trainer
JOB = {"model": "mlp", "model_args": {"hidden": 16, "layers": 4}, "batch_size": 16, "micro_batches": 2,
       "scheduler": "one_f_one_b", "parallel": "pipeline"}


def on_ranks(grid, work, **job):
    """`work(trainer)` on every rank of a grid, after each has recorded the step of its replica."""
    own = [Recorded(Job(**JOB | job), grid.place(rank)[0], grid.replicas) for rank in range(grid.size)]
    return run_ranks(grid.size, lambda c: work(PipelineTrainer(own[c.rank], COST, c, Link(50.0, 1e3))))


def test_replicas_that_drift_apart_are_noticed():
    def work(trainer):
        trainer.step()
        if trainer.communicator.rank == 3:
            held = {id(trainer.recorded.graph.storages[i].live) for i in trainer._mine}
            p = next(p for p in trainer.recorded.model.parameters() if id(p.storage) in held)
            p.storage.data[...] += 1
        trainer.finish()

    with deadline(), pytest.raises(TrainingError, match="rank 3 has other parameters than rank 1, which holds the same "
                                                        "layers, after 1 steps"):
        on_ranks(GRID, work)


def test_every_rank_ends_with_the_whole_model_and_the_mean_loss():
    def work(trainer):
        for _ in range(3):
            trainer.step()
        own = list(trainer.losses)
        trainer.finish()
        return own, trainer.losses, trainer.params_sha256()

    with deadline():
        found = on_ranks(GRID, work)
    assert len({sha for *_, sha in found}) == 1
    assert [bool(own) for own, *_ in found] == [False, True, False, True]
    for _, losses, _ in found:
        assert losses == np.mean([found[1][0], found[3][0]], axis=0).tolist()


def test_ranks_whose_plans_sum_in_different_orders_end_before_they_run(monkeypatch):
    def work(communicator):
        own = recorded_of[communicator.rank]
        monkeypatch.setattr(communicator, "own_process", True)  # threads would share one plan
        if communicator.rank == 2:
            made = own.plan
            monkeypatch.setattr(own, "plan", lambda *args, **options: replace(
                made(*args, **options), schedule=changed(
                    made(*args, **options).schedule, lambda own: own[Lane(0, "comm")].reverse())))
        PipelineTrainer(own, COST, communicator, Link(50.0, 1e3))

    recorded_of = [Recorded(Job(**JOB, scheduler_args={"part_bytes": 3000}), GRID.place(rank)[0], 2)
                   for rank in range(4)]
    with deadline(), pytest.raises(Disagreement, match="orders tasks on rank 2 otherwise than on rank 0"):
        run_ranks(4, work)


# ---------------------------------------------------------------------------------------------------------- the command
SMALL = ["--model", "mlp", "--model-arg", "layers=5", "--model-arg", "hidden=16", "--batch-size", "32",
         "--micro-batches", "4"]


PLAN = [*SMALL, "--costs", "analytic", "--ranks", "2", "--replicas", "2"]


def test_a_saved_plan_of_other_replicas_is_told(capsys, tmp_path):
    path, alone = str(tmp_path / "plan.csv"), [*PLAN[:-2], "--scheduler", "one_f_one_b"]
    reported(capsys, "plan", *alone, "--replicas", "2", "--save", path)
    said = reported(capsys, "check", path, *alone, code=1)
    assert said["error"].endswith("A0 sums over replicas of a network, but there is one; say how many there are "
                                  "(--replicas)")
    reported(capsys, "plan", *alone, "--save", path)
    assert "A0 is missing" in reported(capsys, "check", path, *alone, "--replicas", "2", code=1)["error"]


def test_all_reduces_of_replicas_have_a_price(capsys):
    flags = [*PLAN, "--scheduler", "gpipe", "--latency", "100"]
    ring, tree = (reported(capsys, "simulate", *flags, "--replicas", "4", "--collective", shape)["makespan"]
                  for shape in ("ring", "tree"))
    assert ring == pytest.approx(tree + 200), "six messages in a row, or four"
    found = reported(capsys, "explain", "0A0", *flags)
    assert found["end"] - found["start"] == pytest.approx(200)
    assert found["needs"] == ["0B3"]


@pytest.mark.slow
@under_mpi
def test_a_run_goes_on_on_another_grid(tmp_path, capsys):
    """Two replicas of two ranks, then two data-parallel ranks of MPI, then two replicas of three."""
    data, grid = ["--parallel", "data", "--scheduler", "fifo"], ["--parallel", "pipeline", "--replicas", "2"]
    saved = ["--costs", "analytic", "--checkpoint", str(tmp_path / "run")]
    threads = partial(reported, capsys, "train", *SMALL)
    wanted = threads(*data, *saved[:2], "--ranks", "2", "--steps", "6")["params_sha256"]
    threads(*grid, *saved, "--ranks", "2", "--scheduler", "gpipe", "--steps", "2")
    code, _, errors = command(2, *SMALL, *data, *saved[2:], "--steps", "4", "--resume")
    assert code == 0, errors
    found = threads(*grid, *saved, "--ranks", "3", "--scheduler", "zb_h1", "--steps", "6", "--resume")
    assert found["params_sha256"] == wanted


@pytest.mark.parametrize(("ranks", "flags", "line"), [
    (3, [], "3 ranks do not divide into 2 replicas of a pipeline"),
    (2, [], "a pipeline needs at least 2 ranks; start 4 or more for 2 replicas"),
    (4, ["--micro-batches", "32"], "a batch of 32 does not divide into 32 micro-batches on each of 2 replicas")])
def test_what_no_grid_can_do_is_one_line(ranks, flags, line, capsys):
    own = [*SMALL, "--parallel", "pipeline", "--replicas", "2", "--scheduler", "gpipe", *flags]
    assert line in told_apart(capsys, *[own] * ranks)
