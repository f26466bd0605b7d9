"""DualPipe and DualPipeV against the authors' eight steps, which are loops over forwards, backwards and pairs."""

import random
from collections import Counter, deque

import pipelines
import pytest

from minidl.core.tasks import task_name


def authors(depth, place, micro_batches, streams):
    """A rank's actions, step by step; each stream is (stage, first micro-batch)."""
    inner, count, left, found = depth - place - 1, Counter(), deque(), []

    def task(action):
        letter, (stage, first) = action[0], streams[int(action[1])]
        number = count[letter == "F", stage]
        count[letter == "F", stage] += 1
        if letter == "O":
            left.append(f"{stage}W{first + number}")
        return f"{stage}{letter}{first + number}"

    def act(*tasks):
        found.append([task(each) for each in tasks])

    def weight():
        found.append([left.popleft()])

    for _ in range(2 * inner):  # 1
        act("F0")
    for _ in range(place + 1):  # 2
        act("F0")
        act("F1")
    for _ in range(inner):  # 3
        act("O1")
        weight()
        act("F1")
    for i in range(micro_batches - 2 * depth + place + 1):  # 4: the first pair of the innermost rank is none
        for pair in ([["F0"], ["B1"]] if i == 0 == inner else [["F0", "B1"]]) + [["F1", "B0"]]:
            act(*pair)
    for _ in range(inner):  # 5
        act("B1")
        act("F1", "B0")
    for i in range(2 * (place + 1)):  # 6: the second half leaves its weight gradients
        act("BO"[i > place] + "10"[i % 2])
    for _ in range(inner):  # 7
        weight()
        act("O0")
    while left:  # 8
        weight()
    return found


def planned(schedule):
    rows = [[] for _ in schedule.lanes]
    for key, lane, second in zip(schedule.keys.tolist(), schedule.lane_of_each().tolist(), schedule.second.tolist(),
                                 strict=True):
        rows[lane].append([*rows[lane].pop(), task_name(key)] if second else [task_name(key)])
    return rows


@pytest.mark.parametrize("name", ["dualpipe_v", pytest.param("dualpipe", marks=pytest.mark.slow)])
def test_the_order_is_that_of_the_authors_in_50_random_sizes(name):
    rng = random.Random(1)
    for _ in range(50):
        p = 2 * rng.randint(1, 8)
        m, wanted = 2 * rng.randint(p, 2 * p + 4), []
        for rank in range(p):
            streams = [(rank, 0), (p - 1 - rank, m // 2) if name == "dualpipe" else (2 * p - 1 - rank, 0)]
            wanted.append(authors(p, rank, m, streams) if name == "dualpipe_v" else
                          authors(p // 2, min(rank, p - 1 - rank), m // 2, streams[:: -1 if rank >= p // 2 else 1]))
        assert planned(pipelines.plan(name, p, m).schedule) == wanted, (p, m)
