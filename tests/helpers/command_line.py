"""What tests of the command line share: a call in this process, its output, and its one line of error."""

from __future__ import annotations

import json
import re
from typing import Any

from minidl.cli import main

SMALL = ["--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--costs", "analytic"]


def run(capsys: Any, *argv: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Any, *argv: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *argv, "--json")
    return code, json.loads(out)


def one_line(err: str) -> str:
    assert re.fullmatch(r"minidl: .+\n", err), err
    return err


def refusal(capsys: Any, *argv: str) -> str:
    """The one line of a command that ends with exit code 2."""
    code, _, err = run(capsys, *argv)
    assert code == 2, err
    return one_line(err)
