"""Flags: each serves the verbs and subjects that the table says, and is refused in one line wherever it
would have no effect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, refusal, reported, run

from minidl.cli.flags import FLAGS, UsageError
from minidl.cli.parser import VERBS, parse
from minidl.cli.values import pair

#: a command for each verb and subject that there is
COMMANDS = {
    ("train", "s"): ["train", "--model", "mlp"], ("train", "r"): ["train", "--model", "mlp", "--parallel", "data"],
    ("compare", "s"): ["compare", "--model", "mlp"],
    ("compare", "r"): ["compare", "--model", "mlp", "--parallel", "data"],
    ("compare", "c"): ["compare", "--model", "mlp", "--parallel", "pipeline"],
    **{(verb, "s"): [verb, *more, "--model", "mlp"]
       for verb, more in (("plan", []), ("check", ["p.csv"]), ("explain", ["4W0"]), ("simulate", []))},
    **{(verb, "p"): [verb, *more, "--ranks", "2"]
       for verb, more in (("plan", []), ("check", ["p.csv"]), ("explain", ["4W0"]), ("simulate", []))},
    **{(verb, "c"): [verb, *more, "--ranks", "2", "--model", "mlp"]
       for verb, more in (("plan", []), ("check", ["p.csv"]), ("explain", ["4W0"]), ("simulate", []))},
    ("train", "c"): ["train", "--model", "mlp", "--parallel", "pipeline"],
    **{(verb, "r"): [verb, *more, "--parallel", "data", "--model", "mlp"]
       for verb, more in (("plan", []), ("check", ["p.csv"]), ("explain", ["4W0"]), ("simulate", []))},
    **{(verb, "l"): [verb, *more, "--parallel", "data"]
       for verb, more in (("plan", []), ("explain", ["4W0"]), ("simulate", []))},
}
#: values that change something, where 2 does not
VALUES = {
    "--model": "ffnn", "--model-arg": "hidden=12", "--data": "table.csv", "--tokenizer": "300", "--batch-size": "32",
    "--micro-batches": "8", "--optimizer": "adam", "--lr": "0.3", "--lr-schedule": "cosine", "--warmup": "1",
    "--momentum": "0", "--weight-decay": "0.1", "--clip": "0.1", "--seed": "3", "--dtype": "float64", "--fusion": "all",
    "--memory-limit": "1kB", "--shard": "1", "--lanes": "python", "--scheduler": "multi_stream",
    "--schedulers": "in_order,multi_region", "--streams": "3", "--scheduler-arg": "nothing=1",
    "--costs": "costs.json", "--pairs": "estimated",
    "--save-costs": "x.json", "--steps": "3", "--checkpoint": "folder", "--checkpoint-every": "1",
    "--init": "start.safetensors", "--log-every": "1", "--log": "x.jsonl", "--tensorboard": "board", "--ranks": "4",
    "--forward": "3", "--output-grad": "3", "--weight-grad": "3", "--latency": "3", "--bandwidth": "1MB",
    "--activation-cap": "1", "--k": "1", "--parts": "3", "--comm": "9,9,9", "--collective": "tree",
    "--objective": "period", "--time-limit": "0", "--save": "x.csv", "--svg": "x.svg", "--html": "x.html",
    "--trace": "x.json", "--log-versions": "x.jsonl", "--transport": "nccl", "--root": ".", "--chunks": "3",
    "--offload": "all", "--backward": "deeppcr", "--slow": "0=4", "--format": "torch", "--parallel": "none",
    "--topology": "nodes=2,across=3", "--optimizer-arg": "centered=true", "--order": "hint",
    "--resume": "auto", "--log-order": "x.jsonl", "--experts-over": "data"}
#: what one of the compared policies takes
OF_COMMANDS = {("--scheduler-arg", "compare", subject): "streams=2" if subject == "s" else "part_bytes=64"
               for subject in "src"}


def given(flag: str, command: tuple[str, str]) -> list[str]:
    return ([flag] if "action" in FLAGS[flag].options and FLAGS[flag].options["action"] == "store_true"
            else [flag, OF_COMMANDS.get((flag, *command), VALUES.get(flag, "2"))])


def test_every_subject_of_the_table_has_a_command() -> None:
    served = {(verb, subject) for flag in FLAGS.values() for verb, subjects in flag.serves.items()
              for subject in subjects if subject != "*"}
    assert served == set(COMMANDS)
    assert {verb for flag in FLAGS.values() for verb in flag.serves} == set(VERBS)
    for (verb, subject), command in COMMANDS.items():
        arguments = parse(command)
        assert (arguments.command, arguments.subject) == (verb, subject)


def condition_holds(flag: str, command: tuple[str, str]) -> bool:
    """Whether a command, with this flag and nothing else added, is one that the flag needs."""
    arguments = parse(COMMANDS[command])
    setattr(arguments, flag[2:].replace("-", "_"), (given(flag, command)[1:] or [True])[0])
    return all(hold(arguments) for _, hold in FLAGS[flag].needs)


def is_apart(flag: str, command: tuple[str, str]) -> bool:
    """The subject follows from the flag, or changes with it."""
    verb, subject = command
    changes = flag in ("--latency", "--chunks", "--activation-cap", "--forward", "--output-grad", "--weight-grad")
    return (flag in ("--parallel", "--config", "--model", "--ranks", "--table", *COMMANDS[command])
            or (changes and subject == "s" and verb not in ("train", "compare")))


@pytest.mark.few(6)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_is_taken_where_the_table_says_and_refused_elsewhere(command: tuple[str, str]) -> None:
    """A failure begins with the flag."""
    verb, subject = command
    for flag in FLAGS:
        if is_apart(flag, command):
            continue
        try:
            parse([*COMMANDS[command], *given(flag, command)])
            said = ""
        except UsageError as error:
            said = str(error)
        if subject not in FLAGS[flag].serves.get(verb, ""):
            assert re.search("no effect|leave one out", said), (flag, said)
            assert flag in said, (flag, said)
            assert "\n" not in said, (flag, said)
        elif condition_holds(flag, command):
            assert said == "", (flag, said)
        else:
            assert said.startswith(f"{flag} has no effect here; it goes with "), (flag, said)


def test_steps_on_the_command_line_win_over_epochs_in_the_file_and_two_in_one_place_are_refused(capsys: Any,
                                                                                                tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("epochs = 3\nresume = false\n")
    assert reported(capsys, "train", *SMALL, "--config", str(config), "--steps", "2")["steps"] == 2
    config.write_text("epochs = 3\nsteps = 2\n")
    assert "--epochs" in refusal(capsys, "train", *SMALL, "--config", str(config))
    config.write_text("lr = 0.5\n")
    said = refusal(capsys, "plan", *SMALL, "--config", str(config))
    assert said == f"minidl: {config}: --lr has no effect on `minidl plan`; it is for train, compare\n"
    config.write_text("config = 'other.toml'\n")
    assert "similar names: config" not in refusal(capsys, "plan", *SMALL, "--config", str(config))


@pytest.mark.parametrize("value", ["True", "true", "False", "false"])
def test_a_truth_is_written_as_in_python_or_as_in_a_file_of_flags(value: str) -> None:
    assert pair(f"crossing={value}") == ("crossing", value.lower() == "true")


@pytest.mark.few(1)
@pytest.mark.parametrize(("flags", "says"), [
    (["--streams", "2"], "--streams"), (["--scheduler-arg", "crossing=False"], "--scheduler-arg"),
    (["--pairs", "none"], "--pairs"), (["--micro-batches", "2"], "give --scheduler")])
def test_a_flag_that_needs_a_new_schedule_goes_with_a_scheduler_when_a_run_is_resumed(capsys: Any, tmp_path: Path,
                                                                                      flags: list[str], says: str
                                                                                      ) -> None:
    folder = str(tmp_path / "run")
    assert run(capsys, "train", *SMALL, "--steps", "2", "--checkpoint", folder, "--scheduler", "multi_region")[0] == 0
    resume = ["train", *SMALL, "--checkpoint", folder, "--resume", "--steps", "3", *flags]
    assert says in refusal(capsys, *resume)
    assert run(capsys, *resume, "--scheduler", "multi_region")[0] == 0


DEEP = ["--model", "gpt", "--model-arg", "preset=tiny", "--model-arg", "layers=1", "--batch-size", "8", "--costs",
        "analytic"]


@pytest.mark.slow
@pytest.mark.parametrize("subject", [
    ["--scheduler", "in_order"], ["--parallel", "data", "--ranks", "2", "--scheduler", "barrier"],
    ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4", "--scheduler", "gpipe"]], ids=lambda s: s[1])
def test_a_limit_alone_picks_the_fastest_plan_below_it_and_says_why(capsys: Any, subject: list[str]) -> None:
    plan = ["plan", *DEEP, *subject]
    whole, least = (reported(capsys, *plan, "--recompute", how)["peak_bytes"] for how in ("none", "all"))
    limit = str((whole + 2 * least) // 3)
    code, out, err = run(capsys, *plan, "--memory-limit", limit, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["peak_bytes"] <= int(limit)
    assert re.search(rf"of what fits {int(limit):,} bytes in place of {whole:,}, .*(recompute|offload|shard \d) is the "
                     rf"fastest predicted: ", err)
    again = reported(capsys, *plan, "--memory-limit", limit, "--recompute", "auto")
    assert record["predicted_step_ms"] <= again["predicted_step_ms"]
    assert any(f"to fit {int(limit):,} bytes, activations of " in remark for remark in again["remarks"])
    assert "of what fits" not in run(capsys, *plan, "--memory-limit", str(whole))[2]
    said = refusal(capsys, *plan, "--memory-limit", "9K")
    assert f"the limit of 9,000 bytes: with all activations kept it needs {whole:,}, and the least" in said
    said = refusal(capsys, *plan, "--memory-limit", limit, "--recompute", "none")
    assert f"more than the limit of {int(limit):,}" in said
