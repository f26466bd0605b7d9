"""The Slurm recipes of docs/clusters.md, as the page has them, under a real Slurm: `python tests/helpers/slurm.py`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from each_mpi import needed, variables
from helpers import PATIENCE, ROOT, python, until
from slurm import Cluster, cluster, missing

from minidl.training import checkpoint

pytestmark = [pytest.mark.slurm, pytest.mark.may_skip, pytest.mark.skipif(bool(missing()), reason=missing())]
PAGE = (ROOT / "docs" / "clusters.md").read_text().partition("\n## Slurm\n")[2].partition("\n## ")[0]
CHECK, TRAIN, REQUEUE, CANCEL, AGAIN, ARRAY = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
SEEDS, SCANCELS = (1, 2, 3), int(os.environ.get("MINIDL_SCANCELS", "20"))


@pytest.fixture(scope="module", params=[("MPICH", "pmi2"), ("Open MPI v4", "pmix")], ids=lambda p: p[1])
def slurm(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A Slurm for jobs of this MPI, and the environment that the page speaks of."""
    name, kind = request.param
    told = {k: v for k, v in variables(needed(name), name).items() if not k.startswith(("SLURM", "PMI"))}
    told["PYTHONPATH"] = os.pathsep.join([str(ROOT), told["PYTHONPATH"]])
    with cluster(told) as made:
        (there := made.home / "minidl-venv" / "bin").mkdir(parents=True)
        (there / "activate").write_text(f"PATH={os.path.dirname(sys.executable)}:$PATH\n")
        for script in (CHECK, TRAIN, ARRAY):
            assert "--mpi=pmi2" in script
        made.environment["KIND"] = kind
        yield made


def run(slurm: Cluster, block: str) -> str:
    """A block of the page, with the kind of MPI that the page says to write."""
    return slurm.run(block.replace("--mpi=pmi2", f"--mpi={slurm.environment['KIND']}"), PATIENCE)


def ended(slurm: Cluster) -> None:
    until(lambda: not slurm.jobs(), "the jobs end")


@pytest.fixture
def log(slurm: Cluster) -> Iterator[object]:
    """Reads the log of the job; afterwards its jobs and files are gone."""
    yield (slurm.home / "train.log").read_text
    slurm.run("scancel --user=$(id -un)")
    ended(slurm)
    slurm.run("rm -rf run1 seeds *.log *.sh")


@cache
def in_one_process(block: str, seed: int) -> str:
    """The digest of the parameters that the block's command leaves on threads."""
    flags = re.search(r"-m minidl (train.*?) --checkpoint ", block.replace("\\\n", " "))
    assert flags
    argv = shlex.split(flags[1].replace("$SLURM_ARRAY_TASK_ID", str(seed)))
    done = python("-m", "minidl", *argv, "--ranks", "2", "--json")
    return str(json.loads(done.stdout)["params_sha256"])[:16]


def saved(slurm: Cluster) -> int:
    """The step of the checkpoint; 0 without one."""
    folder = slurm.home / "run1"
    return checkpoint.peek(folder).step if checkpoint.exists(folder) else 0


def test_ranks_on_two_nodes_fit(slurm: Cluster) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the page's check wants a core for each rank")
    assert "everything fits" in run(slurm, CHECK)
    assert "started by Slurm's srun" in run(slurm, CHECK)


def test_a_job_that_is_queued_again_goes_on(slurm: Cluster, log) -> None:
    run(slurm, TRAIN)
    until(lambda: saved(slurm), "the first checkpoint")
    run(slurm, REQUEUE)
    ended(slurm)
    assert "DUE TO JOB REQUEUE" in log()
    assert f"resumed from {slurm.home}/run1 after step " in log()
    assert f"parameters sha256 {in_one_process(TRAIN, 0)}" in log()


def test_a_job_that_is_cancelled_ends_by_itself_and_goes_on(slurm: Cluster, log) -> None:
    run(slurm, TRAIN)
    until(lambda: saved(slurm), "the first checkpoint")
    run(slurm, CANCEL)
    ended(slurm)
    assert log().count("stopped by SIGTERM") == 1
    assert log().count("minidl: ") == 1
    kept = saved(slurm)
    run(slurm, AGAIN)
    ended(slurm)
    assert f"resumed from {slurm.home}/run1 after step {kept}" in log()
    assert f"parameters sha256 {in_one_process(TRAIN, 0)}" in log()


def test_each_task_of_an_array_has_a_seed_of_its_own(slurm: Cluster, log) -> None:
    run(slurm, ARRAY)
    ended(slurm)
    for seed in SEEDS:
        assert f"parameters sha256 {in_one_process(ARRAY, seed)}" in (slurm.home / f"seeds-{seed}.log").read_text()


def test_a_step_without_mpi_is_one_line(slurm: Cluster) -> None:
    done = subprocess.run(["srun", "--ntasks=2", "--mpi=none", sys.executable, "-m", "minidl", "info", "--each-rank"],
                          env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE)
    said = [line for line in done.stderr.splitlines() if line.startswith("minidl:")]
    assert (done.returncode, done.stdout, len(said)) == (2 if "pmi2" in slurm.environment["KIND"] else 1, "", 1)
    assert "srun" in said[0]


@pytest.mark.campaign
def test_nothing_is_lost_but_steps_since_the_last_checkpoint(slurm: Cluster, log) -> None:
    """scancel at random times, from the start of the job to its end, as often as MINIDL_SCANCELS says."""
    seed = int(os.environ.get("SEED", "0"))
    random, longest, count, step = np.random.default_rng(seed), 0.0, 0, 0
    run(slurm, TRAIN)
    while count < SCANCELS:
        until(lambda: "PENDING" not in slurm.jobs(), "the job starts")
        time.sleep(float(random.uniform(0, 15)))
        if slurm.jobs():
            begin = time.monotonic()
            run(slurm, CANCEL)
            ended(slurm)
            longest, count = max(longest, time.monotonic() - begin), count + 1
            assert saved(slurm) >= step, f"seed {seed}: a checkpoint is lost"
            step = saved(slurm)
        else:
            assert log().count(in_one_process(TRAIN, 0)) == 1, f"seed {seed}: {log()}"
            slurm.run("rm -r run1 train.log")
            step = 0
        run(slurm, AGAIN)
    ended(slurm)
    assert log().count(in_one_process(TRAIN, 0)) == 1, f"seed {seed}: {log()}"
    print(f"{count} scancels; the longest took {longest:.1f} s")
