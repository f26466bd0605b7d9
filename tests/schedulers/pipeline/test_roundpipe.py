"""RoundPipe: the cut against all cuts, slots of equal length against the closed form, and odd numbers."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from command_line import run, run_json
from helpers import drawn
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl.core.draw import timeline_svg
from minidl.core.tasks import Kind, unpack
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.roundpipe import ROUNDING, best_cut, cut

TIME = st.one_of(st.integers(1, 9).map(float), st.floats(0.1, 5))
LAYERS = st.lists(st.tuples(TIME, TIME), min_size=1, max_size=9)


def lasts(slot: Any, forward: list[float], backward: list[float]) -> float:
    return sum(forward[i] for i in slot.forward) + sum(backward[i] for i in slot.backward)


def first_layers(plan: Any) -> int:
    """The layers of the first slot."""
    return max(plan.notes["rounds"]["layers"][0])


def made(ranks: int, micro_batches: int, forward: Any, output: Any, weight: Any, **more: Any) -> pipeline.PipelinePlan:
    return ml.plan(pipeline.Pipeline(micro_batches, forward, output, weight), "roundpipe",
                   machine=ml.Machine(ranks), **more)


@settings(max_examples=drawn(150))
@given(LAYERS, st.integers(1, 5), st.floats(1, 2))
def test_slots_are_the_best_of_all_bounds(layers: Any, ranks: int, threshold: float) -> None:
    forward, backward = map(list, zip(*layers, strict=True))
    both = [f + b for f, b in layers]
    least = max(*forward, *backward, both[-1])
    runs = [total for times in (forward, backward, both) for first in range(len(times))
            for total in accumulate(times[first:]) if least <= total <= threshold * least]
    costs = {most: max(ranks, len(cut(forward, backward, most))) * most for most in [least, *runs]}
    slots = best_cut(forward, backward, ranks, threshold)
    longest = max(lasts(slot, forward, backward) for slot in slots)
    assert max(ranks, len(slots)) * longest <= min(costs.values()) * (1 + 1e-9)
    assert longest <= threshold * least * ROUNDING


@settings(max_examples=drawn(150))
@given(LAYERS, st.floats(1, 2))
def test_every_layer_goes_up_and_down_once_and_no_slot_could_be_left_out(layers: Any, threshold: float) -> None:
    forward, backward = map(list, zip(*layers, strict=True))
    most = threshold * max(*forward, *backward, forward[-1] + backward[-1])
    slots = cut(forward, backward, most)
    assert [i for slot in slots for i in slot.forward] == [*range(len(layers))]
    assert [i for slot in slots for i in slot.backward] == [*reversed(range(len(layers)))]
    assert [bool(slot.forward) and bool(slot.backward) for slot in slots].count(True) == 1
    assert all(lasts(slot, forward, backward) <= most * ROUNDING for slot in slots)
    for a, b in pairwise(slots):  # greedy: two neighbours of one kind do not fit in one
        if bool(a.forward) == bool(b.forward) and bool(a.backward) == bool(b.backward):
            assert lasts(a, forward, backward) + lasts(b, forward, backward) > most


@settings(max_examples=drawn(60))
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 9), st.sampled_from([1.0, 0.75, 3.0]))
def test_k_rounds_of_equal_slots_take_k_m_and_a_ramp(p: int, k: int, more: int, length: float) -> None:
    """The makespan is k m + p - 1 slots, for k p slots and m >= p micro-batches; every rank is busy without a gap."""
    m, slots = p + more, k * p
    assume(slots != 2)  # there is a joined slot, and then as many backward slots as forward ones, or one more
    layers = (slots + 2) // 2
    forward, backward = [length] * (layers - 1) + [length / 2], [length / 2] * (layers - 1) + [length / 4]
    if slots % 2 == 0:  # two layers whose forwards share a slot
        forward[:2] = [length / 2] * 2
    plan = made(p, m, forward, backward, backward)
    assert plan.notes["rounds"]["slots"] == slots
    found = pipeline.price(plan)
    assert found.makespan == pytest.approx((k * m + p - 1) * length, rel=1e-9)
    assert found.spans == pytest.approx([k * m * length] * p, rel=1e-9)
    # fetches of up to m slots hide beside the slot before: only the first and the last way home show
    fetch = length * m / 2  # two layers of one slot take m slots
    loads = pipeline.price(made(p, m, forward, backward, backward, fetch=fetch))
    assert loads.makespan == pytest.approx(found.makespan + first_layers(plan) * fetch + fetch, rel=1e-9)


@settings(max_examples=drawn(40))
@given(LAYERS, st.integers(1, 5), st.integers(1, 7), st.sampled_from([0.0, 0.5]))
def test_any_numbers_give_a_plan_that_holds(layers: Any, p: int, m: int, latency: float) -> None:
    """Fewer micro-batches than ranks, one layer, fewer slots than ranks: proved, within bounds."""
    forward, backward = map(list, zip(*layers, strict=True))
    half = [b / 2 for b in backward]
    plan = ml.plan(pipeline.Pipeline(m, forward, half, half, latency), "roundpipe", machine=ml.Machine(p))
    total, slots = sum(forward) + sum(backward), plan.notes["rounds"]["slots"]
    assert plan.timeline.makespan >= max(m * total / min(p, slots), total + latency * (min(p, slots) - 1)) * (1 - 1e-9)
    assert plan.timeline.makespan <= (m * total + 2 * len(layers) * m * latency) * (1 + 1e-9)
    own = unpack(plan.schedule.keys)
    assert (own.kind == Kind.F).sum() == (own.kind == Kind.B).sum() == m * len(layers)


def test_a_large_head_costs_less_than_under_policies_that_bind_weights() -> None:
    """As in the paper, each layer takes a third of the last one's time."""
    times = [1.0] * 20 + [3.0]
    bound = [ml.plan(pipeline.Pipeline(15, times, times, times), name, machine=ml.Machine(3), chunks=7)
             for name in ("interleaved", "looped_bfs", "interleaved_zb")]
    assert made(3, 15, times, times, times).timeline.makespan < 0.95 * min(plan.timeline.makespan for plan in bound)


