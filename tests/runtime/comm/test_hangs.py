"""Never a hang: the orders of messages on which published pipelines hung are refused before they run, or run; and what
does not come has a deadline.

Messages are of 8 KiB and more: an MPI takes smaller ones before they are received, so that they prove nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pipelines
import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT, together, until
from helpers import planned as planned_tasks
from launcher import MPIEXEC, under_mpi
from rank_runs import alone, check, on_ranks, prepared

from minidl import models
from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.core.tasks import RECEIVES, SENDS, Kind
from minidl.passes.messages import check_rendezvous
from minidl.plans.program import lower
from minidl.runtime.comm import Host, RankError, Standstill, Wait, loopback
from minidl.runtime.comm.flight import Abandoned, Entry, Flight
from minidl.runtime.comm.loopback import LoopBack
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers.pipeline import add_communication

WIDTH, SHARE = 256, 8  # 8 KiB a message


# --------------------------------------------------------------------------------------------------- orders of messages
def inline(graph, schedule, side_lane=False):
    """All of a rank on one lane: each send after what makes it, each receive before what reads it, as
    everybody writes it once.
    `side_lane`: messages in that order on one lane beside."""
    lanes, sends, receives = {}, {}, {}
    place = {key: i for i, key in enumerate(schedule.keys.tolist())}
    computes = ~np.isin(graph.kind, [*SENDS, *RECEIVES])
    for t in range(len(graph)):
        if graph.kind[t] in SENDS:
            sends.setdefault(next(int(p) for p in graph.preds[t] if computes[p]), []).append(t)
        if graph.kind[t] in RECEIVES:
            readers = [s for s in range(len(graph)) if t in graph.preds[s] and computes[s]]
            receives.setdefault(min(readers, key=lambda s: place[int(graph.keys[s])]), []).append(t)
    for i, lane in enumerate(schedule.lanes):
        if lane.name == "main":
            mine, beside = [], []
            for t in graph.find(schedule.order(i)).tolist():
                beside += [*receives.get(t, []), *sends.get(t, [])]
                mine += [*receives.get(t, []), t, *sends.get(t, [])]
            lanes[lane] = [t for t in mine if not side_lane or t not in set(beside)]
            if side_lane:
                lanes[Lane(lane.rank, "messages")] = beside
    return Schedule.of(graph, lanes)


def swapped_by_parity(schedule):
    """The cure of (b) that does not help: on odd ranks a receive goes before the send next to it."""
    names = {lane: schedule.names(i) for i, lane in enumerate(schedule.lanes)}
    for lane, tasks in names.items():
        for i in range(len(tasks) - 1):
            if lane.rank % 2 and "S" in tasks[i] and "R" in tasks[i + 1]:
                tasks[i], tasks[i + 1] = tasks[i + 1], tasks[i]
    return Schedule.from_names(names)


def refused(graph, schedule):
    """The tasks of the circle that the proof names, in one line."""
    with pytest.raises(ScheduleError, match="deadlock under rendezvous sends") as error:
        check_rendezvous(graph, schedule)
    assert "\n" not in error.value.message
    return set(error.value.tasks)


@pytest.mark.parametrize(("name", "cure", "rows", "circle"), [
    ("one_f_one_b", False, {}, {"0SF1>1", "1SO0>0"}),
    ("interleaved", False, {0: "0F1,0SF1>1,1RF0>0,2F0", 1: "1F0,1SF0>0,0RF1>1,1F1"}, {"0SF1>1", "1SF0>0"}),
    ("interleaved", True, {1: "2RF1>1,3SO0>0,3F1"}, {"0SF2>1", "3SO0>0"})],
    ids=["a: two ranks that both send first", "b: two stages on each of two ranks", "c: the same swapped by parity"])
def test_abc_messages_inline(name, cure, rows, circle):
    plan = pipelines.plan(name, 2, 4)
    graph, schedule = add_communication(plan.graph, plan.schedule)
    inlined = swapped_by_parity(inline(graph, schedule)) if cure else inline(graph, schedule)
    for rank, part in rows.items():
        assert f",{part}," in ",".join(inlined.names(rank))
    assert circle <= refused(graph, inlined)
    assert cure or circle == refused(graph, inlined)
    check_rendezvous(graph, schedule)


def skipping():
    """Rank 0's result goes to ranks 1 and 2."""
    return planned_tasks(("0F0", "", "a"), ("0SF0>2", "a", "far"), ("0SF0>1", "a", "near"), ("0RF0>1", "near", "near"),
                         ("1F0", "near", "b"), ("1SF0>2", "b", "next"), ("1RF0>2", "next", "next"),
                         ("0RF0>2", "far", "far"), ("2F0", "next far", "c"), nbytes=8192)


