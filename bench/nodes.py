"""Nodes of a step's CUDA graph: how many there are, plain and fused, and the least time that they take in a row.

    python bench/nodes.py [--network NAME]... [--before] [--out FILE.json]

A step is recorded, and the calls of its tasks are counted from the kernels' CUDA forms; nothing runs, so no GPU is
needed. The least time is a sum of floors that an H100 has shown (FLOORS): it leaves out all work on data, so it says
what fewer nodes can save where they bind, and is no prediction of a step. `--before` keeps today's counts as those with
which later ones are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from common import RESULTS, machine, save
from ladder_cases import CASES, OTHERS, PRECISIONS, batches
from ladder_minidl import sgd

import minidl as ml
from minidl import models
from minidl.autograd.tape import Tape, use
from minidl.devices.cuda.driver import Driver
from minidl.devices.device import CPU
from minidl.fusion import fused
from minidl.kernels import KERNELS, cuda

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


def calls(graph: Any) -> Iterator[tuple[str, Any]]:
    """(kernel, call) of everything that a step issues."""

    def array(view: Any) -> Any:
        memory = SimpleNamespace(data=SimpleNamespace(ptr=(1 + view.storage) << 32))
        size: int = np.dtype(view.dtype).itemsize
        return Driver.array(None, memory, view.shape, view.dtype, tuple(s * size for s in view.strides),
                            view.offset * size)

    for launch in (launch for task in graph.launches for launch in task):
        reads, writes, work = ([array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        for call in KERNELS[launch.kernel].cuda_calls(reads, writes, work, dict(launch.constants)):
            yield launch.kernel, call


def kind(call: Any) -> str:
    if isinstance(call, cuda.Product):
        return "product"
    return "library" if isinstance(call, cuda.Convolution | cuda.Attention) else "own"


def count(graph: Any) -> dict[str, Any]:
    """Nodes, how many there are of each kind, and the milliseconds that they take at least."""
    kinds = Counter(kind(call) for _, call in calls(graph))
    return {"nodes": kinds.total(), **{name: kinds[name] for name in FLOORS},
            "floor_ms": round(sum(FLOORS[name] * n for name, n in kinds.items()) / 1e3, 4)}


def counted(label: str) -> dict[str, Any]:
    """The counts of a network, plain and fused."""
    return {name: count(graph) for name, graph in zip(("plain", "fused"), steps(label), strict=True)}


def show(record: dict[str, Any]) -> None:
    print(f"{'':34}{'plain':>14}{'fused':>14}   least ms fused, before -> now")
    for label, entry in record["networks"].items():
        before, now = entry["before"], entry["now"]
        columns = "".join(f"{before[name]['nodes']:>6} -> {now[name]['nodes']:>4}" for name in ("plain", "fused"))
        a, b = before["fused"]["floor_ms"], now["fused"]["floor_ms"]
        print(f"{label:34}{columns}   {a:.3f} -> {b:.3f} ({b / a:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--before", action="store_true", help="later counts are compared with these")
    parser.add_argument("--out", help="the record, which is also read where it exists")
    given = parser.parse_args()
    path = Path(given.out or RESULTS / "nodes.json")
    kept = json.loads(path.read_text())["networks"] if path.exists() else {}
    for label in given.network or NETWORKS:
        now = counted(label)
        kept[label] = {"before": now if given.before else kept.get(label, {}).get("before", now), "now": now}
    record = {"machine": machine(), "floors_us": FLOORS, "networks": kept}
    save("nodes", record, given.out)
    show(record)


if __name__ == "__main__":
    main()
