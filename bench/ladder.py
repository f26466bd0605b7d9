"""A training step on one GPU, rung by rung: torch from eager to its autotuning compiler, minidl from single launches to
one fused graph.

    python bench/ladder.py [--models TEXT ...] [--dtype tf32 bf16 float32] [--seconds 20] [--budget SECONDS]
                           [--pairs 60] [--rungs TEXT ...] [--no-compile] [--quick] [--resume] [--out FILE.json]

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
| E3   | fused launches, as one CUDA graph; `--rungs E1 E3` adds other settings of the chip (CHIP of `ladder_minidl`) |

--rungs takes whole names of rungs ("E3 in_order"), or how names begin (E3, B), and runs no others; a schedule is made
if one of them needs it.

SGD with momentum on random images, batch 32, in the same precision on both sides: `tf32`, float32 whose products and
convolutions round their inputs for the tensor cores; `bf16`, products and convolutions in bfloat16 under autocast;
`float32`, strict. Without --dtype the first two. Each step takes its batch from pinned host memory; on both sides it is
copied on a stream of its own while the step before runs. `resident` is the time of a step whose batch is on the device
already. Correctness comes first: E0 to E2 must give the same bits, and the losses of the first steps are compared with
torch in float64. Then time: groups of steps between two events, rungs in turn; each compiler runs with the one rung
that represents minidl.

Each run is a process of its own, so that an error which spoils a CUDA context, a hang or a crash ends that run alone.
The record is written as results come: after the checks of a run, and every few seconds of its timing. No run begins
that would not fit in --budget, and none may take twice its expected time. `--resume` continues an existing record:
missing runs first, then runs of other sources. Needs a GPU; without one it prints a message and ends with 2.

`ladder_cases` has the networks, `ladder_minidl` and `ladder_torch` the rungs, `ladder_checks` the correctness checks,
`ladder_runs` the runs, `ladder_record` ratios and targets, `ladder_table` the text.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent),
                str(Path(__file__).parent.parent / "tests" / "helpers")]

from common import RESULTS, machine, save
from ladder_cases import CASES, FIRST, OTHERS, PRECISIONS, QUICK, Case, Effort, Precision
from ladder_checks import passed, said
from ladder_minidl import CHIP, FUSED, PAIRS, PLAIN, measured_costs
from ladder_record import FIRST_RUN, summary, targets
from ladder_runs import How, Keep, Run, compiled_run, first_run, give_back
from ladder_table import result, run_text
from ladder_torch import COMPILED, EAGER
from processes import GRACE, end

import minidl as ml
from minidl.devices import DeviceError
from minidl.system.files import write_atomic

#: seconds of a run of a network without earlier runs: on an H100 a first run took 26 to more than 150
NEED = {FIRST_RUN: 100.0, "B3 reduce-overhead": 90.0, "B4 max-autotune": 300.0, "B5 torchsched": 150.0}
BEGUN = "begun, and not finished"
POLL = 2.0  #: seconds between two looks at a run's results so far
MISSING, STARTED, OTHER, FAILED, DONE = range(5)  #: the state of a run: see Climb.jobs


class Job(NamedTuple):
    """One run of a network in one precision."""

    precision: str
    label: str
    run: str


@dataclass(frozen=True)
class Here:
    """Does runs in this process. The failure of one does not stop the others."""

    cases: Mapping[str, Case]
    precisions: Mapping[str, Precision]
    device: Any
    how: How

    def __call__(self, job: Job, first: Run, seconds: float, keep: Keep) -> Run:
        """The results of a run; `first`: of the network's first run."""
        case, precision = self.cases[job.label], self.precisions[job.precision]
        try:
            return (first_run(case, precision, self.device, self.how, keep) if job.run == FIRST_RUN
                    else compiled_run(job.run, first, case, precision, self.device, self.how))
        except Exception as error:
            return {"left_out": {job.run: said(error)}}
        finally:
            give_back(self.device)


