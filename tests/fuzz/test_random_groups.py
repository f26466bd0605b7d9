"""Random steps whose weight gradients wait for company: each order of each grouping leaves the bits of the eager run.

    MINIDL_FUZZ_SEED=7000 MINIDL_FUZZ_CASES=300 python -m pytest tests/fuzz/test_random_groups.py -q -m campaign

joins 2,000 steps; fewer cases, as many fewer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest
import random_steps

import minidl as ml
from minidl.passes.draft import Draft
from minidl.passes.group import grouped
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import CheckingExecutor, StreamExecutor
from minidl.testing import fuzz

FIRST = int(os.environ.get("MINIDL_FUZZ_SEED", "1000"))
CASES = 20 * int(os.environ.get("MINIDL_FUZZ_CASES", "300")) // 3
BLOCKS = 4  #: tests of the campaign


def groupings(case: fuzz.Case) -> Iterator[tuple[str, Callable[[], fuzz.Trace]]]:
    """In a random order with checks for races; and on lanes, by a policy, perhaps with a bound on what waits."""
    graph, choices, company = case.graph, case.choices, int(case.choices.integers(2, 9))
    joined = grouped(Draft.of(graph), company).graph
    if len(joined) == len(graph):
        return

    def checked() -> fuzz.Trace:
        return case.trace(CheckingExecutor(joined, random_schedule(joined, 3, choices), seed=int(choices.integers(99)),
                                           device=fuzz.Shuffled(choices)))

    def planned(policy: str, **bound: int) -> fuzz.Trace:
        plan = ml.plan(graph, policy, group_weights=company, **bound)
        return case.trace(StreamExecutor(plan.graph, plan.schedule))

    yield f"groups of {company}", checked
    for policy in ("in_order", "multi_stream"):
        bound = {"lag": int(choices.integers(9))} if choices.random() < 0.5 else {}
        yield f"{policy}, groups of {company}, {bound}", partial(planned, policy, **bound)


def hold(first: int, cases: int) -> None:
    """Fails with the seed of the first step that differs. Counts the steps that have groups."""
    done = 0
    for seed in count(first):
        make = fuzz.random_training if seed % 2 else random_steps.training
        verdict = fuzz.check(make, seed, groupings)
        assert not verdict.failures, f"seed {seed}: {verdict.failures}"
        done += verdict.runs > 0
        if done >= cases:
            return


def test_random_groups() -> None:
    hold(0, 6)


@pytest.mark.campaign
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_random_groups(block: int) -> None:
    hold(FIRST + 100_000 * block, CASES // BLOCKS)
