"""The same command with `--resume` goes on, whatever flags the first run took, with the bits of a run that never ended;
a flag of the schedule or the weights with another value is refused with both.

    MINIDL_SEED=7 MINIDL_CASES=300 python -m pytest tests/cli/test_resume_flags.py -q -m campaign
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import SMALL, refusal, reported, run, run_json

FLAGS: dict[str, list[Any]] = {
    "--recompute": ["none", "all", "sqrt", "0"], "--offload": ["none", "activations", "states", "all"],
    "--split": ["none", 2, 3, "auto"], "--memory-limit": ["14kB", "16kB", "1MB"], "--streams": [2, 3],
    "--scheduler": ["multi_stream", "multi_region", "in_order"], "--pairs": ["none", "estimated"],
    "--group-weights": [2, "auto"],
    "--scheduler-arg": ["crossing=False", "map=densenet121"], "--offload-to": ["FOLDER/far"],
    "--micro-batches": [2], "--optimizer": ["adam", "adamw"], "--momentum": [0.5], "--clip": [0.1],
    "--weight-decay": [0.01], "--lr": [0.03], "--dither": [1], "--backward": ["jacobi"], "--sweeps": [1],
    "--feed": ["ring", "hold=2"], "--seed": [3], "--dtype": ["float64"], "--lanes": ["python"], "--fusion": ["all"],
    "--init": ["FOLDER/init.safetensors"], "--keep": [2], "--checkpoint-every": [1], "--log-every": [1],
    "--log": ["FOLDER/log"], "--trace": ["FOLDER/trace.json"], "--html": ["FOLDER/page.html"], "--shard": [1, 3],
    "--save-costs": ["FOLDER/costs.json"]}
SUBJECTS = {"one device": [], "ranks": ["--parallel", "data", "--ranks", "2"],
            "a pipeline": ["--parallel", "pipeline", "--ranks", "2"]}
SCHEDULERS = {"ranks": ["barrier", "buckets"], "a pipeline": ["gpipe", "zb_h1"]}


def drawn(subject: str, random: np.random.Generator, folder: Path) -> list[str]:
    """A command's flags, half a dozen of them from those that matter."""
    names = [name for name in FLAGS if random.random() < (0.3 if name in [*FLAGS][:10] else 0.1)]
    values = FLAGS | ({"--scheduler": SCHEDULERS[subject]} if subject in SCHEDULERS else {})
    pairs = [(name, str(random.choice(np.array(values[name], str)))) for name in names]
    return [*SMALL, *SUBJECTS[subject], *(word.replace("FOLDER", str(folder)) for pair in pairs for word in pair)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("subject", "count"), [
    ("one device", 2), ("ranks", 1), ("a pipeline", 1),
    *(pytest.param(subject, n, marks=pytest.mark.wide) for subject, n in zip(SUBJECTS, (6, 2, 2), strict=True)),
    *(pytest.param(subject, int(os.environ.get("MINIDL_CASES", "300")) // 3, marks=pytest.mark.campaign)
      for subject in SUBJECTS)])
def test_the_same_command_goes_on(subject: str, count: int, capsys: Any, tmp_path: Path) -> None:
    random, done = np.random.default_rng([int(os.environ.get("MINIDL_SEED", "1")), *subject.encode()]), 0
    assert run(capsys, "train", *SMALL, "--steps", "1", "--checkpoint", str(tmp_path / "first"))[0] == 0
    assert run(capsys, "export", str(tmp_path / "first"), str(tmp_path / "init.safetensors"))[0] == 0
    while done < count:
        command, folder = ["train", *drawn(subject, random, tmp_path)], str(tmp_path / f"run{done}")
        if run(capsys, *command, "--steps", "1", "--checkpoint", folder)[0]:
            continue  # not accepted
        done += 1
        code, out, err = run(capsys, *command, "--steps", "2", "--checkpoint", folder, "--resume", "--json")
        assert code == 0, f"{' '.join(command)}: {err}"
        whole = reported(capsys, *command, "--steps", "2", "--checkpoint", f"{folder} whole")
        assert json.loads(out)["params_sha256"] == whole["params_sha256"], " ".join(command)


@pytest.mark.few(2)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("first", "other", "says"), [
    (["--recompute", "all"], ["--recompute", "none"], "was made with --recompute all, and goes on so; with --recompute "
                                                      "none it needs a new schedule: give --scheduler too"),
    ([], ["--offload", "states"], "made with --offload none, and goes on so; with --offload states it needs"),
    (["--split", "2"], ["--split", "3"], "made with --split 2, and goes on so; with --split 3 it needs"),
    ([], ["--init", "x.safetensors"], "made without --init, and goes on so; with --init x.safetensors it needs a new "
                                      "run")])
