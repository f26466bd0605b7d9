"""A plan that was saved, and perhaps edited, is a scheduler too: it is proved, priced, run and compared like any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import PATIENCE, deadline

from minidl.cli import main

NETWORK = ["--model", "mlp", "--model-arg", "layers=6", "--model-arg", "hidden=32", "--batch-size", "32"]
RUN = [*NETWORK, "--steps", "3", "--costs", "analytic", "--json"]
PIPELINE = ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4"]


def record(capsys, *flags: str) -> dict:
    with deadline(PATIENCE):
        assert main([*flags]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *flags: str) -> str:
    with deadline(PATIENCE):
        assert main([*flags]) == 2
    return capsys.readouterr().err


@pytest.fixture
def saved(tmp_path, capsys):
    """Saves a plan; returns its path."""
    def save(*flags: str) -> str:
        path = str(tmp_path / "plan.csv")
        record(capsys, "plan", *NETWORK, *flags, "--costs", "analytic", "--save", path, "--json")
        return path

    return save


def test_an_edited_plan_of_one_device_runs_with_the_same_bits(saved, capsys):
    path = saved("--scheduler", "multi_stream")
    lines = Path(path).read_text().splitlines()
    weight = next(i for i, line in enumerate(lines) if line.startswith("0,sub,") and "W" in line)
    moved = lines.pop(weight).replace("0,sub,", "0,main,")
    Path(path).write_text("\n".join([lines[0], *(x for x in lines[1:] if x.startswith("0,main,")), moved,
                                     *(x for x in lines[1:] if not x.startswith("0,main,"))]) + "\n")
    alone = record(capsys, "train", *RUN)
    assert record(capsys, "train", *RUN, "--scheduler", path)["params_sha256"] == alone["params_sha256"]
    arms = record(capsys, "compare", *RUN, "--schedulers", f"in_order,{path}")
    assert arms["bit_identical"]
    assert [arm["scheduler"] for arm in arms["arms"]] == ["in_order", path]
    assert record(capsys, "simulate", *NETWORK, "--scheduler", path, "--costs", "analytic", "--json")


@pytest.mark.parametrize(("scheduler", "optimizer"), [("zb_h1", "sgd"), ("interleaved", "adam"), ("hanayo", "adam")])
def test_a_plan_of_a_pipeline_runs_with_the_same_bits(saved, capsys, scheduler, optimizer):
    path = saved(*PIPELINE, "--scheduler", scheduler)
    told = ["--optimizer", optimizer, "--lr", "0.01"]
    alone = record(capsys, "train", *RUN, *told, "--micro-batches", "4")
    ranks = record(capsys, "train", *RUN, *told, *PIPELINE, "--scheduler", path)
    assert ranks["params_sha256"] == alone["params_sha256"]
    assert record(capsys, "plan", *NETWORK, *PIPELINE, "--scheduler", path, "--json")["tasks"]


def test_a_plan_that_cannot_run_is_refused_before_it_does(saved, capsys):
    path = saved("--scheduler", "in_order")
    lines = Path(path).read_text().splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    Path(path).write_text("\n".join(lines) + "\n")
    first = refused(capsys, "train", *RUN[:-1], "--scheduler", path).splitlines()[0]
    assert "1F0" in first
    Path(path).write_text("\n".join(lines[:-1]) + "\n")
    assert "missing" in refused(capsys, "train", *RUN[:-1], "--scheduler", path)
    assert "no such file" in refused(capsys, "train", *RUN[:-1], "--scheduler", "nowhere.csv").lower()
    assert "can be checked" in refused(capsys, "train", *RUN[:-1], "--parallel", "data", "--ranks", "2",
                                       "--scheduler", path)
    assert "takes no argument" in refused(capsys, "train", *RUN[:-1], "--scheduler", path, "--scheduler-arg", "k=1")


def test_a_plan_is_made_for_the_clip_that_it_runs_with(saved, capsys):
    path = saved(*PIPELINE, "--scheduler", "gpipe", "--clip", "0.5")
    alone = record(capsys, "train", *RUN, "--micro-batches", "4", "--clip", "0.5")
    assert record(capsys, "train", *RUN, *PIPELINE, "--scheduler", path,
                  "--clip", "0.5")["params_sha256"] == alone["params_sha256"]
    assert record(capsys, "check", path, *NETWORK, "--ranks", "2", "--micro-batches", "4", "--clip", "0.5",
                  "--json")["valid"]
    assert "does not belong here" in refused(capsys, "train", *RUN[:-1], *PIPELINE, "--scheduler", path)
