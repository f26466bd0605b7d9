"""What tests of the command line share: a call in this process, its output, and its one line of error."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from helpers import deadline, together

from minidl.cli import distributed, main
from minidl.cli.parser import parse

SMALL = ["--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--costs", "analytic"]


def run(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Any, *argv: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *argv, "--json")
    return code, json.loads(out)


def shown(capsys: Any, *argv: str) -> str:
    """The text of a command that ends well."""
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out


def reported(capsys: Any, *argv: str, code: int = 0) -> Any:
    """The record of a command that ends with this exit code, and in time: ranks may wait for each other."""
    with deadline():
        found, record = run_json(capsys, *argv)
    assert found == code, record
    return record


def one_line(err: str) -> str:
    assert re.fullmatch(r"minidl: .+\n", err), err
    return err


def refusal(capsys: Any, *argv: str) -> str:
    """The one line of a command that ends with exit code 2 and does nothing else."""
    with deadline():
        code, out, err = run(capsys, *argv)
    assert (code, out) == (2, ""), err
    return one_line(err)


def told_apart(capsys: Any, *each: Sequence[str]) -> str:
    """The one line of ranks that do not train: threads that get the flags that a launcher would give to each."""
    def work(communicator: Any) -> int:
        return distributed._part(lambda: parse(["train", *each[communicator.rank]]), communicator)

    codes = together(len(each), work)
    out, err = capsys.readouterr()
    assert ({*codes}, out) == ({2}, ""), err
    return one_line(err)
