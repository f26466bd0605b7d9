"""Pipelines on the command line: what `plan` prints or saves, `check` accepts; caps, limits and flags mean
something."""

import json
import os
import re

import numpy as np
import pipelines
import pytest
from command_line import one_line, refusal, reported, run, run_json, shown

from minidl.pricing.cost import CostModel

NETWORK = ["--model", "mlp", "--model-arg", "layers=5", "--model-arg", "hidden=16", "--batch-size", "16",
           "--costs", "analytic"]
LARGE = ["--model", "resnet20", "--batch-size", "8", "--costs", "analytic"]


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    pipelines.little_effort(monkeypatch)


def flags_at_random(rng):
    """(policy, flags of its plan)."""
    name = str(rng.choice([n for n in sorted(pipelines.POLICIES) if n != "optimal"]))
    p, m = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    flags = ["--scheduler", name, "--ranks", str(p), "--micro-batches", str(m)]
    chunks = pipelines.policy(name).chunks
    if not pipelines.policy(name).chunks_fixed and rng.random() < 0.7:
        chunks = int(rng.integers(1, 4))
        flags += ["--chunks", str(chunks)]
    if rng.random() < 0.5:
        for what in ("--forward", "--output-grad", "--weight-grad"):
            flags += [what, str(rng.integers(1, 6))]
    if rng.random() < 0.2 and name != "chimera" and not name.startswith("dualpipe"):
        flags += ["--forward", ",".join(str(rng.integers(1, 6)) for _ in range(p * chunks))] if p * chunks > 1 else []
    if rng.random() < 0.3:
        flags += ["--latency", str(rng.integers(0, 4))]
    if name == "zb_auto" and rng.random() < 0.5:
        flags += ["--scheduler-arg", "kept=0.5"]
    if name == "pipedream_2bw" and rng.random() < 0.5:
        flags += ["--scheduler-arg", f"mini_batches={rng.integers(1, 4)}"]
    if rng.random() < 0.3:
        flags += ["--parallel", "pipeline"]
    return name, flags


