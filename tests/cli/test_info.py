"""`info` with parts of the machine replaced: ranks that differ, GPUs, an MPI that does not answer."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from command_line import run_json

from minidl.cli import info, ranks
from minidl.devices import device
from minidl.runtime.comm import RankError, SilentRank
from minidl.system import interrupts

VERSIONS = {"minidl": "1", "python": "3.12", "numpy": "2", "mpi4py": "4"}


class Ranks:
    """What rank 0 hears of the others: their records, each with some entries changed."""

    rank, local_rank, library = 0, 3, "MPI one"

    def __init__(self, *others):
        self.others, self.size, self.failed, self.closed = others, 1 + len(others), None, False

    def gather(self, mine):
        return mine and [mine, *({**mine, **changed} for changed in self.others)]

    def fail(self, error):
        self.failed = error
        return True

    def close(self):
        self.closed = True


@pytest.fixture
def job(monkeypatch, capsys):
    """Runs `info --each-rank` as rank 0 beside others."""
    monkeypatch.setattr(ranks, "versions", lambda: dict(VERSIONS))
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(ranks.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(ranks, "_gpus", lambda: 0)

    def run(*others):
        monkeypatch.setattr("minidl.runtime.comm.mpi.MPI", lambda: Ranks(*others))
        return run_json(capsys, "info", "--each-rank")

    return run


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda:0"), (2, "cuda:1"), (8, "cuda:3")])
def test_ranks_that_agree_have_no_problem(job, monkeypatch, gpus, device):
    """Each says its own number on its machine, and so its GPU: they take turns."""
    monkeypatch.setattr(ranks, "_gpus", lambda: gpus)
    code, found = job({"host": "there"}, {"host": "there"}, {})
    assert (code, found["problems"]) == (0, [])
    assert (found["ranks"][0]["local_rank"], found["ranks"][0]["device"]) == (3, device)


def test_whatever_differs_between_ranks_is_named(job):
    code, found = job({"versions": {**VERSIONS, "numpy": "1"}}, {"mpi": "MPI two", "host": "there"})
    assert code == 1
    assert found["problems"] == ["rank 1 has numpy 1, rank 0 2", "rank 2 uses MPI two, rank 0 MPI one"]


def test_more_ranks_than_cores_are_a_problem_of_their_host(job):
    code, found = job({"cores": [1]}, {"cores": [0]}, {"host": "there"})
    assert (code, found["problems"]) == (1, ["3 ranks share 2 cores on here"])


@pytest.mark.parametrize(("error", "code", "line"), [
    (ValueError("no such file\nmore"), 2, "minidl: rank 0: no such file"),
    (RankError(1, "gone"), 2, "minidl: rank 0: rank 1 failed: gone"),
    (SilentRank(1, "rank 1 is silent"), 2, "minidl: rank 1 is silent"),
    (KeyboardInterrupt(), 130, "minidl: rank 0: stopped by SIGINT"),
])
def test_one_of_several_ranks_that_ends_early_ends_all_with_one_line(error, code, line, monkeypatch, capsys):
    communicator, codes = Ranks({}), []
    monkeypatch.setattr("minidl.runtime.comm.mpi.MPI", lambda: communicator)
    monkeypatch.setattr("minidl.runtime.comm.watch.abort", codes.append)
    monkeypatch.setattr(interrupts, "take", lambda: interrupts.SIGNALS[0])
    with ranks.job():
        raise error
    assert (codes, communicator.failed, communicator.closed) == ([code], error, False)
    assert capsys.readouterr().err == f"{line}\n"


def test_a_rank_that_is_alone_raises(monkeypatch):
    monkeypatch.setattr("minidl.runtime.comm.mpi.MPI", Ranks)
    with pytest.raises(ValueError, match="bad"), ranks.job():
        raise ValueError("bad")


def test_gpus_are_listed_until_there_are_no_more(monkeypatch):
    def get(name):
        if name == "cuda:2":
            raise device.DeviceError("there is no cuda:2")
        return SimpleNamespace(driver=SimpleNamespace(describe=lambda: {"name": "H", "capability": 90}))

    monkeypatch.setattr(device, "get", get)
    assert info._gpus() == ([{"name": f"cuda:{n}", "gpu": "H", "capability": 90} for n in range(2)],
                            "there is no cuda:2")


@pytest.mark.parametrize("answer", [OSError("no Python"), subprocess.TimeoutExpired("python", 20), (1, "half a line"),
                                    (0, " \n")])
def test_an_mpi_that_does_not_answer_is_none(answer, monkeypatch):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(returncode=answer[0], stdout=answer[1])

    monkeypatch.setattr(subprocess, "run", run)
    assert info._mpi()[0] is None
