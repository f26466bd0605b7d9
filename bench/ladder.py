"""A training step on one GPU, rung by rung: torch from eager to its autotuning compiler, minidl from single launches to
one fused graph.

    python bench/ladder.py [--models TEXT] [--dtype tf32 bf16 float32] [--seconds 20] [--budget SECONDS] [--pairs 60]
    [--no-compile]
                           [--quick] [--resume] [--out FILE.json]

| rung | what |
|---|---|
| B0   | torch, eager |
| B1   | torch, eager, tuned: channels last if that is faster, fused optimizer |
| B2   | B1 as one CUDA graph |
| B3   | torch.compile, reduce-overhead |
| B4   | torch.compile, max-autotune |
| B5   | torch.compile with apex's torchsched as one CUDA graph, where apex is installed |
| E0a  | minidl, launch by launch, one stream |
| E0b  | the same launches on several streams, out of order |
| E1   | E0a as one CUDA graph |
| E2   | E0b as one CUDA graph |
| E3   | fused launches, as one CUDA graph |

SGD with momentum on random images, batch 32, in the same precision on both sides: `tf32`, float32 whose products and
convolutions round their inputs for the tensor cores; `bf16`, products and convolutions in bfloat16 under autocast;
`float32`, strict. Without --dtype the first two. Each step takes its batch from the host's memory, torch from pinned
memory. Correctness comes first: E0 to E2 must give the same bits, and the losses of the first steps are compared with
torch in float64. Then time: groups of steps between two events, rungs in turn; each compiler runs with the one rung
that represents minidl.

The record is written after every run. No run begins that would not fit in --budget. `--resume` continues an existing
record: missing runs first, then runs of other sources. Needs a GPU; without one it prints a message and ends with 2.

`ladder_cases` has the networks, `ladder_minidl` and `ladder_torch` the rungs, `ladder_checks` the correctness checks,
`ladder_runs` the runs, `ladder_record` ratios and targets, `ladder_table` the text.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent),
                str(Path(__file__).parent.parent / "tests")]

from common import RESULTS, machine, save
from ladder_cases import CASES, FIRST, PRECISIONS, QUICK, Case, Effort, Precision
from ladder_checks import passed, said
from ladder_minidl import PAIRS, measured_costs
from ladder_record import FIRST_RUN, summary, targets
from ladder_runs import How, Run, compiled_run, first_run, give_back
from ladder_table import result, run_text
from ladder_torch import COMPILED

import minidl as ml
from minidl.runtime.device import DeviceError

#: seconds of a run of a network without earlier runs: a safe guess for an H200
NEED = {FIRST_RUN: 150.0, "B3 reduce-overhead": 90.0, "B4 max-autotune": 300.0, "B5 torchsched": 150.0}
BEGUN = "begun, and not finished"
MISSING, STARTED, OTHER, FAILED, DONE = range(5)  #: the state of a run: see Climb.jobs


class Job(NamedTuple):
    """One run of a network in one precision."""

    precision: str
    label: str
    run: str


def described(device: Any) -> dict[str, Any]:
    """The machine with its GPU, and the versions of packages."""
    found = {**machine(), "gpu": device.driver.describe()}
    for name in ("cudnn", "torch"):
        if importlib.util.find_spec(name):
            module = importlib.import_module(name)
            found["versions"][name] = module.backend_version() if name == "cudnn" else module.__version__
    return found


class Climb:
    """The ladder's record while it is completed. `record`: networks[precision][network][run], and the summary of
    them."""

    def __init__(self, cases: Mapping[str, Case], precisions: Sequence[Precision], about: Mapping[str, Any], path: str
                 | None = None, *, resume: bool = False, runs: Sequence[str] = (FIRST_RUN, *COMPILED)) -> None:
        self.cases, self.precisions, self.path, self.runs = cases, {p.name: p for p in precisions}, path, runs
        self.stamp = {key: about.get(key) for key in ("sources", "commit", "date")}
        networks = _earlier(path) if resume else {}
        self.record: dict[str, Any] = {"machine": dict(about), "networks": networks}

    def entry(self, job: Job) -> dict[str, Run]:
        """The results of a network in a precision, by run."""
        networks: dict[str, Any] = self.record["networks"].setdefault(job.precision, {})
        return networks.setdefault(job.label, {})

    def jobs(self) -> list[Job]:
        """The runs to do: missing ones, then unfinished ones, then those of other sources, then failed ones. First of
        all a compiler on the first two networks; then one kind of run after the other, by precision."""
        found = []
        for r, run in enumerate(self.runs):
            for p, precision in enumerate(self.precisions):
                for c, label in enumerate(self.cases):
                    job = Job(precision, label, run)
                    early = p == 0 and r < 2 and label in FIRST
                    found.append((self._state(job), not early, (c, r) if early else (r, p, c), job))
        return [job for state, _, _, job in sorted(found) if state < DONE]

    def _state(self, job: Job) -> int:
        entry = self.record["networks"].get(job.precision, {}).get(job.label, {})
        run = entry.get(job.run, {})
        if "sources" in run:
            state = OTHER if run["sources"] != self.stamp["sources"] else DONE if "step_ms" in run else FAILED
        else:
            state = STARTED if run.get("begun") else MISSING
        if job.run == FIRST_RUN or "step_ms" in entry.get(FIRST_RUN, {}):
            return state
        return max(state, self._state(job._replace(run=FIRST_RUN)))  # it needs the first run

    def need(self, job: Job) -> float:
        """The seconds that a run may take."""
        seen = [self.record["networks"].get(p, {}).get(job.label, {}).get(job.run, {}).get("seconds")
                for p in self.record["networks"]]
        return 1.25 * max((s for s in seen if s), default=NEED[job.run] / 1.25)

    def store(self) -> None:
        networks = self.record["networks"]
        self.record["summary"] = {p: summary(found) for p, found in networks.items()}
        self.record["targets"] = {p: targets(found, len(CASES)) for p, found in networks.items()}
        firsts = [entry[FIRST_RUN] for found in networks.values()
                  for entry in found.values() if "sources" in entry.get(FIRST_RUN, {})]
        self.record["complete"] = all(self._state(job) >= FAILED for job in self.jobs())
        self.record["passed"] = bool(firsts) and all("correct" in run and passed(run) for run in firsts)
        save("ladder", self.record, self.path)

    def __call__(self, device: Any, how: How, budget: float = math.inf) -> dict[str, Any]:
        """Does the runs that fit in the budget, in seconds, and returns the record."""
        end = time.perf_counter() + budget
        for run in (run for run in COMPILED if run not in self.runs):
            for entry in (self.entry(Job(p, label, run)) for p in self.precisions for label in self.cases):
                entry.setdefault(run, {"left_out": {run: "not asked for"}})
        for job in self.jobs():
            entry, first = self.entry(job), job.run == FIRST_RUN
            why = ("no time was left" if self.need(job) > end - time.perf_counter() else
                   None if first or "step_ms" in entry.get(FIRST_RUN, {})
                   else "what stands for minidl has no times yet")
            if why:
                entry.setdefault(job.run, {"left_out": {job.run: why}})
                continue
            if "sources" not in entry.get(job.run, {}):
                entry[job.run] = {"begun": True, "left_out": {job.run: BEGUN}}
                self.store()
            begin = time.perf_counter()
            try:
                case, precision = self.cases[job.label], self.precisions[job.precision]
                run = (first_run(case, precision, device, how) if first
                       else compiled_run(job.run, entry[FIRST_RUN], case, precision, device, how))
            except Exception as error:  # the failure of one network does not stop the others
                run = {"left_out": {job.run: said(error)}}
            entry[job.run] = {**self.stamp, "seconds": round(time.perf_counter() - begin, 1), **run}
            self.store()
            print(run_text(f"{job.label}, {job.precision}, {job.run}", entry[job.run]), flush=True)
            give_back(device)
        self.store()
        return self.record


def _earlier(path: str | None) -> dict[str, Any]:
    target = Path(path) if path else RESULTS / "ladder.json"
    return dict(json.loads(target.read_text())["networks"]) if target.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", metavar="cuda[:N]")
    parser.add_argument("--models", metavar="TEXT", default="", help="networks whose name contains this")
    parser.add_argument("--dtype", nargs="+", choices=list(PRECISIONS), default=["tf32", "bf16"],
                        help="precisions, the same on both sides")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of measuring per run")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS",
                        help="seconds in which all runs should end")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N",
                        help="how many pairs of groups of tasks are measured, for multi_region")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="a rehearsal with few steps; its times mean little")
    parser.add_argument("--resume", action="store_true", help="continue the existing record")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    try:
        device = ml.device.get(arguments.device)
        if not device.captures:
            raise DeviceError(f"the ladder needs a GPU; {device.name} is not a GPU")
    except (DeviceError, ValueError) as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 2
    cases = {label: case for label, case in CASES.items() if arguments.models in label}
    if not cases:
        print(f"ladder: no network's name contains {arguments.models!r}; there are: {', '.join(CASES)}",
              file=sys.stderr)
        return 2
    climb = Climb(cases, [PRECISIONS[name] for name in arguments.dtype], described(device), arguments.out,
                  resume=arguments.resume, runs=(FIRST_RUN,) if arguments.no_compile else (FIRST_RUN, *COMPILED))
    effort = QUICK if arguments.quick else Effort(seconds=arguments.seconds)
    record = climb(device, How(effort, partial(measured_costs, most=arguments.pairs)), arguments.budget)
    print(result(record))
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