def test_d_a_skip_over_a_stage_whose_receives_are_one_batch():
    graph = skipping()
    rank0, rank1 = ["0F0", "0SF0>2", "0SF0>1"], ["0RF0>1", "1F0", "1SF0>2"]
    wrong = Schedule.from_names({Lane(0): rank0, Lane(1): rank1, Lane(2): ["1RF0>2", "0RF0>2", "2F0"]})
    assert {"0SF0>2", "0SF0>1"} <= refused(graph, wrong)
    apart = Schedule.from_names({Lane(0): ["0F0"], Lane(0, "send->2"): ["0SF0>2"], Lane(0, "send->1"): ["0SF0>1"],
                                 Lane(1): rank1, Lane(2): ["2F0"], Lane(2, "recv<-0"): ["0RF0>2"],
                                 Lane(2, "recv<-1"): ["1RF0>2"]})
    check_rendezvous(graph, apart)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "micro_batches"),
                         [("looped_bfs", 2), ("looped_bfs", 8), ("interleaved", 4), ("gpipe", 4), ("one_f_one_b", 4)])
def test_e_all_messages_of_a_rank_in_one_queue(name, micro_batches):
    own = planned(name, 4, micro_batches)
    graph, schedule = own[0][1].with_messages
    queue = inline(graph, schedule, side_lane=True)
    try:
        check_rendezvous(graph, queue)
    except ScheduleError:
        assert (name, micro_batches) not in {("looped_bfs", 2), ("gpipe", 4)}
        with pytest.raises(ScheduleError, match="deadlock under rendezvous sends"):
            lower(graph, queue, ranks=4)
    else:
        queued = [(run, replace(plan).with_known(with_messages=(plan.with_messages[0], queue))) for run, plan in own]
        settings = of(name, 4, micro_batches)
        assert on_ranks(settings, queued).tensors == alone(settings).tensors


def message(communicator, kind, peer, array=None, task=0, **more):
    array = np.zeros(2048, "f") if array is None else array
    transfer = communicator.bind(kind, Host(communicator, [array], sums=False), None, peer)
    return Entry(task, transfer, None, array.nbytes, peers=(peer,), **more)


def move(communicator, kind, peer, *array):
    flight = Flight(communicator)
    flight.submit(message(communicator, kind, peer, *array))
    flight.drain()


def test_an_event_let_through_after_the_rank_gave_up_is_no_error_of_its_own():
    """Another thread opens all events, then this one records what has ended: the first error is the one that counts."""
    def work(communicator):
        flight = Flight(communicator)

        def look():
            flight.abandon()
            raise RuntimeError("release unlocked lock")

        flight._look = look
        with pytest.raises(Abandoned):
            flight.look()

    together(1, work)


def test_f_a_wait_for_one_of_several_transfers_moves_all():
    """Rank 0 waits for rank 2 alone, which sends when it has heard of rank 1, whose message to rank 0 comes first."""
    def work(communicator):
        arrays = [np.full(2**16, communicator.rank, "f") for _ in range(2)]
        if communicator.rank == 0:
            flight, ended = Flight(communicator), []
            flight.begin([[message(communicator, Kind.RF, 1, arrays[0])],
                          [message(communicator, Kind.RF, 2, arrays[1], 1, done=[lambda: ended.append(2)])]])
            flight.until(lambda: bool(ended), 2, "rank 2's")
            flight.run()
        elif communicator.rank == 1:
            move(communicator, Kind.SF, 0, arrays[0])
            move(communicator, Kind.SF, 2, arrays[0])
        else:
            move(communicator, Kind.RF, 1, arrays[0])
            move(communicator, Kind.SF, 0, arrays[0])
        return float(arrays[1][0])

    assert together(3, work)[0] == 1, "what rank 1 told rank 2"


# ------------------------------------------------------------------------------------------------------------ real runs
def wide(*_: bool) -> Any:
    return models.mlp(12, *[WIDTH] * 8, 5)


