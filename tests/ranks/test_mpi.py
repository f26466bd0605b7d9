"""Ranks as MPI processes: the same bits in every layout, agreement at the start, and ends without hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refusal, reported, told_apart
from helpers import IMPORTABLE, IN_AN_IMPORT, PATIENCE, ROOT, interruptible, python, until
from launcher import MPIEXEC, printed

COMMON = ["--model", "mlp", "--model-arg", "hidden=32", "--costs", "analytic", "--steps", "6", "--json"]

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")]


def command(ranks, *argv):
    """`mpiexec -n RANKS python ARGV`; `:` begins the ranks with other arguments."""
    line = [str(MPIEXEC), "-n", str(ranks), sys.executable]
    for a in argv:
        line += [":", "-n", "1", sys.executable] if a == ":" else [str(a)]
    return line


def run(ranks, *argv, **variables):
    """What hangs is ended by the limit, and the test fails."""
    return subprocess.run(command(ranks, *argv), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, **variables})


def train(*flags, common=COMMON):
    return ["-m", "minidl", "train", *common, *flags]


def parallel(scheduler, *flags, common=COMMON):
    return train("--parallel", "data", "--scheduler", scheduler, *flags, common=common)


def patched(code, *flags, scheduler="priority", common=COMMON):
    """The program after this code, which changes it and runs it."""
    return ["-c", code, *parallel(scheduler, *flags, common=common)[2:]]


def record(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said(done):
    """The one line that the program says."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidl:")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def one_line(done):
    """The one line of a refused run."""
    assert done.returncode == 2, done.stderr
    assert not printed(done)
    return said(done)


@pytest.fixture
def alone(capsys):
    """`alone(*flags)`: the record of a run without ranks, in this process."""
    return lambda *flags, common=COMMON: reported(capsys, "train", *map(str, [*common, *flags]))


# --------------------------------------------------------------------------------------------------------------- bits
@pytest.mark.slow
def test_two_ranks_equal_one_process_with_two_micro_batches_bit_for_bit(alone):
    wanted = alone("--micro-batches", "2")
    found = record(run(2, *parallel("reverse_first_k", "--k", "2")))
    assert found["params_sha256"] == wanted["params_sha256"]
    assert (found["ranks"], found["k"], found["steps"]) == (2, 2, 6)
    assert found["loss_last"] == pytest.approx(wanted["loss_last"], rel=1e-6)
    assert found["accuracy"] == wanted["accuracy"]


def test_ranks_with_shards_equal_one_process_bit_for_bit(alone, tmp_path):
    flags = ["--optimizer", "adam", "--clip", "0.5"]
    wanted = alone("--micro-batches", "2", *flags)
    found = record(run(2, *parallel("barrier", *flags, "--shard", "3,prefetch=1,keep=3", "--checkpoint", tmp_path,
                                    "--checkpoint-every", "3")))
    assert found["params_sha256"] == wanted["params_sha256"]
    assert found["accuracy"] == wanted["accuracy"]


@pytest.mark.slow
def test_one_process_without_mpiexec(alone):
    assert record(python(*parallel("dear")))["params_sha256"] == alone()["params_sha256"]


CUDA = """
import sys
import cuda_runtime
from minidl.cli import main
from minidl.devices.cuda import device

def cuda_device(number):
    return device._devices.setdefault(number, cuda_runtime.device(number))

device.gpus, device.cuda_device = lambda: 2, cuda_device
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="CUDA kernels are not run on the CPU: g++ is not installed")
def test_two_ranks_on_cuda_without_a_gpu():
    """On a runtime of the CPU, so that all but the GPU is real: each rank takes its own device,
    gradients go through MPI."""
    on_cuda = ["--device", "cuda"]
    single = python("-c", CUDA, *train(*on_cuda, "--micro-batches", "2")[2:], PYTHONPATH=IMPORTABLE)
    found = record(run(2, *patched(CUDA, "--k", "2", *on_cuda, scheduler="reverse_first_k"), PYTHONPATH=IMPORTABLE))
    assert found["params_sha256"] == record(single)["params_sha256"]
    assert (found["ranks"], found["device"]) == (2, "cuda:0")


@pytest.mark.slow
def test_an_mpi_that_was_not_built_for_cuda_is_not_given_its_memory():
    refused = one_line(run(2, *patched(CUDA, "--transport", "cuda-aware", "--device", "cuda"), PYTHONPATH=IMPORTABLE))
    assert "cannot read the memory of CUDA devices" in refused
    assert "use --transport staged" in refused


SUMS = """
import sys
import numpy as np
from minidl.runtime.comm import Host
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.mpi import MPI
from minidl.core.tasks import Kind

