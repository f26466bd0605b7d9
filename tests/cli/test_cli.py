"""The command line as a user meets it: JSON and nothing else, one clear line for what cannot be, exit codes."""

import json
import os
import re

import numpy as np
import pytest
from command_line import SMALL, one_line, refusal, reported, run, run_json, shown
from helpers import deadline, python

from minidl import __version__, checkpoint, models
from minidl.cli import main
from minidl.cli.parser import VERBS, parse
from minidl.runtime.executors import TaskError
from minidl.schedulers import registry
from minidl.training.job import OPTIMIZERS
from minidl.training.trainer import Trainer


# ------------------------------------------------------------------------------------------------------ what it does
def test_train_reports_every_promised_key(capsys):
    record = reported(capsys, "train", *SMALL, "--steps", "3")
    assert set(record) >= {"model", "parameters", "data", "device", "ranks", "scheduler", "steps", "loss_first",
                           "loss_last", "accuracy", "step_ms", "predicted_step_ms", "peak_bytes",
                           "params_sha256", "versions"}
    assert set(record["step_ms"]) == {"median", "p10", "p90"}
    assert record["steps"] == 3
    assert 0 <= record["accuracy"] <= 1


LOUD = """
import numpy as np
from minidl import nn, schedulers
print("loaded")

class Loud(nn.Module):
    input_shape, classes = (4,), 3
    def __init__(self):
        print("made")
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        print("forward")
        return self.layer(x)

def net():
    return Loud()

def points():
    return np.random.default_rng(0).standard_normal((100, 4)), np.arange(100) % 3

def order(graph, cost, machine):
    print("ordered")
    return schedulers.in_order(graph)
"""


@pytest.mark.parametrize("how", ["--json", "--config quiet.toml", ""])
@pytest.mark.parametrize("ranks", ["", "--parallel data --ranks 2"])
def test_what_a_users_file_prints_is_not_on_the_output_of_json(how, ranks, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "quiet.toml").write_text("json = true")
    own = "" if ranks else "--scheduler loud.py:order"
    words = f"train --model loud.py:net --data loud.py:points --costs analytic --batch-size 8 --steps 2 {own} {ranks}"
    assert main([*words.split(), *how.split()]) == 0
    found, printed = capsys.readouterr(), {"loaded", "made", "forward", *(["ordered"] if own else [])}
    if not how:
        assert printed <= set(found.out.split()), "without --json it stays where it was printed"
    else:
        assert json.loads(found.out)["steps"] == 2
        assert printed <= set(found.err.split())


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"minidl {__version__}\n"


def test_params_sha256_is_of_every_parameter_in_state_dict_order(capsys):
    import hashlib

    from minidl.training.job import Job
    from minidl.training.recorded import Recorded
    from minidl.training.trainer import params_sha256

    recorded = Recorded(Job(model_args={"preset": "tiny"}, batch_size=16))
    expected = hashlib.sha256(b"".join(np.ascontiguousarray(v).astype("<f4").tobytes()
                                       for v in recorded.model.state_dict().values()))
    assert params_sha256(recorded.model) == expected.hexdigest()


@pytest.mark.wide
def test_train_told_nothing_compares_two_schedules_and_learns(capsys):
    record = reported(capsys, "train")
    assert record["bit_identical"] is True
    assert [arm["scheduler"] for arm in record["arms"]] == ["in_order", "multi_stream"]
    assert len({arm["params_sha256"] for arm in record["arms"]}) == 1
    assert all(arm["accuracy"] >= 0.95 for arm in record["arms"])


#: tasks of all these cross the border of a step
ACROSS = ["--model", "densenet121", "--batch-size", "4", "--micro-batches", "2", "--optimizer", "adam", "--lr", "0.001",
          "--schedulers", "in_order,multi_stream,multi_region"]


@pytest.mark.few(1)
@pytest.mark.parametrize("extra", [[], ["--micro-batches", "4"], ["--optimizer", "adam", "--lr", "0.01"],
                                   ["--dtype", "float64"], ["--streams", "3"],
                                   pytest.param(ACROSS, marks=pytest.mark.slow)])
def test_compare_is_bit_identical(capsys, extra):
    record = reported(capsys, "compare", *SMALL, "--steps", "4", *extra)
    assert record["bit_identical"] is True


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "schedulers", "judged"), [
    ("mlp", "in_order,multi_stream,multi_region", 1), ("lenet", "in_order,multi_region", 1),
    ("mlp", "in_order,partime", 2)])
