"""Each peak of the curve, as a limit, gives a plan that is as fast; the smallest one is the least that can be had."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from command_line import refusal, run, run_json

MLP = ["--model", "mlp", "--model-arg", "preset=tiny", "--costs", "analytic", "--batch-size", "8"]
RANKS = [*MLP, "--parallel", "data", "--ranks", "2"]
STAGES = [*MLP, "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4"]


def network(name: str) -> list[str]:
    return ["--model", name, "--model-arg", "preset=tiny", "--costs", "analytic", "--optimizer", "adam"]


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [
    [*MLP, "--optimizer", "adam", "--scheduler", "in_order"], [*STAGES, "--scheduler", "zb_h1"],
    *(pytest.param(flags, marks=pytest.mark.wide) for flags in (
        MLP, [*MLP, "--optimizer", "adam"], [*MLP, "--scheduler", "multi_stream"],
        [*RANKS, "--scheduler", "barrier"], [*RANKS, "--scheduler", "priority"],
        [*RANKS, "--scheduler", "barrier", "--shard", "3"],
        [*STAGES, "--micro-batches", "2", "--replicas", "2", "--scheduler", "gpipe"])),
    *(pytest.param([*network(name), "--scheduler", policy], marks=pytest.mark.slow) for name, policy in (
        ("gpt", "multi_stream"), ("densenet121", "in_order")))],
    ids=" ".join)
def test_each_point_of_the_curve_can_be_had_by_a_limit(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    _, record = run_json(capsys, "plan", *flags, "--curve")
    points = record["curve"][::-1]  # from the least memory on
    for point in points[:: -(-len(points) // 4)]:
        code, made = run_json(capsys, "plan", *flags, "--memory-limit", str(point["peak_bytes"]))
        assert code == 0
        assert made["peak_bytes"] <= point["peak_bytes"]
        assert made["predicted_step_ms"] <= point["step_ms"]
    code, _, err = run(capsys, "plan", *flags, "--memory-limit", "100")
    assert code == 2
    least = re.search(r"the least that can be had is ([\d,]+)$", err.strip())
    assert least is not None
    assert int(least[1].replace(",", "")) == record["smallest_limit"]


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [
    [*MLP, "--optimizer", "adam", "--scheduler", "in_order"],
    [*MLP, "--model-arg", "hidden=8", "--model-arg", "layers=8", "--batch-size", "4", "--scheduler", "multi_stream"],
    *(pytest.param(flags, marks=pytest.mark.wide) for flags in (
        [*RANKS, "--scheduler", "barrier", "--optimizer", "adam"], [*RANKS, "--scheduler", "no_overlap"],
        [*STAGES, "--micro-batches", "2", "--replicas", "2", "--scheduler", "zb_h1", "--optimizer", "adam"]))],
    ids=" ".join)
def test_no_flags_beat_the_curve(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    _, record = run_json(capsys, "plan", *flags, "--curve")
    levels = ("0", "1", "2", "3") if "--parallel" in flags else ("0",)
    for again, away, shard in product(("none", "all", "sqrt"), ("none", "activations", "states", "all"), levels):
        more = ["--recompute", again, "--offload", away, *(["--shard", shard] if shard != "0" else [])]
        code, made, _ = run(capsys, "plan", *flags, *more, "--json")
        assert code == 0 or away != "none"
        if code == 0:  # a step may have nothing to offload
            made = json.loads(made)
            assert any(point["peak_bytes"] <= made["peak_bytes"] and point["step_ms"] <= made["predicted_step_ms"]
                       for point in record["curve"]), more


def test_the_fastest_of_all_policies_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "plan", *MLP, "--memory-limit", "17500")[1]
    named = run_json(capsys, "plan", *MLP, "--memory-limit", "17500", "--scheduler", "in_order")[1]
    assert found["predicted_step_ms"] < named["predicted_step_ms"]
    assert "is the fastest predicted" in found["remarks"][-1]
    assert "of in_order, multi_stream, multi_region, " in found["remarks"][-1]


def test_a_limit_alone_says_why_if_no_policy_can_plan_the_step(capsys):
    assert "no task of this step can be cut in so many parts" in refusal(
        capsys, "plan", *MLP, "--memory-limit", "9KB", "--split", "999")


def test_less_is_offloaded_where_all_would_need_more(capsys):
    """Memory that comes back needs a place; of one layer's states it is free."""
    flags = ["plan", *RANKS, "--scheduler", "barrier", "--optimizer", "adam", "--shard", "3"]
    every = run_json(capsys, *flags, "--offload", "states")[1]["peak_bytes"]
    found = run_json(capsys, *flags, "--offload", "states", "--memory-limit", str(every - 1))[1]
    assert found["peak_bytes"] < every
    assert run_json(capsys, *flags, "--curve")[1]["smallest_limit"] <= found["peak_bytes"]
