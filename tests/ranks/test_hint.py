"""An order as a hint, on ranks whose tasks sleep at random: runs are bit-identical to one process, keep the cap, and
can be replayed from the log of their order; no preference of a rank makes another one wait for ever."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import refusal, reported, run_json
from helpers import deadline, together
from rank_runs import Run, alone, merged, prepared

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.schedule import ScheduleError
from minidl.core.tasks import GraphError, Kind, What, unpack
from minidl.passes.hint import CHAINED, Hint, windows
from minidl.runtime.bound import Bound
from minidl.runtime.comm.flight import Election
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import runtime
from minidl.schedulers import pipeline

POLICIES = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_auto", "fast_forward", "interleaved", "interleaved_zb",
            "modulo", "looped_bfs", "zb_v", "v_half", "hanayo", "chimera"]
CASES = int(os.environ.get("MINIDL_CASES", "500"))
BLOCK = 25  #: cases of one test of the campaign
ROUNDS = 3  #: steps


def settings_of(seed: int) -> dict[str, Any]:
    """A random pipeline under a hint."""
    draw = random.Random(seed)
    ranks, name = draw.choice([2, 2, 3, 4]), draw.choice(POLICIES)
    micro_batches = draw.choice([2, 4, 6, 8])
    if name == "chimera":
        ranks, micro_batches = draw.choice([2, 4]), draw.choice([4, 8])
    if name == "zb_h2":
        micro_batches = 8
    if name.startswith("interleaved"):
        micro_batches = ranks * draw.choice([1, 2])
    more: dict[str, Any] = {"norm": draw.random() < 0.3, "drop": draw.random() < 0.3, "tied": draw.random() < 0.2,
                            "optimizer": draw.choice(["sgd", "adam"]), "clip": draw.choice([None, None, 0.05])}
    if draw.random() < 0.2:
        more["recompute"] = "all"
    if draw.random() < 0.15 and name != "chimera":
        more["replicas"], more["ranks"] = 2, 2
    cap = draw.choice([None, None, "2p-s", 1, 2, "p", "m"])
    return {"loss": True, "scheduler": name, "ranks": ranks, "micro_batches": micro_batches,
            "options": {"order": "hint"} | ({"cap": cap} if cap else {}),
            **({"groups": 2} if name == "chimera" else {}), **more}


def kept(plan: Any, order: list[int]) -> Counter[int]:
    """For each stage the most micro-batches at once between their forward and their last use, in a rank's order."""
    own = unpack(np.array(order, np.int64))
    left = Counter((u, m) for u, m, k in zip(own.unit, own.micro_batch, own.kind, strict=True) if k in CHAINED)
    live, most = Counter[int](), Counter[int]()
    for unit, micro_batch, kind in zip(own.unit, own.micro_batch, own.kind, strict=True):
        if kind not in CHAINED:
            continue
        live[unit] += kind == Kind.F
        most[unit] = max(most[unit], live[unit])
        left[unit, micro_batch] -= 1
        live[unit] -= not left[unit, micro_batch]
    return most


def train(communicator: Any, run: Run, plan: Any, nap: float, seed: int, replays: Any = None,
          shuffled: bool = False) -> Any:
    """A rank's losses, tensors and orders; tasks sleep at random. `shuffled`: its preferences are random."""
    execute = runtime(plan.program(communicator.rank), transport=communicator)
    draw, lanes = random.Random(f"{seed} {communicator.rank} {replays is None}"), execute._body[0].lanes
    for calls in lanes._calls.values():
        calls.insert(0, lambda: time.sleep(nap * draw.random() ** 3))
    if shuffled:
        lanes._place = {t: draw.random() for t in lanes._place}
    losses, did = [], []
    for step, parts in enumerate(run.batches()):
        execute.follow(None if replays is None else replays[step][communicator.rank])
        losses.append(execute(*parts))
        did.append(execute.realised())
    execute.settle()
    bound = execute._body[0].bound
    assert sum(map(len, {id(m): m for m in (bound.arena, *bound.persistent)}.values())) == execute.peak_bytes
    execute.whole(everywhere=True)
    execute.close()
    held = {id(live) for s in execute.program.graph.storages for live in (s.live, s.share_of) if live is not None}
    return [np.asarray(loss).tobytes() for loss in losses if loss is not None], run.tensors(held), did