def test_compare_judges_models_with_equal_bits_once(monkeypatch, capsys, model, schedulers, judged):
    runs, evaluate = [], Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self, *given: runs.append(self) or evaluate(self, *given))
    record = reported(capsys, "compare", "--model", model, "--steps", "2", "--costs", "analytic", "--schedulers",
                      schedulers)
    assert len(runs) == judged
    assert len({arm["params_sha256"] for arm in record["arms"]}) == len({str(arm["test"]) for arm in record["arms"]})


def test_micro_batches_give_the_same_training_to_rounding(capsys):
    losses = [reported(capsys, "train", *SMALL, "--dtype", "float64", "--steps", "5", "--micro-batches",
                       m)["loss_last"] for m in "124"]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-10)


def test_plan_saves_a_schedule_that_check_accepts_and_an_edited_one_that_it_does_not(capsys, tmp_path):
    plan, svg = tmp_path / "plan.csv", tmp_path / "plan.svg"
    record = reported(capsys, "plan", *SMALL, "--scheduler", "multi_stream", "--save", str(plan), "--svg", str(svg))
    assert set(record) == {"tasks", "edges", "waits", "predicted_step_ms", "peak_bytes", "activation_peak_bytes",
                           "remarks"}
    assert svg.read_text().lstrip().startswith("<")
    checked = reported(capsys, "check", str(plan), *SMALL)
    assert (checked["valid"], checked["peak_bytes"]) == (True, record["peak_bytes"])
    lines = plan.read_text().splitlines()
    plan.write_text("\n".join([lines[0], lines[2], lines[1], *lines[3:]]) + "\n")
    code, out, _ = run(capsys, "check", str(plan), *SMALL)
    assert code == 1
    assert "comes before" in out
    assert re.search(r"\[\d+F0\]", out), "the culprit is marked in the grid"
    plan.write_text("\n".join([*lines, lines[-1]]) + "\n")
    checked = reported(capsys, "check", str(plan), *SMALL, code=1)
    assert checked["valid"] is False
    assert "appears twice" in checked["error"]


@pytest.mark.parametrize("ranks", [[], ["--parallel", "pipeline", "--ranks", "2"]])
def test_compare_names_the_schedule_that_is_not_valid(capsys, tmp_path, ranks):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    network = [*SMALL, *ranks, "--scheduler", "one_f_one_b" if ranks else "in_order"]
    assert run(capsys, "plan", *network, "--save", str(good))[0] == 0
    first, after = re.search(r"(0,main,.*\n)(0,main,.*\n)", good.read_text()).groups()
    bad.write_text(good.read_text().replace(first + after, after + first))
    code, _, err = run(capsys, "compare", *SMALL, *ranks, "--steps", "2", "--schedulers", f"{good},{bad}")
    assert code == 2
    assert err.startswith(f"minidl: {bad}: ")


@pytest.mark.parametrize("ranks", ["", "--parallel data --ranks 2", "--parallel data --ranks 2 --dry-run"])
def test_train_says_what_the_plan_remarks_on_ranks_too(capsys, ranks):
    flags = ["--backward", "jacobi", "--sweeps", "1", "--steps", "2", *ranks.split()]
    code, _, err = run(capsys, "train", "--model", "mlp", *SMALL[-4:], *flags)
    assert (code, err.count("gradients are inexact: 1 of the 2 sweeps of jacobi")) == (0, 1)


def test_explain_says_of_how_many_parts_a_task_is_one(capsys):
    for flags, name, parts in (((), "1W0", 1), (("--split", "2"), "1W0/2", 2)):
        asked = "explain", name, *SMALL, "--costs", "analytic", *flags
        explained = reported(capsys, *asked)
        assert explained["parts"] == parts
        assert explained["along"] == ["outputs"] * (parts - 1)
        assert (", one of 2 parts along outputs\n" in run(capsys, *asked)[1]) == (parts == 2)


def test_explain_without_a_task_says_what_the_order_costs(capsys, tmp_path):
    asked = "explain", "--ranks", "4", "--micro-batches", "8", "--scheduler", "zb_h1"
    found = reported(capsys, *asked)
    assert (found["false_waits"], len(found["largest"])) == (40, 20)
    assert [lane["idle_by_order"] for lane in found["lanes"]] == [3, 2, 1, 0]
    assert found["largest"][0] == {"task": "0F7", "lane": "0/main", "waits_for": "0W3", "may_start": 0, "start": 18,
                                   "wait": 18, "idle": 3, "slack": 0}
    _, text, _ = run(capsys, *asked)
    assert "the largest of 40 waits by the order alone" in text
    assert re.search(r"1/main +24.000 +1.000 +2.000\n", text)
    assert "no task waits by the order alone" in run(capsys, "explain", "--ranks", "1", "--micro-batches", "1")[1]
    page = tmp_path / "page.html"
    assert run(capsys, "explain", *SMALL, "--costs", "analytic", "--html", str(page))[0] == 0
    assert "idle_by_order" in page.read_text()


