"""The command line trains on older weights, over MPI as well."""

from __future__ import annotations

import json

import pytest
from command_line import refusal, reported
from launcher import under_mpi
from rank_runs import command

FLAGS = ["--model", "mlp", "--model-arg", "layers=4", "--lr", "0.01", "--parallel", "pipeline", "--micro-batches", "8"]


def trained(capsys, *flags):
    """The record of two ranks as threads."""
    return reported(capsys, "train", *FLAGS, "--costs", "analytic", "--ranks", "2", *flags)


def refused(capsys, *flags):
    return refusal(capsys, "train", *FLAGS, "--costs", "analytic", "--ranks", "2", "--steps", "2", *flags)


@pytest.mark.slow
@under_mpi
def test_replicas_train_on_stale_weights(capsys):
    """Over MPI, and as threads of one process, with the same bits."""
    flags = [*FLAGS, "--scheduler", "pipedream_2bw", "--scheduler-arg", "mini_batches=2", "--replicas", "2",
             "--costs", "analytic", "--steps", "4"]
    code, found, errors = command(4, *flags)
    assert code == 0, errors
    assert found["staleness"]["most_of_stages"] == [1, 1]
    assert reported(capsys, "train", *flags, "--ranks", "2")["params_sha256"] == found["params_sha256"]


def test_a_network_is_planned_with_the_updates_of_the_policy(capsys):
    plan = ["plan", "--model", "mlp", "--model-arg", "layers=4", "--ranks", "2", "--micro-batches", "4", "--costs",
            "analytic", "--scheduler"]
    stale, fresh = (reported(capsys, *plan, name)["tasks"] for name in ("pipedream", "one_f_one_b"))
    assert stale == fresh + 2 * 3, "an update for each micro-batch"


@pytest.mark.slow
@under_mpi
def test_training_on_stale_weights_learns_and_says_how_stale(tmp_path):
    code, found, errors = command(2, *FLAGS, "--scheduler", "pipedream", "--epochs", "3", "--log-versions",
                                  str(tmp_path / "log.jsonl"))
    assert code == 0, errors
    assert found["staleness"] == {"mean": 0.4972, "most": 1, "most_of_stages": [1, 0], "drift": 0}
    assert found["steps"] == 68, "and a run settles once in an epoch: 541 of 544 micro-batches are late on rank 0"
    assert found["accuracy"] > 0.8
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"step": 1, "task": "0F1", "version": 0} in lines
    assert {"step": 2, "task": "1F7", "version": 15} in lines
    assert max(line["step"] for line in lines) == found["steps"]


OWN = """
import numpy as np
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.flush import one_f_one_b
from minidl.schedulers.pipeline.layerpipe import layerpipe
from minidl.schedulers.ordered import Ordered
from minidl.core.tasks import unpack


def weights_of_one_update_ago(problem):
    \"\"\"Weights of one more update ago than need be.\"\"\"
    schedule = one_f_one_b(problem)
    read = np.maximum(0, unpack(schedule.keys).micro_batch // 2 - problem.stages)
    return Ordered(schedule, versions=pipeline.Versions(read, 2))


older = pipeline.Policy(weights_of_one_update_ago, "contiguous", stale=True)
newest = pipeline.Policy(one_f_one_b, "contiguous")
"""


def test_a_stale_scheduler_of_ones_own_has_a_log(tmp_path, capsys):
    file, log = tmp_path / "own.py", tmp_path / "log.jsonl"
    file.write_text(OWN)
    own, logged = ["--scheduler", f"{file}:older"], ["--log-versions", str(log)]
    found = trained(capsys, *own, *logged, "--steps", "2", "--update-every", "2")
    assert found["staleness"] == {"mean": 1.625, "most": 2, "most_of_stages": [2, 2], "drift": 0}
    assert '{"step": 2, "task": "0F7", "version": 5}' in log.read_text().splitlines()
    for wrong, says in ((own, "with other updates; record it so (a scheduler of your own needs --update-every 2)"),
                        (["--scheduler", f"{file}:newest", *logged], "own.py:newest trains on the newest weights"),
                        (["--scheduler", "paci", "--update-every", "2"],
                         "--update-every has no effect here; it goes with a scheduler of your own")):
        assert says in refused(capsys, *wrong)


@pytest.mark.few(1)
@pytest.mark.parametrize(("scheduler", "told", "stale"), [
    ("paci", ["mini_batches=4"], {"mean": 0.2472, "most": 1, "most_of_stages": [1, 0], "drift": 1}),
    ("layerpipe2", ["history=average"], {"mean": 0.9917, "most": 2, "most_of_stages": [2, 0], "drift": 0})])
def test_training_without_old_weights_learns(scheduler, told, stale, capsys):
    found = trained(capsys, "--scheduler", scheduler, "--epochs", "3", "--scheduler-arg", *told)
    assert found["staleness"] == stale
    assert found["accuracy"] > 0.8


def test_weights_follow_to_other_ranks(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    found = trained(capsys, "--model-arg", "layers=3", "--scheduler", "layerpipe", "--epochs", "2", "--log-versions",
                    str(log))
    assert found["accuracy"] > 0.8
    assert any("U7/1" in line for line in log.read_text().splitlines())


def test_a_stale_run_goes_on_where_it_was(tmp_path, capsys):
    """A run settles at the end of an epoch, whether it saves or not."""
    flags = ["--scheduler", "pipedream_2bw", "--scheduler-arg", "mini_batches=2", "--optimizer", "adam", "--epochs"]
    saved = ["--checkpoint", str(tmp_path / "run")]
    wanted = trained(capsys, *flags, "2")["params_sha256"]
    trained(capsys, *flags, "1", *saved)
    assert trained(capsys, *flags, "2", *saved, "--resume")["params_sha256"] == wanted


@pytest.mark.parametrize(("flags", "line"), [
    (["--scheduler", "pipedream_2bw", "--scheduler-arg", "mini_batches=3"],
     "pipedream_2bw updates after each mini-batch, so the number of mini-batches"),
    (["--scheduler", "gpipe", "--log-versions", "x.jsonl"],
     "--log-versions has no effect here; it goes with a scheduler that trains on older weights")])
def test_what_cannot_be_stale_is_one_line(flags, line, capsys):
    assert line in refused(capsys, *flags)
