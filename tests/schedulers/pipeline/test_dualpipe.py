"""DualPipe and DualPipeV against the authors' eight steps, written as one expression per rank."""

import random
import re

import pipelines
import pytest

from minidl.core.tasks import Kind, task_name


def steps(depth, place, micro_batches):
    """A rank's actions: f and F are forwards of the first and the second stream, b and B whole backwards, o and O
    output gradients alone, w the oldest weight gradient left; a pair is in parentheses."""
    inner = depth - 1 - place
    main = "(fB)(Fb)" * (micro_batches - 2 * depth + place + 1)
    if inner == 0:
        main = main.replace("(fB)", "fB", 1)
    last = "Bb" * (place + 1)
    last = last[: place + 1] + last[place + 1 :].translate(str.maketrans("Bb", "Oo"))  # the second half leaves its W
    return ("f" * (2 * inner) + "fF" * (place + 1) + "OwF" * inner + main + "B(Fb)" * inner + last + "wo" * inner
            + "w" * (place + 1))


def names(text, streams):
    """The entries of a rank; each stream is (stage, first micro-batch)."""
    count = dict.fromkeys("fFbB", 0)
    found, left = [], []
    for action in re.findall(r"\(.*?\)|.", text):
        entry = []
        for letter in action.strip("()"):
            if letter == "w":
                entry.append(left.pop(0))
                continue
            key = {"o": "b", "O": "B"}.get(letter, letter)
            stage, first = streams[letter.isupper()]
            number = first + count[key]
            count[key] += 1
            entry.append(f"{stage}{letter.upper()}{number}")
            if letter in "oO":
                left.append(f"{stage}W{number}")
        found.append(entry)
    return found


def planned(schedule):
    rows = [[] for _ in schedule.lanes]
    for key, lane, second in zip(schedule.keys.tolist(), schedule.lane_of_each().tolist(), schedule.second.tolist(),
                                 strict=True):
        if second:
            rows[lane][-1].append(task_name(key))
        else:
            rows[lane].append([task_name(key)])
    return rows


def settings(seed, count=50):
    rng = random.Random(seed)
    return [(p := 2 * rng.randint(1, 8), 2 * rng.randint(p, 2 * p + 4)) for _ in range(count)]


@pytest.mark.slow
def test_dualpipe_has_the_order_of_its_authors_in_50_random_sizes():
    for p, m in settings(1):
        wanted = []
        for rank in range(p):
            streams = [(rank, 0), (p - 1 - rank, m // 2)]
            streams = streams[::-1] if rank >= p // 2 else streams
            wanted.append(names(steps(p // 2, min(rank, p - 1 - rank), m // 2), streams))
        assert planned(pipelines.plan("dualpipe", p, m).schedule) == wanted, (p, m)


def test_dualpipe_v_has_the_order_of_its_authors_in_50_random_sizes():
    for p, m in settings(2):
        wanted = [names(steps(p, rank, m), [(rank, 0), (2 * p - 1 - rank, 0)]) for rank in range(p)]
        assert planned(pipelines.plan("dualpipe_v", p, m).schedule) == wanted, (p, m)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_every_rank_runs_each_forward_and_backward_once(name):
    plan = pipelines.plan(name, 4, 10)
    assert sum(Kind.F.name in name for row in planned(plan.schedule) for action in row for name in action) == (
        4 * 10 * (1 if name == "dualpipe" else 2))