def test_explain_and_simulate_agree_on_the_step(capsys):
    explained = reported(capsys, "explain", "1W0", *SMALL, "--scheduler", "multi_stream")
    assert explained["may_start"] <= explained["start"] <= explained["end"] <= explained["must_end"]
    assert explained["slack"] == pytest.approx(explained["must_end"] - explained["end"])
    simulated = reported(capsys, "simulate", *SMALL, "--scheduler", "multi_stream")
    assert simulated["predicted_step_ms"] * 1000 >= explained["must_end"] - 1e-3


def test_trace_is_a_chrome_trace(capsys, tmp_path):
    path = tmp_path / "trace.json"
    _ = shown(capsys, "train", *SMALL, "--steps", "2", "--trace", str(path))
    assert any(e.get("ph") == "X" for e in json.loads(path.read_text())["traceEvents"])


def test_schedulers_lists_every_policy_with_what_it_says(capsys):
    record = reported(capsys, "schedulers")
    listed = {s["scheduler"]: s for s in record["schedulers"]}
    assert listed.keys() == registry.SCHEDULERS.keys()
    for name, entry in listed.items():
        assert len(entry["about"]) > 40, name
        assert "Raises" not in entry["about"]
    assert listed["reverse_first_k"]["arguments"]["k"] is None
    assert listed["zb_auto"]["arguments"]["kept"] == 1.0
    out = shown(capsys, "schedulers", "--parallel", "data")
    assert "reverse_first_k" in out
    assert "zb_h1" not in out


def test_info_and_models(capsys):
    record = reported(capsys, "info", "--model", "mlp")
    assert set(record) == {"model", "parameters", "flops_per_sample", "layers", "objective"}
    assert record["parameters"] == sum(layer["parameters"] for layer in record["layers"])
    code, record = run_json(capsys, "models")
    found = {m["model"]: m for m in record["models"]}
    keys = {"model", "parameters", "flops_per_sample", "layers", "objective", "schedulers", "arguments", "presets"}
    assert all(set(m) == keys for m in found.values())
    assert found["bert_large"]["parameters"] == 335_141_888
    assert "modulo" in found["gpt2_medium"]["schedulers"]
    assert "modulo" not in found["lenet"]["schedulers"], "it has no four even stages"
    assert found["mlp"]["layers"] == 5


