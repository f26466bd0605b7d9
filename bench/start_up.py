"""From the start of a command to the end of its first step, of one process and of ranks under mpiexec: what starting on
ranks costs. Arms run in turns; a ratio is the median of neighbouring runs.

    python bench/start_up.py [--ranks 2,4] [--runs 5] [--save]

Each rank starts Python, numba and MPI by itself, so ranks that share a core take turns: `cpu_seconds` is the processor
time of a whole command, all ranks together, of which each core can give one second a second.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

from minidl.system import launcher

TRAIN = ["train", "--model", "mlp", "--batch-size", "256", "--steps", "2", "--log-every", "1"]


def start(ranks: int) -> tuple[float, float]:
    """Seconds until rank 0 reports its first step, and the processor time of the whole command, which does not count
    what Open MPI's daemons start."""
    command = [sys.executable, "-m", "minidl", *TRAIN]
    if ranks:
        found = launcher.first()
        assert found is not None, "no mpiexec"
        many = ["--oversubscribe"] if found[1] == "Open MPI's mpiexec" else []
        command = [found[0], *many, "-n", str(ranks), *command, "--parallel", "data", "--scheduler", "buckets"]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, cwd=common.ROOT,
                          env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        said, first = [], 0.0
        for line in process.stdout:
            said.append(line)
            if not first and line.startswith("step 1 "):
                first = time.perf_counter() - begin
    assert first, "".join(said)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the record to bench/results")
    arguments = parser.parse_args()
    counts = [0, *map(int, arguments.ranks.split(","))]
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    start(0)  # caches
    for _ in range(arguments.runs):
        for count in counts:
            found[count].append(start(count))
    seconds = {str(count): [first for first, _ in found[count]] for count in counts}
    rows: list[dict[str, Any]] = []
    for count in counts:
        cpu = sorted(used for _, used in found[count])[arguments.runs // 2]
        row: dict[str, Any] = {"ranks": count, "seconds": common.spread(seconds[str(count)], 1.0), "cpu_seconds": cpu}
        if count:
            row["ratio"] = common.ratio(seconds, str(count), "0")
        rows.append(row)
        print(f"{f'{count} ranks' if count else 'one process':12}", *(
            f"{name} {value['median']:.2f} ({value['p10']:.2f} to {value['p90']:.2f})" if isinstance(value, dict)
            else f"{name} {value:.2f}" for name, value in row.items() if name != "ranks"), sep="  ")
    if arguments.save:
        common.save("start_up", {"command": " ".join(TRAIN), "cores": len(os.sched_getaffinity(0)), "rows": rows})


if __name__ == "__main__":
    main()
