"""`only_new`: a rank does not receive again what it holds of a joined value; bits and planned bytes stay."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import one_line, run, run_json
from covering import covering
from rank_runs import COST, Run, check

import minidl as ml
from minidl.core.graph import View
from minidl.core.placement import Refused
from minidl.core.tasks import SENDS
from minidl.passes.held import inside

NETWORKS = ("all", "grown", "U")


def plans(network: str, name: str, ranks: int, **options: Any) -> list[Any]:
    """Without the choice and with it."""
    graph = Run({"network": network}).recorded()
    return [ml.plan(graph, name, COST, ml.Machine(ranks), **options, **more) for more in ({}, {"only_new": True})]


def moved(made: Any) -> int:
    graph = made.with_messages[0]
    return sum(t.bytes for t in graph if t.kind in SENDS)


SETTINGS = covering([{"network": network, "scheduler": name, "ranks": ranks, "optimizer": "adam", **more,
                      "options": {"only_new": True, **chunks, **more.get("options", {})}}
                     for network in NETWORKS for name, ranks, chunks in (
                         ("interleaved", 2, {"chunks": 4}), ("interleaved", 4, {"chunks": 2}), ("zb_v", 2, {}),
                         ("looped_bfs", 2, {"chunks": 4}), ("one_f_one_b", 4, {}), ("hanayo", 2, {"chunks": 4}))
                     for more in ({}, {"recompute": (1,), "options": {"fill": "R"}}, {"saved": True})])


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_bits_are_of_one_process_in_the_planned_bytes(settings: dict[str, Any]) -> None:
    check(settings)


def test_only_what_is_new_travels_forward() -> None:
    """With four stages per rank, each result is sent to the other rank once; both ranks have the input."""
    plain, new = plans("grown", "interleaved", 2, chunks=4)
    width = 4 * 4 * 4 * 4  # bytes of four new columns, of four samples of each of four micro-batches
    sent = [sum(t.bytes for t in made.with_messages[0] if t.name.split("F")[0].endswith("S")) for made in (plain, new)]
    assert sent[1] <= 8 * width < sent[0] / 3


@pytest.mark.few(1)
@pytest.mark.parametrize("network", NETWORKS)
def test_fewer_bytes_travel_and_the_plan_says_how_many(network: str) -> None:
    for name, ranks, options in (("interleaved", 2, {"chunks": 4}), ("zb_v", 2, {}), ("one_f_one_b", 4, {})):
        plain, new = plans(network, name, ranks, **options)
        assert moved(new) < moved(plain) or (name != "interleaved" and moved(new) == moved(plain))
        assert new.remarks == (f"only_new: {moved(new):,} bytes travel in place of {moved(plain):,}",)
        assert sum(new.sent_bytes.values()) == moved(new)


def test_a_result_that_several_stages_of_a_rank_read_travels_once_anyway() -> None:
    for network in ("mlp", "within chunks", "to every stage"):
        plain, new = plans(network, "one_f_one_b", 2)
        assert plain.schedule.to_csv().splitlines()[-1:] == new.schedule.to_csv().splitlines()[-1:]
        assert moved(plain) == moved(new)
        assert max(plain.peak_bytes) == max(new.peak_bytes)


def test_places_in_a_copy() -> None:
    source, target = View(0, (4, 6), (6, 1), 0, "f"), View(1, (4, 6), (10, 1), 2, "f")
    assert inside(View(0, (4, 2), (6, 1), 3, "f"), source, target) == View(1, (4, 2), (10, 1), 5, "f")
    assert inside(View(0, (2, 6), (6, 1), 12, "f"), source, target) == View(1, (2, 6), (10, 1), 22, "f")
    for other in (View(0, (4, 2), (6, 2), 0, "f"), View(0, (4, 2), (6, 1), 5, "f"), View(0, (24,), (1,), 0, "f")):
        assert inside(other, source, target) is None


BASE = ["--model", "mlp", "--costs", "analytic", "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4"]


def test_the_bytes_of_each_hop_are_printed(capsys: Any) -> None:
    found = run_json(capsys, "plan", *BASE, "--scheduler", "one_f_one_b", "--scheduler-arg", "only_new=true")[1]
    assert set(found["sent_bytes"]) == {"0>1", "1>0"}
    total = f"{sum(found['sent_bytes'].values()):,}"
    assert found["remarks"] == [f"only_new: {total} bytes travel in place of {total}"]
    assert total in run(capsys, "plan", *BASE, "--scheduler", "one_f_one_b")[1]


def test_what_has_no_such_choice_is_one_line(capsys: Any) -> None:
    code, out, err = run(capsys, "plan", *BASE, "--scheduler", "one_f_one_b", "--scheduler-arg", "only_new=2")
    assert (code, out) == (2, "")
    assert "only_new" in one_line(err)
    with pytest.raises(Refused, match="never drains"):
        ml.plan(Run({"every": 1}).recorded(), "pipedream", COST, ml.Machine(2), only_new=True)
