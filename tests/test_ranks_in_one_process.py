"""`train --ranks`: ranks as threads of one process, with the bits of one process, or of ranks under a launcher."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import PATIENCE, deadline

from minidl.cli import main
from minidl.loading import function_of

NETWORK = ["--model", "mlp", "--batch-size", "32", "--steps", "3", "--costs", "analytic"]
PIPELINE = ["--parallel", "pipeline", "--ranks", "2", "--scheduler", "zb_h1"]


def trained(capsys, *flags: str, network: list[str] = NETWORK) -> dict:
    with deadline(PATIENCE):
        assert main(["train", *network, *flags, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def refused(capsys, *flags: str) -> str:
    with deadline(PATIENCE):
        assert main(["train", *NETWORK, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("scheduler", ["zb_h1", "interleaved"])
def test_a_pipeline_has_the_bits_of_one_process(capsys, scheduler):
    alone = trained(capsys, "--micro-batches", "4")
    ranks = trained(capsys, "--micro-batches", "4", *PIPELINE[:-1], scheduler)
    assert ranks["ranks"] == 2
    assert ranks["params_sha256"] == alone["params_sha256"]
    assert ranks["loss_last"] == alone["loss_last"]


def test_replicas_have_the_bits_of_every_order(capsys):
    found = {trained(capsys, "--parallel", "data", "--ranks", "3", "--scheduler", scheduler, "--batch-size", "33")[
        "params_sha256"] for scheduler in ("priority", "barrier")}
    assert len(found) == 1


def test_replicas_of_a_pipeline_have_the_bits_of_data_parallel_ranks(capsys):
    data = trained(capsys, "--micro-batches", "4", "--parallel", "data", "--ranks", "2", "--scheduler", "fifo")
    grid = trained(capsys, "--micro-batches", "4", *PIPELINE, "--replicas", "2")
    assert grid["ranks"] == 4
    for key in ("params_sha256", "loss_first", "loss_last", "accuracy"):
        assert grid[key] == data[key]


def test_what_ranks_of_one_process_cannot_do_is_one_line(capsys):
    assert "at most 64 ranks" in refused(capsys, *PIPELINE[:3], "65", "--scheduler", "zb_h1")
    assert "blocks to cut between" in refused(capsys, *PIPELINE[:3], "9", "--scheduler", "zb_h1",
                                              "--micro-batches", "4")
    assert "at least 2 ranks" in refused(capsys, *PIPELINE[:3], "1", "--scheduler", "zb_h1")
    assert "at most 64 ranks" in refused(capsys, *PIPELINE[:3], "9", "--scheduler", "zb_h1", "--replicas", "8")
    assert "with mpiexec" in refused(capsys, *PIPELINE, "--device", "cuda")
    assert "--ranks has no effect" in refused(capsys, "--ranks", "2")


def test_a_checkpoint_goes_on_with_other_ranks(capsys, tmp_path):
    folder = str(tmp_path / "run")
    whole = trained(capsys, "--micro-batches", "4")
    trained(capsys, "--micro-batches", "4", *PIPELINE, "--checkpoint", folder, "--steps", "2")
    rest = trained(capsys, "--micro-batches", "4", *PIPELINE[:3], "3", "--scheduler", "gpipe", "--checkpoint", folder,
                   "--resume")
    assert rest["params_sha256"] == whole["params_sha256"]


def test_a_file_of_code_runs_once_for_all_ranks(tmp_path):
    """A rank that comes while another runs the file waits until all of its functions are there."""
    file = tmp_path / "own.py"
    file.write_text("import time\nRUNS = []\nRUNS.append(1)\ntime.sleep(0.2)\ndef runs(): return RUNS\n")
    with ThreadPoolExecutor(3) as ranks:
        for found in ranks.map(function_of, [f"{file}:runs"] * 3):
            assert found() == [1]


@pytest.mark.parametrize("parallel", [["pipeline", "--scheduler", "zb_h1"], ["data", "--scheduler", "fifo"]])
def test_dropout_goes_on_from_a_checkpoint_on_every_rank(capsys, tmp_path, parallel):
    network = ["--model", "gpt", "--model-arg", "preset=tiny", "--data", "pydoc", "--batch-size", "6",
               "--micro-batches", "2", "--costs", "analytic", "--parallel", *parallel, "--ranks", "3"]
    whole = trained(capsys, "--steps", "3", network=network)
    kept = ["--checkpoint", str(tmp_path / "run")]
    trained(capsys, "--steps", "1", *kept, network=network)
    rest = trained(capsys, "--steps", "3", *kept, "--resume", network=network)
    assert rest["params_sha256"] == whole["params_sha256"]
