"""multi_region on the command line: plans with late tasks are checked, explained, priced and trained; what
cannot be is one line."""

import json
from pathlib import Path

import pytest
from command_line import reported, run

from minidl.schedulers.saved import PAIRS

NETWORK = ["--model", "densenet121", "--model-arg", "preset=tiny", "--batch-size", "4"]
MODEL = [*NETWORK, "--costs", "analytic", "--scheduler", "multi_region"]


@pytest.fixture
def plan(capsys, tmp_path):
    """A plan in which tasks are late, as CSV."""
    path = tmp_path / "plan.csv"
    assert run(capsys, "plan", *MODEL[:-4], "--costs", "analytic", "--scheduler", "multi_stream", "--scheduler-arg",
               "map=densenet121", "--save", str(path))[0] == (0)
    assert "W0@1" in path.read_text()
    return path


def test_a_plan_with_late_tasks_is_valid(capsys, plan):
    record = reported(capsys, "check", str(plan), *NETWORK)
    assert record["valid"]


def late_update(text):
    """An update that is late in the plan."""
    return next(line.split(",")[2] for line in text.splitlines() if "U0@1" in line)


@pytest.mark.parametrize("edit", [lambda text: text.replace(",0F0", ",0F0@1"),
                                  lambda text: text.replace(late_update(text), late_update(text).split("@")[0])])
def test_a_plan_whose_late_tasks_are_needed_is_not_valid(capsys, plan, edit):
    plan.write_text(edit(plan.read_text()))
    record = reported(capsys, "check", str(plan), *NETWORK, code=1)
    assert "cannot cross the iteration boundary" in record["error"]
    assert record["tasks"][0].endswith("@1")
    code, text, _ = run(capsys, "check", str(plan), *NETWORK)
    assert code == 1
    assert f"[{record['tasks'][0]}]" in text


def test_a_plan_that_needs_more_memory_fails_its_check(capsys, plan):
    record = reported(capsys, "check", str(plan), *NETWORK, "--memory-limit", "1KB", code=1)
    assert "more than the limit of 1,000" in record["error"]


def test_a_late_task_is_explained_by_its_own_name(capsys, plan):
    late = late_update(plan.read_text())
    flags = [*NETWORK, "--costs", "analytic", "--scheduler", "multi_stream", "--scheduler-arg", "map=densenet121"]
    for name in (late, late.split("@")[0]):
        record = reported(capsys, "explain", name, *flags)
        assert record["task"] == late
    code, _, err = run(capsys, "explain", "9999W0", *flags)
    assert code == 2
    assert "no task 9999W0" in err


def test_a_priced_plan_says_its_peak(capsys):
    record = reported(capsys, "simulate", *MODEL)
    assert record["peak_bytes"] == reported(capsys, "plan", *MODEL)["peak_bytes"] > 0
    assert "peak" in run(capsys, "simulate", *MODEL)[1].splitlines()[0]


def test_costs_and_pairs_are_kept_and_give_the_same_plan(capsys, tmp_path):
    costs, one, two = (tmp_path / name for name in ("costs.json", "one.csv", "two.csv"))
    assert run(capsys, "plan", *MODEL, "--save-costs", str(costs), "--save", str(one))[0] == 0
    assert json.loads(costs.read_text())["corun"]["source"] == "estimated"
    code, _, said = run(capsys, "plan", *MODEL, "--costs", str(costs), "--save", str(two))
    assert (code, one.read_text()) == (0, two.read_text())
    assert "has times of tasks" not in said
    known = json.loads(costs.read_text())
    costs.write_text(json.dumps({**known, "tasks": {**known["tasks"], "1F7": 1.0, "99O0/1/2": 2.0, "1W0/1": 1.0}}))
    said = run(capsys, "plan", *MODEL, "--costs", str(costs))[2]
    assert "costs.json has times of tasks that this step does not have: 1F7, 99O0/1/2\n" in said


def test_a_saved_plan_is_priced_with_pairs_as_before_it_was_saved(tmp_path, capsys):
    """Its notes say it; an order without pairs stays without."""
    file = str(tmp_path / "plan.csv")
    base = [*NETWORK, "--costs", "analytic"]
    for policy, priced in (("multi_region", True), ("multi_stream", False)):
        known = reported(capsys, "plan", *base, "--scheduler", policy, "--save", file)["predicted_step_ms"]
        assert (f"# {PAIRS}: " in Path(file).read_text()) is priced
        for again in (["plan", *base, "--scheduler", file], ["check", file, *base]):
            assert reported(capsys, *again)["predicted_step_ms"] == known
