"""`compare --parallel`: the same training under several policies, on ranks as threads of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import SMALL, refusal, reported, run
from helpers import PATIENCE, deadline

from minidl.cli import training

OWN = str(Path(__file__).parents[2] / "docs" / "extend" / "pipeline.py") + ":last_in_first_out"
STEPS = [*SMALL, "--steps", "3"]
PIPELINE = [*STEPS, "--micro-batches", "4", "--parallel", "pipeline", "--ranks", "2"]
DATA = [*STEPS, "--parallel", "data", "--ranks", "2"]


def compared(capsys: Any, *flags: str) -> dict[str, Any]:
    return reported(capsys, "compare", *flags)


def as_trained(capsys: Any, record: dict[str, Any], *flags: str) -> None:
    """Asserts that each arm has the bits and the prediction that `train` has under its policy."""
    for arm in record["arms"]:
        alone = reported(capsys, "train", *flags, "--scheduler", arm["scheduler"])
        for key in ("params_sha256", "loss_last", "test", "predicted_step_ms", "peak_bytes"):
            assert arm[key] == alone[key]


def test_arms_of_a_pipeline_have_equal_bits_which_are_those_of_train(capsys: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.csv")
    assert run(capsys, "plan", *SMALL, *PIPELINE[len(STEPS):], "--scheduler", "zb_h1", "--save", path)[0] == 0
    record = compared(capsys, *PIPELINE, "--schedulers", f"gpipe,zb_h1,{OWN},{path}")
    assert [arm["scheduler"] for arm in record["arms"]] == ["gpipe", "zb_h1", OWN, path]
    assert (record["bit_identical"], record["ranks"], record["steps"]) == (True, 2, 3)
    assert not any(arm["stale"] for arm in record["arms"])
    assert all(arm["step_ms"]["median"] > 0 and arm["predicted_step_ms"] > 0 for arm in record["arms"])
    assert [*record["diagnosis"]] == ["zb_h1", OWN, path]
    as_trained(capsys, record, *PIPELINE)
    by_default = compared(capsys, *PIPELINE)
    assert [arm["scheduler"] for arm in by_default["arms"]] == ["gpipe", "one_f_one_b"]


@pytest.mark.slow
def test_so_have_data_parallel_ones(capsys: Any) -> None:
    record = compared(capsys, *DATA, "--schedulers", "barrier,priority")
    assert (record["bit_identical"], record["ranks"]) == (True, 2)
    as_trained(capsys, record, *DATA)
    assert [arm["scheduler"] for arm in compared(capsys, *DATA)["arms"]] == ["barrier", "priority"]  # by default


def test_stale_policies_and_other_orders_of_sums_are_shown_apart(capsys: Any) -> None:
    """Turns are shorter than the run, so that runs which never drain go on after those of others."""
    flags = [*PIPELINE, "--steps", "7"]
    with deadline(PATIENCE):
        code, out, _ = run(capsys, "compare", *flags, "--schedulers", "gpipe,zb_h1,chimera,pipedream")
    assert code == 0
    assert "on 2 ranks, interleaved" in out
    assert "the parameters of gpipe, zb_h1 are equal bit for bit\n" in out
    assert "summed in another order than gpipe's, so compared apart: chimera\n" in out
    assert "trained on older weights, so not compared: pipedream\n" in out
    record = compared(capsys, *flags, "--schedulers", "pipedream,chimera")
    assert record["bit_identical"] is None
    assert [arm["stale"] for arm in record["arms"]] == [True, False]
    as_trained(capsys, record, *flags)


def test_an_own_policy_may_train_on_older_weights(capsys: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from minidl.schedulers.registry import SCHEDULERS\nlate = SCHEDULERS['pipedream'].staged\n")
    record = compared(capsys, *PIPELINE, "--schedulers", f"gpipe,pipedream,{own}:late", "--update-every", "1")
    gpipe, published, mine = record["arms"]
    assert mine["params_sha256"] == published["params_sha256"] != gpipe["params_sha256"]
    assert (gpipe["stale"], mine["stale"]) == (False, True)


def test_options_go_to_the_policies_that_take_them(capsys: Any) -> None:
    record = compared(capsys, *DATA, "--schedulers", "barrier,reverse_first_k", "--k", "1")
    assert record["bit_identical"]
    record = compared(capsys, *PIPELINE, "--replicas", "2", "--clip", "0.1", "--schedulers", "gpipe,modulo",
                      "--scheduler-arg", "group=1")
    assert (record["bit_identical"], record["ranks"]) == (True, 4)


@pytest.mark.parametrize(("stale", "sums", "equal", "says"), [
    ((0, 0), (1, 1), True, "the parameters are equal bit for bit"),
    ((0, 0), (1, 1), False, "THE PARAMETERS DIFFER: this is a bug in minidl; please report it"),
    ((0, 0, 1), (1, 1, 1), False, "THE PARAMETERS of gpipe, zb_h1 DIFFER: this is a bug in minidl; please report it\n"
     "trained on older weights, so not compared: zb_h2"),
    ((0, 0, 0, 0), (2, 1, 2, 1), True, "the parameters of gpipe, zb_h2 and of zb_h1, zb_v are equal bit for bit\n"
     "summed in another order than gpipe's, so compared apart: zb_h1, zb_v"),
    ((1, 1), (1, 1), None, "nothing to compare: no two of these schedules promise equal parameters\n"
     "trained on older weights, so not compared: gpipe, zb_h1")])
def test_the_verdict(stale: tuple[int, ...], sums: tuple[int, ...], equal: bool | None, says: str) -> None:
    trainers: list[Any] = [
        SimpleNamespace(plan=SimpleNamespace(stale=bool(late)),
                        job=SimpleNamespace(scheduler=name, parallel="pipeline", groups=groups, slices=1,
                                            deterministic=True))
        for name, late, groups in zip(("gpipe", "zb_h1", "zb_h2", "zb_v"), stale, sums, strict=False)]
    digests = [f"{n}" if equal is False else f"of {groups}" for n, groups in enumerate(sums)]
    assert training._verdict(trainers, digests) == (equal, says)


def test_under_a_launcher_it_says_how_to_start_it(capsys: Any, monkeypatch: Any) -> None:
    for name, value in (("PMI_RANK", "0"), ("PMI_SIZE", "2")):
        monkeypatch.setenv(name, value)
    said = refusal(capsys, "compare", *PIPELINE)
    assert "compare runs ranks as threads of one process; start it without a launcher, with --ranks P" in said