def plans_and_checks_agree(capsys, tmp_path, seed, count):
    """Both ways: what plan saves holds under the same flags, and a cap is kept by one where it is kept by the other."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "plan.csv"
    made = refused = 0
    while made < count:
        name, flags = flags_at_random(rng)
        policy = pipelines.policy(name)
        where = f"seed {seed}: {' '.join(flags)}"
        path.unlink(missing_ok=True)
        code, out, err = run(capsys, "plan", *flags, "--save", str(path), "--json")
        assert code in (0, 2), (where, err)
        if code == 2:
            assert not path.exists(), where
            assert one_line(err), where
            continue
        made += 1
        record = json.loads(out)
        assert {"tasks", "edges", "waits", "predicted_step_ms", "peak_bytes"} <= set(record), where
        assert (record["waits"] > 0) == (int(flags[3]) > 1), where
        shape = "--ranks", "--micro-batches", *(() if policy.arranges else ("--chunks",))  # it chooses how many stages
        times = ("--forward", "--output-grad", "--weight-grad") if name in ("layerpipe", "roundpipe") else ()
        checks = [_only(flags, "--scheduler", "--chunks", "--scheduler-arg", *shape, *times)]
        if not (policy.stale or policy.sliced or "kept=0.5" in flags or name == "roundpipe"):  # its forwards are apart
            checks.append(_only(flags, *shape))
        for chosen in checks:
            checked = reported(capsys, "check", str(path), *chosen)
            assert checked["waits"] == record["waits"], where
            assert checked["peak_activations"] == pytest.approx(record["peak_activations"]), where
            assert checked["tasks"] == record["tasks"], where
        cap = str(max(0.5, max(record["peak_activations"]) - float(rng.choice([0, 0.5, 1]))))
        code, out, err = run(capsys, "plan", *flags, "--activation-cap", cap, "--save", str(path), "--json")
        if code == 0:
            assert max(json.loads(out)["peak_activations"]) <= float(cap) + 1e-9, where
            for chosen in checks:
                assert run_json(capsys, "check", str(path), *chosen, "--activation-cap", cap)[0] == 0, (where, cap)
        else:
            refused += 1
            assert "cap" in one_line(err), where
            # these plan for a cap, and say if they cannot
            if not (name in ("zb_auto", "zb_v", "v_half", "v_min") or policy.placements or policy.arranges):
                assert run_json(capsys, "check", str(path), *checks[0], "--activation-cap", cap)[0] == 1, (where, cap)
    return refused


def _only(flags, *wanted):
    """Those of the flags, with their values."""
    return [word for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] in wanted for word in pair]


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_what_plan_saves_check_accepts(capsys, tmp_path, count):
    seed = 1 if count == 15 else int(os.environ.get("SEED", np.random.SeedSequence().entropy % 2**32))
    with capsys.disabled():
        print(f"seed {seed}")
    assert plans_and_checks_agree(capsys, tmp_path, seed, count) > 2


def test_a_cap_that_is_broken_is_one_line_and_nothing_is_saved(capsys, tmp_path):
    path, shape = tmp_path / "plan.csv", ["--ranks", "4", "--micro-batches", "8", "--activation-cap", "2"]
    for verb in ("plan", "simulate"):
        said = refusal(capsys, verb, "--scheduler", "one_f_one_b", *shape,
                       *(["--save", str(path)] if verb == "plan" else []))
        assert "rank 0 holds 3 activations; the cap is 2 (this plan needs 4)" in said
    assert not path.exists()


@pytest.mark.parametrize(("cap", "policy", "says"), [
    (3.999999, "one_f_one_b", "holds 4 activations; the cap is 3.999999 (this plan needs 4)"),
    (0.9999999, "zb_auto", "no order fits an activation cap of 0.9999999; the smallest feasible cap is 1"),
    (0.9999999, "v_half", "an activation cap of 0.9999999 is too small")])
def test_a_cap_just_below_a_whole_number_is_told_as_given(capsys, cap, policy, says):
    shape = ["--ranks", "4", "--micro-batches", "8", "--activation-cap", str(cap), "--scheduler", policy]
    assert says in refusal(capsys, "simulate", *shape)


def test_costs_of_tasks_that_given_times_do_not_have_get_a_note(capsys, tmp_path):
    file, shape = tmp_path / "costs.json", ["--ranks", "2", "--micro-batches", "2", "--costs"]
    kinds = {"F": 1.0, "O": 1.0, "W": 1.0, "B": 2.0}
    for names, note in ((["0F0", "1F1"], ""), (["0F0", "9F0", "1F7"], "does not have: 9F0, 1F7\n")):
        CostModel(tasks=dict.fromkeys(names, 3.0), kinds=kinds).save(file)
        for verb in ("plan", "simulate"):
            said = run(capsys, verb, *shape, str(file))[2]
            assert said.endswith(note)
            assert ("times of tasks" in said) == bool(note)


def test_the_table_leaves_out_what_breaks_the_cap(capsys):
    record = reported(capsys, "simulate", "--table", "--ranks", "3", "--micro-batches", "6", "--activation-cap", "3")
    assert all(max(row["peak_activations"]) <= 3 for row in record["policies"])
    assert "the cap is 3" in record["left_out"]["gpipe"]
    assert {row["scheduler"] for row in record["policies"]} >= {"one_f_one_b", "zb_h1", "zb_auto", "zb_v"}


# ------------------------------------------------------------------------------------------------------------- networks
def test_tasks_on_ranks_that_are_not_theirs_are_refused(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    shape = [*NETWORK, "--ranks", "2", "--micro-batches", "4"]
    assert run(capsys, "plan", "--scheduler", "gpipe", *shape, "--save", str(path))[0] == 0
    text = path.read_text()
    for edit, says in (((("0,main,0U0", "7,main,0U0"), ("1,main,1F0", "5,main,1F0")), "rank"),
                       ((("0,main,0U0", "7,main,0U0"),), "0U0 is on a rank that does not exist"),
                       ((("0,main,0U0", "1,main,0U0"),), "0U0 is on rank 1, but stage 0 lives on rank 0"),
                       ((("1,main,1F0", "0,main,1F0"),), "is on rank 1, but stage 1 lives on rank 0"),
                       ((("1,main,1U0", "1,other,1U0"),), "rank 1 computes on the lanes main and other")):
        changed = text
        for old, new in edit:
            assert old in changed
            changed = changed.replace(old, new)
        path.write_text(changed)
        record = reported(capsys, "check", str(path), *shape, code=1)
        assert says in record["error"]


def test_a_check_without_costs_predicts_nothing(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    shape = [*NETWORK, "--ranks", "3", "--micro-batches", "4"]
    reported(capsys, "plan", "--scheduler", "zb_h1", *shape, "--save", str(path), "--save-costs",
             str(tmp_path / "costs.json"))
    shape = [*shape[: shape.index("--costs")], *shape[shape.index("--costs") + 2 :]]
    assert "predicted_step_ms" not in reported(capsys, "check", str(path), *shape)
    assert run(capsys, "check", str(path), *shape, "--costs", str(tmp_path / "costs.json"))[0] == 0


def test_the_memory_limit_is_that_of_a_rank(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    shape = [*NETWORK, "--ranks", "2", "--micro-batches", "4"]
    code, record = run_json(capsys, "plan", "--scheduler", "gpipe", *shape, "--save", str(path))
    peak = record["peak_bytes"]
    for verb in (["plan", "--scheduler", "gpipe"], ["check", str(path)]):
        assert run(capsys, *verb, *shape, "--memory-limit", str(peak))[0] == 0
    code, _, err = run(capsys, "plan", "--scheduler", "gpipe", *shape, "--memory-limit", str(peak - 1), "--recompute",
                       "none")
    assert code == 2
    assert f"needs {peak:,} bytes (" in one_line(err)
    assert f"more than the limit of {peak - 1:,}" in err
    record = reported(capsys, "check", str(path), *shape, "--memory-limit", str(peak - 1), code=1)
    assert f"{peak:,}" in record["error"]
    assert reported(capsys, "plan", "--scheduler", "one_f_one_b", *shape)["peak_bytes"] < peak


def test_a_bandwidth_makes_messages_take_their_time(capsys):
    shape = [*NETWORK, "--ranks", "2", "--micro-batches", "4", "--scheduler", "one_f_one_b"]
    free = reported(capsys, "plan", *shape)
    slow = reported(capsys, "plan", *shape, "--bandwidth", "1MB")
    assert slow["predicted_step_ms"] > free["predicted_step_ms"] + 4 * 2 * 4 * 16 * 4 / 1e6 * 1e3 / 4
    assert slow["tasks"] == free["tasks"]
    assert reported(capsys, "simulate", *shape, "--bandwidth", "1MB")["makespan"] == slow["makespan"]


def test_a_networks_grid_shows_its_tasks(capsys):
    out = shown(capsys, "plan", *LARGE, "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4", "--scheduler",
                "one_f_one_b")
    grid = out.split("\n\none_f_one_b")[0]
    assert len(grid.splitlines()) <= 7
    for row, stage in zip([line for line in grid.splitlines() if "/main" in line][:2], "01", strict=True):
        assert len(re.findall(rf"{stage}?[FB]\d", row)) == 8
        assert row.count(" ") < 0.6 * len(row)


# ---------------------------------------------------------------------------------------------------------------- flags
def test_absurd_plans_fail_their_check_at_once(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text("rank,lane,task\n0,main,0F0\n0,main,0B0\n")
    assert run(capsys, "check", str(path), "--ranks", "1", "--micro-batches", "1")[0] == 0
    assert run(capsys, "check", str(path), "--ranks", "10000000", "--micro-batches", "1")[0] in (1, 2)
    path.write_text("rank,lane,task\n65535,main,0F0\n0,main,0B0\n")
    assert run(capsys, "check", str(path), "--ranks", "1", "--micro-batches", "1")[0] == 1


def test_optimal_says_what_is_proved(capsys):
    pytest.importorskip("ortools")
    shape = ["--scheduler", "optimal", "--ranks", "2", "--micro-batches", "3"]
    for verb in ("plan", "simulate"):
        out = shown(capsys, verb, *shape)
        assert out.splitlines()[-1] == "makespan 10, bound 10: proved"
        for flags in (["--objective", "span"], ["--scheduler-arg", "objective=span"]):
            code, record = run_json(capsys, verb, *shape, *flags)
            assert (record["objective"], record["bound"], record["proved"]) == ("span", 9, True)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["pipedream", "layerpipe", "zb_h1"])
def test_a_saved_order_for_older_weights_says_that_prices_are_of_the_newest(name, capsys, tmp_path):
    path, shape = str(tmp_path / "plan.csv"), ["--ranks", "2", "--micro-batches", "6"]
    run_json(capsys, "plan", "--scheduler", name, *shape, "--save", path)
    for verb, own in (("simulate", ["--scheduler", path]), ("plan", ["--scheduler", path]), ("check", [path])):
        code, _, err = run(capsys, verb, *own, *shape)
        assert code == 0
        assert (f"{name} made this order, for older weights" in err) == (name != "zb_h1"), verb
        assert bool(run_json(capsys, verb, *own, *shape)[1]["remarks"]) == (name != "zb_h1"), verb


def test_a_scheduler_of_ones_own_keeps_its_defaults(capsys, tmp_path):
    (tmp_path / "own.py").write_text("from minidl.schedulers.pipeline.flush import gpipe\n"
                                     "def own(problem, objective='mine', time_limit=2.0):\n"
                                     "    assert (objective, time_limit) == ('mine', 2.0)\n    return gpipe(problem)\n")
    run_json(capsys, "plan", "--ranks", "2", "--micro-batches", "2", "--scheduler", f"{tmp_path / 'own.py'}:own")


def test_weight_versions_are_part_of_a_stale_plans_check(capsys, tmp_path):
    path = tmp_path / "plan.csv"
    shape = ["--ranks", "2", "--micro-batches", "6"]
    code, _, err = run(capsys, "plan", "--scheduler", "pipedream", *shape, "--save", str(path))
    assert code == 0
    assert "--scheduler pipedream" in err
    late = path.read_text().replace("0,main,0B0\n0,main,0F2\n", "0,main,0F2\n0,main,0B0\n")
    assert late != path.read_text()
    path.write_text(late)
    assert run(capsys, "check", str(path), *shape)[0] == 0
    record = reported(capsys, "check", str(path), *shape, "--scheduler", "pipedream", code=1)
    assert "0F2 reads weight version 1, but then the newest one of stage 0 is 0" in record["error"]


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e-3, 1.0, 1e3])
def test_times_in_any_unit_keep_their_digits(scale, capsys, tmp_path):
    """Seconds, say: the text, the trace's report and the draws of a hint have the figures of --json."""
    shape = ["--ranks", "2", "--micro-batches", "2", *(word for flag, time in (("forward", 12.5), ("output-grad", 13.5),
             ("weight-grad", 11.5), ("latency", 1.5)) for word in (f"--{flag}", repr(time * scale)))]

    def said(text: str, pattern: str) -> float:
        found = re.search(pattern + r" +([\d.,e-]+)", text)
        assert found, text
        return float(found[1].replace(",", ""))

    made = reported(capsys, "simulate", *shape)["makespan"]
    assert said(run(capsys, "simulate", *shape)[1], "makespan") == pytest.approx(made, rel=0.005)
    told = reported(capsys, "explain", "1F1", *shape)
    text = run(capsys, "explain", "1F1", *shape)[1]
    assert [said(text, name) for name in ("may start", "runs", "to", "must end", "until")] == pytest.approx(
        [told["may_start"], told["start"], told["end"], told["must_end"], told["waits"][0]["until"]], rel=1e-6)
    lane = reported(capsys, "explain", *shape)["lanes"][0]
    assert said(run(capsys, "explain", *shape)[1], "0/main") == pytest.approx(lane["work"], rel=0.005)
    hint = reported(capsys, "simulate", *shape, "--order", "hint")["steps"]["without_spread"]
    assert hint["own"] == pytest.approx(made, rel=1e-6)


def test_text_keeps_to_the_width_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "simulate", "--scheduler", "dualpipe", "--ranks", "4", "--micro-batches", "8")
    grid = out.split("\n\ndualpipe")[0]
    assert 50 < max(map(len, grid.splitlines())) <= 60
    assert "0F3&3B5" in grid, "a pair has both names"
