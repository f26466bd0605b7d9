"""Whose fault an error is: a `raise` of the package and a user's code have words for the user; what Python or NumPy
says of the package's own code is an internal error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import refusal

import minidl as ml
from minidl import nn, optim
from minidl.autograd.recording import record
from minidl.cli import main
from minidl.core.graph import TaskGraph
from minidl.core.machine import PlanError
from minidl.schedulers import planner
from minidl.system.loading import function_of

TEXT = {"a raise": "raise ValueError('a reason')", "NumPy": "np.zeros(3) + np.zeros(4)", "int": "int('x')",
        "a key": "{}['x']", "an index": "[][0]", "a type": "len(3)", "an attribute": "(3).x", "nothing": "min([])",
        "a claim": "assert not 1"}
PLAN = ("plan", "--model", "mlp", "--model-arg", "hidden=8", "--batch-size", "4", "--costs", "analytic")


def of(name: str, file: str) -> Callable[..., object]:
    """A function of this file that fails in this way."""
    scope = {"np": np}
    exec(compile(f"def own(*_, **__):\n    {TEXT[name]}\n", file, "exec"), scope)
    return scope["own"]


def graph() -> TaskGraph:
    layer = nn.Linear(2, 2)
    opt = optim.SGD(layer.parameters(), 0.1)

    def step(x: ml.Tensor) -> None:
        layer(x).sum().backward()
        opt.step()

    return record(step, np.ones((1, 2), np.float32))


@pytest.mark.parametrize("name", TEXT)
def test_an_error_of_our_own_is_internal(name: str, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """It was the user's PlanError."""
    monkeypatch.setattr(planner, "through", of(name, planner.__file__))
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError, AssertionError)) as found:
        ml.plan(graph(), "in_order")
    assert not isinstance(found.value, PlanError)
    said = refusal(capsys, *PLAN)
    assert ("an internal error of minidl: " in said) == ("MINIDL_DEBUG=1 shows where" in said) == (name != "a raise")
    monkeypatch.setenv("MINIDL_DEBUG", "1")
    with pytest.raises(type(found.value)):
        main([*PLAN])


@pytest.mark.parametrize("name", TEXT)
def test_an_error_of_a_policy_is_its_authors(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"import numpy as np\n\ndef own(graph, cost, machine):\n    {TEXT[name]}\n")
    with pytest.raises(PlanError, match=r"own.py:own failed: .*\(own\.py, line 4\)$"):
        ml.plan(graph(), f"{file}:own")
    with pytest.raises(PlanError, match=r"own failed: .*\(own\.py, line 4\)$"):
        ml.plan(graph(), function_of(f"{file}:own"))
    assert "internal" not in refusal(capsys, *PLAN, "--scheduler", f"{file}:own")


def test_a_package_is_found_where_the_command_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m minidl` found it, and `minidl` did not; what is installed comes first."""
    (tmp_path / "own_package_1").mkdir()
    (tmp_path / "own_package_1" / "nets.py").write_text("def net(): return 3\n")
    (tmp_path / "string.py").write_text("def net(): return 4\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert function_of("own_package_1.nets:net")() == 3
    with pytest.raises(ValueError, match="string has no function net"):
        function_of("string:net")


@pytest.mark.parametrize("last", ["raise SystemExit", "sys.exit(0)"])
def test_a_script_that_ends_the_process_is_no_module(last: str, tmp_path: Path) -> None:
    """The command ended with it, without a word and with its exit code."""
    (tmp_path / "script.py").write_text(f"import sys\n\ndef net(): return 3\n\n{last}\n")
    with pytest.raises(ValueError, match=r"script\.py: SystemExit"):
        function_of(f"{tmp_path}/script.py:net")


def test_policies_are_among_the_names_that_a_file_has(tmp_path):
    """A policy is a value, not a function, and was left out."""
    (tmp_path / "own.py").write_text("from functools import partial, reduce\nfrom math import exp\n"
                                     "from minidl.schedulers.pipeline import Policy\n"
                                     "def order(problem): ...\n"
                                     "lifo, half, number = Policy(order, 'contiguous'), partial(order, 2), 3\n")
    with pytest.raises(ValueError, match=r"has no function lif; it has order, lifo, half$"):
        function_of(f"{tmp_path / 'own.py'}:lif")
