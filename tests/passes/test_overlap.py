"""Messages and sums that start earlier: shorter steps on two ranks, with the bits of one process and no more memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rank_runs import CLASSES, WIDTH, check, prepared

import minidl as ml
from minidl import nn, optim
from minidl.core.graph import TaskGraph
from minidl.core.placement import Refused
from minidl.models import mlp

MICRO_BATCHES, SHARE = 4, 16
INPUTS = [np.zeros((SHARE, 64), "f"), np.zeros(SHARE, int)] * MICRO_BATCHES
SHAPES = [(64, 512, 16, 512, 16, 10), (64, 32, 32, 32, 32, 32, 10), (64, 256, 32, 128, 64, 64, 64, 10)]
GAINS = [("gpipe", 0, 0.985), ("zb_v", 1, 0.96), ("interleaved", 2, 0.98)]  # each as it is predicted, or better


def recorded(shape: tuple[int, ...], each: bool = False, **of_optimizer: Any) -> TaskGraph:
    """A step of micro-batches; `each` has an update of its own."""
    ml.seed(0)
    model = mlp(*shape)
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9, **of_optimizer)

    def step(*parts: Any) -> None:
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i):
                (nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / MICRO_BATCHES)).backward()
                if each:
                    optimizer.step()
        if not each:
            optimizer.step()

    return ml.record(step, *INPUTS)


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "shape", "gain"), GAINS)
def test_a_step_is_shorter(policy: str, shape: int, gain: float) -> None:
    graph = recorded(SHAPES[shape])
    before, after = (ml.plan(graph, policy, machine=ml.Machine(2), overlap=n) for n in (0, 300))
    assert after.period < gain * before.period
    assert after.peak_bytes <= before.peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["zb_v", "interleaved"])
def test_messages_that_start_earlier_leave_the_bits_of_one_process(policy: str) -> None:
    settings = {"scheduler": policy, "network": lambda *_: mlp(WIDTH, *[64] * 7, CLASSES)}
    earlier = {**settings, "options": {"overlap": 300}}
    plain, moved = (prepared(each, 0)[0][1].with_messages[1] for each in (settings, earlier))
    assert plain.to_csv() != moved.to_csv()
    check(earlier)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"replicas": 2, "collective": lambda sizes: 20 + sum(sizes.values()) / 2000}])
@pytest.mark.parametrize("policy", ["gpipe", "one_f_one_b", "zb_h1", "zb_auto"])
def test_no_plan_gets_slower_or_larger(policy: str, options: dict[str, Any]) -> None:
    for shape in SHAPES:
        graph = recorded(shape, max_norm=1.0)
        found = [ml.plan(graph, policy, machine=ml.Machine(2, **options), overlap=n) for n in (0, 10, 300)]
        for before, after in pairwise(found):
            assert after.period <= before.period
            assert all(mine <= other for mine, other in zip(after.peak_bytes, before.peak_bytes, strict=True))


def test_a_cap_on_activations_holds() -> None:
    graph = recorded(SHAPES[1])
    capped = [ml.plan(graph, "zb_h1", machine=ml.Machine(2, activation_cap=2), overlap=n) for n in (0, 300)]
    assert max(capped[1].peaks) <= 2
    assert capped[1].period <= capped[0].period


def test_pairs_move_together() -> None:
    graph = recorded(SHAPES[2])
    before, after = (ml.plan(graph, "dualpipe_v", machine=ml.Machine(2), overlap=n) for n in (0, 100))

    def pairs(plan: ml.Plan) -> set[tuple[int, int]]:
        return {(int(plan.schedule.keys[i - 1]), int(plan.schedule.keys[i]))
                for i in np.flatnonzero(plan.schedule.second)}

    assert pairs(before) == pairs(after) != set()
    assert after.period < before.period
    assert all(mine <= other for mine, other in zip(after.peak_bytes, before.peak_bytes, strict=True))


def test_an_order_that_says_which_weights_are_read_is_refused() -> None:
    with pytest.raises(Refused, match="pipedream: overlap moves tasks, but their order also says which weights"):
        ml.plan(recorded(SHAPES[1], each=True), "pipedream", machine=ml.Machine(2), overlap=300)