def checked(settings: dict[str, Any], seed: int, nap: float = 1e-3, shuffled: bool = False) -> None:
    try:
        own = prepared(settings)
    except PlanError as error:
        pytest.fail(f"{settings}: {error}")
    plan, ranks = own[0][1], settings["ranks"]
    found = together(len(own), lambda c: train(c, *own[c.rank], nap, seed, shuffled=shuffled))
    left, wanted = merged(settings, [(*each[:2], []) for each in found]), alone(settings)
    assert (left.losses, left.tensors) == (wanted.losses, wanted.tensors), settings
    for rank, (_, _, did) in enumerate(found):
        for order in did:
            for stage, most in kept(plan, order).items():
                assert most <= plan.hint.caps[rank % ranks, stage], (settings, rank, stage)
    orders = [[each[2][step] for each in found] for step in range(len(found[0][2]))]
    for each in orders:
        for first in range(0, len(each), ranks):
            plan.realised(each[first : first + ranks])
    again = prepared(settings)
    replayed = together(len(again), lambda c: train(c, *again[c.rank], nap, seed, orders))
    assert [each[2] for each in replayed] == [each[2] for each in found], "a replay keeps the order"
    left = merged(settings, [(*each[:2], []) for each in replayed])
    assert (left.losses, left.tensors) == (wanted.losses, wanted.tensors), settings


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_pipelines_leave_the_bits_of_one_process_keep_the_cap_and_repeat(seed: int) -> None:
    checked(settings_of(seed), seed)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(4, CASES, BLOCK))
def test_many_random_pipelines_leave_the_bits_of_one_process_keep_the_cap_and_repeat(first: int) -> None:
    for seed in range(first, min(first + BLOCK, CASES)):
        checked(settings_of(seed), seed)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_ranks_may_prefer_whatever_they_like(name: str) -> None:
    """Two ranks with different, random hints never wait for each other in a circle."""
    checked({"loss": True, "scheduler": name, "ranks": 2, "micro_batches": 6,
             "options": {"order": "hint", "cap": 3}}, 7, nap=2e-4, shuffled=True)


def test_what_is_not_kept_in_order_is_noticed() -> None:
    """The tests above would notice a run without its waits."""
    (_, plan), *_ = prepared({"loss": True, "scheduler": "one_f_one_b", "ranks": 2,
                              "options": {"order": "hint", "cap": 1}})
    order = [k for lane in range(2) for k in plan.schedule.order(lane)]
    assert max(kept(plan, [int(k) for k in order]).values()) == 1
    assert windows(plan.graph, plan.schedule) == plan.hint.caps
    first = plan.schedule.order(0).tolist()
    at = [i for i, k in enumerate(first) if unpack(np.array(k)).kind == Kind.F][1]
    ahead = [*first[:1], first[at], *first[1:at], *first[at + 1 :]]
    assert kept(plan, ahead)[0] == 2
    with pytest.raises(ScheduleError, match="needs it: it reads its turn under the hint"):
        plan.realised([ahead, plan.schedule.order(1).tolist()])
    backwards = replace(plan, hint=Hint(plan.hint.caps, ((first[-1], first[0]),)))
    with pytest.raises(GraphError, match="cannot wait for 0U0, which comes after it"):
        backwards.divided()


def test_a_timeline_has_the_lanes_of_a_fixed_order() -> None:
    own = prepared({"loss": True, "network": "mlp", "scheduler": "zb_v", "ranks": 2, "options": {"order": "hint"}})

    def work(communicator: Any) -> Any:
        run, plan = own[communicator.rank]
        execute = runtime(plan.program(communicator.rank), transport=communicator, trace=True)
        execute(*run.batches()[0])
        return execute.timeline, execute.realised()

    found = together(2, work)
    for rank, (timeline, order) in enumerate(found):
        assert [str(lane) for lane in timeline.lanes] == [f"{rank}/{name}" for name in (
            "main", f"recv<-{1 - rank}", f"send->{1 - rank}")]
        main = [i for i in range(len(timeline.key)) if timeline.lane[i] == 0 and timeline.what[i] == What.TASK]
        assert [int(timeline.key[i]) for i in main] == order
        assert all(timeline.end[a] <= timeline.issued[b] + 1e-6 <= timeline.start[b] + 2e-6
                   for a, b in pairwise(main))


def test_a_device_that_is_issued_ahead_is_refused() -> None:
    (_, plan), *_ = prepared({"loss": True, "network": "mlp", "ranks": 2, "options": {"order": "hint"}})
    with pytest.raises(ml.DeviceError, match="order=hint: cuda:0 issues a step ahead .* take --device cpu"):
        runtime(plan.program(0), device=SimpleNamespace(captures=True, name="cuda:0"))


def test_a_failing_task_ends_all_ranks() -> None:
    own = prepared({"loss": True, "network": "mlp", "scheduler": "zb_h1", "ranks": 3, "options": {"order": "hint"}})

    def boom() -> None:
        raise ArithmeticError("no luck")

    def work(communicator: Any) -> None:
        run, plan = own[communicator.rank]
        execute = runtime(plan.program(communicator.rank), transport=communicator)
        if communicator.rank == 1:
            task = next(t for t in execute._body[0].lanes._calls if execute.graph.kind[t] == Kind.W)
            execute._body[0].lanes._calls[task][0] = boom
        execute(*run.batches()[0])

    with deadline(), pytest.raises(ml.TaskError, match="on rank 1 failed: ArithmeticError: no luck"):
        run_ranks(3, work)