def test_config_file_gives_flags_and_the_command_line_wins(capsys, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('model = "mlp"\nsteps = 2\nbatch-size = 16\ncosts = "analytic"\n[model-arg]\npreset = "tiny"\n')
    record = reported(capsys, "train", "--config", str(config), "--steps", "3")
    assert (record["model"], record["steps"]) == ("mlp", 3)


def test_a_config_gives_a_flag_several_times_by_a_table_or_a_list(tmp_path):
    config = tmp_path / "run.toml"
    for text in ('optimizer-arg = ["eps=1e-6", "amsgrad=true"]', "[optimizer-arg]\neps = 1e-6\namsgrad = true"):
        config.write_text(text)
        assert parse(["train", "--config", str(config)]).optimizer_arg == [("eps", 1e-6), ("amsgrad", True)]


def test_pipeline_simulate_has_the_promised_keys(capsys):
    record = reported(capsys, "simulate", "--scheduler", "zb_h1", "--ranks", "4", "--micro-batches", "8", "--forward",
                      "1", "--output-grad", "1", "--weight-grad", "1")
    assert set(record) == {"makespan", "max_span", "period", "spans", "peak_activations", "bubble_rate",
                           "remarks"}
    assert record["makespan"] == 27


@pytest.mark.slow
def test_table_marks_the_best(capsys):
    out = shown(capsys, "simulate", "--ranks", "2", "--micro-batches", "4", "--table")
    assert "zb_h2" in out
    assert " *" in out


# --------------------------------------------------------------------------------------------------------- bad input
def test_a_loss_that_is_not_finite_names_the_step(capsys):
    code, _, err = run(capsys, "train", *SMALL, "--lr", "1e30", "--steps", "50")
    assert code == 2
    assert re.search(r"loss is (nan|inf) at step \d+", one_line(err))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_debug_names_the_layer_of_the_first_nan(capsys, monkeypatch):
    monkeypatch.setenv("MINIDL_DEBUG", "1")
    with pytest.raises(TaskError, match=r"task \d+\w+ \(.*\).*not finite"):
        run(capsys, "train", *SMALL, "--lr", "1e30", "--steps", "50")


@pytest.mark.parametrize("level", ["abc", "4", "-1", "1.5", " 1"])
def test_a_debug_level_that_there_is_not_is_one_line(capsys, monkeypatch, level):
    monkeypatch.setenv("MINIDL_DEBUG", level)
    assert f"MINIDL_DEBUG is {level!r}; it must be 0, 1, 2 or 3" in refusal(capsys, "plan", *SMALL)


@pytest.mark.few(1)
@pytest.mark.parametrize("argv", [
    ["train", "--model", "mlp", "--model-arg", "hidden=1000000"],
    ["train", "--model", "resnet20", "--model-arg", "image_size=100000"],
    ["train", "--model", "mlp", "--model-arg", "hidden=20000", "--model-arg", "layers=100"],
    ["train", "--model", "mlp", "--model-arg", "classes=1000000000"],
    ["simulate", "--scheduler", "gpipe", "--ranks", "4096", "--micro-batches", "4096"]])
def test_absurd_sizes_end_in_one_line_and_not_the_machine(argv):
    """The program alone, on a machine that seems to have little memory left."""
    code = ("import sys; from minidl.cli import machine; machine.available = lambda: 700 << 20; "
            "sys.argv[0] = 'minidl'; from minidl.__main__ import run; run()")
    more = ["--costs", "analytic", "--steps", "1"] if argv[0] == "train" else []
    done = python("-c", code, *argv, *more)
    assert done.returncode == 2, done.stderr
    said = one_line(done.stderr.splitlines(keepends=True)[-1])
    assert "there is not enough memory for this" in said
    assert ("scheduler gpipe cannot plan" if argv[0] == "simulate" else "a smaller batch or network") in said


def test_what_is_available_is_the_least_of_machine_and_control_group(tmp_path, monkeypatch):
    from minidl.cli import machine

    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    assert machine.available() is None
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\nSwapFree:   7 kB\n")
    assert machine.available() == 57 << 10
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available() == 57 << 10
    (tmp_path / "memory.max").write_text("9000\n")
    assert machine.available() == 4000


@pytest.mark.parametrize("text", [b"", b"a,b\n", b"rank,lane,task\n0,main\n", b"rank,lane,task\n0,main,4Z0\n",
                                  b"rank,lane,task\n-1,main,4W0\n", b"\xff\xfe\x00\x01"])
def test_a_file_that_is_no_plan(capsys, tmp_path, text):
    path = tmp_path / "plan.csv"
    path.write_bytes(text)
    for shape in (SMALL, ["--ranks", "2", "--micro-batches", "4"]):
        said = refusal(capsys, "check", str(path), *shape)
        assert str(path) in said
        assert ("not a text file" in said) == (text[:1] == b"\xff")


@pytest.mark.parametrize("flags", [["check", "PIPE"], ["check", "PIPE", "--ranks", "2"], ["train", "--config", "PIPE"],
                                   ["plan", "--costs", "PIPE"]])
def test_what_is_no_file_is_refused_and_not_waited_for(capsys, tmp_path, flags):
    os.mkfifo(path := tmp_path / "pipe")
    with deadline():
        assert str(path) in refusal(capsys, flags[0], *SMALL, *[str(path) if f == "PIPE" else f for f in flags[1:]])


def test_a_byte_order_mark_and_other_ends_of_lines_change_nothing(capsys, tmp_path):
    plan, grid, config = tmp_path / "plan.csv", tmp_path / "grid.csv", tmp_path / "run.toml"
    assert run(capsys, "plan", *SMALL, "--save", str(plan))[0] == 0
    grid.write_text("0F0,0B0,0F1,0B1\n")
    config.write_text("ranks = 1\nmicro-batches = 2\n")
    for path in (plan, grid, config):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert run(capsys, "check", str(plan), *SMALL)[0] == 0
    assert run(capsys, "check", str(grid), "--config", str(config), "--ranks", "1")[0] == 0


@pytest.mark.parametrize(("text", "says"), [("bogus = 1\n", "bogus"), ("steps = 'many'\n", "steps"),
                                            ("json = 3\n", "json"), ("=", "Invalid")])
def test_bad_config(capsys, tmp_path, text, says):
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert says in refusal(capsys, "train", *SMALL, "--config", str(path))


# -------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_gives_the_bits_of_an_uninterrupted_run(capsys, tmp_path, optimizer):
    flags = [*SMALL, "--optimizer", optimizer, "--lr", "0.01"]
    whole = reported(capsys, "train", *flags, "--steps", "9")
    folder = str(tmp_path / "run")
    assert run(capsys, "train", *flags, "--steps", "4", "--checkpoint", folder, "--scheduler", "multi_stream")[0] == 0
    code, out, err = run(capsys, "train", *flags, "--steps", "9", "--checkpoint", folder, "--resume", "--json")
    assert code == 0
    assert "after step 4" in err
    resumed = json.loads(out)
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["loss_last"] == whole["loss_last"]


def test_a_learning_rate_given_with_resume_wins_and_one_not_given_goes_on(capsys, tmp_path):
    from minidl.training import trainer as training
    from minidl.training.job import Job
    from minidl.training.recorded import Recorded

    recorded = Recorded(Job(model_args={"preset": "tiny"}, batch_size=16, lr=0.01))
    trainer = training.Trainer(recorded, training.CostModel.analytic())
    for step in range(9):
        trainer.recorded.optimizer.lr = 0.01 if step < 4 else 0.5
        trainer.step()
    whole = reported(capsys, "train", *SMALL, "--lr", "0.01", "--steps", "9")["params_sha256"]
    for given, expected in ((["--lr", "0.5"], trainer.params_sha256()), ([], whole)):
        folder = str(tmp_path / f"run{len(given)}")
        assert run(capsys, "train", *SMALL, "--lr", "0.01", "--steps", "4", "--checkpoint", folder)[0] == 0
        record = reported(capsys, "train", *SMALL, *given, "--steps", "9", "--checkpoint", folder, "--resume")
        assert record["params_sha256"] == expected


@pytest.mark.parametrize("verb", VERBS)
def test_help_begins_with_the_purpose_of_the_verb(capsys, verb):
    """It began with fifty flags."""
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    purpose, usage, *_ = capsys.readouterr().out.split("\n\n")
    assert purpose.lower().rstrip(".") == VERBS[verb][1].lower()
    assert re.fullmatch(rf"usage: minidl {verb}( [A-Z\[.][^\s-]*)* \[flags\]", " ".join(usage.split())), usage


def test_a_resumed_run_says_by_which_scheduler_it_goes_on(capsys, tmp_path):
    folder = str(tmp_path / "run")
    assert run(capsys, "train", *SMALL, "--steps", "2", "--checkpoint", folder, "--scheduler", "multi_stream")[0] == 0
    resume = ["train", *SMALL, "--checkpoint", folder, "--resume"]
    assert reported(capsys, *resume, "--steps", "3")["scheduler"] == "multi_stream"
    assert reported(capsys, *resume, "--steps", "4", "--scheduler", "in_order")["scheduler"] == "in_order"


def test_two_runs_do_not_save_to_one_folder(capsys, tmp_path):
    folder = tmp_path / "run"
    run_it = ["train", *SMALL, "--steps", "2", "--checkpoint", str(folder)]
    with checkpoint.claim(folder):
        assert "another run saves to" in refusal(capsys, *run_it)
    assert run(capsys, *run_it)[0] == 0
    assert [p.name for p in folder.iterdir()] == [checkpoint.NAME]
    with checkpoint.claim(folder):
        assert "another run saves to" in refusal(capsys, *run_it, "--resume")


def test_a_checkpoint_of_another_run_is_refused_and_none_is_overwritten_unasked(capsys, tmp_path):
    command = ["train", *SMALL, "--steps", "2", "--checkpoint", str(tmp_path / "run")]
    assert run(capsys, *command)[0] == 0
    for change, says in ((["--model-arg", "hidden=24"], "another model"), (["--seed", "5"], "seed"),
                         (["--optimizer", "adam"], "optimizer"), (["--batch-size", "8"], "batch_size")):
        assert says in refusal(capsys, *command, *change, "--steps", "4", "--resume")
    assert "--resume" in refusal(capsys, *command)
    assert "already has 2 steps" in refusal(capsys, *command, "--resume")
    assert run(capsys, *command[:-1], str(tmp_path / "none"), "--resume")[0] == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_run_that_names_no_network_takes_the_small_one(verb, capsys):
    """As `train` without any flag does: `train --epochs 4` is the same run, longer."""
    record = reported(capsys, verb, "--steps", "1", "--costs", "analytic")
    assert (record["model"], models.create(record["model"]).depth) == ("mlp_large", 4)
