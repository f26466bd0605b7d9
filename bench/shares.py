"""Where the time of a step goes: the share of each kernel family and of waiting, from traced steps, beside floors.

    python bench/shares.py [--device cuda|cpu] [--precision tf32] [--only NETWORK ...] [--scheduler in_order] [--quick]
                           [--within SECONDS] [--out FILE.json]

For each network of the ladder (or those whose names contain a text of --only) the step is traced some times; on a GPU
it has the ladder's fused launches, and each trace is one replayed graph with events around its tasks. The trace of
median length counts. `share`: a family's time of all lanes' time; `floor_ms`: the larger of its flops at the rate of a
large product and its bytes at a copy's bandwidth, both measured on the device at the start. What lanes do not work is
said by cause, as in `minidl report`. `untraced_ms`: the same step without a trace; the events around tasks cost the
rest.
The record goes on: networks of earlier calls stay. Ends with 0 if all networks ran, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import RESULTS, machine, save, write
from ladder_cases import CASES, OTHERS, PRECISIONS, Case, Precision
from ladder_minidl import Ours

import minidl as ml
from minidl import schedulers
from minidl.core.report import causes, families, usage
from minidl.core.timeline import Timeline
from minidl.devices import DeviceError
from minidl.measuring.work import Floor, of_device, work_of
from minidl.runtime.executors import executor

TRACES, QUICK = 15, 3  #: traced steps
WARM = 3  #: steps before


def rows(timeline: Timeline) -> dict[str, Any]:
    """A trace's milliseconds by kernel family, longest first, and of what lanes waited for. Its tasks know their
    work."""
    t = timeline.in_unit("ms")
    whole = t.makespan * len(usage(t))
    of = [{"family": f.family, "tasks": f.tasks, "ms": round(f.time, 4), "share": round(f.time / whole, 4),
           "floor_ms": round(f.floor or 0.0, 4), "gflop": round(f.flops / 1e9, 4), "mb": round(f.bytes / 1e6, 3)}
          for f in families(t)]
    waits = {cause: {"ms": round(ms, 4), "share": round(ms / whole, 4)} for cause, ms in causes(t).items()}
    return {"ms": round(t.makespan, 4), "lanes": len(usage(t)), "tasks": len(t.tasks),
            "floor_ms": round(sum(f["floor_ms"] for f in of), 4), "families": of, "waits": waits}


def traced(case: Case, precision: Precision, device: Any, scheduler: str, floor: Floor, steps: int) -> dict[str, Any]:
    """The shares of one network."""
    ours, found = Ours(case, precision, device), dict[bool, list[Any]]()
    for trace in (False, True):
        _, graph = ours.recorded("E3" if device.captures else "E1")
        plan = schedulers.plan(graph, scheduler, ml.CostModel.analytic(), ml.Machine())
        run, each = executor(plan.graph, plan.schedule, device=device, trace=trace), []
        for n in range(WARM + steps):
            begin = time.perf_counter()
            run(*ours.batches[n % len(ours.batches)])
            device.synchronize()
            each.append(run.timeline if trace else (time.perf_counter() - begin) * 1e3)
        run.close()
        found[trace] = each[WARM:]
    middle = sorted(found[True], key=lambda t: t.makespan)[len(found[True]) // 2]
    return {"batch": case.batch, "precision": precision.name, "scheduler": scheduler,
            "untraced_ms": round(median(found[False]), 4),
            **rows(replace(middle, work=work_of(plan.graph, floor)))}


def show(name: str, entry: dict[str, Any]) -> None:
    print(f"{name}: {entry['ms']:.3f} ms traced, {entry['untraced_ms']:.3f} untraced, floor {entry['floor_ms']:.3f}")
    for row in entry["families"]:
        print(f"  {row['family']:<16}{row['tasks']:>5} tasks {row['ms']:>10.3f} ms {row['share']:>7.1%}   floor "
              f"{row['floor_ms']:.3f}")
    for cause, row in entry["waits"].items():
        print(f"  {cause:<58} {row['ms']:>10.3f} ms {row['share']:>7.1%}")


def earlier(out: Path) -> dict[str, Any]:
    """The record of earlier calls, if there is one. Raises ValueError for a file that is none."""
    try:
        record = json.loads(out.read_text()) if out.exists() else {"networks": {}}
        if isinstance(record["networks"], dict):
            return dict(record)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{out} is no record of this program, which would go on; give another --out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="tf32", choices=tuple(PRECISIONS))
    parser.add_argument("--only", nargs="+", default=[""], metavar="NETWORK")
    parser.add_argument("--scheduler", default="in_order")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} traces of each network, not {TRACES}")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS",
                        help="no network begins later")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin, out = time.perf_counter(), arguments.out or RESULTS / f"shares_{arguments.device}.json"
    try:
        device, _ = ml.device.get(arguments.device), schedulers.find(arguments.scheduler, "none")
        record = earlier(out)
    except (DeviceError, ValueError, OSError) as error:
        print(f"shares: {error}", file=sys.stderr)
        return 2
    wanted = {name: case for name, case in {**OTHERS, **CASES}.items() if any(text in name for text in arguments.only)}
    if not wanted:
        parser.error(f"--only {' '.join(arguments.only)} names no network of bench/ladder_cases.py")
    precision = PRECISIONS["float32" if arguments.device == "cpu" else arguments.precision]
    record |= {"machine": machine(), "device": device.name, "left_out": {}}
    device.tf32, floor = precision.tf32, of_device(device)
    for name, case in wanted.items():
        if time.perf_counter() - begin > arguments.within:
            record["left_out"][name] = "no time was left"
            continue
        try:
            record["networks"][name] = traced(case, precision, device, arguments.scheduler, floor,
                                              QUICK if arguments.quick else TRACES)
            show(name, record["networks"][name])
        except Exception as error:
            record["left_out"][name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {record['left_out'][name]}", file=sys.stderr)
        write(out.stem, record, str(out))
    save(out.stem, record, str(out))
    return int(any(reason != "no time was left" for reason in record["left_out"].values()))


if __name__ == "__main__":
    sys.exit(main())
