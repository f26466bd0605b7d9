"""The bench of start-up times one process and ranks, and tells their ratio."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import BENCH, PATIENCE
from launcher import under_mpi


@pytest.mark.slow
@under_mpi
def test_it_times_ranks_beside_one_process() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "start_up.py"), "--ranks", "2", "--runs", "1"],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one.startswith("one process   seconds ")
    assert two.startswith("2 ranks       seconds ")
    assert "  ratio " in two
