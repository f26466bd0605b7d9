"""LayerPipe's partition: exact against brute force, and the published examples."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.core.tasks import Kind
from minidl.schedulers.partition import METHODS, LayerCosts, PartitionError, assign, atoms
from minidl.schedulers.pipeline.models import linear_partition

TIME = st.one_of(st.integers(0, 5).map(float), st.floats(0.1, 5))
LAYERS = st.integers(1, 4).flatmap(lambda n: st.tuples(*[st.lists(TIME, min_size=n, max_size=n)] * 3)).filter(
    lambda times: sum(map(sum, times)) > 0)


def brute_force(times, processors):
    """The smallest largest load over all ways to cut a row into at most `processors` runs."""
    best = sum(times)
    for cuts in range(1, min(processors, len(times))):
        for places in combinations(range(1, len(times)), cuts):
            edges = [0, *places, len(times)]
            best = min(best, max(sum(times[a:b]) for a, b in pairwise(edges)))
    return best


def brute_force_with_cuts(parts, processors):
    """The same where a border may also lie inside an O, at most one in each.

    For given borders the best shares are those of a transport between neighbours, whose optimum is the largest mean
    load over runs of processors of what cannot leave the run.
    """
    places = [(i, False) for i in range(1, len(parts))] + [
        (i, True) for i, part in enumerate(parts) if part.kind == Kind.O]
    places.sort(key=lambda place: place[0] + 0.5 * place[1])
    best = sum(p.time for p in parts)
    for count in range(1, processors):
        for borders in combinations(places, count):
            fixed, inner, at = [], [], 0
            for i, inside in borders:
                fixed.append(sum(p.time for p in parts[at:i]))
                inner.append(parts[i].time if inside else 0.0)
                at = i + inside
            fixed.append(sum(p.time for p in parts[at:]))
            worst = max((sum(fixed[i : j + 1]) + sum(inner[i:j])) / (j - i + 1)
                        if all(inner[k] for k in range(i, j)) else 0.0
                        for i in range(len(fixed)) for j in range(i, len(fixed)))
            best = min(best, worst)
    return best


@settings(max_examples=drawn(200))
@given(LAYERS, st.integers(1, 5))
def test_equals_brute_force(times, processors):
    costs = LayerCosts.given(*times)
    for method in ("pipedream", "intra"):
        loads = [sum(p.time for p in unit) for unit in atoms(costs, method)]
        assert assign(costs, processors, method).period == pytest.approx(brute_force(loads, processors), rel=1e-12)
        whole = linear_partition(np.array(loads), min(processors, len(loads)))
        assert {*np.diff(whole).tolist()} <= {0, 1}
        assert (whole[0], whole[-1]) == (0, min(processors, len(loads)) - 1), "none is empty"
    parts = [p for unit in atoms(costs, "inter") for p in unit]
    if len(parts) <= 9:
        assert assign(costs, processors).period == pytest.approx(brute_force_with_cuts(parts, processors), rel=1e-9)


@settings(max_examples=drawn(100))
@given(LAYERS, st.integers(1, 9))
def test_every_assignment_is_complete_and_in_order(times, processors):
    costs = LayerCosts.given(*times)
    periods = []
    for method in METHODS:
        found = assign(costs, processors, method)
        assert found.loads.sum() == pytest.approx(sum(map(sum, times)))
        owners = [p.processor for p in found.parts]
        assert owners == sorted(owners)
        assert owners[-1] < processors
        shares = {}
        for p in found.parts:
            assert 0 < p.share <= 1 or p.time == 0
            shares.setdefault((p.layer, p.kind), []).append(p)
        for (layer, kind), cut in shares.items():
            assert sum(p.share for p in cut) == pytest.approx(1)
            assert sum(p.time for p in cut) == pytest.approx(
                {Kind.F: costs.forward, Kind.O: costs.output_grad, Kind.W: costs.weight_grad}[kind][layer])
            assert len(cut) == 1 or (method == "inter" and kind == Kind.O and len(cut) == 2
                                     and cut[1].processor == cut[0].processor + 1)
        assert 0 < found.loads.sum() <= processors * found.period * (1 + 1e-9)
        periods.append(found.period)
    assert periods[0] * (1 + 1e-9) >= periods[1] * (1 + 1e-9) >= periods[2]


def test_the_worked_example():
    """f = a = w = 1, one layer per PipeDream processor."""
    one = LayerCosts.given([1], [1], [1])
    assert assign(one, 1, "pipedream").period == 3
    assert assign(one, 2, "intra").period == 2
    assert assign(one, 2, "inter").period == pytest.approx(1.5)
    assert [(p.kind.name, p.share, p.processor) for p in assign(one, 2, "inter").parts] == [
        ("F", 1.0, 0), ("O", 0.5, 0), ("O", 0.5, 1), ("W", 1.0, 1)]
    assert assign(one, 3, "intra").period == 1


@pytest.mark.parametrize(("times", "more", "message"), [
    (([1, 2], [1], [1, 2]), (), "given for 2, 1, 2 layers"), (([], [], []), (), "at least 1"),
    (([1], [-1], [1]), (), "not negative"), (([np.nan], [1], [1]), (), "finite"),
    (([0], [0], [0]), (), "nothing to partition"), (([1], [1], [1]), (0,), "0 processors"),
    (([1], [1], [1]), (2, "outer"), "unknown method 'outer'; known: pipedream, intra, inter")])
def test_what_cannot_be_partitioned_is_one_clear_line(times, more, message):
    with pytest.raises(PartitionError, match=message):
        assign(LayerCosts.given(*times), *more)
