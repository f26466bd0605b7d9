"""LayerPipe against PipeDream: the period on 2 to 16 processors, from computed costs, recorded networks or given costs.

    python bench/layerpipe.py [--model NAME]... [--batch 32] [--out FILE.json]
    python bench/layerpipe.py --forward 1,2,2 --output-grad 0,2,2 --weight-grad 1,2,2 [--activation 8,8,8,8]
    [--weights 4,4,4]

This benchmark measures nothing: a period is the busiest processor's work per batch, and transfers are counted in bytes
and take no time. Networks are recorded and priced by the analytic cost model (roofline), without launch costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import save

import minidl as ml
from minidl import models, nn
from minidl.core.graph import Role, TaskGraph
from minidl.core.tasks import Kind
from minidl.pricing.cost import CostModel
from minidl.schedulers.partition import METHODS, Assignment, LayerCosts, PartitionError, assign

PROCESSORS = range(2, 17)
PUBLISHED = {"mean": 1.25, "best, 7 to 9 processors": 1.8}
WHY = """Why our figures differ from the published ones. Here a speed-up has one source: the partition. PipeDream's
period is never below its largest layer, so it stays constant once there are more processors than total work / largest
layer. LayerPipe's falls until its largest F, W or half O; that ratio is the most it can gain (column "limit": 3 for
equal F, O and W). With many similar layers PipeDream's loads are nearly even, and there is little to gain up to 16
processors; networks with a few heavy layers reach the published range at 7 to 9 processors and exceed it with more. The
layers of a recorded network are its units, with normalisations and activations separate, so PipeDream's loads are still
more even. The networks, costs and transfer times behind the published figures are not known here: partition model and
bytes are reconstructed, and transfers take no time. Bytes: dividing a layer sends its input and its output's gradient
to every processor that computes a part of it, and its weights after each update; cuts at whole layers send one
activation and one gradient. So by this count LayerPipe moves more bytes per batch, not fewer."""


@dataclass(frozen=True)
class Layers(LayerCosts):
    """The costs of layers, and the bytes of their weights. `activation[l]`: the bytes of the input of layer l; the last
    entry is the output of the last layer. A gradient is as large as its activation."""

    activation: Any
    weights: Any

    @classmethod
    def sized(cls, forward: Sequence[float], output_grad: Sequence[float], weight_grad: Sequence[float],
              activation: Sequence[int] | int = 1, weights: Sequence[int] | int = 0) -> Layers:
        """Costs from lists. Raises PartitionError as `given` does, and for too few or too many sizes."""
        times = LayerCosts.given(forward, output_grad, weight_grad)
        layers = len(times)
        try:
            sizes = (np.broadcast_to(np.asarray(activation, np.int64), layers + 1),
                     np.broadcast_to(np.asarray(weights, np.int64), layers))
        except ValueError:
            raise PartitionError(f"{layers} layers need {layers + 1} activations and {layers} weights, not "
                                 f"{np.size(activation)} and {np.size(weights)}") from None
        return cls(times.forward, times.output_grad, times.weight_grad, *sizes)

    @classmethod
    def of(cls, graph: TaskGraph, cost: CostModel) -> Layers:
        """The costs of a recorded graph: layers are its units in order; units without time are left out.

        The input of a layer is everything that earlier forwards wrote and that its own or later forwards read, so a
        skip connection counts at every border that it crosses.
        """
        units = int(graph.unit.max()) + 1
        time = cost.durations(graph)
        f, o, w = (np.bincount(graph.unit, time * (graph.kind == kind), units) for kind in (Kind.F, Kind.O, Kind.W))
        fused = np.flatnonzero(graph.kind == Kind.B)
        if fused.size:
            raise PartitionError(f"task {graph.name(int(fused[0]))} is a fused backward; O and W must be separate")
        crossing = np.zeros(units + 2, np.int64)
        weights = np.zeros(units, np.int64)
        forward = graph.kind == Kind.F
        written = np.full(len(graph.buffer_bytes), -1)
        last = np.full(len(graph.buffer_bytes), -1)
        row = graph.writes.row_of_each()
        written[graph.writes.ids[forward[row]]] = graph.unit[row[forward[row]]]
        row = graph.reads.row_of_each()
        readers, read = graph.unit[row[forward[row]]], graph.reads.ids[forward[row]]
        np.maximum.at(last, read, readers)
        for b in np.flatnonzero((written >= 0) & (last > written)):
            crossing[written[b] + 1] += graph.buffer_bytes[b]
            crossing[last[b] + 1] -= graph.buffer_bytes[b]
        is_weight = graph.role_is(Role.PARAMETER)[read]
        pairs = np.unique(np.stack([readers, read])[:, is_weight], axis=1)
        np.add.at(weights, pairs[0], graph.buffer_bytes[pairs[1]])
        entering = np.cumsum(crossing)[: units + 1]
        used = np.flatnonzero(f + o + w)
        return cls.sized(f[used].tolist(), o[used].tolist(), w[used].tolist(), [*entering[used].tolist(), 0],
                         weights[used].tolist())


def bytes_moved(costs: Layers, assignment: Assignment) -> float:
    """Bytes that go between processors per batch.

    F and W of a layer read its input; O and W read the gradient of its output; F and O read its weights, which are on
    W's processor and change with every batch. Each processor receives what it reads once, from the processor that made
    it; a part of an O reads its share of the weights and makes its share of the gradient. Reconstructed.
    """
    home: dict[tuple[int, Kind], dict[int, float]] = {}  # computation -> its share on each processor
    for part in assignment.parts:
        home.setdefault((part.layer, part.kind), {})[part.processor] = part.share

    def sent(size: float, makers: dict[int, float], *readers: dict[int, float]) -> float:
        want = {p for reader in readers for p in reader}
        return size * sum(share for p in want for maker, share in makers.items() if maker != p)

    none: dict[int, float] = {}
    layers, moved = len(costs), 0.0
    for i in range(layers):
        f, o, w = (home.get((i, kind), none) for kind in (Kind.F, Kind.O, Kind.W))
        makers = home.get((i + 1, Kind.O), none) if i + 1 < layers else home.get((i, Kind.F), none)
        moved += sent(float(costs.activation[i + 1]), makers, o, w)
        if i:
            moved += sent(float(costs.activation[i]), home.get((i - 1, Kind.F), none), f, w)
        keeper = w or f
        moved += float(costs.weights[i]) * sum(share for reader in (f, o) for p, share in reader.items()
                                               if p not in keeper and not (reader is o and p in f))
    return moved


def compare(costs: Layers, processors: Sequence[int]) -> list[dict[str, Any]]:
    """For each number of processors and method: period, utilisation, bytes moved, and the speed-up over PipeDream."""
    rows = []
    for p in processors:
        base = assign(costs, p, "pipedream")
        for method in METHODS:
            found = assign(costs, p, method)
            rows.append({"processors": p, "method": method, "period": found.period,
                         "utilisation": float(found.loads.sum() / (p * found.period)),
                         "used": int((found.loads > 0).sum()), "bytes_per_batch": bytes_moved(costs, found),
                         "speed_up": base.period / found.period})
    return rows


def convolutional(channels: Sequence[int | None], size: int, dense: Sequence[int], batch: int) -> Layers:
    """Multiply-adds and bytes of 3x3 convolutions (None: halve the image) and dense layers; layer 0 needs no O."""
    flops, activation, weights, last = [], [3 * size * size], [], 3
    for channel in channels:
        if channel is None:
            size //= 2
            activation[-1] //= 4
            continue
        flops.append(9.0 * last * channel * size * size)
        weights.append(9 * last * channel)
        activation.append(channel * size * size)
        last = channel
    features = [last * size * size, *dense]
    for i, o in zip(features, dense, strict=False):
        flops.append(float(i * o))
        weights.append(i * o)
        activation.append(o)
    return Layers.sized(flops, [0.0, *flops[1:]], flops, [4 * batch * a for a in activation],
                            [4 * w for w in weights])


def by_hand(batch: int) -> dict[str, Layers]:
    vgg = (64, 64, None, 128, 128, None, 256, 256, 256, None, 512, 512, 512, None, 512, 512, 512, None)
    return {
        "8 equal layers": Layers.sized([1] * 8, [1] * 8, [1] * 8),
        "VGG-16 by arithmetic": convolutional(vgg, 224, (4096, 4096, 1000), batch),
        "fully connected, 784-4096-4096-4096-1000": dense((784, 4096, 4096, 4096, 1000), batch)}


def dense(sizes: Sequence[int], batch: int) -> Layers:
    flops = [float(i * o) for i, o in pairwise(sizes)]
    return Layers.sized(flops, [0.0, *flops[1:]], flops, [4 * batch * s for s in sizes],
                            [4 * int(f) for f in flops])


def of_network(name: str, batch: int) -> Layers:
    """Records one training step of a network with an image or vector as input. Raises ValueError for others."""
    model: Any = models.create(name)
    shape = tuple(getattr(model, "input_shape", ()))
    if not shape or not hasattr(model, "classes"):
        raise ValueError(f"{name} is not a convolutional or fully connected network")
    opt = ml.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    graph = ml.record(step, np.zeros((batch, *shape), np.float32), np.zeros(batch, np.int64))
    return Layers.of(graph, CostModel.analytic(launch=0.0))


def report(costs: Layers) -> dict[str, Any]:
    rows = compare(costs, PROCESSORS)
    layer = costs.forward + costs.output_grad + costs.weight_grad
    smallest = float(max(costs.forward.max(), costs.weight_grad.max(), costs.output_grad.max() / 2))
    summary = {}
    for method in METHODS[1:]:
        gains = {r["processors"]: r["speed_up"] for r in rows if r["method"] == method}
        summary[method] = {"mean": float(np.mean(list(gains.values()))), "best": max(gains.values()),
                           "best_at": max(gains, key=gains.__getitem__),
                           "best_7_to_9": max(gains[p] for p in (7, 8, 9))}
    return {"layers": len(costs), "speed_up": summary, "limit": float(layer.max()) / smallest,
            "pipedream_stands_still_from": int(np.ceil(layer.sum() / layer.max())), "rows": rows}


def text(name: str, found: dict[str, Any]) -> str:
    lines = [f"{name}: {found['layers']} layers",
             "  processors   PipeDream period (util.)   intra          inter          MiB per "
             "batch: PipeDream, intra, inter"]
    for p in PROCESSORS:
        base, intra, inter = (next(r for r in found["rows"] if r["processors"] == p and r["method"] == m)
                              for m in METHODS)
        moved = "  ".join(f"{r['bytes_per_batch'] / 2**20:9.3g}" for r in (base, intra, inter))
        lines.append(f"  {p:10d}   {base['period']:14.4g} ({base['utilisation']:4.0%})     "
                     + "   ".join(f"{r['speed_up']:4.2f}x ({r['utilisation']:4.0%})" for r in (intra, inter))
                     + f"   {moved}")
    return "\n".join(lines)


def summary(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'speed-up over PipeDream, 2 to 16 processors':45s}  intra mean   best   inter mean   "
             f"best   at   7 to 9   limit"]
    for name, r in found.items():
        intra, inter = r["speed_up"]["intra"], r["speed_up"]["inter"]
        lines.append(f"{name:45s}  {intra['mean']:10.2f} {intra['best']:6.2f}   {inter['mean']:10.2f} "
                     f"{inter['best']:6.2f}   {inter['best_at']:2d}   {inter['best_7_to_9']:6.2f}   {r['limit']:5.2f}")
    means = [r["speed_up"]["inter"]["mean"] for r in found.values()]
    bests = [r["speed_up"]["inter"]["best_7_to_9"] for r in found.values()]
    lines.append(f"{'all of them; published: mean 1.25, best > 1.80':45s}  {'':17s}   {np.mean(means):10.2f} "
                 f"{'':6s}        {max(bests):6.2f}")
    return "\n".join(lines)


def numbers(value: str) -> list[float]:
    return [float(v) for v in value.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="LayerPipe's partitions against PipeDream's")
    parser.add_argument("--model", action="append",
                        help="a network (default: all convolutional and fully connected ones)")
    parser.add_argument("--batch", type=int, default=32)
    for flag in ("--forward", "--output-grad", "--weight-grad", "--activation", "--weights"):
        parser.add_argument(flag, type=numbers, metavar="X,X,..", help="one per layer (activations: one more)")
    parser.add_argument("--out", metavar="FILE.json")
    arguments = parser.parse_args()
    cases: dict[str, Layers] = {}
    if arguments.forward or arguments.output_grad or arguments.weight_grad:
        try:
            cases["given"] = Layers.sized(
                arguments.forward or [], arguments.output_grad or [], arguments.weight_grad or [],
                [int(v) for v in arguments.activation] if arguments.activation else 1,
                [int(v) for v in arguments.weights] if arguments.weights else 0)
        except PartitionError as error:
            parser.error(str(error))
    else:
        cases |= {} if arguments.model else by_hand(arguments.batch)
        for name in arguments.model or models.names():
            try:
                cases[name] = of_network(name, arguments.batch)
            except ValueError as error:
                if arguments.model:
                    parser.error(str(error))
                print(f"left out: {error}", file=sys.stderr)
    found = {name: report(costs) for name, costs in cases.items()}
    print("\n\n".join([*(text(name, r) for name, r in found.items()), summary(found), WHY]))
    save("layerpipe", {"published": PUBLISHED, "batch": arguments.batch, "why": WHY, "networks": found}, arguments.out)


if __name__ == "__main__":
    main()
