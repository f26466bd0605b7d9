"""What is chosen besides the order is one value: it prints, is saved with the order, and comes back from it."""

from __future__ import annotations

from typing import Any

import golden_plans
import pytest

import minidl as ml
from minidl.schedulers import pipeline
from minidl.schedulers.saved import choices_in, moves_in


@pytest.mark.parametrize(("policy", "ranks", "chosen", "text"), [
    ("in_order", 1, {"recompute": "1-4"}, "recompute 5+6"),
    ("in_order", 1, {"recompute": "all", "offload": "all"}, "offload all,window="),
    ("in_order", 1, {"split": 2}, "split 2"),
    ("multi_stream", 1, {"streams": 3}, "streams 3"),
    ("barrier", 2, {"shard": "3,prefetch=0,keep=none"}, "shard 3,prefetch=0,keep=none"),
    ("interleaved", 2, {"chunks": 3}, "chunks 3"),
])
def test_choices_print_and_come_back(policy: str, ranks: int, chosen: dict[str, Any], text: str) -> None:
    graph = golden_plans.step("norms", 4 if "chunks" in chosen else 1)
    plan = ml.plan(graph, policy, machine=ml.Machine(ranks), **chosen)
    assert text in str(plan.choices)
    assert text in repr(plan)
    order = pipeline.read_schedule(plan.schedule.to_csv())
    back = choices_in(order, ml.plan(graph, policy, machine=ml.Machine(ranks)).choices, False)
    assert {*back.dropped} <= {*plan.choices.dropped}  # some have nothing that the backward pass reads
    assert bool(back.dropped) == bool(plan.choices.dropped)
    assert (back.shard, moves_in(order)) == (plan.choices.shard, plan.choices.moves)
    assert bool(back.parts) == (plan.choices.parts != 1)


def test_a_plan_without_choices_says_none() -> None:
    assert str(ml.plan(golden_plans.step("mlp"), "in_order").choices) == ""
