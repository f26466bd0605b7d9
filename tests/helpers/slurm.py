"""A Slurm of two nodes on this machine, in a temporary folder: munge, a controller, a node daemon for each node, all on
loopback. The machine's own Slurm, if there is one, is not touched. As a program it runs the tests that need it:

    python tests/helpers/slurm.py [--install]

`--install` calls apt-get, as root or by sudo, for Debian's packages; nothing else installs anything. The exit code is 2
if Slurm is not there.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: srun --mpi=pmix loads libpmix.so; in Debian only the package for developers has a file of this name
PACKAGES = ("slurm-wlm", "munge", "libpmix-dev")
DAEMONS = ("munged", "slurmctld", "slurmd")
CPUS = 4  #: of each node, whatever this machine has
CONFIGURATION = """
ClusterName=minidl
# MPICH names its shared memory by the job's number: what a killed one leaves would be in the way of its namesake
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# a job that is queued again starts after cred_expire, by default 120 s
AuthInfo=socket={at}/munge.sock,cred_expire=5
StateSaveLocation={at}
SlurmdSpoolDir={at}/%n
# PMIx makes files here, whose names would be the same for two nodes of one machine
TmpFS={at}/%n
SlurmctldPidFile={at}/controller.pid
SlurmdPidFile={at}/%n.pid
SlurmctldLogFile={at}/controller.log
SlurmdLogFile={at}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
ReturnToService=2
KillWait=5
NodeName=node1 NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=node2 NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def daemon(name: str) -> str | None:
    """Its path; Debian puts it into a folder that is only on root's path."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def missing() -> str:
    """Why no Slurm can start here; empty if it can."""
    absent = [name for name in (*DAEMONS, "sbatch") if daemon(name) is None]
    return f"no {', '.join(absent)}: python tests/helpers/slurm.py --install" if absent else ""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm. `home`: its user's home."""

    home: Path
    environment: dict[str, str]

    def run(self, script: str, seconds: float = 120) -> str:
        """Runs lines of a shell in the home, and returns what they print. AssertionError if they fail."""
        done = subprocess.run(["bash", "-euc", script], cwd=self.home, env=self.environment, capture_output=True,
                              text=True, timeout=seconds)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self) -> list[str]:
        """The states of all jobs that have not ended."""
        return self.run("squeue --noheader --array --format=%T").split()


def _ports(count: int) -> list[int]:
    with ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [found.getsockname()[1] for found in taken]


@contextmanager
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    """A Slurm whose jobs have these variables; its jobs and daemons end with it."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, ExitStack() as held:
        at = Path(folder)
        for name in ("node1", "node2", "home"):
            (at / name).mkdir()
        (at / "slurm.conf").write_text(CONFIGURATION.format(
            at=at, host=socket.gethostname().partition(".")[0], user=getpass.getuser(), ports=_ports(3), cpus=CPUS,
            first=1 + int.from_bytes(os.urandom(3), "big")))
        (key := at / "munge.key").write_bytes(os.urandom(128))
        key.chmod(0o400)
        told = {**environment, "SLURM_CONF": str(at / "slurm.conf"), "HOME": str(at / "home")}

        def start(name: str, *flags: str) -> None:
            with open(at / f"{name}.out", "ab") as out:
                held.callback(_end, subprocess.Popen([str(daemon(name)), *flags], stdout=out, stderr=out, env=told))

        start("munged", "--foreground", "--force", f"--socket={at}/munge.sock", f"--key-file={key}",
              f"--pid-file={at}/munged.pid", f"--log-file={at}/munged.log", f"--seed-file={at}/munge.seed")
        start("slurmctld", "-D")
        for node in ("node1", "node2"):
            start("slurmd", "-D", "-N", node)
        made = Cluster(at / "home", told)
        made.run("for i in {1..300}; do [ $(sinfo --noheader --format=%T 2>&1) = idle ] && exit 0; sleep 0.1; done; "
                 f"tail -n 20 {at}/*.log {at}/*.out; exit 1")
        held.callback(made.run, "scancel --user=$(id -un); for i in {1..150}; do "
                                "[ -z \"$(squeue --noheader)\" ] && exit 0; sleep 0.1; done; echo jobs stay; exit 1")
        yield made


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    if "--install" in sys.argv[1:]:
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
            with suppress(FileNotFoundError, subprocess.TimeoutExpired):
                subprocess.run([*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *command],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=300)
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    try:
        with cluster(dict(os.environ)):
            pass
    except AssertionError as error:  # such as a container whose control groups Slurm cannot use
        print(f"Slurm does not start here: {error}", file=sys.stderr)
        return 2
    tests = Path(__file__).resolve().parents[1] / "system" / "test_slurm.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slurm and not campaign", str(tests)]
    if subprocess.run(command).returncode == 0:
        return 0
    # MPICH 5.0.2 under pmi2 has failed in MPI_Init once in some forty starts of two ranks on two nodes
    return int(subprocess.run([*command, "--last-failed"]).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
