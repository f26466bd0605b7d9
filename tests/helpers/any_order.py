"""A training step that is recorded leaves the bits of the eager one, in any order that its graph permits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from helpers import bits

import minidl as ml
from minidl.runtime.checking import random_schedule

#: makes a step anew, and the tensors that it leaves; perhaps a function that is called with its number before each step
Make = Callable[[], tuple[Any, ...]]


def trained(make: Make, batches: Sequence[Sequence[Any]], run_of: Callable[[Any], Any] | None = None) -> bytes:
    """The bits of all losses and of what training leaves. `run_of`: makes an executor of the graph; None: eager."""
    step, left, *before = make()
    run = run_of(ml.record(step, *batches[0])) if run_of else lambda *batch: step(*map(ml.array, batch))
    losses = []
    for n, batch in enumerate(batches):
        for call in before:
            call(n)
        losses.append(np.array(run(*batch)))
    if hasattr(run, "close"):
        run.close()
    return bits(*losses, *left)


def same_in_any_order(make: Make, batches: Sequence[Sequence[Any]], seeds: Iterable[int] = range(3)) -> None:
    """In sequence, on streams, and in random orders with checks for races."""
    eager = trained(make, batches)
    assert trained(make, batches, ml.SequentialExecutor) == eager
    for seed in seeds:
        assert trained(make, batches, lambda g, seed=seed: ml.CheckingExecutor(  # type: ignore[misc]
            g, random_schedule(g, 3, np.random.default_rng(seed)), seed=seed)) == eager
    assert trained(make, batches, lambda g: ml.StreamExecutor(
        g, random_schedule(g, 2, np.random.default_rng(9)))) == eager
