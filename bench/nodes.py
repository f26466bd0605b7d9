"""Nodes of a step's CUDA graph: how many there are, plain and fused, and the least time that they take in a row.

    python bench/nodes.py [--network NAME]... [--before] [--out FILE.json]

A step is recorded, and the calls of its tasks are counted from the kernels' CUDA forms; nothing runs, so no GPU is
needed. The least times are made of floors that an H100 has shown (FLOORS), in a row and simulated under multi_region:
they leave out all work on data, so they say what fewer nodes can save where nodes bind, and predict no step. With
`--group-weights` ("grouped") a group counts as one node of its kind; its length does not matter. `--before` keeps
today's counts: later ones are compared with them.

The MLP's whole call, host included, comes from the ladder's record; of K steps a launch (`--steps-per-launch`) its part
of the host is assumed to be a K-th, and the device's to have three more nodes, which an H100 has not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from common import RESULTS, machine, save
from ladder_cases import CASES, OTHERS, PRECISIONS, batches
from ladder_minidl import sgd

import minidl as ml
from minidl import models, schedulers
from minidl.autograd.tape import Tape, use
from minidl.devices.cuda.driver import Driver
from minidl.devices.device import CPU
from minidl.fusion import fused
from minidl.kernels import KERNELS, cuda
from minidl.passes.draft import Draft
from minidl.passes.group import grouped

#: microseconds of a dependent node in a graph, by the kind of its call: a product of 64 x 64, a convolution of a small
#: image, a kernel of ours on a few numbers (launch_overhead_cuda.json, three samples each)
FLOORS = {"product": 4.1, "library": 4.5, "own": 1.22}
#: label -> (case of the ladder, precision)
NETWORKS = {
    "MLP": ("mlp 8px b64", "tf32"), "LeNet": ("lenet 28px b64", "tf32"),
    **{f"MobileNetV3 {a}, {px} px": (f"mobilenet_v3_large a{a} {px}px b32", "tf32")
       for a, px in (("0.25", 32), ("0.5", 32), ("1", 32), ("0.25", 224), ("1", 224))},
    "MobileNetV3 0.25, 32 px, bf16": ("mobilenet_v3_large a0.25 32px b32", "bf16"),
    "DenseNet-121 k12, 32 px, batch 4": ("densenet121 k12 32px b4", "tf32"),
    "ResNet-50": ("resnet50 224px b32", "tf32"),
    "BERT small": ("bert small b8", "tf32"), "GPT small": ("gpt small b8", "tf32"),
    "GPT small, bf16": ("gpt small b8", "bf16")}


class Shapes(CPU):
    """Records steps as for CUDA, with the scratch memory of its kernels. Its arrays have addresses and no memory."""

    name = "cuda, counted"
    captures = halves = flash = True
    most_scores = float("inf")

    def work(self, kernel: Any) -> Any:
        return kernel.cuda_work

    def cuts(self, kernel: Any, reads: Any, constants: Any) -> None:
        return None


def steps(label: str) -> tuple[Any, Any]:
    """A network's recorded step, and its fused one."""
    (case, precision), device = NETWORKS[label], Shapes()
    found = {**CASES, **OTHERS}[case]
    with use(Tape(device)), PRECISIONS[precision].autocast():
        model = models.create(found.model, **found.arguments)
        graph = ml.record(sgd(model), *batches(found, model)[0])
    return graph, fused(graph, device)


