"""A missing wait, and memory that is taken over too early, are found, and the tasks are named."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import SMALL, in_stages, may_share, recorded

import minidl as ml
from minidl import optim
from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.plans.memory import plan_memory
from minidl.runtime.checking import _Memory, _pieces, random_schedule
from minidl.runtime.executors import CheckingExecutor, VersionError


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_every_removed_wait_is_found_by_the_proof_and_by_versions_alone(seed):
    graph = recorded()
    schedule = random_schedule(graph, 3, np.random.default_rng(seed))
    waits = schedule.waits(graph)
    plan = plan_memory(graph, schedule)
    (values,) = SMALL.batches(1)
    for gone in range(len(waits)):
        rest = np.delete(waits, gone, axis=0)
        with pytest.raises(ScheduleError, match=r"race: nothing orders \d+[FOWU]\d+ after \d+[FOWU]\d+"):
            schedule.validate(graph, rest)
        with pytest.raises(ScheduleError, match=r"race"):
            CheckingExecutor(graph, schedule, waits=rest)
    # versions alone need a draw that shows it: over many draws every wait is missed at least once
    missed, messages = set(), set()
    for gone in range(len(waits)):
        for draw in range(60):
            run = CheckingExecutor(graph, schedule, waits=np.delete(waits, gone, axis=0), plan=plan,
                                   prove=False, seed=draw)
            try:
                with np.errstate(all="ignore"):
                    run(*values)
            except VersionError as error:
                missed.add(gone)
                messages.add(str(error))
                break
    assert len(missed) >= 0.9 * len(waits), f"{len(missed)} of {len(waits)} missing waits were noticed"
    assert all(re.search(r"^task \d+[FOWU]\d+ ", m) for m in messages)


def said(graph, schedule, x):
    """What thirty drawn orders say if no task waits for another."""
    messages = set()
    for seed in range(30):
        try:
            CheckingExecutor(graph, schedule, waits=np.empty((0, 2)), prove=False, seed=seed)(x)
        except VersionError as error:
            messages.add(str(error))
    return messages


def test_a_read_before_its_write_names_both_tasks():
    graph = ml.record(lambda x: (x + 1.0) * 2.0, np.zeros(2, np.float32))
    schedule = Schedule.from_names({Lane(0): ["0F0"], Lane(0, "sub"): ["1F0"]})
    assert said(graph, schedule, np.zeros(2, np.float32)) == {
        "task 1F0 reads 0.shift as the step before left it, but it must read what 0F0 writes"}


def test_an_overwrite_before_the_read_names_both_tasks():
    w = ml.Parameter(np.ones(2, np.float32))
    opt = optim.SGD([w], 0.1)

    def step(x):
        (x * w).sum().backward()
        other = x * w
        opt.step()
        return other

    graph = ml.record(step, np.ones(2, np.float32))
    reader = graph.index("3F0")
    schedule = Schedule.of(graph, {Lane(0): [t for t in range(len(graph)) if t != reader], Lane(0, "sub"): [reader]})
    assert [(graph.name(a), graph.name(b)) for a, b in schedule.waits(graph).tolist()] == [("0U0", "3F0")]
    assert said(graph, schedule, np.ones(2, np.float32)) == {"task 0U0 overwrites parameter before 3F0 has read it"}


@pytest.mark.few(1)
@pytest.mark.parametrize("stages", [False, True])
def test_memory_that_is_taken_over_too_early_is_noticed(stages):
    """Also within the task of a whole stage."""
    graph = in_stages(recorded()) if stages else recorded()
    schedule = Schedule.of(graph, {Lane(0): range(len(graph))})
    plan = plan_memory(graph, schedule)
    (values,) = SMALL.batches(1)
    CheckingExecutor(graph, schedule, plan=plan)(*values)
    free = may_share(graph, schedule)
    size = ml.plans.memory.rounded(np.array([s.bytes for s in graph.storages]))
    users = graph.storage_users
    placed = (plan.offset >= 0) & [len(used) > 0 for used in users]
    offset = np.where(plan.offset >= 0, np.cumsum(np.where(plan.offset >= 0, size, 0)) - size, -1)
    wrong = [*zip(*np.nonzero(np.triu(~free & placed & placed[:, None], 1)), strict=True)]
    for a, b in wrong[6::7]:  # a sample of them
        apart = offset.copy()
        apart[b] = offset[a]
        bad = replace(plan, offset=apart, arena_bytes=int(size.sum()) + int(size.max()))
        with np.errstate(all="ignore"), pytest.raises(VersionError, match=r"memory"):
            CheckingExecutor(graph, schedule, plan=bad)(*values)
    assert len(wrong) > 200


def test_an_output_whose_memory_is_taken_over_is_noticed():
    x = np.ones(64, np.float32)
    graph = ml.record(lambda x: (x + 1.0, (x * 2.0).exp()), x)
    schedule = Schedule.of(graph, {Lane(0): range(len(graph))})
    plan = plan_memory(graph, schedule)
    first, inner = graph.outputs[0].storage, int(graph.buffer_storage[graph.writes[1][0]])
    offset = plan.offset.copy()
    offset[inner] = offset[first]
    with pytest.raises(VersionError, match=r"has overwritten"):
        CheckingExecutor(graph, schedule, plan=replace(plan, offset=offset))(x)


def test_what_has_no_elements_takes_no_memory():
    x = np.ones(64, np.float32)
    graph = ml.record(lambda x: (x + 1.0, x[:0] * 2.0), x)
    schedule = Schedule.of(graph, {Lane(0): range(len(graph))})
    plan = plan_memory(graph, schedule)
    offset = plan.offset.copy()
    offset[graph.outputs[1].storage] = offset[graph.outputs[0].storage]
    whole, none = CheckingExecutor(graph, schedule, plan=replace(plan, offset=offset))(x)
    assert whole.numpy().tolist() == [2] * 64
    assert none.shape == (0,)


def test_the_memory_that_the_check_itself_takes_grows_with_the_storages():
    n = 5_000  # all at one offset, as the weight gradients of a deep network; pairs of them would be 25 million
    graph: Any = SimpleNamespace(storages=[SimpleNamespace(bytes=256, name=f"s{i}") for i in range(n)])
    plan: Any = SimpleNamespace(offset=np.zeros(n, np.int64))
    tracemalloc.start()
    memory = _Memory(graph, _pieces(graph, plan))
    for s in range(n):
        memory.touch([s], f"task {s}")
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    with pytest.raises(VersionError, match=f"task 9 needs s1, whose memory s{n - 1} has overwritten"):
        memory.touch([1], "task 9")
    with pytest.raises(VersionError, match="task 9 needs s0 and s1 at once, which share memory"):
        _Memory(graph, _pieces(graph, plan)).touch([0, 1], "task 9")
