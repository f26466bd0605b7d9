"""Random steps whose tasks are cut at random: all orders of one split graph leave the same bits, which differ from the
whole step's by rounding alone (float64: 1e-12).

    MINIDL_FUZZ_SEED=7000 MINIDL_FUZZ_CASES=300 python -m pytest tests/fuzz/test_random_splits.py -q -m campaign

cuts 2,000 steps; fewer cases, as many fewer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import random_steps
from arrangements import arrangements

from minidl.passes import split
from minidl.testing import fuzz

FIRST = int(os.environ.get("MINIDL_FUZZ_SEED", "1000"))
CASES = 20 * int(os.environ.get("MINIDL_FUZZ_CASES", "300")) // 3
BLOCKS = 4  #: tests of the campaign


def training(seed: int) -> Any:
    """A random step; every second one in float64 without Adam, which divides gradients that are rounding errors by
    their size."""
    step = random_steps.draw(seed)
    if seed % 2:
        optimizers = {name: ("SGD", *rest) for name, (_, *rest) in step.optimizers.items()}
        step = replace(step, dtype="float64", scaled=False, optimizers=optimizers)
    return step.training(seed)


def splits(case: fuzz.Case) -> Iterator[Any]:
    return (found for found in arrangements(case) if found[0] == "split")


def hold(first: int, cases: int) -> None:
    """Fails with the seed of the first step that differs."""
    done = 0
    for seed in count(first):
        verdict = fuzz.check(training, seed, splits)
        assert not verdict.failures, f"seed {seed}: {verdict.failures}\n{random_steps.draw(seed).source}"
        done += verdict.runs
        if done >= cases:
            return


def test_random_splits() -> None:
    hold(0, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_random_splits(block: int) -> None:
    hold(FIRST + block * 10 * CASES, -(-CASES // BLOCKS))


def test_parts_that_add_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that computes with one element less is far from the whole step."""
    bounds = split.bounds
    monkeypatch.setattr(split, "bounds", lambda n, parts: [*bounds(n, parts)[:-1], n - (n > parts)])
    split.cut_in_parts.cache_clear()  # of parts that other tests have cut, and then of these
    try:
        with pytest.raises(AssertionError, match=r"seed .*split"):
            hold(0, 3)
    finally:
        split.cut_in_parts.cache_clear()
