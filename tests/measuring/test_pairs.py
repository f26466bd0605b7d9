"""Samples of groups of tasks, and how long programs take beside each other."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

import minidl as ml
from minidl.devices.device import cpu
from minidl.devices.lanes import Stop, Stream
from minidl.measuring import lanes, pairs
from minidl.pricing.cost import Cross


@pytest.mark.parametrize(("durations", "wanted"), [
    ([0.1] * 9, [*range(9)]), ([1.0, 9.0, 5.0], [2]), ([0.5] * 8, [0, 4]), ([0.25] * 10, [0, 2, 5, 7])])
def test_a_sample_is_spread_evenly_over_its_group(durations, wanted):
    """The tasks of a group are numbered 3, 6, 9 ... here."""
    tasks = [3 * i + 3 for i in range(len(durations))]
    of_task = np.zeros(3 * len(durations) + 3)
    of_task[tasks] = np.array(durations) * pairs.PIECE
    assert pairs._piece(tasks, of_task) == [3 * i + 3 for i in wanted]


def test_programs_beside_each_other_are_timed_by_the_run(monkeypatch):
    """Here the other program has ended before the first one begins."""
    now = [0.0]

    def takes(microseconds):
        return lambda: now.__setitem__(0, now[0] + microseconds * 1e-6)

    stream = SimpleNamespace(start=lambda program, on_error: cpu().once(program), join=Stop)
    monkeypatch.setattr(pairs, "perf_counter", lambda: now[0])
    assert pairs._together(stream, [takes(1), takes(2)], 5, [takes(7)], 4) == pytest.approx((3, 7))
    assert pairs._microseconds([takes(1), takes(2)], 5) == pytest.approx(3)


def test_an_interrupt_ends_a_measurement():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pairs._microseconds([interrupted], 5)
    stream = Stream("fails")  # before both programs have run once
    with pytest.raises(KeyboardInterrupt):
        pairs._together(stream, [lambda: None], 1, [interrupted], 4)
    stream.close()


def test_what_crosses_from_core_to_core_costs_more_by_the_byte(monkeypatch):
    """By four: a write and a read beside another core, then the same of a lane's own data."""
    stamps = np.zeros((lanes.ROUNDS, 8, 3))
    stamps[..., 2] = [5.0, 9.0, 3.0, 1.0] * 2
    monkeypatch.setattr(lanes, "stamped", lambda device, work, cores: stamps)
    assert lanes.measure_cross(None, (0, 1), rounds=2, nbytes=64) == Cross(8 / 64, 2 / 64, "measured")
    assert lanes.measure_cross(None, (0,)) == lanes.ASSUMED


def test_lanes_that_were_held_to_cores_leave_the_process_where_it_was():
    before = os.sched_getaffinity(0)
    work = lanes.probe([[0], [1]], [], lambda task, stream: [])
    assert lanes.stamped(ml.device.cpu(), work, (min(before),) * 2).shape == (lanes.ROUNDS, 2, 3)
    assert os.sched_getaffinity(0) == before


def test_the_bandwidth_is_that_of_the_copies_of_all_lanes(monkeypatch):
    """Of two lanes, each with its part of the bytes, and one task before its copies; a stopped lane counts little."""
    nbytes, found, device = 1 << 25, [], ml.device.cpu()

    def stamped(device, work, cores):
        copies = len(work.tasks) * lanes.COPIES
        stamps = np.zeros((lanes.ROUNDS, len(work.tasks) + copies, 3))
        stamps[:, len(work.tasks) :, 2] = 50.0
        stamps[0, :, 2] = 900.0
        stamps[1, -1, 2] = 7000.0
        assert all(len(own) == 1 + lanes.COPIES for own in work.tasks)
        found.extend(work.waits)
        return stamps

    monkeypatch.setattr(lanes, "stamped", stamped)
    assert lanes.copied(device, (0,), nbytes) == nbytes / lanes.PIECES / 50
    assert not found
    assert lanes.copied(device, (0, 1), nbytes) == nbytes / lanes.PIECES / 50
    assert found == [(2, 1), (2 + lanes.COPIES, 0)], "they begin when all have come"
    assert lanes.copied(device, (0, 1), 1) == 2 * lanes.OWN / lanes.PIECES / 50, "more than a core's own cache"


def test_the_memory_that_lanes_share_is_measured(both_lanes, monkeypatch):
    device, before = ml.device.CPU(), os.sched_getaffinity(0)
    assert lanes.measure_memory(device, 1 << 10) is None, "a core's own cache holds them"
    memory = lanes.measure_memory(device, 1 << 22)
    assert os.sched_getaffinity(0) == before
    assert (memory is None) == (len(lanes.lane_cores()) < 2)
    if memory:
        assert memory.lanes == lanes.cores()
        assert memory.one > 1
        assert memory.every > 1
        assert lanes.measure_memory(device, lanes.SIZES[0]) is memory, "once in a process for each size"
    monkeypatch.setattr(lanes, "lane_cores", lambda: (0,))
    assert lanes.measure_memory(device, 1 << 30) is None
