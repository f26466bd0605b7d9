"""Networks with experts in training: the same bits however a step runs, the load table, what is refused."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import ROOT

from minidl.cli import main
from minidl.kernels import vectors
from minidl.training.metrics import numbers_of

TEXT = str(ROOT / "SECURITY.md")  #: short, so that it is soon evaluated
RUN = ["train", "--model", "moe_gpt", "--model-arg", "preset=tiny", "--model-arg", "layers=2", "--data", TEXT,
       "--batch-size", "8", "--steps", "3", "--costs", "analytic", "--json"]
PIPELINE = "--parallel pipeline --ranks 2 --micro-batches 4 --scheduler "
PARTS = "--split 2 "  #: all orders of the parts have equal bits; with AVX-512 these are the bits of the whole step
DROPS, BIAS = "--model-arg capacity=20 ", "--model-arg bias_rate=0.01 --model-arg shared=1 --model-arg score=sigmoid "


def trained(flags: str) -> tuple[str, str]:
    """The hash of the parameters, and what the run says beside its result."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([*RUN, *flags.split()])
    assert code == 0, err.getvalue()
    return json.loads(out.getvalue())["params_sha256"], err.getvalue()


@cache
def on_one_stream(flags: str) -> str:
    return trained(f"{flags}--scheduler in_order --micro-batches 4")[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(("more", "flags"), [
    (DROPS, "--scheduler multi_stream --micro-batches 4"),
    (DROPS, "--scheduler in_order --micro-batches 4 --recompute all"),
    (BIAS, "--scheduler in_order --micro-batches 4 --recompute all"),
    (DROPS + PARTS, "--scheduler multi_stream --micro-batches 4"),
    *[(DROPS, "--scheduler in_order --micro-batches 4 --split 2")] * vectors.WIDE,
    (DROPS, "--scheduler in_order --micro-batches 4 --offload all"),
    (DROPS, "--scheduler in_order --micro-batches 4 --lanes python"),
    (DROPS, PIPELINE + "zb_h1"),
    (BIAS, PIPELINE + "zb_h1"),
    (DROPS, PIPELINE + "dualpipe_v"),
    (DROPS, PIPELINE + "gpipe --recompute all"),
    (DROPS, PIPELINE + "zb_h1 --clip 0.5"),
])
def test_the_bits_are_those_of_one_stream(more: str, flags: str) -> None:
    assert trained(more + flags)[0] == on_one_stream(more + "--clip 0.5 " * ("--clip" in flags))


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", ["--scheduler in_order", "--parallel data --ranks 2", PIPELINE + "zb_h1"])
def test_the_log_has_the_load_of_every_expert(flags: str, tmp_path: Any) -> None:
    """Of all ranks, since the record before."""
    log = tmp_path / "log.jsonl"
    _, said = trained(f"{flags} {DROPS}--log {log} --log-every 1")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    seen = [record["experts"] for record in records if "loss" in record]
    assert len(seen) == 3
    for layers in seen:
        assert [own["layer"] for own in layers] == [f"transformer.h.{i}.mlp" for i in range(2)]
        for own in layers:
            assert sum(own["tokens"]) == 8 * 16 * 2
            assert 0 < sum(own["dropped"]) < 256
            assert all(0 <= d <= t for d, t in zip(own["dropped"], own["tokens"], strict=True))
    own = seen[-1][1]
    assert f"transformer.h.1.mlp: tokens {' '.join(map(str, own['tokens']))}, dropped" in said


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Any) -> None:
    whole = trained(BIAS + "--scheduler in_order --steps 6")
    trained(f"{BIAS}--scheduler in_order --steps 3 --checkpoint {tmp_path / 'run'}")
    log = tmp_path / "log.jsonl"
    rest = trained(f"{BIAS}--scheduler in_order --steps 6 --log {log} --log-every 3 --resume --checkpoint "
                   f"{tmp_path / 'run'}")
    assert rest[0] == whole[0]
    (record,) = [one for line in log.read_text().splitlines() if "experts" in (one := json.loads(line))]
    assert [np.sum(own["tokens"]) for own in record["experts"]] == [3 * 8 * 16 * 2] * 2


@pytest.mark.parametrize(("flags", "message"), [
    ("--model-arg top_k=5", "top_k is 5; a token can use from 1 to 4 of 4 experts"),
    ("--model-arg capacity=0", "capacity must be an integer of at least 1, not 0"),
    ("--model-arg score=tanh", "score is 'tanh'; it must be softmax or sigmoid"),
    ("--optimizer sgd --lr 1e30", "/route) on lane 0/main failed: ValueError: scores of a router are not numbers"),
    (PIPELINE + "chimera", "chimera: load follows the micro-batches one after another"),
    (PIPELINE.replace("--micro-batches 4", "--micro-batches 2") + "seq1f1b --scheduler-arg slices=2 " + DROPS,
     "moe_gpt cannot read its input in slices"),
])
def test_what_cannot_be_is_one_line(flags: str, message: str, capsys: Any) -> None:
    given = flags if "--scheduler" in flags else flags + " --scheduler in_order"
    assert main([*RUN, *given.split()]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("minidl:")]
    assert len(lines) == 1
    assert message in lines[0]


def test_events_have_a_number_for_each_expert() -> None:
    record = {"step": 3, "loss": 2.5, "experts": [{"layer": "a.mlp", "tokens": [4, 6], "dropped": [0, 1]}]}
    assert [*numbers_of(record)] == [("step", 3), ("loss", 2.5), ("tokens/a.mlp/0", 4), ("tokens/a.mlp/1", 6),
                                     ("dropped/a.mlp/0", 0), ("dropped/a.mlp/1", 1)]
