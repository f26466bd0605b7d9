"""What a user is told about time: the step that `train` and `compare` predict, against the step that they then take.

    python bench/predicted_steps.py [--kind KIND]... [--network NAME]... [--again [disturbed]] [--out FILE.json]

Each run is a command as a user types it, in a process of its own, and both times are from its `--json`. Kinds: `one
device` (`compare`), `data` and `pipeline` (`mpiexec -n 2 minidl train`). Runs that the record has are left out unless
`--again`, so a record can be made in parts. Beside each run stands how much of the machine others used meanwhile; where
that is more than QUIET, the run is marked as disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent)]

from common import RESULTS, ROOT, machine, save

QUIET = 0.03  #: the share of the machine's time that others may use
RANKS = 2


class Network(NamedTuple):
    """Flags of a network; samples a step on one device, on each data-parallel rank, and in each of 8 micro-batches;
    and about how many milliseconds a sample takes."""

    flags: str
    batch: int
    micro_batch: int
    sample_ms: float


NETWORKS = {
    "FFNN 9 x 512": Network("--model ffnn --model-arg hidden=512 --model-arg layers=8", 64, 64, 0.25),
    "LeNet": Network("--model lenet", 64, 16, 0.09),
    "ResNet-20": Network("--model resnet20", 32, 4, 2.5),
    "MobileNetV3 small": Network("--model mobilenet_v3_large --model-arg preset=small", 32, 16, 0.25),
    "GPT small": Network("--model gpt --model-arg preset=small", 8, 2, 9.4),
    "RNN small": Network("--model rnn --model-arg preset=small", 32, 8, 2.7)}
#: of each kind its policies
KINDS = {"one device": ("in_order", "multi_stream", "multi_region"),
         "data": ("barrier", "priority", "reverse_first_k"),
         "pipeline": ("gpipe", "one_f_one_b", "zb_h1", "zb_auto", "interleaved", "modulo")}
MICRO_BATCHES = 8
SECONDS, LEAST, MOST = 1.5, 16, 150  #: of training a run, and steps


def commands(kind: str, name: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(policies, the command that runs them) of a kind and a network."""
    network = NETWORKS[name]
    batch = {"one device": network.batch, "data": RANKS * network.batch,
             "pipeline": MICRO_BATCHES * network.micro_batch}[kind]
    cores = 1 if kind == "one device" else RANKS
    steps = int(min(MOST, max(LEAST, SECONDS * 1e3 * cores / (network.sample_ms * batch))))
    flags = f"{network.flags} --batch-size {batch} --json"
    if kind == "one device":
        yield KINDS[kind], f"minidl compare {flags} --steps {steps} --schedulers {','.join(KINDS[kind])}"
        return
    for policy in KINDS[kind]:
        more = f" --micro-batches {MICRO_BATCHES}" if kind == "pipeline" else ""
        # the first steps of reverse_first_k measure which k is best
        count = steps + 24 if policy == "reverse_first_k" else steps
        yield (policy,), (f"mpiexec -n {RANKS} minidl train {flags} --parallel {kind} --scheduler {policy}{more} "
                          f"--steps {count}")


def run(command: str) -> tuple[list[dict[str, Any]], float]:
    """The records that a command prints, one for each policy, and the share of the machine that others used. Raises
    RuntimeError if it fails."""
    folder = Path(sys.executable).parent
    words = [str(folder / word) if (folder / word).exists() else word for word in command.split()]
    before, began, mine = _busy(), perf_counter(), _own()
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    took, busy, mine = perf_counter() - began, _busy() - before, _own() - mine
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip().splitlines()[-1]}")
    record = json.loads(done.stdout.splitlines()[-1])
    return record.get("arms", [record]), (busy - mine) / (took * (os.cpu_count() or 1))


def _busy() -> float:
    """Seconds for which the machine's processors have worked since it started, also for other guests (steal)."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Seconds of processors that the commands so far have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def entries(kind: str, name: str, known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(policy, its entry) of a kind and a network, without those that are known."""
    for policies, command in commands(kind, name):
        if all(policy in known for policy in policies):
            continue
        found, others = run(command)
        for record in found:
            step = record["step_ms"]
            yield record["scheduler"], {
                "command": command, "predicted_ms": record["predicted_step_ms"], "step_ms": step,
                "error": round(record["predicted_step_ms"] / step["median"] - 1, 4), "others": round(others, 4),
                "disturbed": others > QUIET, "reasons": record["diagnosis"]["reasons"],
                "remarks": record["remarks"]}


def summary(errors: Iterable[float]) -> dict[str, float]:
    """Median and worst of the sizes of errors."""
    sizes = sorted(map(abs, errors))
    return {"median": round(statistics.median(sizes), 4), "worst": sizes[-1], "n": len(sizes)} if sizes else {}


def summaries(runs: dict[str, Any], disturbed: bool = True) -> dict[str, Any]:
    """The summary of each kind, and of all together; `disturbed`: also of the disturbed runs."""
    errors = {kind: [e["error"] for policies in networks.values() for e in policies.values()
                     if disturbed or not e["disturbed"]] for kind, networks in runs.items()}
    errors["all"] = [error for found in errors.values() for error in found]
    return {kind: summary(found) for kind, found in errors.items() if found}


def recorded(runs: dict[str, Any]) -> dict[str, Any]:
    return {"machine": machine(), "summary": summaries(runs), "summary_undisturbed": summaries(runs, disturbed=False),
            "runs": runs}


def show(record: dict[str, Any]) -> None:
    for kind, networks in record["runs"].items():
        print(f"\n{kind}: predicted / taken - 1   (ms taken)")
        print(f"{'':20}" + "".join(f"{policy:>19}" for policy in KINDS[kind]))
        for name, policies in networks.items():
            print(f"{name:20}" + "".join(
                f"{e['error']:+9.1%} ({e['step_ms']['median']:6.1f}){'*' if e['disturbed'] else ' '}"
                if (e := policies.get(policy)) else f"{'':19}" for policy in KINDS[kind]))
    print("\n* others used the machine")
    for which in ("summary", "summary_undisturbed"):
        print("\n".join([f"\n{which.replace('_', ', ')}", *(
            f"  {kind}: median {found['median']:.1%}, worst {found['worst']:.1%} of {found['n']}"
            for kind, found in record[which].items())]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--again", nargs="?", const="all", choices=("all", "disturbed"),
                        help="also runs that the record has, or only its disturbed ones")
    parser.add_argument("--out", help="the record, which is also read where it exists")
    arguments = parser.parse_args()
    path = Path(arguments.out) if arguments.out else RESULTS / "predicted_steps.json"
    runs: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}
    for kind in arguments.kind or KINDS:
        for name in arguments.network or NETWORKS:
            known = runs.setdefault(kind, {}).setdefault(name, {})
            kept = {policy: e for policy, e in known.items()
                    if not arguments.again or (arguments.again == "disturbed" and not e["disturbed"])}
            for policy, entry in entries(kind, name, kept):
                known[policy] = entry
                print(f"{kind}, {name}, {policy}: predicted {entry['predicted_ms']:.2f}, took "
                      f"{entry['step_ms']['median']:.2f} ms: {entry['error']:+.1%}"
                      + (f"; others used {entry['others']:.0%} of the machine" if entry["disturbed"] else ""),
                      file=sys.stderr, flush=True)
                save("predicted_steps", recorded(runs), arguments.out)  # what is finished is not lost
    show(recorded(runs))


if __name__ == "__main__":
    main()
