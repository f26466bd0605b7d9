"""Weight gradients that wait for company, on one lane of the CPU: a step without groups, with groups of two sizes and
with the size that `auto` chooses; and against another build of minidl.

    python bench/group.py [--against FOLDER] [--seconds 20] [--out FILE.json]      the folder of another checkout

Each arm runs in a process of its own. The arms take turns of some milliseconds. Times are those of the thread, so that
other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
NETWORKS = ("mlp 16 x 64, batch 8", "mobilenet_v3 a0.25 at 32 px, batch 8", "mobilenet_v3 a0.25 at 32 px, batch 32")
GROUP = 0.008  #: seconds that an arm runs in its turn


def serve(network: str, size: str) -> None:
    """Answers each line of standard input with the seconds of a step."""
    import minidl as ml
    from minidl import models, nn, optim

    ml.seed(0)
    model = (models.mlp(*[64] * 16, 10) if network.startswith("mlp")
             else models.create("mobilenet_v3_large", width=0.25, image_size=32, classes=10))
    opt, rng = optim.SGD(model.parameters(), lr=1e-7, momentum=0.9), np.random.default_rng(0)  # far from denormals
    x = rng.standard_normal((int(network.split()[-1]), *model.input_shape), np.float32)
    y = rng.integers(0, 10, len(x))

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    graph = ml.record(step, x, y)
    asked: dict[str, Any] = {} if size == "none" else {"group_weights": int(size) if size.isdecimal() else size}
    plan = ml.plan(graph, "in_order", ml.measure(graph) if size == "auto" else None, **asked)
    run = ml.StreamExecutor(plan.graph, plan.schedule)
    for _ in range(20):
        run(x, y)
    begin = time.perf_counter()
    run(x, y)
    count = max(1, int(GROUP / (time.perf_counter() - begin)))
    print(json.dumps({"groups": len(plan.schedule.notes.get("groups of weight gradients", "").split()),
                      "peak_bytes": max(plan.peak_bytes)}), flush=True)
    for _ in sys.stdin:
        for _ in range(max(1, count // 4)):
            run(x, y)  # what other arms have left in the caches
        begin = time.thread_time()
        for _ in range(count):
            run(x, y)
        print((time.thread_time() - begin) / count, flush=True)


def measured(network: str, arms: dict[str, tuple[str, str]], seconds: float) -> dict[str, Any]:
    """Milliseconds of a step of each arm, a folder and a size, and the ratios to the first one."""
    from common import ratio, spread

    workers = {name: subprocess.Popen(
        [sys.executable, __file__, "--serve", network, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": folder}) for name, (folder, size) in arms.items()}
    found: dict[str, Any] = {}
    try:
        known = {name: json.loads(str(worker.stdout.readline())) for name, worker in workers.items()}  # type: ignore
        samples: dict[str, list[float]] = {name: [] for name in arms}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, worker in workers.items():
                worker.stdin.write("\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
                samples[name].append(float(worker.stdout.readline()))  # type: ignore[union-attr]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()  # closes its pipes
    first = next(iter(arms))
    for name in arms:
        found[name] = {**known[name], "ms": spread(samples[name]), "faster": ratio(samples, first, name),
                       "least_ms": round(1e3 * min(samples[name]), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="the folder of another build, the first arm")
    parser.add_argument("--seconds", type=float, default=20.0, help="per network")
    parser.add_argument("--out", help="where to write the record")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    from common import machine, save

    here = str(HERE.parent)
    arms = {"none": (here, "none"), "groups of 4": (here, "4"), "groups of 16": (here, "16"), "auto": (here, "auto")}
    if arguments.against:
        arms = {"another build": (arguments.against, "none"), **arms}
    record = {"machine": machine(), "networks": {}}
    for network in NETWORKS:
        record["networks"][network] = found = measured(network, arms, arguments.seconds)
        for name, one in found.items():
            print(f"{network:40} {name:14} {one['ms']['median']:8.4f} ms  {one['faster']['median']:.3f}x "
                  f"({one['faster']['p10']:.3f} to {one['faster']['p90']:.3f})  {one['groups']} groups")
    save("group", record, arguments.out)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
