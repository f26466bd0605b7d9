"""Native lanes against Python lanes: whole calls of a step, inputs and outputs included, and what a trace costs.

    python bench/lanes.py [--seconds 8] [--only NAME] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import interleave, machine, ratio, recorded_step, save, spread
from prediction import CASES as SHORT

import minidl as ml
from minidl import device, models

#: how to make a network, and its batch: networks of short tasks, and others
CASES: dict[str, tuple[Callable[[], Any], int]] = {
    **SHORT,
    "MLP 784-512-512-10, batch 64": (lambda: models.mlp(784, 512, 512, 10), 64),
    "MLP 8 x 1024, batch 256": (lambda: models.mlp(*[1024] * 8, 10), 256),
    "LeNet, batch 64": (lambda: models.create("lenet"), 64),
    "ResNet-20, batch 32": (lambda: models.create("resnet20"), 32),
}
#: how many times faster native lanes shall be; they are never slower
TARGETS = {"MLP 16 x 64, batch 8": 2.3, "MobileNetV3 a0.25, batch 8": 1.5, "MobileNetV3 a0.25, batch 32": 1.15}
KINDS = ("native", "python", "traced")  #: traced: native with a trace


def measured(case: str, seconds: float) -> dict[str, Any]:
    """The entry of a case."""
    make, batch = CASES[case]
    ml.seed(0)
    graph, x, y = recorded_step(make(), batch)
    cost = ml.measure(graph)
    python = device.CPU()
    python.set_lanes("python")
    arms: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:
        for name in ("in_order", "multi_stream"):
            schedule = ml.plan(graph, name, cost).schedule
            for kind in KINDS:
                run = stack.enter_context(closing(ml.StreamExecutor(
                    graph, schedule, device=python if kind == "python" else None, trace=kind == "traced")))
                arms[f"{name}, {kind}"] = lambda run=run: run(x, y)
        samples = interleave(arms, seconds=seconds)
    return {"tasks": len(graph), "target": TARGETS.get(case, 1.0), "streams": {"multi_stream": len(schedule.lanes)},
            "step_ms": {arm: spread(s) for arm, s in samples.items()},
            **{f"{what}, {name}": ratio(samples, f"{name}, {kind}", f"{name}, native")
               for what, kind in (("python / native", "python"), ("traced / untraced", "traced"))
               for name in ("in_order", "multi_stream")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="per network")
    parser.add_argument("--only", choices=CASES, help="one network")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}}
    for case in [arguments.only] if arguments.only else CASES:
        entry = record["networks"][case] = measured(case, arguments.seconds)
        print(f"\n{case}   ({entry['tasks']} tasks, multi_stream on {entry['streams']['multi_stream']} streams)")
        for key, value in entry.items():
            if "/" in key:
                print(f"  {key:32} {value['median']:7.3f}x   p10 {value['p10']:7.3f}   p90 {value['p90']:7.3f}")
    save("lanes", record, arguments.out)


if __name__ == "__main__":
    main()
