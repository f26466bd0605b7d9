"""An order as a hint on given times: without spread exactly the order's time, draws that repeat, caps that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden_plans
import numpy as np
import pipelines
import pytest
from command_line import run_json

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import Kind
from minidl.passes.hint import CHAINED, windows
from minidl.plans.memory import MemoryLimitError
from minidl.plans.ready import Picks, draws
from minidl.schedulers.pipeline import Pipeline
from minidl.schedulers.pipeline.hint import cap_of

POLICIES = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_auto", "fast_forward", "fast_forward_strict",
            "fast_forward_push", "fast_forward_push_released", "interleaved", "interleaved_zb", "modulo",
            "modulo_greedy", "looped_bfs", "hanayo", "chimera", "seq1f1b", "zb_v", "v_half", "v_min"]


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    pipelines.little_effort(monkeypatch)


def plan(times: Pipeline, name: str, ranks: int, **more: Any) -> Any:
    return ml.plan(times, name, machine=ml.Machine(ranks), **more)


def random_times(random: np.random.Generator, name: str) -> tuple[Pipeline, int]:
    ranks = int(random.choice([2, 4]))
    stages = len(plan(Pipeline(8), name, ranks).placement.table[0])
    forward, output_grad, weight_grad = random.uniform(0.2, 3.0, (3, stages)).tolist()
    even = random.random() < 0.3
    return Pipeline(8, 1.0 if even else forward, 1.0 if even else output_grad,
                    1.0 if even else weight_grad, float(random.choice([0.0, 0.3])),
                    100.0 if random.random() < 0.3 else None, 40), ranks


@pytest.mark.few(2)
@pytest.mark.parametrize("name", POLICIES)
def test_without_spread_a_hint_takes_exactly_as_long_as_the_order(name: str) -> None:
    random = np.random.default_rng(len(name))
    for _ in range(2):
        times, ranks = random_times(random, name)
        own = plan(times, name, ranks)
        for cap in (None, "2p-s", 1):
            hint = plan(times, name, ranks, order="hint", cap=cap)
            fixed = own if cap is None else plan(times, name, ranks, cap=cap)
            each = Picks.of(hint)
            played = each.play()
            assert played.end.max() == pytest.approx(fixed.timeline.makespan, rel=1e-9)
            assert hint.step == fixed.step, "what is predicted is the order"
            assert np.array_equal(hint.schedule.keys, fixed.schedule.keys)
            if cap is None:
                assert np.array_equal(hint.schedule.keys, own.schedule.keys)
            order = {int(each.graph.keys[t]): i for i, t in enumerate(played.order)}
            for lane in range(len(fixed.schedule.lanes)):
                place = [order[k] for k in fixed.schedule.order(lane).tolist()]
                assert place == sorted(place), "each rank does just what the order says"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v", "chimera"])
def test_the_cap_holds_whatever_the_times(name: str) -> None:
    for cap in (1, 3, "2p-s"):
        hint = plan(Pipeline(16), name, 4, order="hint", cap=cap)
        each = Picks.of(hint)
        kind, graph = each.graph.kind, each.graph
        for seed in range(5):
            played = each.play(each.drawn(0.6, seed))
            assert played.done == len(graph), "no rank waits for ever"
            for i in range(len(played.ptr) - 1):
                live, most = dict[int, set[int]](), dict[int, int]()
                order = [t for t in played.order[played.ptr[i] : played.ptr[i + 1]] if kind[t] in CHAINED]
                last = {(graph.unit[t], graph.micro_batch[t]): t for t in order}
                for t in order:
                    unit, micro_batch = int(graph.unit[t]), int(graph.micro_batch[t])
                    own = live.setdefault(unit, set())
                    own |= {micro_batch} if kind[t] == Kind.F else set()
                    most[unit] = max(most.get(unit, 0), len(own))
                    own -= {micro_batch} if last[unit, micro_batch] == t else set()
                rank = int(hint.placement.home(graph.keys[order[:1]], 16)[0]) if order else 0
                assert all(number <= hint.hint.caps[rank, unit] for unit, number in most.items())


def test_draws_repeat_and_keep_the_mean() -> None:
    own = plan(Pipeline(32), "one_f_one_b", 4)
    hint = plan(Pipeline(32), "one_f_one_b", 4, order="hint", cap="2p-s")
    each = Picks.of(hint)
    first, second, other = (each.drawn(0.3, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert np.mean([each.drawn(0.3, seed).sum() for seed in range(200)]) == pytest.approx(each.clock.duration.sum(),
                                                                                           rel=0.02)
    assert np.array_equal(each.drawn(0.0, 3), each.clock.duration)
    one, two = (draws(own, hint, 0.3, 5) for _ in range(2))
    assert np.array_equal(one.hint, two.hint)
    assert np.array_equal(one.own, two.own)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_memory_and_readiness_are_two_columns(ranks: int, capsys: Any) -> None:
    """B = 2F, spread .3: at the cap 2p - s a hint takes at most .85 of 1F1B's time; at 1F1B's own cap, no less."""
    flags = ["--scheduler", "one_f_one_b", "--ranks", str(ranks), "--micro-batches", str(4 * ranks), "--order", "hint",
             "--jitter", "0.3", "--draws", "25"]
    _, wide = run_json(capsys, "simulate", *flags, "--scheduler-arg", "cap=2p-s")
    _, own = run_json(capsys, "simulate", *flags)
    ratio = wide["steps"]["ratio"]
    assert 0.72 < ratio["hint"] < 0.85
    assert ratio["hint"] < ratio["fixed"] < ratio["own"] == 1
    assert own["steps"]["ratio"]["fixed"] == 1
    assert 0.97 < own["steps"]["ratio"]["hint"] < 1.06, "without more memory, readiness alone gives nothing"
    assert own["cap"] == [ranks - s for s in range(ranks)]
    assert wide["cap"] == [2 * ranks - s for s in range(ranks)]
    assert len({*wide["steps"]["without_spread"].values()}) == 1


def test_orders_that_keep_a_rank_waiting_keep_it_under_a_hint() -> None:
    hint = plan(Pipeline(16, latency=0.3), "zb_h1", 4, order="hint")
    assert hint.hint.gaps, "the order leaves gaps that its W could fill"
    assert Picks.of(hint).play().end.max() == pytest.approx(plan(Pipeline(16, latency=0.3), "zb_h1", 4).step)


def test_caps_are_numbers_or_follow_ranks() -> None:
    assert [cap_of("2p-s", 4, 9, rank) for rank in range(4)] == [8, 7, 6, 5]
    assert [cap_of(text, 4, 9, 3) for text in (5, "5", "p", "m", "p+m//2", "2(p-s)", "3*2", " 2p - s ")] == [
        5, 5, 4, 9, 8, 2, 6, 5]
    for text in ("", "2p-s-9", "p/2", "x", "2.5", "p" * 50, "--", "p if s else 1", True, "0"):
        with pytest.raises(PlanError, match="^cap="):
            cap_of(text, 4, 9, 3)


def test_a_policys_own_cap_is_what_its_order_keeps() -> None:
    for name, most in (("gpipe", [8] * 4), ("one_f_one_b", [4, 3, 2, 1]), ("zb_h1", [4] * 4)):
        own = plan(Pipeline(8), name, 4)
        assert [windows(own.graph, own.schedule)[r, r] for r in range(4)] == most
    assert max(windows(own.graph, own.schedule).values()) == 4


def test_a_file_with_a_hint_has_the_order_in_the_first_column(tmp_path: Path, capsys: Any) -> None:
    times = ["--ranks", "3", "--micro-batches", "6"]
    file = str(tmp_path / "p.csv")
    run_json(capsys, "plan", "--scheduler", "one_f_one_b", *times, "--order", "hint", "--save", file)
    drawn = [run_json(capsys, "simulate", "--scheduler", name, *times, *more, "--jitter", "0.3", "--draws", "5")[1]
             for name, *more in (("one_f_one_b", "--order", "hint"), (file,))]
    assert drawn[0]["steps"] == drawn[1]["steps"]
    assert drawn[0]["steps"]["ratio"]["hint"] != 1
    code, smaller = run_json(capsys, "simulate", "--scheduler", file, *times, "--order", "hint", "--scheduler-arg",
                             "cap=2")
    assert (code, smaller["cap"]) == (0, [2] * 3), "policies that cannot have a hint are left out beside it"


def test_a_cap_beside_a_file_with_a_hint_counts() -> None:
    hint = plan(Pipeline(8), "zb_h1", 4, order="hint").schedule
    assert set(ml.plan(Pipeline(8), hint, machine=ml.Machine(4), cap=5).hint.caps.values()) == {5}
    with pytest.raises(PlanError, match="cap=0 is 0 on rank 0; a rank keeps at least 1 micro-batch"):
        ml.plan(Pipeline(8), hint, machine=ml.Machine(4), cap=0)


def test_a_hint_within_a_memory_limit_searches_all_but_copies() -> None:
    graph = golden_plans.step("mlp", 8)
    asked: dict[str, Any] = {"order": "hint", "recompute": "auto", "offload": "auto", "lag": "auto"}
    plain = max(ml.plan(graph, "gpipe", machine=ml.Machine(2), order="hint").peak_bytes)
    with pytest.raises(MemoryLimitError, match="the least that can be had") as above:
        ml.plan(graph, "gpipe", machine=ml.Machine(2, memory_limit=1), **asked)
    assert above.value.least < plain
    found = ml.plan(graph, "gpipe", machine=ml.Machine(2, memory_limit=above.value.least), **asked)
    assert max(found.peak_bytes) == above.value.least
    assert (found.choices.order, found.choices.moves) == ("hint", None)
    for policy in ("gpipe", "barrier"):
        with pytest.raises(Refused, match="order=hint: copies of memory"):
            ml.plan(graph, policy, machine=ml.Machine(2), order="hint", offload="states")

