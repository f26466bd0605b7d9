"""What tests of benchmarks share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`call(program, "--out", path)`: what the program ends with, given these flags."""
    def run(program: Any, *flags: Any) -> Any:
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, flags)])
        return program.main()

    return run
