"""The measurement of one network: a run times several rungs in turn. The first run has all of minidl's rungs and
torch's without compilers, after they have been checked; each of torch's compilers has its own run, with the rung that
represents minidl.

A run is a dictionary for the record: milliseconds per step and ratios of rungs, host cost, preparation time, and why a
rung is left out. The first run plans; its record has the plan of the rung that represents minidl, and the other runs
use it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common import spread
from ladder_cases import Case, Effort, Precision
from ladder_checks import COMPARED, against_float64, said, same
from ladder_minidl import CHIP, FUSED, PLAIN, Ours, best, measured_costs, scheduler_of
from ladder_record import ratios
from ladder_rungs import Rung, RungError, interleaved, of_rung
from ladder_torch import EAGER, Theirs, missing

from minidl.core.schedule import Schedule

LAUNCHED = ("E0", "B0", "B1")  #: rungs that the host launches one by one: resident inputs change nothing there
Run = dict[str, Any]
Keep = Callable[[Run], None]  #: gets the results of a run so far


@dataclass(frozen=True)
class How:
    """`costs(graph, device)`: the costs for schedules. `torch_on`: torch's device, None for minidl alone. `rungs`: all
    but those of compilers, which have runs of their own."""

    effort: Effort
    costs: Callable[[Any, Any], Any] = measured_costs
    torch_on: str | None = "cuda"
    rungs: Sequence[str] = (*PLAIN, *FUSED, *EAGER)

    def no_torch(self) -> str | None:
        """Why torch is left out."""
        return missing() if self.torch_on else "not asked for"


def timed(rungs: Mapping[str, Rung], effort: Effort, keep: Keep = lambda found: None) -> Run:
    """The times of rungs, in turns. `keep` gets the results so far, every few seconds. `resident_ms`: of captured
    steps whose inputs are on the device already. Raises RungError."""
    mine = best(list(rungs))
    host_us, launch_us = {}, {}
    for name, rung in rungs.items():
        with of_rung(name):
            host_us[name] = spread(rung.host_us(effort.single, rung.step), 1.0)
            if rung.launch:
                launch_us[name] = spread(rung.host_us(effort.single, rung.launch, rung.bring), 1.0)
    about = {"minidl": mine, "host_us": host_us, "launch_us": launch_us,
             "ready_s": {name: round(rung.ready_s, 3) for name, rung in rungs.items()},
             "peak_bytes": {name: rung.peak_bytes for name, rung in rungs.items()},
             "about": {name: rung.about for name, rung in rungs.items()}}
    resident = interleaved({name: replace(rung, step=rung.resident) for name, rung in rungs.items()
                            if rung.resident and not name.startswith(LAUNCHED)},
                           replace(effort, seconds=effort.seconds / 4))
    about["resident_ms"] = {name: spread(s) for name, s in resident.items()}

    def found(samples: Mapping[str, list[float]]) -> Run:
        return {"step_ms": {name: spread(s) for name, s in samples.items()}, "ratios": ratios(samples, mine), **about}

    return found(interleaved(rungs, effort, lambda samples: keep(found(samples))))


def first_run(case: Case, precision: Precision, device: Any, how: How, keep: Keep = lambda found: None) -> Run:
    """All rungs without a compiler, checked and timed. A rung that fails is left out, with its error. `keep`
    gets the results so far: after the checks, and every few seconds of timing."""
    ours, steps = Ours(case, precision, device), how.effort.steps
    rungs: dict[str, Rung] = {}
    made: dict[str, Schedule] = {}
    bits: dict[str, bytes] = {}
    losses: dict[str, list[float]] = {}
    run: Run = {"batch": case.batch, "planning_s": 0.0, "predicted_ms": {}, "left_out": {}}

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, or None if it fails: the other rungs are still measured, and the check reports it."""
        try:
            return make()
        except Exception as error:
            run["left_out"][name] = said(error)
            return None

    def trained(name: str, schedule: Any) -> Rung:
        rung, model = ours.rung(name, schedule)
        first = [float(rung.step()) for _ in range(min(COMPARED, steps))]
        for _ in range(steps - COMPARED):
            rung.step()
        bits[name], losses[name] = b"".join(p.numpy().tobytes() for p in model.parameters()), first
        return rung

    try:
        for kind in (PLAIN, (*FUSED, *CHIP)):
            names, begin = [name for name in how.rungs if name in kind], time.perf_counter()
            planned = attempt(", ".join(names), lambda: ours.plans(names, how.costs)) if names else None
            run["planning_s"] = round(run["planning_s"] + time.perf_counter() - begin, 3)
            for name in names if planned else ():
                schedules, predicted = planned
                made[name] = schedules[scheduler_of(name)]
                rung = attempt(name, lambda: trained(name, made[name]))
                if rung:
                    rungs[name] = rung
                    if not name.startswith("E0") and scheduler_of(name) in predicted:
                        run["predicted_ms"][name] = predicted[scheduler_of(name)]
        if not any(name in PLAIN for name in rungs):
            raise RuntimeError(f"no rung runs: {run['left_out']}")
        allowed, correct = precision.rounding, {}
        wanted = [name for name in EAGER if name in how.rungs]
        if how.no_torch():
            run["left_out"] |= dict.fromkeys(wanted, how.no_torch())
        else:
            theirs = Theirs(ours, str(how.torch_on))
            correct["losses"] = against_float64(ours, theirs, [next(n for n in rungs if n in kind)
                                                               for kind in (PLAIN, FUSED) if {*kind} & {*rungs}],
                                                min(COMPARED, steps))
            allowed = correct["losses"]["allowed"]
            for name in wanted:
                rung = attempt(name, lambda: theirs.rung(name))
                rungs |= {name: rung} if rung else {}
        run["correct"] = {**same(bits, losses, steps, allowed), **correct}
        timing = dict(rungs)
        while any(name in made for name in timing):
            run["plan"] = made[best(list(timing))].to_csv()
            keep(run)
            try:
                return run | timed(timing, how.effort, lambda found: keep(run | found))
            except RungError as error:  # the others are timed again without it
                run["left_out"][error.rung] = said(error.__cause__ or error)
                del timing[error.rung]
        raise RuntimeError(f"no rung can be timed: {run['left_out']}")
    finally:
        for rung in rungs.values():
            rung.close()


def compiled_run(name: str, first: Mapping[str, Any], case: Case, precision: Precision, device: Any, how: How) -> Run:
    """One of torch's compilers, timed with the rung that represents minidl in the first run, by its plan. Raises the
    compiler's errors."""
    if how.no_torch():
        return {"left_out": {name: how.no_torch()}}
    ours, mine = Ours(case, precision, device), first["minidl"]
    seen = next((about for rung in ("B1 tuned", "B2 graph") if (about := first["about"].get(rung))), {})
    its = Theirs(ours, str(how.torch_on), seen.get("memory_format")).rung(name)
    rung, _ = ours.rung(mine, Schedule.from_csv(first["plan"], f"the plan of {mine}"))
    try:
        return {"left_out": {}, **timed({mine: rung, name: its}, how.effort)}
    finally:
        rung.close()


def give_back(device: Any) -> None:
    """Frees the memory that allocators keep after a network is done."""
    device.synchronize()
    gc.collect()
    pool = getattr(device.driver.cupy, "get_default_memory_pool", None)
    if pool:
        pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
