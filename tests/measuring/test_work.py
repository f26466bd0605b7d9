"""The work of tasks in a report: kernel families, floors, and the causes of waits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from command_line import shown
from helpers import recorded_classifier
from hypothesis import given
from random_plans import Plan, plans

from minidl import models, optim
from minidl.cli import main
from minidl.core.graph import TaskGraph
from minidl.core.report import _computing, causes, compare, families, usage
from minidl.core.schedule import Lane
from minidl.core.tasks import Kind, pack, parse_task
from minidl.core.timeline import Timeline, What
from minidl.devices import device as devices
from minidl.measuring import kernel_times
from minidl.measuring.work import by_rates, of_device, work_of
from minidl.pricing.cost import CostModel
from minidl.pricing.simulation import simulate
from minidl.schedulers.single import in_order


@pytest.fixture(scope="module")
def mlp() -> TaskGraph:
    model = models.mlp(64, 128, 128, 10)
    return recorded_classifier(model, optim.SGD(model.parameters(), lr=0.1), 64, 64)


@given(plans(latency=True, pairs=True))
def test_causes_account_for_all_that_is_not_busy(plan: Plan):
    t = plan.timeline
    still = sum(u.wait + u.transfer + u.gap + u.idle
                for u, works in zip(usage(t), _computing(t), strict=True) if works)
    found = causes(t)
    assert sum(found.values()) == pytest.approx(still)
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert not any(cause.startswith("a gap") for cause in found), "a predicted lane never loiters"


def test_causes_by_name():
    lanes = (Lane(0), Lane(0, "sub1"), Lane(1), Lane(1, "recv"))
    names = ["0F0", "0O0", "0U0", "0W0", "1F0", "1W0", "0RF0>1"]
    rows = [(0, 0, 2), (0, 2, 5), (0, 6, 7), (1, 5, 7), (2, 4, 7), (2, 9, 10), (3, 3, 4)]
    lane, start, end = zip(*rows, strict=True)
    t = Timeline.of_tasks(lanes, [parse_task(name) for name in names], lane, start, end,
                          edges=[(0, 4), (1, 3)], arrived=[4.0, 5.0])
    assert causes(t) == {"no task is left; the last to end is the weight gradient": 6,
                         "output gradient on another lane": 5, "a gap: the task could have run": 3,
                         "forward on another rank": 2, "data on their way: forward on another rank": 2}
    assert causes(replace(t, lane=np.full(len(t), 3))), "a run with messages alone has causes as well"
    first = (t.what == What.WAIT) & (t.start == t.begin)
    early = replace(t, start=np.where(first, t.begin - 100, t.start))
    assert first.any()
    assert (causes(early), usage(early)) == (causes(t), usage(t)), "the step begins with its first task"


def test_causes_of_many_waits_take_no_time(monkeypatch: pytest.MonkeyPatch):
    """3,000 kernels wait for their launches; the ranks of all records are not looked up for each."""
    n, looks = 3000, []
    lane, begin = np.repeat([0, 1], n), np.tile(np.arange(n) * 10.0, 2) + np.repeat([0, 6], n)
    keys = [pack(unit, Kind.F, i) for unit in (0, 1) for i in range(n)]
    t = Timeline.of_tasks((Lane(0), Lane(0, "stream")), keys, lane, begin, begin + 5,
                          edges=[(i, n + i) for i in range(n)], arrived=begin[:n] + 6)
    rank = Timeline.rank_of_each.fget
    monkeypatch.setattr(Timeline, "rank_of_each", property(lambda self: looks.append(1) or rank(self)))
    assert causes(t)["forward on another lane"] > n
    assert len(looks) < 10


def test_families_share_out_the_time_of_tasks(mlp):
    cost = CostModel.analytic(launch=0.0)
    priced = simulate(mlp, in_order(mlp), cost)
    t = replace(priced, work=work_of(mlp, by_rates(2e4, 1e4)))
    found = families(t)
    assert {f.family for f in found} >= {"linear", "loss", "elementwise", "sgd"}
    assert sum(f.time for f in found) == pytest.approx(t.makespan), "each task of this step launches kernels"
    assert sum(f.flops for f in found) == pytest.approx(mlp.flops.sum())
    assert [f.time for f in found] == sorted((f.time for f in found), reverse=True)
    for f in found:
        assert 0 < f.floor <= f.time * (1 + 1e-9), "a task with several launches has a floor for each"
    share = np.bincount(np.unique(t.work.key, return_inverse=True)[1], t.work.share)
    assert share == pytest.approx(1)
    milli = families(t.in_unit("ms"))
    assert [f.floor * 1e3 for f in milli] == pytest.approx([f.floor for f in found])
    assert families(priced) == []
    assert all(f.floor is None for f in families(replace(t, unit="")))


def test_a_floor_by_the_rates_of_a_device(monkeypatch):
    monkeypatch.setattr(kernel_times, "SIDE", 64)
    monkeypatch.setattr("minidl.measuring.work.SIZES", (1 << 8, 1 << 12))
    least = of_device(devices.get("cpu"))
    sizes = 2.0 ** np.arange(4, 20)
    times = least(np.zeros(len(sizes)), sizes)
    assert (np.diff(times) > 0).all()
    assert least(np.array([2e9]), np.array([1.0]))[0] > least(np.array([1e9]), np.array([1.0]))[0] > 0


def test_a_trace_keeps_the_work(mlp, tmp_path):
    t = replace(simulate(mlp, in_order(mlp), CostModel.analytic()), work=work_of(mlp, by_rates(2e4, 1e4)))
    path = tmp_path / "t.json"
    t.save(path)
    again = Timeline.load(path)
    assert again.work.as_json() == t.work.as_json()
    assert [(f.family, f.tasks) for f in families(again)] == [(f.family, f.tasks) for f in families(t)]
    content = json.loads(path.read_text())
    for name, wrong in (("family", [99] * len(t.work.key)), ("tasks", ["0F0"]), ("share", None), ("flops", [-1.0])):
        spoiled = json.loads(json.dumps(content))
        spoiled["minidl"]["work"][name] = wrong
        path.write_text(json.dumps(spoiled))
        with pytest.raises(ValueError, match="is not a trace that minidl wrote"):
            Timeline.load(path)


def test_two_runs_side_by_side(mlp):
    slow, fast = (replace(simulate(mlp, in_order(mlp), CostModel.analytic(rate, 1e4)), predicted=False,
                          work=work_of(mlp)) for rate in (1e3, 2e4))
    text = compare(slow, fast)
    row = next(line.split() for line in text.splitlines() if line.startswith("linear"))
    assert float(row[1]) > float(row[2])
    assert "time by kernel family" in text


def test_a_traced_run_reports_its_families(tmp_path, capsys):
    path = str(tmp_path / "t.json")
    shown(capsys, "train", "--model", "mlp", "--steps", "2", "--trace", path)
    assert main(["report", path, "--json"]) == 0
    found = {f["family"]: f for f in json.loads(capsys.readouterr().out)["families"]}
    assert found["linear"]["floor"] > 0
    assert found["sgd"]["tasks"] == 3
