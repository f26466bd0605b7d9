"""`train --ranks`: ranks as threads of one process, with the bits of one process, or of ranks under a launcher."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

import pytest
from command_line import refusal, reported
from helpers import PATIENCE, ROOT

from minidl.cli import distributed, main
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.loopback import run_ranks
from minidl.system import loading
from minidl.system.loading import function_of

NETWORK = ["--model", "mlp", "--batch-size", "32", "--steps", "3", "--costs", "analytic"]
PIPELINE = ["--parallel", "pipeline", "--ranks", "2", "--scheduler", "zb_h1"]


def trained(capsys, *flags: str, network: list[str] = NETWORK) -> dict:
    return reported(capsys, "train", *network, *flags)


def refused(capsys, *flags: str) -> str:
    return refusal(capsys, "train", *NETWORK, *flags)


@pytest.mark.parametrize(("cores", "measure"), [(1, 1), (2, 2), (8, 3)])
def test_as_many_ranks_measure_costs_as_there_are_cores(capsys, monkeypatch, cores, measure):
    asked = []
    monkeypatch.setattr(distributed, "costs", lambda *_: asked.append(1) or CostModel.analytic())
    monkeypatch.setattr(distributed.os, "cpu_count", lambda: cores)
    trained(capsys, "--parallel", "data", "--ranks", "3", "--scheduler", "barrier", network=[
        "--model", "mlp", "--batch-size", "33", "--steps", "1", "--costs", "analytic"])
    assert len(asked) == measure


DATA = ["--parallel", "data", "--ranks", "2", "--scheduler", "fifo"]


@pytest.mark.few(2)
@pytest.mark.parametrize(("flags", "others"), [
    (PIPELINE, []), ([*PIPELINE[:-1], "interleaved"], []), ([*PIPELINE, "--replicas", "2"], DATA),
    ([*DATA[:-1], "priority"], [*DATA[:-1], "barrier"])], ids=" ".join)
def test_threads_have_the_bits_of_one_process_or_of_data_parallel_ranks(capsys, flags, others):
    found, wanted = (trained(capsys, "--micro-batches", "4", *more) for more in (flags, others))
    assert found["ranks"] == (4 if "--replicas" in flags else 2)
    for key in ("params_sha256", "loss_first", "loss_last", "accuracy"):
        assert found[key] == wanted[key], key


def test_a_machine_without_mpiexec_is_told_how_to_get_it(capsys, monkeypatch):
    flags = *PIPELINE[:2], "--scheduler", "zb_h1"
    for path, says in ((os.environ["PATH"], "start it with mpiexec -n P, or give --ranks P"),
                       ("", "or give --ranks P; there is no mpiexec here: pip install 'minidl[mpich]'")):
        monkeypatch.setenv("PATH", path)
        if not path or which("mpiexec"):
            assert refused(capsys, *flags).endswith(f"{says}\n")


def test_a_file_of_code_runs_once_for_all_ranks(tmp_path, monkeypatch):
    """A rank that comes while another runs the file waits until all of its functions are there."""
    class Lock:
        def __init__(self):
            self.lock, self.asked = threading.RLock(), []

        def __enter__(self):
            self.asked.append(threading.get_ident())
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    monkeypatch.setattr(loading, "_LOADING", Lock())
    file = tmp_path / "own.py"
    file.write_text("from helpers import until\nfrom minidl.system import loading\nRUNS = []\nRUNS.append(1)\n"
                    "until(lambda: len(loading._LOADING.asked) == 3, 'three ranks that ask')\n"
                    "def runs(): return RUNS\n")
    with ThreadPoolExecutor(3) as ranks:
        for found in ranks.map(function_of, [f"{file}:runs"] * 3):
            assert found() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [["pipeline", "--scheduler", "zb_h1"], ["data", "--scheduler", "fifo"]])
def test_dropout_goes_on_from_a_checkpoint_on_every_rank(capsys, tmp_path, parallel):
    network = ["--model", "gpt", "--model-arg", "preset=tiny", "--data", str(ROOT / "SECURITY.md"), "--batch-size", "6",
               "--micro-batches", "2", "--costs", "analytic", "--parallel", *parallel, "--ranks", "3"]
    whole = trained(capsys, "--steps", "3", network=network)
    kept = ["--checkpoint", str(tmp_path / "run")]
    trained(capsys, "--steps", "1", *kept, network=network)
    rest = trained(capsys, "--steps", "3", *kept, "--resume", network=network)
    assert rest["params_sha256"] == whole["params_sha256"]


GOES_AWAY = """
import os, tempfile
from minidl.schedulers.pipeline.flush import gpipe

def own(problem):
    os.chdir(tempfile.gettempdir())
    return gpipe(problem)
"""


def test_a_policy_that_changes_the_folder_loses_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(GOES_AWAY)
    assert main(["train", "--model", "mlp", "--model-arg", "hidden=8", "--model-arg", "layers=3", "--batch-size", "16",
                 "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4", "--costs", "analytic", "--json",
                 "--steps", "2", "--scheduler", "own.py:own", "--log", "log.jsonl", "--checkpoint", "saved"]) == 0
    assert Path.cwd() == tmp_path
    assert Path("log.jsonl").exists()
    assert list(Path("saved").iterdir())


def test_ranks_with_folders_of_their_own_under_one_name_are_told_before_the_first_step(tmp_path, monkeypatch, capsys):
    """As on a disk of each machine."""
    monkeypatch.chdir(tmp_path)
    begun = distributed.begun

    def elsewhere(arguments):
        here = Path(threading.current_thread().name)
        here.mkdir()
        os.chdir(here)
        return begun(arguments)

    monkeypatch.setattr(distributed, "begun", elsewhere)
    assert refused(capsys, *PIPELINE, "--checkpoint", "folder") == (
        "minidl: rank 1: cannot save to folder: rank 0 has another folder there; give one that all ranks share\n")
    assert not [*tmp_path.rglob("*.*")]


def test_each_rank_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = threading.Event()

    def work(communicator):
        if communicator.rank == 0:
            os.chdir("/")
            first.set()
        assert first.wait(PATIENCE)
        return os.getcwd()

    assert run_ranks(2, work) == ["/", str(tmp_path)]
    assert Path.cwd() == tmp_path
