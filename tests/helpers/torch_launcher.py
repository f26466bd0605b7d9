"""Runs a script of this folder once for each rank of torch's runtime."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers import PATIENCE, ROOT


def on_torch_ranks(script: str, ranks: int, folder: Path, written: int, *arguments: str) -> list[list[Any]]:
    """The lines of JSON that each rank prints, one for each of the `written` grids of the folder. The script gets its
    rank, the arguments, and the folder."""
    path = ROOT / "tests" / "helpers" / script
    started = [subprocess.Popen([sys.executable, path, str(rank), *arguments, folder], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True) for rank in range(ranks)]
    try:
        found = [rank.communicate(timeout=PATIENCE) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    every = [[json.loads(line) for line in out.splitlines()] for out, _ in found]
    for lines, (_, err) in zip(every, found, strict=True):
        assert len(lines) == written, err[-3000:]
    return every
