"""What is chosen besides the order is one value: it prints, is saved with the order, and comes back from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_plans
import pytest

import minidl as ml
from minidl.core.tasks import unpack
from minidl.pricing.corun import CoRun
from minidl.schedulers.multi_region import profile_groups
from minidl.schedulers.saved import PAIRS

#: by which late weight gradients save time
COST = ml.CostModel(kinds={"F": 2.0, "O": 1.0, "W": 2.0, "U": 0.1}, far=ml.Link(1.0, 1e3))


@pytest.mark.parametrize(("policy", "ranks", "chosen", "text"), [
    ("in_order", 1, {"recompute": "1-4"}, "recompute 5+6"),
    ("in_order", 1, {"recompute": "all", "offload": "all"}, "offload all,window="),
    ("in_order", 1, {"split": 2}, "split 2"),
    ("multi_stream", 1, {"streams": 3}, "streams 3"),
    ("barrier", 2, {"shard": "3,prefetch=0,keep=none"}, "shard 3,prefetch=0,keep=none"),
    ("interleaved", 2, {"chunks": 3}, "chunks 3"),
])
def test_choices_print(policy: str, ranks: int, chosen: dict[str, Any], text: str) -> None:
    graph = golden_plans.step("norms", 4 if "chunks" in chosen else 1)
    plan = ml.plan(graph, policy, machine=ml.Machine(ranks), **chosen)
    assert text in str(plan.choices)
    assert text in repr(plan)


@pytest.mark.few(6)
@pytest.mark.parametrize(("policy", "ranks", "micro_batches", "chosen"), [
    *((policy, 1, 1, chosen) for policy in ("in_order", "multi_stream", "multi_region") for chosen in (
        {}, {"recompute": "all"}, {"offload": "all"}, {"group_weights": 4})),
    ("multi_stream", 1, 1, {"streams": 2, "lag": 1}), ("multi_stream", 1, 1, {"split": {"1F0": 2, "4O0": 3}}),
    ("partime", 1, 1, {}), ("pd_asgd", 1, 1, {}), ("layup", 2, 1, {}), ("delayed_update", 2, 2, {}), ("acco", 2, 2, {}),
    ("no_overlap", 2, 1, {"offload": "states"}), ("barrier", 2, 1, {"shard": 3}), ("buckets", 2, 1, {"lag": 1}),
    ("one_f_one_b", 2, 4, {"recompute": "all"}), ("interleaved", 2, 4, {"chunks": 3})], ids=str)
def test_a_saved_plan_comes_back(policy: str, ranks: int, micro_batches: int, chosen: dict[str, Any],
                                 tmp_path: Path) -> None:
    """Also one whose tasks are late, in parts, in groups, computed again or copied, or whose step was changed."""
    graph, machine = golden_plans.step("norms", micro_batches), ml.Machine(ranks)
    made = ml.plan(graph, policy, COST, machine, **chosen)
    assert policy != "multi_region" or "offload" in chosen or unpack(made.schedule.keys).late.any()
    made.schedule.save(tmp_path / "order.csv")
    read = ml.plan(graph, str(tmp_path / "order.csv"), COST, machine)
    assert read.schedule.to_csv() == made.schedule.to_csv()
    assert (read.graph.keys == made.graph.keys).all()
    assert (read.peak_bytes, read.waits, read.step, read.period, read.stale) == (
        made.peak_bytes, made.waits, made.step, made.period, made.stale)


@pytest.mark.few(1)
@pytest.mark.parametrize("chosen", [{}, {"lag": 1}, {"group_weights": 4}], ids=str)
def test_a_file_keeps_all_its_notes_when_it_is_saved_again(chosen: dict[str, Any], tmp_path: Path) -> None:
    graph = golden_plans.step("norms", 1)
    pairs = CoRun.estimated(graph, *profile_groups(graph, COST))
    made = ml.plan(graph, "multi_region", replace(COST, corun=pairs), **chosen).schedule
    assert PAIRS in made.notes
    made.save(tmp_path / "order.csv")
    assert ml.plan(graph, str(tmp_path / "order.csv"), COST).schedule.to_csv() == made.to_csv()


def test_a_plan_without_choices_says_none() -> None:
    assert str(ml.plan(golden_plans.step("mlp"), "in_order").choices) == ""
