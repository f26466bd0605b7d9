"""`fill=W+R`: W and R fill waits for messages. No task is later, no rank holds more than is planned, and bits stay."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from rank_runs import COST, Run, check

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import Kind, unpack
from minidl.core.timeline import What
from minidl.pricing.cost import Link


@cache
def step() -> Any:
    return Run({"micro_batches": 8}).recorded()


def plan(name: str, fill: str | None, ranks: int = 2, **options: Any) -> Any:
    more = {} if fill is None else {"fill": fill}
    return ml.plan(step(), name, replace(COST, link=Link(5.0, 1e3)), ml.Machine(ranks), recompute="sqrt", **options,
                   **more)


def order(made: Any, rank: int) -> list[str]:
    return [name for i, lane in enumerate(made.schedule.lanes) if lane.rank == rank for name in made.schedule.names(i)
            if "U" not in name]


def ends(made: Any) -> dict[tuple[int, int, int], float]:
    """The times at which a stage has its output, or the gradient that it sends, for each micro-batch."""
    line = made.timeline
    found, own = {}, unpack(line.key)
    for i in np.flatnonzero((line.what == What.TASK) & np.isin(own.kind, (Kind.F, Kind.O, Kind.B))).tolist():
        found[int(own.kind[i] == Kind.F), int(own.unit[i]), int(own.micro_batch[i])] = float(line.end[i])
    return found


def test_a_stage_computes_again_then_makes_what_it_sends_then_its_weight_gradients() -> None:
    for rank in (0, 1):
        joined, apart = (order(plan("one_f_one_b", fill), rank) for fill in (None, "W+R"))
        with_b = [name if name[1] in "FB" else f"{rank}B{name[2]}" for name in apart]
        assert joined == [name for name, before in zip(with_b, ["", *with_b], strict=False) if name != before]
        if rank:  # the first stage sends no gradient, so it has W alone
            assert apart[(at := apart.index("1R3")) : at + 3] == ["1R3", "1O3", "1W3"]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "fill"), [
    (name, fill) for name in ("gpipe", "one_f_one_b", "interleaved", "looped_bfs", "hanayo")
    for fill in ("W", "R", "W+R")] + [("zb_h1", "R"), ("zb_v", "R"), ("interleaved_zb", "R")])
def test_no_result_is_later(name: str, fill: str) -> None:
    before, after = plan(name, None), plan(name, fill)
    was, now = ends(before), ends(after)
    assert was.keys() == now.keys()
    assert all(now[key] <= was[key] + 1e-9 for key in was)
    assert after.period <= before.period * (1 + 1e-9)
    assert after.peaks == before.peaks


def test_waits_get_shorter() -> None:
    for name, fill in (("one_f_one_b", "W"), ("one_f_one_b", "R"), ("zb_h1", "R")):
        assert plan(name, fill).period < plan(name, None).period


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [
    *({"scheduler": name, "options": {"fill": "W+R"}, **more} for name in ("one_f_one_b", "gpipe", "interleaved")
      for more in ({}, {"ranks": 4}, {"clip": 0.05, "norm": True, "drop": True}, {"saved": True})),
    *({"scheduler": name, "options": {"fill": "R"}, **more} for name in ("zb_h1", "zb_v", "dualpipe_v")
      for more in ({}, {"saved": True}, {"replicas": 2, "shard": "3,prefetch=auto", "optimizer": "adam"})),
    {"scheduler": "chimera", "groups": 2, "options": {"fill": "W+R"}},
    {"scheduler": "seq1f1b", "slices": 2, "options": {"fill": "R"}},
    {"scheduler": "one_f_one_b", "options": {"fill": "W+R"}, "offload": "all"},
    {"scheduler": "one_f_one_b", "options": {"fill": "R"}, "split": 2, "saved": True}], ids=str)
def test_bits_and_bytes_stay_as_planned(settings: dict[str, Any]) -> None:
    check({"recompute": (0,), **settings})


@pytest.mark.few(1)
@pytest.mark.parametrize("fill", ["R", "W+R"])
def test_a_remark_says_that_nothing_is_computed_again(fill: str) -> None:
    said = "fill: nothing is computed again, so no R fills a wait"
    plain, alone, every = (ml.plan(step(), "one_f_one_b", COST, ml.Machine(2), recompute=again, **more) for again, more
                           in (("none", {}), ("none", {"fill": fill}), ("sqrt", {"fill": fill})))
    assert (said in alone.remarks, said in every.remarks) == (True, False)
    assert fill != "R" or alone.schedule.keys.tolist() == plain.schedule.keys.tolist()
    auto = ml.plan(step(), "one_f_one_b", COST, ml.Machine(2, memory_limit=max(plain.peak_bytes) - 1), fill=fill,
                   recompute="auto")
    assert said not in auto.remarks


def test_other_choices_and_orders_that_cannot_have_it() -> None:
    for wrong in ("X", "W+", "W+W", "", "r"):
        with pytest.raises(PlanError, match="it must be W, R or W"):
            plan("one_f_one_b", wrong)
    with pytest.raises(Refused, match="no backward task with both gradients; leave W out"):
        plan("zb_h1", "W")
    with pytest.raises(Refused, match="weights that they read"):
        plan("pipedream", "R")
