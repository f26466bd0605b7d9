"""One fingerprint for each plan of a grid: every policy, on recorded steps and on given times, with every choice.

A fingerprint is of what a plan says: its saved file, its remarks, its predicted step and its planned peak, or the
message that refuses it. `python tests/helpers/golden_plans.py` writes them to `tests/schedulers/plans.json`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.graph import TaskGraph
from minidl.schedulers.registry import SCHEDULERS, names

FILE = Path(__file__).parents[1] / "schedulers" / "plans.json"
LIMITS = (0.75,)  #: of the peak of the plan without a limit
STREAMS = {"multi_stream": {"streams": 3}, "multi_region": {"streams": 2}}
Case = tuple[str, Callable[[], ml.Plan]]


@cache
def step(network: str, micro_batches: int = 1) -> TaskGraph:
    """A small network's step: a chain, one with norms, or one with tied weights and clipping."""
    if network == "mlp":
        model = models.mlp(16, 16, 16, 16, 10)
        x, y = np.zeros((8, 16), np.float32), np.zeros(8, np.int64)
    elif network == "norms":
        model = nn.Sequential(*(layer for _ in range(4) for layer in
                                (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())), nn.Linear(16, 10))
        x, y = np.zeros((8, 16), np.float32), np.zeros(8, np.int64)
    else:
        model = models.create("gpt", preset="tiny")
        x = y = np.zeros((8, 8), np.int64)
    opt = (optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if network == "mlp" else
           optim.Adam(model.parameters(), lr=0.1, max_norm=1.0 if network == "tied" else None))

    def train(x: Any, y: Any) -> None:
        n = len(x) // micro_batches
        for i in range(micro_batches):
            with ml.micro_batch(i):
                out = model(x[i * n:(i + 1) * n])
                target = y[i * n:(i + 1) * n]
                if network == "tied":
                    out, target = ops.reshape(out, (-1, out.shape[-1])), ops.reshape(target, (-1,))
                (nn.cross_entropy(out, target) * (1 / micro_batches)).backward()
        opt.step()

    return ml.record(train, x, y)


def cases() -> Iterator[Case]:
    """Name and maker of every plan."""
    yield from one_device()
    yield from ranks()
    yield from networks()
    yield from given_times()


def one_device() -> Iterator[Case]:
    for network, name in itertools.product(("mlp", "norms", "tied"), names("none")):
        graph = step(network)

        def make(graph: TaskGraph = graph, name: str = name, machine: ml.Machine | None = None, **more: Any) -> ml.Plan:
            return ml.plan(graph, name, machine=machine, **more)

        yield from with_choices(f"{network}/{name}", make, STREAMS.get(name, {}))


def ranks() -> Iterator[Case]:
    for network, name, count in itertools.product(("mlp", "tied"), names("data"), (2, 3)):
        graph = step(network, 2 if name == "acco" else 1)

        def make(graph: TaskGraph = graph, name: str = name, count: int = count, machine: ml.Machine | None = None,
                 **more: Any) -> ml.Plan:
            limit = None if machine is None else machine.memory_limit
            return ml.plan(graph, name, machine=ml.Machine(count, limit, collective=collective), **more)

        shards = [0, 1, "2,prefetch=1", 3] if count == 2 else [0]
        for shard in shards:
            yield from with_choices(f"{network}/{name}/{count} ranks/shard {shard}", make, {"shard": shard},
                                    short=bool(shard) or network == "tied" or count > 2)


def networks() -> Iterator[Case]:
    for network, name, count in itertools.product(("mlp", "tied"), names("pipeline"), (2, 3)):
        for replicas in (1, 2) if count == 2 else (1,):
            def make(network: str = network, name: str = name, count: int = count, replicas: int = replicas,
                     machine: ml.Machine | None = None, **more: Any) -> ml.Plan:
                limit = None if machine is None else machine.memory_limit
                return ml.plan(step(network, 8), name, machine=ml.Machine(count, limit, replicas=replicas), **more)

            yield from with_choices(f"{network}/{name}/{count} ranks of {replicas}", make, {},
                                    short=network == "tied" or count > 2 or replicas > 1)
            if replicas > 1:
                for shard in (1, 3, "3,prefetch=0,keep=none"):
                    yield (f"{network}/{name}/{count} ranks of {replicas}/shard {shard}",
                           lambda make=make, shard=shard: make(shard=shard))