def of(name: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Settings of `rank_runs` in which all messages have 8 KiB."""
    return {"scheduler": name, "ranks": ranks, "micro_batches": micro_batches, "rows": SHARE, "network": wide}


def planned(name: str, ranks: int, micro_batches: int) -> list[Any]:
    """The run and the plan of each rank."""
    own = prepared(of(name, ranks, micro_batches))
    graph = own[0][1].with_messages[0]
    assert graph.bytes[np.isin(graph.kind, SENDS)].min() >= 8192
    return own


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [
    ("one_f_one_b", 2, 4), ("interleaved", 2, 4), ("interleaved", 4, 4),
    *((name, 4, few) for few in (1, 2, 3) for name in (
        "gpipe", "one_f_one_b", "zb_h1", "zb_auto", "fast_forward", "modulo", "looped_bfs", "hanayo", "zb_v"))])
def test_g_the_orders_of_a_to_c_run_with_a_lane_for_each_peer_and_direction(name, ranks, micro_batches):
    """And with fewer micro-batches than ranks."""
    check(of(name, ranks, micro_batches))


def test_a_run_is_proved_before_it_starts():
    own = planned("one_f_one_b", 2, 4)

    def work(communicator):
        graph, schedule = own[communicator.rank][1].with_messages
        DistributedExecutor(graph, inline(graph, schedule), communicator)

    with pytest.raises(ScheduleError, match="deadlock under rendezvous sends"):
        together(2, work)


def test_a_message_without_its_other_end_is_refused():
    graph = skipping()
    kept = graph.take(np.array([i for i in range(len(graph)) if graph.name(i) != "0RF0>2"]))
    schedule = Schedule.from_names({Lane(0): ["0F0", "0SF0>2", "0SF0>1"], Lane(1): ["0RF0>1", "1F0", "1SF0>2"],
                                    Lane(2): ["1RF0>2", "2F0"]})
    with pytest.raises(ScheduleError, match="0SF0>2 is a send with 0 receives; it must have exactly one"):
        check_rendezvous(kept, schedule)


# ------------------------------------------------------------------------------------------------------------ deadlines
def receives(communicator, peer, name):
    flight = Flight(communicator)
    flight.begin([[message(communicator, Kind.RF, peer, name=name)]])
    flight.run()


def waiting(work, ranks, monkeypatch, seconds=0.5):
    monkeypatch.setattr(LoopBack, "wait_seconds", seconds)
    with pytest.raises(Standstill) as error:
        together(ranks, work)
    return str(error.value)


@pytest.mark.parametrize(("peers", "circle"), [
    ((1, 2, 0), ["rank 0 waits for rank 1 (0RF7)", "rank 1 waits for rank 2 (1RF7)", "rank 2 waits for rank 0 (2RF7)"]),
    ((1, 0, 0), ["rank 0 waits for rank 1 (0RF7)", "rank 1 waits for rank 0 (1RF7)"]),
    ((1, None, None), ["rank 0 waits for rank 1 (0RF7)", "rank 1 waits for all others (to meet)"])],
    ids=["circle", "outside", "meeting"])
def test_ranks_that_wait_for_each_other_say_who_waits_for_whom(peers, circle, monkeypatch):
    """Also a rank outside the circle sees it."""
    seen = {}

    def work(communicator):
        peer = peers[communicator.rank]
        try:
            communicator.gather(None) if peer is None else receives(communicator, peer, f"{communicator.rank}RF7")
        except RankError as error:
            seen[communicator.rank] = error.rank
            raise

    found = waiting(work, 3, monkeypatch)
    assert seen.keys() == {0, 1, 2}
    assert {*seen.values()} <= {0, 1, 2}
    orders = [circle[i:] + circle[:i] for i in range(len(circle))]
    if peers == (1, 0, 0):  # the one outside may be the first to see it
        orders += [["rank 2 waits for rank 0 (2RF7)", *circle]]
    assert found in {"the ranks wait for each other: " + "; ".join(order) for order in orders}


def test_a_wait_that_is_over_is_no_longer_known():
    one, other = LoopBack.ranks(2)
    now = time.monotonic()
    one.publish(wait := Wait((1,), "0RF0", since=now - LoopBack.wait_seconds, looked=now))
    assert other._waits() == {0: wait}
    one.publish(None)
    assert other._waits() == {}


def test_a_group_that_crosses_its_sums_says_so_whatever_others_do(monkeypatch):
    """Ranks 0 and 2 start two sums in different orders, while rank 1, with which they share none, is at work."""
    over = threading.Event()

    def work(communicator):
        if communicator.rank == 1:
            over.wait(PATIENCE)
            return
        group, peers = communicator.group((0, 2)), (2 - communicator.rank,)
        entries = [Entry(i, group.bind(Kind.A, Host(group, [np.ones(8, "f")]), i), i, 32, name=f"0A0/{i}", peers=peers)
                   for i in range(2)]
        flight = Flight(communicator, credit=1)
        flight.begin([entries if communicator.rank == 0 else entries[::-1]])
        try:
            flight.run()
        finally:
            over.set()

    found = waiting(work, 3, monkeypatch)
    both = ["rank 0 waits for rank 2 (0A0/0)", "rank 2 waits for rank 0 (0A0/1)"]
    assert found in {"the ranks wait for each other: " + "; ".join(order) for order in (both, both[::-1])}


def test_a_rank_at_work_is_waited_for_longer_but_not_for_ever(monkeypatch):
    over = threading.Event()

    def work(communicator):
        if communicator.rank == 0:
            try:
                receives(communicator, 1, "0RO2")
            finally:
                over.set()
        else:
            over.wait(PATIENCE)

    found = waiting(work, 2, monkeypatch, 0.1)
    assert found.startswith("rank 0 waits for rank 1 (0RO2), which is at work, for more than 1 "
                            "s (a larger MINIDL_MPI_WAIT_SECONDS")


def waits_for_long(communicator, rank, seconds):
    communicator.check()
    wait = communicator._waits().get(rank)
    return wait and time.monotonic() - wait.since > seconds


def test_a_rank_that_has_not_looked_since_something_came_stands_still_with_nobody(monkeypatch):
    """As one to which a busy machine gives no turn: what it said last is that it waits."""
    monkeypatch.setattr(LoopBack, "wait_seconds", 0.5)

    def work(communicator):
        if communicator.rank == 0:
            receives(communicator, 1, "0RO2")
            return
        communicator.publish(Wait((0,), "1RF7", since=0.0, looked=0.0))
        until(lambda: waits_for_long(communicator, 0, 2 * LoopBack.wait_seconds), "rank 0 has waited for long")
        move(communicator, Kind.SF, 0)

    together(2, work)


@pytest.mark.slow
def test_a_slow_rank_is_no_standstill(monkeypatch):
    """It waits and works by turns, always longer than a wait in a circle may take."""
    monkeypatch.setattr(LoopBack, "wait_seconds", 1.0)

    def work(communicator):
        other = 1 - communicator.rank
        for turn in range(2):
            if mine := turn % 2 == communicator.rank:
                until(lambda: waits_for_long(communicator, other, LoopBack.wait_seconds), "a long wait")
            move(communicator, Kind.SF if mine else Kind.RF, other)

    together(2, work)


UNDER_MPI = """
import test_hangs
from minidl.cli.ranks import job

with job() as communicator:
    communicator.gather(None)
    test_hangs.receives(communicator, 1 - communicator.rank, f"{communicator.rank}RF7")
"""


@under_mpi
def test_ranks_of_mpi_that_wait_for_each_other_end_with_one_line():
    done = subprocess.run([str(MPIEXEC), "-n", "2", sys.executable, "-c", UNDER_MPI], capture_output=True, text=True,
                          timeout=PATIENCE, cwd=ROOT,
                          env={**os.environ, "MINIDL_MPI_WAIT_SECONDS": "2", "PYTHONPATH": IMPORTABLE})
    assert done.returncode == 2
    assert re.fullmatch(r"minidl: the ranks wait for each other: rank (0 waits for rank 1 \(0RF7\); rank 1 "
                        r"waits for rank 0 \(1RF7\)"
                        r"|1 waits for rank 0 \(1RF7\); rank 0 waits for rank 1 \(0RF7\))\n", done.stderr)


def test_ranks_need_no_working_folders_of_their_own(monkeypatch):
    """Only Linux has a call for them; if it fails, all ranks hear of it."""
    def refused(name):
        raise OSError("no such library")

    monkeypatch.setattr(loopback.ctypes, "CDLL", refused)
    with pytest.raises(OSError, match="no such library"):
        together(3, lambda comm: comm.gather(comm.rank))
    monkeypatch.setattr(loopback.sys, "platform", "darwin")
    assert together(3, lambda comm: comm.gather(comm.rank)) == [[0, 1, 2]] * 3