def test_another_value_is_named_beside_the_first(subject: str, first: list[str], other: list[str], says: str,
                                                 capsys: Any, tmp_path: Path) -> None:
    command = ["train", *SMALL, *SUBJECTS[subject], "--checkpoint", str(tmp_path / "run"), "--micro-batches", "2"]
    assert run(capsys, *command, *first, "--steps", "1")[0] == 0
    assert says in refusal(capsys, *command, *other, "--steps", "2", "--resume")
    again = run_json(capsys, *command, *first, "--steps", "2", "--resume")
    assert again[0] == 0


def test_a_place_after_resume_is_told_where_it_belongs(capsys: Any) -> None:
    said = refusal(capsys, "train", *SMALL, "--steps", "2", "--resume", "my_run")
    assert "unknown resume 'my_run'; known: auto; write --checkpoint my_run --resume" in said


def test_a_schedule_that_goes_on_keeps_its_groups_and_its_memory(capsys: Any, tmp_path: Path) -> None:
    """Other groups were not made, and not refused; a smaller limit was said to be too small for every schedule."""
    command = ["train", *SMALL, "--checkpoint", str(tmp_path / "run")]
    assert run(capsys, *command, "--steps", "1")[0] == 0
    assert ("was made with --group-weights 1, and goes on so; with --group-weights 2 it needs a new schedule: give "
            "--scheduler too") in refusal(capsys, *command, "--group-weights", "2", "--steps", "2", "--resume")
    said = refusal(capsys, *command, "--memory-limit", "16kB", "--steps", "2", "--resume")
    assert "more than the limit of 16,000); give --scheduler to make a new one" in said
    command += ["--memory-limit", "16kB", "--resume", "--scheduler", "in_order"]
    assert run(capsys, *command, "--steps", "2")[0] == 0


@pytest.mark.parametrize("policy", ["multi_stream", "pd_asgd"])
def test_a_run_by_a_plan_goes_on_without_the_file(policy: str, capsys: Any, tmp_path: Path) -> None:
    """The checkpoint keeps the schedule; and the name of the file, which may be no text, made it unreadable."""
    plan = os.fsdecode(os.fsencode(tmp_path) + b"/pl\xe4n.csv")
    command = ["train", *SMALL, "--micro-batches", "2", "--checkpoint", str(tmp_path / "run")]
    assert run(capsys, "plan", *SMALL, "--micro-batches", "2", "--scheduler", policy, "--save", plan)[0] == 0
    assert reported(capsys, *command, "--scheduler", plan, "--steps", "1", "--html", str(tmp_path / "page.html"))
    os.unlink(plan)
    assert "pl?n.csv" in (tmp_path / "page.html").read_text()
    whole = reported(capsys, "train", *SMALL, "--micro-batches", "2", "--scheduler", policy, "--steps", "2")
    assert reported(capsys, *command, "--steps", "2", "--resume")["params_sha256"] == whole["params_sha256"]


def test_what_changes_the_bits_on_ranks_is_given_again(capsys: Any, tmp_path: Path) -> None:
    """Ranks plan anew when they go on."""
    command = ["train", *SMALL, *SUBJECTS["ranks"], "--checkpoint", str(tmp_path / "run")]
    assert run(capsys, *command, "--split", "2", "--steps", "1")[0] == 0
    assert "was made with --split 2; give it again" in refusal(capsys, *command, "--steps", "2", "--resume")