@dataclass(frozen=True)
class Apart:
    """Does each run in a process of its own. `command`: this program with the arguments of all runs."""

    command: Sequence[str]

    def __call__(self, job: Job, first: Run, seconds: float, keep: Keep) -> Run:
        """As `Here`; a run that is ended, or dies, has the results so far and says why it `stopped`."""
        with tempfile.TemporaryDirectory() as name:
            folder, seen = Path(name), ""
            (folder / "first.json").write_text(json.dumps(first))
            with open(folder / "errors", "wb") as errors:
                process = subprocess.Popen([*self.command, "--only", *job, "--folder", name], stdin=subprocess.DEVNULL,
                                           stdout=subprocess.DEVNULL, stderr=errors, process_group=0)
                begin = time.monotonic()
                try:
                    while process.poll() is None and (left := seconds - (time.monotonic() - begin)) > 0:
                        with suppress(subprocess.TimeoutExpired):
                            process.wait(min(POLL, left))
                        if (text := _text(folder / "run.json")) != seen:
                            seen = text
                            keep(json.loads(seen))
                    late = process.poll() is None
                finally:
                    end(process, GRACE / 2)  # whoever ends this process waits for GRACE
            found: Run = {"left_out": {}, **json.loads(_text(folder / "run.json") or "{}")}
            if late or process.returncode:
                why = (f"it took more than {seconds:.0f} s" if late else
                       " ".join((folder / "errors").read_text(errors="replace").split()[-40:]) or
                       f"its process ended with {process.returncode}")
                found |= {"stopped": why, "left_out": {**found["left_out"], job.run: why}}
            return found


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


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
        """The runs to do: missing ones, then unfinished ones, then runs of other sources, then failed ones. First of
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
            whole = "step_ms" in run and "stopped" not in run
            state = OTHER if run["sources"] != self.stamp["sources"] else DONE if whole else FAILED
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
        self.record["targets"] = {p: targets({label: runs for label, runs in found.items() if label not in OTHERS},
                                             len(CASES)) for p, found in networks.items()}
        asked = [networks.get(p, {}).get(label, {}).get(FIRST_RUN, {}) for p in self.precisions for label in self.cases]
        firsts = [run for run in asked if "sources" in run]
        self.record["complete"] = all(self._state(job) >= FAILED for job in self.jobs())
        self.record["passed"] = bool(firsts) and all("correct" in run and passed(run) for run in firsts)
        save("ladder", self.record, self.path)

    def __call__(self, do: Here | Apart, budget: float = math.inf) -> dict[str, Any]:
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

            def keep(found: Run, entry: dict[str, Run] = entry, job: Job = job) -> None:
                entry[job.run] = {"begun": True, **found, "left_out": {**found["left_out"], job.run: BEGUN}}
                self.store()

            run = do(job, entry.get(FIRST_RUN, {}), min(2 * self.need(job), end - begin), keep)
            entry[job.run] = {**self.stamp, "seconds": round(time.perf_counter() - begin, 1), **run}
            self.store()
            print(run_text(f"{job.label}, {job.precision}, {job.run}", entry[job.run]), flush=True)
        self.store()
        return self.record


def _earlier(path: str | None) -> dict[str, Any]:
    target = Path(path) if path else RESULTS / "ladder.json"
    return dict(json.loads(target.read_text())["networks"]) if target.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", metavar="cuda[:N]")
    parser.add_argument("--models", nargs="+", metavar="TEXT", default=[""],
                        help="networks whose name contains one of these, in this order")
    parser.add_argument("--dtype", nargs="+", choices=list(PRECISIONS), default=["tf32", "bf16"],
                        help="precisions, the same on both sides")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of measuring per run")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS",
                        help="seconds in which all runs should end")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N",
                        help="how many pairs of groups of tasks are measured, for multi_region")
    parser.add_argument("--rungs", nargs="+", metavar="TEXT",
                        help="rungs of this name, or whose name begins so, also those that differ in a setting of the "
                             "device (default: all but these)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="a rehearsal with few steps; its times mean little")
    parser.add_argument("--resume", action="store_true", help="continue the existing record")
    parser.add_argument("--out", help="where to write the record")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # one run, in this process,
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # with its results in this folder
    arguments = parser.parse_args()
    try:
        device = ml.device.get(arguments.device)
        if not device.captures:
            raise DeviceError(f"the ladder needs a GPU; {device.name} is not a GPU")
    except (DeviceError, ValueError) as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 2
    known = {**CASES, **OTHERS}
    cases = {label: case for text in arguments.models for label, case in known.items() if text in label}
    if not cases:
        print(f"ladder: no network's name contains {' or '.join(arguments.models)}; there are: {', '.join(known)}",
              file=sys.stderr)
        return 2
    effort = QUICK if arguments.quick else Effort(seconds=arguments.seconds)
    chosen = rungs_of(arguments.rungs)
    if not any(name in PLAIN for name in chosen):
        print(f"ladder: --rungs must name at least one of {', '.join(PLAIN)}", file=sys.stderr)
        return 2
    if arguments.only:
        how = How(effort, partial(measured_costs, most=arguments.pairs), rungs=chosen)
        return _one(Job(*arguments.only), arguments.folder, Here(known, PRECISIONS, device, how))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run in progress ends too
    climb = Climb(cases, [PRECISIONS[name] for name in arguments.dtype], described(device), arguments.out,
                  resume=arguments.resume, runs=(FIRST_RUN, *(name for name in COMPILED if name in chosen
                                                              and not arguments.no_compile)))
    command = [sys.executable, __file__, "--device", arguments.device, "--seconds", str(arguments.seconds), "--pairs",
               str(arguments.pairs), *(["--quick"] if arguments.quick else []),
               *(["--rungs", *arguments.rungs] if arguments.rungs else [])]
    record = climb(Apart(command), arguments.budget)
    print(result(record))
    return 0 if record["passed"] else 1


def rungs_of(texts: Sequence[str] | None) -> list[str]:
    """The rungs that are asked for, in the ladder's order."""
    known = (*PLAIN, *FUSED, *CHIP, *EAGER, *COMPILED)
    if texts is None:
        return [name for name in known if name not in CHIP]
    begins = tuple(text for text in texts if text not in known)
    return [name for name in known if name in texts or name.startswith(begins)]


def _one(job: Job, folder: Path, do: Here) -> int:
    """Does one run, and leaves its results in the folder as they come."""

    def keep(found: Run) -> None:
        write_atomic(folder / "run.json", json.dumps(found))

    keep(do(job, json.loads((folder / "first.json").read_text()), math.inf, keep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