SUMMING = ["barrier", "buckets", "fifo", "priority", "dear", "reverse_first_k"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in SUMMING), ("priority", 3), ("dear", 3)])
def test_data_parallel_ranks_choose_the_next_sum_and_keep_the_bits(name: str, ranks: int, monkeypatch: Any) -> None:
    usual, draw = Bound.thunks, random.Random(ranks)

    def thunks(bound: Any, task: int, stream: Any = None) -> list[Any]:
        return [lambda: time.sleep(1e-3 * draw.random() ** 2), *usual(bound, task, stream)]

    monkeypatch.setattr(Bound, "thunks", thunks)
    settings = {"loss": True, "scheduler": name, "ranks": 1, "replicas": ranks, "options": {"order": "hint"}}
    wanted, orders = alone(settings), list[Any]()
    for replays in (False, True):
        own = prepared(settings)

        def work(communicator: Any, own: Any = own, replays: bool = replays, orders: Any = orders) -> Any:
            run, plan = own[communicator.rank]
            execute, losses, did = runtime(plan.program(communicator.rank), transport=communicator), [], []
            for step, parts in enumerate(run.batches()):
                execute.follow(orders[step] if replays else None)
                losses.append(np.asarray(execute(*parts)).tobytes())
                did.append(execute.realised)
            execute.settle()
            execute.close()
            held = {id(spec.live) for spec in execute.program.graph.storages if spec.live is not None}
            return losses, run.tensors(held), [order() for order in did]

        found = together(ranks, work)
        left = merged(settings, [(*each[:2], []) for each in found])
        assert (left.losses, left.tensors) == (wanted.losses, wanted.tensors)
        assert all(each[2] == found[0][2] for each in found), "ranks agree"
        for order in found[0][2]:
            own[0][1].realised([order] * ranks)
        if replays:
            assert found[0][2] == orders
        orders = [order[::-1] for order in found[0][2]] if name != "dear" else found[0][2]


def test_ranks_take_the_first_sum_that_is_ready_on_all() -> None:
    ready, votes = [[0, 2], [1, 2]], list[Any]()

    def exchange(own: Any, every: Any) -> Any:
        votes.append(own.copy())
        yield
        every[:] = votes[-2:]

    ranks = [Election({10: 0, 11: 1, 12: 2}, 2, exchange) for _ in ready]
    for rank, own in zip(ranks, ready, strict=True):
        rank._ready.update(own)
        assert not rank.chosen(12), "flags are under way"
    assert all(rank.chosen(12) for rank in ranks)
    assert not ranks[0].chosen(10)
    assert not ranks[1].chosen(11)
    for rank in ranks:
        rank.started(12)
    assert [rank.realised for rank in ranks] == [[12], [12]]
    assert all(rank.votes for rank in ranks), "one is left on each"


FLAGS = ["--model", "mlp", "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4", "--scheduler", "zb_h1",
         "--costs", "analytic"]


def test_the_command_line_logs_and_replays(capsys: Any, tmp_path: Any) -> None:
    log, again, plan = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "plan.csv"))
    train = ["train", *FLAGS, "--steps", "2"]
    fixed = reported(capsys, *train)
    hint = ["--order", "hint", "--scheduler-arg", "cap=2p-s"]
    first = reported(capsys, *train, *hint, "--log-order", str(log))
    second = reported(capsys, *train, *hint, "--replay", str(log), "--log-order", str(again))
    assert fixed["params_sha256"] == first["params_sha256"] == second["params_sha256"]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["step"], row["rank"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert log.read_text() == again.read_text()
    assert "is the log of another run: in step 1" in refusal(capsys, *train, "--order", "hint", "--scheduler-arg",
                                                             "cap=1", "--replay", str(log))
    assert "has 2 steps, and this run 3" in refusal(capsys, *train[:-1], "3", *hint, "--replay", str(log))
    assert "--log-order has no effect here; it goes with --order hint" in refusal(
        capsys, *train, "--log-order", str(again))
    run_json(capsys, "plan", *FLAGS, *hint, "--save", str(plan))
    checked = reported(capsys, "check", str(plan), *FLAGS[:8])
    assert checked["peak_activations"] == [4, 3]
    assert "every wait goes forward in an order without a circle" in checked["remarks"][-1]
    saved = FLAGS.copy()
    saved[FLAGS.index("zb_h1")] = str(plan)
    again.unlink()
    third = reported(capsys, "train", *saved, "--steps", "2", "--log-order", str(again))
    assert third["params_sha256"] == fixed["params_sha256"]
    assert again.exists()
    plan.write_text(plan.read_text().replace("# caps: 4 3", "# caps: 1 1"))
    checked = reported(capsys, "check", str(plan), *FLAGS[:8], code=1)
    assert checked["error"].startswith("the plan's 'caps' is '1 1'; this order needs")


def test_another_order_is_refused() -> None:
    with pytest.raises(PlanError, match="order is 'greedy'; it must be fixed or hint"):
        ml.plan(pipeline.Pipeline(4), "zb_h1", machine=ml.Machine(2), order="greedy")
