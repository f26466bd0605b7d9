"""Lanes that one thread runs: the first ready task of a hint, waits kept, errors that name their task."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from minidl.devices.lanes import LaneError, Stop, Work
from minidl.devices.picking import Picking


def lanes(tasks: list[list[int]], waits: list[tuple[int, int]], place: list[int], ran: list[int], **more: Any) -> Any:
    work = Work([f"lane{i}" for i in range(len(tasks))], [0] * len(tasks), tasks, waits,
                lambda task, stream: [partial(ran.append, task)], str, **more)
    return Picking(work, dict(enumerate(place)))


def test_the_first_ready_task_of_the_hint_runs() -> None:
    ran: list[int] = []
    picking = lanes([[0, 1, 2], [3, 4]], [(4, 2)], [0, 4, 3, 1, 2], ran)
    for _ in range(2):
        ran.clear()
        picking.run()
        assert ran == picking.realised == [0, 3, 1, 2, 4], "lanes keep their order, and 4 waits for 2"
    picking.order = [3, 0, 1, 2, 4]
    ran.clear()
    picking.run()
    assert ran == [3, 0, 1, 2, 4]
    assert not picking.given_up


def test_a_task_waits_for_what_arrives_and_others_run_meanwhile() -> None:
    ran, looks, idle = list[int](), list[int](), list[int]()

    def arrives(task: int) -> list[Any]:
        return [lambda: looks.append(task) or len(looks) > 3] if task == 0 else []

    def wait(ready: Any, task: int) -> None:
        idle.append(task)
        while not ready():
            pass

    picking = lanes([[0], [1, 2]], [], [0, 1, 2], ran, polls=arrives, idle=wait)
    picking.run()
    assert ran == [1, 2, 0]
    looks.clear()
    picking.order = [0, 1, 2]
    picking.run()
    assert ran[3:] == [0, 1, 2], "an order waits"
    assert set(idle) == {0}


def test_an_error_names_its_task_and_lane_and_a_run_that_is_given_up_ends() -> None:
    def boom(task: int, stream: Any) -> list[Any]:
        return [lambda: 1 // (task - 3)]

    failing = Picking(Work(["a", "b"], [0, 0], [[0, 1], [2, 3]], [], boom, str), dict(enumerate(range(4))))
    with pytest.raises(LaneError) as caught:
        failing.run()
    assert (caught.value.task, caught.value.lane, type(caught.value.error)) == (3, 1, ZeroDivisionError)
    never = lanes([[0]], [], [0], [], polls=lambda task: [lambda: False], idle=lambda ready, task: None)
    never.give_up(Stop(ArithmeticError("no luck")))
    with pytest.raises(ArithmeticError, match="no luck"):
        never.run()