def given_times() -> Iterator[Case]:
    uneven = ml.Pipeline(8, [1.0, 2.0, 1.5, 1.0], [1.0, 1.5, 2.0, 1.0], [0.5, 1.0, 1.0, 2.0], latency=0.25)
    slow = ml.Pipeline(8, 1.0, 1.0, 1.0, latency=0.5, bandwidth=4.0, message_bytes=2)
    for name in names("pipeline"):
        for count, m, cap in ((2, 4, None), (4, 8, None), (4, 12, 4.0), (3, 5, None)):
            yield (f"times/{name}/{count}x{m}/{cap}", lambda name=name, count=count, m=m, cap=cap: ml.plan(
                ml.Pipeline(m), name, machine=ml.Machine(count, activation_cap=cap)))
        policy = SCHEDULERS[name].staged
        more = {"chunks": 2} if policy.chunks == 1 and not policy.chunks_fixed else {}
        for what, times, count in (("uneven", uneven, 2), ("slow", slow, 4)):
            yield (f"times/{name}/{what}", lambda name=name, times=times, count=count, more=more: ml.plan(
                times, name, machine=ml.Machine(count), **more))


def with_choices(name: str, make: Callable[..., ml.Plan], usual: dict[str, Any], short: bool = False) -> Iterator[Case]:
    """The plain plan, the same read from its file, and with each choice besides the order."""
    yield name, lambda: make(**usual)
    yield f"{name}/read", lambda: again(make, usual)
    for choice in ({"recompute": "all"}, {"split": 2}, {"offload": "activations"}):
        yield f"{name}/{choice}", lambda choice=choice: make(**usual, **choice)
    if short:
        return
    for choice in ({"recompute": "sqrt"}, {"recompute": "0-1"}, {"offload": "states"}, {"offload": "all"},
                   {"recompute": "all", "split": 2}, {"recompute": "all", "offload": "all"}):
        yield f"{name}/{choice}", lambda choice=choice: make(**usual, **choice)
    yield f"{name}/recompute and offload read", lambda: again(make, {**usual, "recompute": "all", "offload": "all"})
    for share in LIMITS:
        for choice in ({}, {"recompute": "auto"}, {"offload": "all"}, {"recompute": "auto", "offload": "auto"}):
            yield f"{name}/{choice} in {share}", lambda choice=choice, share=share: make(
                **usual, **choice, machine=ml.Machine(memory_limit=int(share * max(make(**usual).peak_bytes))))


def again(make: Callable[..., ml.Plan], options: dict[str, Any]) -> ml.Plan:
    """The plan of the file of a plan."""
    plan = make(**options)
    with TemporaryDirectory() as folder, chdir(folder):
        plan.schedule.save("plan.csv")
        return make(name="plan.csv", **{name: value for name, value in options.items() if name == "shard"})


def collective(sizes: Any) -> float:
    return 2.0 + sum(sizes.values()) / 1000


def fingerprint(make: Callable[[], ml.Plan]) -> str:
    """Of all that the plan says, times in 9 digits; or of the message that refuses it."""
    try:
        plan = make()
    except ValueError as error:
        return "refused " + hashlib.sha256(f"{type(error).__name__}: {error}".encode()).hexdigest()[:12]
    told = [plan.schedule.to_csv(), *plan.remarks, f"{plan.step:.9g}", str(plan.peak_bytes), str(plan.limit),
            json.dumps(dict(plan.notes), default=str, sort_keys=True)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


if __name__ == "__main__":
    found = {}
    for name, make in cases():
        found[name] = fingerprint(make)
        if len(found) % 100 == 0:
            print(len(found), name, flush=True)
    FILE.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} plans, {sum(value.startswith('refused') for value in found.values())} refused")
