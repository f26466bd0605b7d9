"""Every flag, given to every command that takes it, changes what the command does, or is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pipelines
import pytest
from command_line import refusal, shown
from test_flags import COMMANDS, VALUES

from minidl.cli import main
from minidl.cli.flags import FLAGS

NETWORK = ["--model", "mlp", "--model-arg", "hidden=8", "--batch-size", "16"]
#: the flags of a command on each subject; "text": of one on text
BASE = {"s": [*NETWORK, "--costs", "analytic"],
        "r": [*NETWORK, "--costs", "analytic", "--parallel", "data", "--ranks", "2", "--scheduler", "buckets"],
        "c": [*NETWORK, "--costs", "analytic", "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "2",
              "--scheduler", "gpipe"],
        "p": ["--ranks", "2", "--micro-batches", "4", "--scheduler", "fast_forward_greedy"],
        "l": ["--parallel", "data", "--scheduler", "fifo", "--forward", "1,2,3", "--output-grad", "0,2,3",
              "--weight-grad", "1,2,3", "--comm", "3,2,1"]}
LONG = (("train", "r"), ("train", "c"), ("compare", "s"), ("compare", "r"), ("compare", "c"), ("plan", "c"),
        ("check", "c"), ("explain", "c"))
MORE = {"check": ["plan.csv"], "train": ["--steps", "2"], "compare": ["--steps", "2"]}
#: flags of which a command alone cannot show the effect -> why
SET_APART = {
    "--json": "only the form of the output", "--config": "flags of a file", "--parallel": "chooses the subject",
    **dict.fromkeys(("--device", "--dependent-launch", "--side-sms"), "need a GPU"),
    "--lanes": "the same results by other calls",
    "--steps-per-launch": "the same results by fewer launches",
    "--resume": "goes on with a checkpoint, tested in test_cli.py", "--epochs": "refused beside --steps",
    **dict.fromkeys(("--max-restarts", "--launch", "--least-ranks"),
                    "start other processes, tested in tests/system/test_restarts.py")}
#: flags without which the value has no effect
BESIDE = {"--optimizer-arg": ["--optimizer", "rmsprop"], "--log-order": ["--order", "hint"]}
COMPARED = {"r": "barrier,buckets", "c": "gpipe,zb_h1"}  #: on ranks
NOISE = ("step_ms", "data_ms", "versions", "diagnosis")  #: of a record: what differs from run to run


def does(capsys: Any, argv: list[str]) -> tuple[int, Any, str, list[str]]:
    """(exit code, record without times, lines on standard error, new files) of a command; the files go again."""
    before = set(Path().iterdir())
    code = main([*argv, "--json"])
    caught = capsys.readouterr()
    new = sorted(set(Path().iterdir()) - before)
    for path in new:
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def still(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: still(v) for k, v in value.items() if k not in NOISE}
        return [still(v) for v in value] if isinstance(value, list) else value

    notes = "bottleneck", "are resized"  # the second is there once in a process
    told = "\n".join(line for line in caught.err.splitlines() if not any(note in line for note in notes))
    return code, still(json.loads(caught.out)) if caught.out else None, told, [path.name for path in new]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Path:
    """A folder with a table, costs and plans; searches try few candidates."""
    monkeypatch.chdir(tmp_path)
    pipelines.little_effort(monkeypatch)
    values = np.random.default_rng(0).random((80, 12)).round(3)
    rows = [",".join(map(str, [*row, i % 3])) for i, row in enumerate(values)]
    Path("table.csv").write_text("\n".join([",".join([f"x{i}" for i in range(12)] + ["label"]), *rows]) + "\n")
    assert main(["plan", *BASE["s"], "--save-costs", "costs.json"]) == 0
    saved = json.loads(Path("costs.json").read_text())
    saved["kinds"] = {name: value / 1000 for name, value in saved["kinds"].items()}
    Path("costs.json").write_text(json.dumps(saved))
    capsys.readouterr()
    return tmp_path


@pytest.mark.few(2)
@pytest.mark.parametrize(("verb", "subject"), [pytest.param(*c, marks=[pytest.mark.slow] if c in LONG else [])
                                               for c in COMMANDS])
def test_every_flag_changes_something_or_is_refused(capsys: Any, folder: Path, verb: str, subject: str) -> None:
    link = ["--latency", "2", "--bandwidth", "1GB"] if subject == "r" and verb not in ("train", "compare") else []
    task = ["4F0" if subject in "sr" else "0F0"] if verb == "explain" else []
    base = [verb, *task, *MORE.get(verb, []), *BASE[subject], *link]
    if verb == "compare" and subject != "s":
        base[(at := base.index("--scheduler")) : at + 2] = ["--schedulers", COMPARED[subject]]
    if verb == "check":
        shown(capsys, "plan", *BASE[subject], "--save", "plan.csv")
        if subject == "p":
            del base[base.index("--scheduler") :]
    plain = does(capsys, base)
    assert plain[0] == 0, plain
    idle, refused = [], []
    for name, flag in FLAGS.items():
        if subject not in flag.serves.get(verb, "") or name in SET_APART:
            continue
        argv = list(base)
        if name in argv and name != "--model-arg":
            del argv[(at := argv.index(name)) : at + 2]
        argv += BESIDE.get(name, [])
        store = flag.options.get("action") == "store_true"
        found = does(capsys, [*argv, name, *([] if store else [VALUES.get(name, "2")])])
        if found[0] == 2:
            assert re.fullmatch(r"minidl: .+", found[2]), found
            assert not found[3], (name, found)
            refused.append(name)
        # one task of the plan need not change with a flag
        elif verb != "explain" and found == (does(capsys, argv) if name in BESIDE else plain):
            idle.append(name)
    assert not idle
    assert len(refused) < 25, refused


@pytest.mark.parametrize("mode", [["train", *BASE["s"], "--dry-run"],
                                  pytest.param(["train", *BASE["c"], "--dry-run"], marks=pytest.mark.slow),
                                  pytest.param(["simulate", "--ranks", "2", "--micro-batches", "2", "--table"],
                                               marks=pytest.mark.slow),
                                  pytest.param(["plan", *BASE["s"], "--scheduler", "multi_region", "--curve"],
                                               marks=pytest.mark.slow)], ids=lambda m: m[-1])
def test_so_it_does_beside_a_flag_that_changes_the_command(capsys: Any, folder: Path, mode: list[str]) -> None:
    plain, subject = does(capsys, mode), {"--table": "p"}.get(mode[-1], "c" if "--ranks" in mode else "s")
    assert plain[0] == 0, plain
    usual = {"--epochs", "--pairs"}  # given as they are by default
    for name, flag in FLAGS.items():
        if subject in flag.serves.get(mode[0], "") and name not in {*SET_APART, *usual, *mode} - {"--lanes"}:
            store = flag.options.get("action") == "store_true"
            found = does(capsys, [*mode, name, *([] if store else [VALUES.get(name, "2")])])
            assert found[0] == 2 or found != plain, name
            assert found[0] == 0 or re.fullmatch(r"minidl: .+", found[2]), found


@pytest.mark.parametrize("policy", ["no_overlap", "barrier", "fifo", "priority", "dear", "reverse_first_k"])
def test_an_unknown_argument_of_a_policy_on_given_times_is_refused(capsys: Any, policy: str) -> None:
    argv = ["simulate", *BASE["l"], "--scheduler", policy]
    shown(capsys, *argv)
    assert f"scheduler {policy} takes no argument 'streams'" in refusal(capsys, *argv, "--scheduler-arg", "streams=1")


def test_a_dry_run_says_what_would_run(capsys: Any, folder: Path) -> None:
    _, record, *_ = does(capsys, ["train", *BASE["s"], "--dry-run", "--epochs", "3", "--optimizer", "rmsprop"])
    assert {name: record[name] for name in ("data", "steps", "optimizer", "lr", "batch_size", "seed")} == {
        "data": "digits", "steps": 270, "optimizer": "rmsprop", "lr": 0.002, "batch_size": 16, "seed": 0}
    assert "loss_first" not in record
    assert record["tasks"] > 0


@pytest.mark.slow
def test_a_saved_pipeline_is_priced_on_given_times(capsys: Any, folder: Path) -> None:
    times = ["--weight-grad", "2", "--latency", "0.5"]
    _, planned, _, _ = does(capsys, ["simulate", *BASE["p"], *times])
    shown(capsys, "plan", *BASE["p"], *times, "--save", "mine.csv")
    mine = [*BASE["p"][:-1], "mine.csv"]
    again = does(capsys, ["simulate", *mine, *times])[1]
    assert BASE["p"][-1] in again.pop("beside")["equals"]  # the policy that it was made by
    assert again == planned
    assert does(capsys, ["simulate", *mine])[1]["makespan"] < planned["makespan"]
    assert does(capsys, ["explain", "0W1", *mine, *times])[0] == 0
    text = Path("mine.csv").read_text().splitlines()
    Path("mine.csv").write_text("\n".join([text[0], text[2], text[1], *text[3:-1]]) + "\n")
    code, _, told, _ = does(capsys, ["simulate", *mine])
    assert code == 2
    assert "missing" in told
