"""Ranks are bit-identical under every MPI and in one process, even where the libraries' own sums differ: minidl sends
numbers, and adds them itself, in the order of the ranks."""

from __future__ import annotations

import os
from functools import cache

import pytest
import random_jobs
from cancelling_sums import RANKS, check, rows
from each_mpi import needed, start, under_each_mpi
from helpers import ROOT

from minidl.runtime.comm.loopback import run_ranks

HERE = ROOT / "tests" / "ranks"
JOBS, SHORT = int(os.environ.get("MINIDL_MPI_JOBS", "40")), 4


@cache
def in_one_process() -> str:
    (digest,) = set(run_ranks(RANKS, check))
    return digest


def test_loop_back_adds_in_the_order_of_ranks() -> None:
    given = rows(6, "float32")[:, [0, 4, 5]]  # without infinities and NaN
    assert sorted(set((given[0] + given[1] + given[2]).tolist())) == [0, 1]  # the order shows
    assert in_one_process()


@pytest.mark.slow
@under_each_mpi
def test_each_mpi_gives_the_bits_of_loop_back(name: str) -> None:
    done = start(needed(name), name, RANKS, str(HERE / "cancelling_sums.py"))
    assert done.returncode == 0, done.stderr
    assert in_one_process() in done.stdout.split()


@cache
def jobs(count: int) -> dict[int, dict[int, str]]:
    return random_jobs.in_one_process(count)


def hold(name: str, count: int) -> None:
    """Random jobs leave under this MPI what they leave in one process."""
    found = needed(name)
    for ranks, wanted in jobs(count).items():
        done = start(found, name, ranks, str(HERE / "random_jobs.py"), *map(str, wanted))
        assert done.returncode == 0, (ranks, [*wanted], done.stderr)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("digest")]
        assert {int(seed): digest for _, seed, digest in lines} == wanted


@pytest.mark.slow
@under_each_mpi
def test_random_jobs_leave_the_same_bits(name: str) -> None:
    hold(name, SHORT)


@pytest.mark.campaign
@under_each_mpi
def test_many_random_jobs_leave_the_same_bits(name: str) -> None:
    hold(name, JOBS)
