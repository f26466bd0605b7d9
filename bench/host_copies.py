"""Copies between a GPU and pinned memory of the host: how fast they are, and how much of them a step hides.

    python bench/host_copies.py [--device cuda] [--out FILE.json]

First it copies arrays of several sizes out and in, as tasks D and H do, and checks their bits. The device measures the
time, while its queue is full. Then each network trains with and without `--offload`, in turns of a few steps, as
captured graphs, and all must end with equal bits. `hidden` is the share of the copies' time by which a step did not
become longer. Ends with 0 if all bits are equal, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save

import minidl as ml
from minidl import device as devices
from minidl.core.graph import View
from minidl.core.tasks import COPIES
from minidl.devices.cuda.clock import Hold, behind
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

COUNTS = (1 << 10, 1 << 18, 1 << 26)  #: elements of float32
HELD = 64 << 20  #: bytes that are filled to keep the stream busy
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "model_args": {"layers": 8, "hidden": 4096}, "batch_size": 4096},
    "resnet20": {"model": "resnet20", "batch_size": 256}}
OFFLOADED = ("none", "activations", "states")
TURNS, STEPS = 7, 10


def copies(device: Any) -> list[dict[str, Any]]:
    """A row for each size and direction."""
    hold, rows = Hold(device.driver, device.main, device.allocate(HELD)), []
    for count in COUNTS:
        host = np.random.default_rng(count).standard_normal(count, np.float32)
        memories = device.allocate(4 * count), device.far(4 * count)
        near, far = (device.array(memory, View(0, (count,), (1,), 0, "float32")) for memory in memories)
        for way, source, out in (("out", near, far), ("in", far, near)):
            device.write(out, np.full(count, np.nan, np.float32))
            device.write(source, host)
            call = device.driver.copy(source, out, device.main)
            call()
            equal = device.read(out).tobytes() == host.tobytes()
            us = behind(device.driver, device.main, hold, call)
            rows.append({"way": way, "bytes": 4 * count, "equal_bits": equal, "us": round(us, 2),
                         "gb_s": round(4 * count / us / 1e3, 2)})
            print(f"{way:3} {4 * count:>12} bytes {us:10.2f} us {rows[-1]['gb_s']:8.2f} GB/s  "
                  f"{'equal bits' if equal else 'OTHER BITS'}")
    return rows


def steps(name: str, bandwidth: float) -> list[dict[str, Any]]:
    """A row for each kind of memory that is offloaded. `bandwidth`: bytes a microsecond of the slower direction."""
    trainers = {what: Trainer(Recorded(Job(**NETWORKS[name], optimizer="adam", device="cuda", offload=what)),
                              ml.CostModel.analytic()) for what in OFFLOADED}
    times: dict[str, list[float]] = {what: [] for what in OFFLOADED}
    for _ in range(1 + TURNS):  # the first one warms up
        for what, trainer in trainers.items():
            device = trainer.recorded.device
            device.synchronize()
            begin = perf_counter()
            for _ in range(STEPS):
                trainer.step()
            device.synchronize()
            times[what].append((perf_counter() - begin) / STEPS * 1e3)
    rows = []
    for what, trainer in trainers.items():
        trainer.collect()
        graph, ms = trainer.plan.graph, median(times[what][1:])
        moved = int(graph.bytes[np.isin(graph.kind, COPIES)].sum())
        alone = moved / bandwidth / 1e3
        longer = ms - rows[0]["step_ms"] if rows else 0.0
        rows.append({"network": name, "offload": what, "step_ms": round(ms, 4),
                     "peak_bytes": max(trainer.plan.peak_bytes), "copied_bytes": moved, "copies_ms": round(alone, 4),
                     "hidden": round(1 - longer / alone, 3) if moved else None,
                     "equal_bits": trainer.params_sha256() == trainers["none"].params_sha256()})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", metavar="FILE.json", help="the record; default: bench/results/host_copies.json")
    options = parser.parse_args(arguments)
    try:
        device = devices.get(options.device)
    except devices.DeviceError as error:
        print(f"host_copies: {error}", file=sys.stderr)
        return 2
    record: dict[str, Any] = {"machine": machine(), "complete": False, "copies": copies(device), "steps": []}
    bandwidth = min(row["bytes"] / row["us"] for row in record["copies"][-2:])
    for name in NETWORKS:
        record["steps"] += steps(name, bandwidth)
        record["passed"] = all(row["equal_bits"] for row in (*record["copies"], *record["steps"]))
        save("host_copies", record, options.out)
    save("host_copies", record | {"complete": True}, options.out)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
