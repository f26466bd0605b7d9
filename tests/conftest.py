"""What a run of the tests says at its end: how many of them need a GPU that is not here."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" in r.keywords]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} gpu tests skipped: {skipped[0].longrepr[2].removeprefix('Skipped: ')}")