def calls(tasks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(kernel, call) of everything that tasks issue, given the launches of each."""

    def array(view: Any) -> Any:
        memory = SimpleNamespace(data=SimpleNamespace(ptr=(1 + view.storage) << 32))
        size: int = np.dtype(view.dtype).itemsize
        return Driver.array(None, memory, view.shape, view.dtype, tuple(s * size for s in view.strides),
                            view.offset * size)

    for launch in (launch for task in tasks for launch in task):
        reads, writes, work = ([array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        for call in KERNELS[launch.kernel].cuda_calls(reads, writes, work, dict(launch.constants)):
            yield launch.kernel, call


#: our own kernels for products, for which nothing shorter than a library's product has been seen
PRODUCTS = ("row_products.cu", "small_product.cu")
GROUP = 36  #: weight gradients of a group at most, as many as the arguments of a launch hold


def kind(call: Any) -> str:
    if isinstance(call, cuda.Product) or (isinstance(call, cuda.Grid) and call.source in PRODUCTS):
        return "product"
    return "library" if isinstance(call, cuda.Convolution | cuda.Attention) else "own"


def count(graph: Any) -> dict[str, Any]:
    """Nodes, how many there are of each kind, and the milliseconds that they take at least."""
    kinds = Counter(kind(call) for _, call in calls(graph.launches))
    return {"nodes": kinds.total(), **{name: kinds[name] for name in FLOORS},
            "floor_ms": round(sum(FLOORS[name] * n for name, n in kinds.items()) / 1e3, 4)}


def beside(graph: Any) -> float:
    """The least milliseconds of a step under multi_region."""
    times = {graph.name(t): sum(FLOORS[kind(call)] for _, call in calls([own])) for t, own in enumerate(graph.launches)}
    cost = ml.CostModel(tasks=times)
    return round(float(ml.simulate(graph, schedulers.multi_region(graph, cost), cost).makespan) / 1e3, 4)


def in_launches(steps: int = 16) -> dict[str, float]:
    """Milliseconds of the MLP's step, host included: seen with one step a launch, and expected with more."""
    seen = json.loads((RESULTS / "ladder.json").read_text())["networks"]["tf32"]["mlp 8px b64"]["first"]
    rung = seen["minidl"]
    host, device = seen["host_us"][rung]["median"] / 1e3, seen["resident_ms"][rung]["median"]
    return {"steps": steps, "seen": round(seen["step_ms"][rung]["median"], 4), "host": round(host, 4),
            "device": round(device, 4), "expected": round(max(device + 3 * FLOORS["own"] / 1e3, host / steps), 4)}


def counted(label: str) -> dict[str, Any]:
    """The counts of a network, plain and fused."""
    return {name: count(graph) for name, graph in zip(("plain", "fused"), steps(label), strict=True)}


def priced(label: str) -> dict[str, Any]:
    """The same, with the least time of the fused step on several lanes; and of the fused step in groups."""
    found, (_, fused_step) = counted(label), steps(label)
    found["fused"]["lanes_ms"] = beside(fused_step)
    return {**found, "grouped": count(grouped(Draft.of(fused_step), GROUP).graph)}


def show(record: dict[str, Any]) -> None:
    print(f"{'':34}{'plain':>14}{'fused':>14} grouped   least ms fused, before -> now: in a row; on lanes; grouped")
    for label, entry in record["networks"].items():
        before, now = entry["before"], entry["now"]
        columns = "".join(f"{before[name]['nodes']:>6} -> {now[name]['nodes']:>4}" for name in ("plain", "fused"))
        times = [(before["fused"][key], now["fused"][key]) for key in ("floor_ms", "lanes_ms")]
        times.append((before["fused"]["floor_ms"], now["grouped"]["floor_ms"]))
        columns += f"{now['grouped']['nodes']:>8}"
        print(f"{label:34}{columns}   " + "; ".join(f"{a:.3f} -> {b:.3f} ({b / a:.2f})" for a, b in times))
    mlp = record["in_launches"]
    print(f"MLP, the whole call: {mlp['seen']} ms seen, {mlp['expected']} expected of {mlp['steps']} steps a launch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--before", action="store_true", help="later counts are compared with these")
    parser.add_argument("--out", help="the record, which is also read where it exists")
    given = parser.parse_args()
    path = Path(given.out or RESULTS / "nodes.json")
    kept = json.loads(path.read_text())["networks"] if path.exists() else {}
    for label in given.network or NETWORKS:
        now = priced(label)
        kept[label] = {"before": now if given.before else kept.get(label, {}).get("before", now), "now": now}
    record = {"machine": machine(), "floors_us": FLOORS, "networks": kept, "in_launches": in_launches()}
    save("nodes", record, given.out)
    show(record)


if __name__ == "__main__":
    main()