def test_times_of_layers_may_be_arrays() -> None:
    times = np.array([3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 4.0])
    lists, arrays = (made(3, 4, each, each, each) for each in (times.tolist(), times))
    assert lists.schedule.to_csv() == arrays.schedule.to_csv()


@pytest.mark.parametrize(("more", "message"), [
    ({"threshold": 0.5}, "threshold is 0.5; a slot takes at least as long as the longest layer"),
    ({"threshold": float("nan")}, "threshold is nan"), ({"chunks": 2}, "3 forward times are given for 4 stages"),
    ({"fetch": -1.0}, "fetch is -1; a time must be finite"), ({"fetch": float("inf")}, "fetch is inf"),
    ({"method": "best"}, "takes no argument 'method'; it takes threshold, fetch")])
def test_what_cannot_be_cut_is_one_line(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        made(2, 4, [1.0, 2.0, 1.0], [1.0] * 3, [1.0] * 3, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("ranks", "peaks"), [(2, [4, 3]), (3, [3, 4, 1])])
def test_activations_count_on_the_ranks_that_hold_them(ranks: int, peaks: list[int]) -> None:
    """On three ranks backwards are one rank on, where activations arrive while that rank still runs forwards."""
    plan = made(ranks, 3, [2.0, 2.0, 1.0], [1.0, 1.0, 0.5], [1.0, 1.0, 0.5])
    assert plan.peaks == pytest.approx([peak * ranks / 3 for peak in peaks])


def test_fetches_are_tasks_with_two_places_on_each_rank() -> None:
    times = [2.0, 2.0, 2.0, 2.0, 1.0]
    half = [t / 2 for t in times]
    plan = made(3, 4, times, half, half, fetch=1.0)
    own, lanes = unpack(plan.schedule.keys), {str(lane) for lane in plan.schedule.lanes}
    assert ((own.kind == Kind.H).sum(), (own.kind == Kind.D).sum()) == (9, 5), "a slot each; backwards go home"
    assert {"0/in", "1/in", "2/in", "0/out", "1/out", "2/out"} < lanes
    ids = {plan.graph.name(t): t for t in range(len(plan.graph))}
    third = {plan.graph.name(t) for t in plan.graph.preds[ids["2H0/1"]].tolist()}  # of rank 0, with 0F, 3F, 2B
    assert third >= {"0F0", "0F1", "0F2", "0F3"}, "it takes the place of the first slot's weights"
    assert not third & {"3F0", "3F1", "3F2", "3F3"}, "beside the second slot"
    assert plan.timeline.makespan == 1 + 28 + 1
    assert "2D0/1" in timeline_svg(plan.timeline)


def test_a_fetch_that_takes_longer_than_a_slot_shows() -> None:
    slow = made(2, 2, [1.0] * 4, [0.5] * 4, [0.5] * 4, fetch=5.0).timeline.makespan
    assert slow > made(2, 2, [1.0] * 4, [0.5] * 4, [0.5] * 4).timeline.makespan + 2 * 5.0


def test_the_command_says_how_it_cut(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", "--scheduler", "roundpipe", "--ranks", "3", "--micro-batches", "4", "--forward", "2,2,1",
             "--output-grad", "1", "--weight-grad", "1"]
    assert "5 slots of layers go around the ranks, the longest takes 3" in run(capsys, *flags)[1]
    assert run_json(capsys, *flags)[1]["rounds"] == {
        "slots": 5, "longest": 3.0, "layers": [[1, 0], [1, 0], [1, 1], [0, 1], [0, 1]]}