comms = MPI(), MPI(deterministic=False)
for dtype in (np.float32, np.float64):
    for count in (1, 3, 1000, 65537):
        values = np.random.default_rng(count).normal(size=(comms[0].size, count)).astype(dtype)
        exact, bound = values.astype(np.float64).mean(0), np.abs(values).sum(0)
        found = []
        for comm in comms:
            halves = [part.copy() for part in np.array_split(values[comm.rank], 2) if part.size]
            flight, place = Flight(comm), Host(comm, halves)
            flight.submit(Entry(0, comm.bind(Kind.A, place, 0), 0, place.whole.nbytes))
            flight.drain()
            found.append(np.concatenate(halves))
            assert (np.abs(found[-1] - exact) <= 2 * np.finfo(dtype).eps * bound).all(), (dtype, count)
        in_order = values[0].copy()
        for row in values[1:]:
            in_order += row
        assert (found[0] == in_order * dtype(1 / comm.size)).all()
comms[0].gather(None)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sum_as_mpi_likes_is_the_same_to_rounding(ranks):
    done = run(ranks, "-c", SUMS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_measured_costs_searched_k_and_a_trace(tmp_path):
    flags = ["--model", "mlp", "--steps", "40", "--json", "--trace", tmp_path / "trace.json", "--k", "auto"]
    found = record(run(2, *parallel("reverse_first_k", common=flags)))
    assert found["predicted_step_ms"] > 0
    assert json.loads((tmp_path / "trace.json").read_text())
    plan = record(run(2, *parallel("priority", "--dry-run")))
    assert plan["lower_bound_ms"] <= plan["predicted_step_ms"]


@pytest.mark.slow
def test_info_looks_at_every_rank():
    ranks = len(os.sched_getaffinity(0)) + 1
    done = run(ranks, "-m", "minidl", "info", "--each-rank", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["problems"] == [f"{ranks} ranks share {ranks - 1} cores on {found['ranks'][0]['host']}"]
    assert [r["local_rank"] for r in found["ranks"]] == list(range(ranks))


@pytest.mark.slow
def test_a_limited_loopback_changes_no_bits_or_says_why_it_cannot(alone):
    script = str(ROOT / "bench" / "limited_loopback.sh")
    done = subprocess.run([script, "500mbit", *command(2, *parallel("reverse_first_k", "--k", "1"))], cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode == 3:
        assert done.stderr.startswith("limited_loopback: ")
        assert len(done.stderr.splitlines()) == 1
        return
    assert record(done)["params_sha256"] == alone("--micro-batches", "2")["params_sha256"]


def test_the_limited_loopback_says_what_is_missing(tmp_path):
    script = ROOT / "bench" / "limited_loopback.sh"
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    done = subprocess.run(["/bin/sh", script, "1gbit", "true"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path)}, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (3, "limited_loopback: unshare is not installed (util-linux, iproute2)\n")
    assert subprocess.run(["/bin/sh", script], capture_output=True, timeout=PATIENCE).returncode == 2


# ------------------------------------------------------------------------------------------------------- started alike
SLOW = pytest.mark.slow
UNLIKE = [(["--seed", "5"], "the seed is 5 on rank 1 but 0 on rank 0"),
          (["--dry-run"], "--dry-run is True on rank 1 but False on rank 0"),
          (["--log-every", "2"], "--log-every is 2 on rank 1 but None on rank 0"),
          (["--config", "nowhere.toml"], "rank 1: nowhere.toml: No such file or directory"),
          (["--model-arg", "hidden=64"], "the model's arguments"),
          (["--bogus"], "rank 1: unrecognized arguments: --bogus"),
          (["--steps", "7"], "the number of steps is 7 on rank 1"),
          (["--model", "nothing"], "rank 1: unknown model 'nothing'"),
          (["--batch-size", "32"], "the batch size is 32 on rank 1"),
          (["--warmup", "2"], "--warmup is 2 on rank 1 but 0 on rank 0"),
          (["--checkpoint", "folder"], "--checkpoint is True on rank 1 but False"),
          (["--trace", "a.json"], "--trace is True on rank 1 but False on rank 0"),
          (["--parallel", "none"], "rank 1: 2 ranks were started, and each would train the whole model by")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("flags", "says"), UNLIKE[2:4])
def test_ranks_that_were_not_started_alike_end_at_once(flags, says):
    """Also what one rank alone was told, before others wait for it."""
    assert says in one_line(run(1, *parallel("priority"), ":", *parallel("priority", *flags)))


@pytest.mark.parametrize(("flags", "says"), UNLIKE)
def test_whatever_differs_is_named(flags, says, capsys):
    first = parallel("priority")[3:]
    assert says in told_apart(capsys, first, [*first, *flags])


@pytest.mark.parametrize(("flags", "says"), [
    (["--batch-size", "63"], "63 rows cannot be divided equally among 2 ranks"),
    (["--transport", "nccl"], "--transport has no effect here; it goes with --device cuda"),
    (["--parallel", "none", "--checkpoint", "folder"],
     "minidl: 2 ranks were started, and each would train the whole model by itself; give --parallel data or --parallel "
     "pipeline, or start one process\n")])
def test_what_no_rank_can_do_is_said_once(flags, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in told_apart(capsys, *[parallel("priority", *flags)[3:]] * 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_version_or_shard_is_found():
    patch = "import sys, minidl; minidl.__version__ = '9.9'; from minidl.cli import main; sys.exit(main(sys.argv[1:]))"
    line = one_line(run(1, *parallel("priority"), ":", *patched(patch)))
    assert "the version of minidl is '9.9' on rank 1" in line
    shorter = """
import sys
from minidl import data
from minidl.cli import main
load = data.load
def short(*args, **kwargs):
    loader = load(*args, **kwargs)
    object.__setattr__(loader.dataset, "samples", 640)
    return loader
data.load = short
sys.exit(main(sys.argv[1:]))
"""
    line = one_line(run(1, *parallel("priority"), ":", *patched(shorter)))
    assert "the number of samples is 640 on rank 1" in line


DRAWS = """
import numpy as np

def anew():
    random = np.random.default_rng()
    return random.standard_normal((640, 8, 8, 1)), random.integers(0, 10, 640)
"""


def test_data_that_each_rank_draws_for_itself_are_told(tmp_path, capsys):
    """In a pipeline, the first rank reads inputs and the last one labels."""
    (tmp_path / "own.py").write_text(DRAWS)
    flags = train("--parallel", "pipeline", "--micro-batches", "2", "--data", f"{tmp_path / 'own.py'}:anew")[3:]
    assert re.search(r"the first labels' hash is '\w+' on rank 1 but '\w+' on rank 0; start every rank with",
                     told_apart(capsys, flags, flags))


@pytest.mark.parametrize("other", ["pass", pytest.param("from mpi4py import MPI; import time; time.sleep(3600)",
                                                        marks=pytest.mark.slow)])
def test_ranks_do_not_wait_for_ever_for_one_that_runs_something_else(other):
    """One that never starts MPI, or that starts it and then does not do what the others do."""
    done = run(2, *parallel("priority"), ":", "-c", other, MINIDL_MPI_START_SECONDS="3")
    assert done.returncode != 0
    assert re.search("MPI has not started within 3 s.* start all with one mpiexec and the same command", said(done))


@pytest.mark.slow
def test_a_file_of_flags_may_say_that_it_is_data_parallel(tmp_path):
    (tmp_path / "flags.toml").write_text('parallel = "data"\nscheduler = "priority"\n')
    assert record(run(2, *train("--config", tmp_path / "flags.toml")))["ranks"] == 2


@pytest.mark.slow
def test_help_is_for_every_rank():
    done = run(2, "-m", "minidl", "train", "--help")
    assert done.returncode == 0
    assert "--parallel" in done.stdout


# ------------------------------------------------------------------------------------------------- scripts of one's own
TWICE = """
import sys
{first}
from minidl.cli import main
for seed in "01":
    assert main([*sys.argv[1:], "--seed", seed]) == 0
total = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.rank == 0:
    print(total)
"""


def test_who_starts_mpi_ends_it():
    """A script may run several trainings beside its own use of mpi4py."""
    done = run(2, *patched(TWICE.format(first="from mpi4py import MPI")))
    assert done.returncode == 0, done.stderr
    *runs, total = map(json.loads, done.stdout.splitlines())
    assert ([found["ranks"] for found in runs], total) == ([2, 2], 2)


@pytest.mark.slow
def test_mpi_that_has_ended_is_told():
    done = run(2, *patched(TWICE.format(first="")))
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidl:")]
    assert {*lines} == {"minidl: MPI has ended in this process and cannot start again; start a process for each run"}


# ------------------------------------------------------------------------------------------------------------ failures
RAISES = """
import sys
from minidl.training import rank_trainer
from minidl.cli import main
step = rank_trainer.RankTrainer.step
def failing(self):
    if self.communicator.rank == 1 and len(self.seconds) == 3:
        raise ArithmeticError("a bad day")
    return step(self)
rank_trainer.RankTrainer.step = failing
sys.exit(main(sys.argv[1:]))
"""


FULL = """
import errno, os, sys
from minidl.cli import main
write, left = os.pwritev, [int(os.environ["PMI_RANK"]) * -20 + 40]
def filled(*arguments):
    left[0] -= 1
    if left[0] < 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(*arguments)
os.pwritev = filled
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_full_disk_of_one_rank_ends_all_with_one_line_that_names_task_rank_and_file(tmp_path):
    done = run(2, *patched(FULL, "--offload", "activations", "--offload-to", tmp_path / "far", "--steps", "1000",
                           scheduler="barrier"))
    assert done.returncode != 0
    remark, *lines = done.stderr.splitlines()
    assert "bytes a step are copied out" in remark
    assert re.fullmatch(rf"minidl: rank 1: task \d+D0 .* on rank 1 failed: OSError: cannot copy [\d,]+ bytes out to "
                        rf"{tmp_path}/far.1: No space left on device", "\n".join(lines))


def test_a_killed_rank_ends_all_and_the_last_checkpoint_goes_on(alone, tmp_path):
    """Killed in the middle of a step; then resumed on another number of ranks, here threads, and in one process."""
    folder = tmp_path / "checkpoint"
    common = ["--model", "mlp", "--model-arg", "hidden=32", "--costs", "analytic", "--json", "--checkpoint", folder]
    killed = "import os, sys\n" + RAISES.replace('raise ArithmeticError("a bad day")',
                                                 "os.kill(os.getpid(), 9)").replace("== 3", "== 30")
    done = run(2, *patched(killed, "--epochs", "40", common=common))
    assert done.returncode != 0
    until(lambda: not _running(str(folder)), "the other ranks have ended")
    ranks = ["--parallel", "data", "--scheduler", "barrier", "--ranks", "4"]
    assert alone(*ranks, "--steps", "50", "--resume", common=common)["steps"] < 50, "it goes on from a checkpoint"
    assert alone("--steps", "51", "--resume", common=common)["steps"] == 1


#: what the middle of a step of rank 1 does
DOES = ("import os, signal, time\nfrom minidl.__main__ import run\n"
        + RAISES.replace('raise ArithmeticError("a bad day")', "{}").replace(
            "sys.exit(main(sys.argv[1:]))", "run()"))


STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
SILENT = (r"minidl: rank [023] waits for rank 1, which has given no sign of life for 4 s: it was stopped, is in "
          r"code that holds Python's lock, or its machine is gone \(a larger MINIDL_MPI_SILENT_SECONDS waits longer\)"
          r"\n")
#: Python handles a signal at the next of its instructions, here within the `with`
CAUGHT = ("exec('with contextlib.suppress(BaseException): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)', "
          "{**globals(), 'contextlib': __import__('contextlib')})")
#: what rank 1 does in its fourth step, how many ranks there are, the exit code, all that is said
ENDS = {"raises": ("raise ArithmeticError('a bad day')", (2, 3), 2,
                   "minidl: rank 1: an internal error of minidl: a bad day; MINIDL_DEBUG=1 shows where\n"),
        "is interrupted": ("os.kill(os.getpid(), signal.SIGINT)", (2, 4), 130, "minidl: rank 1: stopped by SIGINT\n"),
        "is terminated": ("os.kill(os.getpid(), signal.SIGTERM)", (2,), 143, "minidl: rank 1: stopped by SIGTERM\n"),
        "catches an interrupt": (CAUGHT, (2,), 130, "minidl: rank 1: stopped by SIGINT\n"),
        "is stopped for ever": (STOPS, (2, 4), 2, SILENT)}


@pytest.mark.parametrize(("what", "ranks"), [
    pytest.param(what, n, marks=[SLOW] * (n > 2 or what == "is terminated"))
    for what, (_, many, *_) in ENDS.items() for n in many])
def test_a_rank_that_fails_in_a_step_ends_all(what, ranks, tmp_path):
    does, _, code, says = ENDS[what]
    flags = ["--steps", "100000", "--batch-size", "48", "--trace", tmp_path / "trace.json"]
    done = run(ranks, *patched(DOES.format(does), *flags), MINIDL_MPI_SILENT_SECONDS="4")
    assert done.returncode == code, done.stderr
    assert re.fullmatch(says, done.stderr)
    until(lambda: not _running(str(tmp_path)), "also the rank that failed has ended")


def test_a_signal_to_one_rank_of_a_run_with_checkpoints_is_named_with_that_rank(tmp_path):
    """All ranks save and end together, most of them without a signal of their own."""
    done = run(2, *patched(DOES.format("os.kill(os.getpid(), signal.SIGTERM)"), "--steps", "100000", "--checkpoint",
                           tmp_path / "checkpoint"))
    assert (done.returncode, said(done)) == (143, "minidl: rank 1: stopped by SIGTERM"), done.stderr


@pytest.mark.parametrize("module", ["numba", pytest.param("mpi4py", marks=pytest.mark.slow),
                                    pytest.param("minidl.training.trainer", marks=pytest.mark.slow)])
def test_an_interrupt_of_one_rank_before_mpi_has_started_ends_all(module):
    flags = parallel("priority")
    done = run(1, *flags, ":", "-c", IN_AN_IMPORT, module, *flags[2:])
    assert said(done) == "minidl: rank 1: stopped by SIGINT"
    assert done.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["numba", "mpi4py", "a step"])
def test_an_interrupt_of_the_launcher(where, tmp_path):
    """Ctrl-C, which launchers pass on to all ranks: in their imports, at the start of MPI, in their steps."""
    begins = f"""
import os, pathlib, sys
from minidl.__main__ import run

def here():
    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()

class Finder:
    def find_spec(self, name, *_):
        if name == {where!r}:
            here()

if {where!r} == "a step":
    from minidl.training import rank_trainer
    step = rank_trainer.RankTrainer.step
    # not in the first one, which sets up MPI's communicators
    rank_trainer.RankTrainer.step = lambda self: (here() if self.seconds else None, step(self))[1]
sys.meta_path.insert(0, Finder())
run()
"""
    with interruptible(command(2, *patched(begins, "--steps", "100000"))) as job:
        until(lambda: len(list(tmp_path.iterdir())) == 2, f"both ranks are at {where}")
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    (line,) = [line for line in err.splitlines() if line.startswith("minidl:")]
    ranks = "01" if where == "mpi4py" else "0"  # while MPI starts, ranks cannot agree on who speaks
    assert re.fullmatch(f"minidl: rank [{ranks}]: stopped by SIGINT", line), err


@pytest.mark.slow
def test_a_rank_that_is_stopped_and_goes_on_changes_no_bits(alone):
    stopped = DOES.format("os.fork() or (time.sleep(2), os.kill(os.getppid(), signal.SIGCONT), os._exit(0)); "
                          "os.kill(os.getpid(), signal.SIGSTOP)")
    found = record(run(2, *patched(stopped), MINIDL_MPI_SILENT_SECONDS="20"))
    assert found["params_sha256"] == alone("--micro-batches", "2")["params_sha256"]


@pytest.mark.slow
def test_a_rank_that_is_busy_is_not_silent():
    found = record(run(2, *patched(DOES.format("time.sleep(17)")), MINIDL_MPI_SILENT_SECONDS="8"))
    assert found["steps"] == 6


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_by_one_that_looks_at_nothing():
    """As in a call of a library that waits by itself."""
    stuck = DOES.format(STOPS).replace("return step(self)",
                                       "time.sleep(3600) if len(self.seconds) == 3 else None; return step(self)")
    done = run(2, *patched(stuck), MINIDL_MPI_SILENT_SECONDS="4")
    assert done.returncode == 2
    assert [line[:32] for line in done.stderr.splitlines()] == ["minidl: rank 0 waits for rank 1,"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["MPI's", "the program's", "the interpreter's"])
def test_a_rank_that_is_stopped_at_its_end_is_noticed(end):
    """Before the last call of MPI, in which the others then wait, and after it, where nobody waits but the launcher."""
    stopped = f"""
import ctypes, os, signal
from minidl.system import interrupts
from minidl.runtime.comm import mpi

def stop():
    {STOPS}

if os.environ["PMI_RANK"] == "0":
    pass
elif {end!r} == "MPI's":
    close = mpi.MPI.close
    mpi.MPI.close = lambda self: (stop(), close(self))
elif {end!r} == "the program's":
    ignore = interrupts.ignore
    interrupts.ignore = lambda: (stop(), ignore())
else:  # when Python has gone: raise(SIGSTOP), called by the C library
    c = ctypes.CDLL(None)
    c.__cxa_atexit(ctypes.cast(c["raise"], ctypes.c_void_p), ctypes.c_void_p(signal.SIGSTOP), None)
from minidl.__main__ import run
run()
"""
    done = run(2, *patched(stopped), MINIDL_MPI_SILENT_SECONDS="4")
    assert done.returncode != 0
    assert "this job has not ended within 4 s after its last step" in said(done)


@pytest.mark.parametrize("variable", [f"MINIDL_MPI_{what}_SECONDS" for what in ("SILENT", "WAIT", "START")])
def test_a_deadline_is_a_number_of_seconds(variable, capsys, monkeypatch):
    for value in ("soon", "0", "nan", "1e300"):
        monkeypatch.setenv(variable, value)
        assert refusal(capsys, *parallel("priority")[2:]) == (
            f"minidl: {variable}={value} must be a number of seconds above 0, at most a million\n")


def _running(mark):
    """Processes whose command line holds `mark`."""
    return [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(p) and p.parent.name != str(os.getpid())]


def _text(path):
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
