"""Data-parallel schedules on two ranks over a loopback of limited rate: all arms, for several ratios of communication
to computation.

    python bench/data_parallel.py [--network NAME]... [--ratio 0.5]... [--rounds 3] [--out FILE.json]

Each setting runs in its own network namespace (bench/limited_loopback.sh; needs root). Its rate is chosen so that
summing all gradients takes `ratio` times as long as a step's computation. `buckets` is the controlled baseline, on the
same transport as all other arms. Arms run in turn; a sample is the mean step of a group in steady state.

Further arms: `buckets` with sums in MPI's order instead of rank order (the cost of determinism); reverse first-k with
other k than the simulator's, to confirm its choice; and torch DistributedDataParallel over gloo (extra `parity`), one
thread per rank, buckets of the same size.

There are two kinds of computation, and a record says which it has:

- `waits` (the default): each task waits for its share of the step's arithmetic, and uses no core, as if an accelerator
  computed. This measures schedule and transport; the sums are real, but gradients have arbitrary values.
- `kernels`: the real kernels on the ranks' own cores, which the transport needs too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests" / "helpers")]

from common import machine, ratio, save, spread

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.core.tasks import Kind
from minidl.kernels import kernel
from minidl.measuring.links import among_ranks, measure_link
from minidl.passes.synchronise import gradients
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.mpi import MPI
from minidl.runtime.executors import Runtime, runtime
from minidl.schedulers import names
from minidl.training.rank_trainer import neighbours
from minidl.training.trainer import params_sha256

STEPS = 4  #: timed steps of a group, after one to warm up
WAITED_MS = 300.0  #: milliseconds of computation in a step that waits
BATCH = {"resnet50-like": 8, "head-heavy": 512, "tail-heavy": 512}  #: samples of one rank
AS_MPI_LIKES = "buckets, sums as MPI likes"
TORCH = "torch DDP, gloo"
RESNET: dict[str, Any] = {"classes": 100, "image_size": 64, "width": 32}
MLPS = {"head-heavy": [3072, 512] + [384] * 8 + [10], "tail-heavy": [384] * 9 + [3072]}


def network(name: str) -> Any:
    ml.seed(0)
    if name in MLPS:
        return models.mlp(*MLPS[name])
    return models.create("resnet50", **RESNET)


def batch(name: str, rank: int) -> tuple[Any, Any]:
    random = np.random.default_rng(rank)
    shape = (MLPS[name][0],) if name in MLPS else (64, 64, 3)
    classes = MLPS[name][-1] if name in MLPS else 100
    return random.standard_normal((BATCH[name], *shape), np.float32), random.integers(0, classes, BATCH[name])


def recorded(name: str, rank: int) -> tuple[Any, Any]:
    """A fresh network and its step on this rank's batch."""
    model = network(name)
    opt = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return model, ml.record(step, *batch(name, rank))


# ----------------------------------------------------------------------------------------------------- waiting for work
class Clock:
    """Waits whose sum is exact, although no sleep is: the next wait is shorter by what the last one overslept."""

    def __init__(self) -> None:
        self._until = 0.0

    def wait(self, seconds: float) -> None:
        now = perf_counter()
        self._until = max(self._until, now - 5e-4) + seconds
        if self._until - now > 2e-4:
            sleep(self._until - now)


CLOCK = Clock()


@kernel("wait")
def wait(xp: Any, *reads: Any) -> Any:
    """Computes nothing."""
    return reads[0]


@wait.cpu
def _(*arrays: Any, seconds: float) -> list[Any]:
    return [partial(CLOCK.wait, seconds)]


def waited(graph: Any, step_ms: float = WAITED_MS, flops: Any = None) -> Any:
    """Microseconds that each task waits: its share of the arithmetic, or of the `flops` given for each task."""
    flops = graph.flops if flops is None else flops
    return flops / flops.sum() * step_ms * 1000


def waiting(graph: Any, step_ms: float = WAITED_MS, flops: Any = None) -> tuple[Any, CostModel]:
    """The same graph with tasks that wait, each for its share of the arithmetic of a step; and their costs."""
    share = waited(graph, step_ms, flops)
    launches = tuple(tuple(replace(launch, kernel="wait", work=(), constants=(("seconds", share[t] / len(task) / 1e6),))
                           for launch in task) for t, task in enumerate(graph.launches))
    return (replace(graph, launches=launches),
            CostModel(tasks={graph.name(t): float(share[t]) for t in range(len(graph))}))


# --------------------------------------------------------------------------------------------------------- on each rank
def work(name: str, computation: str, rounds: int) -> None:
    """Times all arms on this rank; rank 0 writes the results to standard output."""
    comm = MPI()
    x, y = batch(name, comm.rank)
    _, graph = recorded(name, comm.rank)
    comm.gather(None)
    cost = (waiting(graph)[1] if computation == "waits" else
            among_ranks(comm.gather(ml.measure(graph, seconds=2.0))[0], comm))
    link = measure_link(comm, lane=cost.cores == 1)
    arms: dict[str, Runtime] = {}
    plans: dict[str, Any] = {}
    digests = {}
    any_order = MPI(deterministic=False)

    def add(arm: str, scheduler: str, k: int | None = None) -> None:
        model, graph = recorded(name, comm.rank)
        machine = ml.Machine(comm.size, collective=lambda sizes: link[0] + link[1] * sum(sizes.values()))
        made = plans[arm] = ml.plan(waiting(graph)[0] if computation == "waits" else graph, scheduler, cost, machine,
                                    **schedulers.find(scheduler).known(bucket_bytes=bucket_bytes(model), k=k))
        arms[arm] = runtime(made.program(comm.rank), transport=any_order if arm == AS_MPI_LIKES else comm)
        for _ in range(2):
            arms[arm](x, y)
        arms[arm].settle()
        if arm != AS_MPI_LIKES:
            digests[arm] = params_sha256(model)

    for scheduler in names("data", exact=True):
        add(scheduler, scheduler)
    add(AS_MPI_LIKES, "buckets")
    found_k = plans["reverse_first_k"].notes["k"]
    candidates = {found_k: "reverse_first_k"}
    for k in neighbours(found_k, plans["reverse_first_k"].notes["largest_k"]):
        candidates[k] = f"reverse_first_k, k = {k}"
        add(candidates[k], "reverse_first_k", k)
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    calls: dict[str, Callable[[], Any]] = {arm: lambda run=run: run(x, y) for arm, run in arms.items()}
    ddp = torch_step(name, computation, comm, x, y)
    if ddp is not None:
        samples[TORCH], calls[TORCH] = [], ddp
    for _ in range(rounds):
        for arm, call in calls.items():
            call()
            comm.gather(None)
            begin = perf_counter()
            for _ in range(STEPS):
                call()
            samples[arm].append((perf_counter() - begin) / STEPS)
            if arm in arms:
                arms[arm].settle()
    for run in arms.values():
        run.close()
    slowest = {arm: np.max(comm.gather(mine), axis=0).tolist() for arm, mine in samples.items()}
    alike = len({d for all_of in comm.gather(digests) for d in all_of.values()}) == 1
    if comm.rank == 0:
        bound = min(p.bound for p in plans.values())  # plans that cut gradients into parts pay for more messages
        found = {"network": name, "computation": computation, "parameters": parameters(name),
                 "bits_equal": alike if computation == "kernels" else None,
                 "link": {"us_each": link[0], "us_per_byte": link[1]}, "compute_ms": plans["priority"].compute / 1000,
                 "communication_ms": plans["buckets"].communication / 1000, "lower_bound_ms": bound / 1000,
                 "ceiling_over_barrier": plans["barrier"].period / bound, "k": found_k,
                 "k_measured": min(candidates, key=lambda k: float(np.median(slowest[candidates[k]]))),
                 "cost_of_rank_order": ratio(slowest, "buckets", AS_MPI_LIKES),
                 "arms": {arm: {"step_ms": spread(times), "speed_up_over_buckets": ratio(slowest, "buckets", arm),
                                "speed_up_over_barrier": ratio(slowest, "barrier", arm),
                                "predicted_ms": plans[arm].period / 1000 if arm in plans else None,
                                "hidden": plans[arm].hidden if arm in plans else None}
                          for arm, times in slowest.items()}}
        print(json.dumps(found))
    comm.gather(None)


def parameters(name: str) -> int:
    return sum(p.size for p in network(name).parameters())


def bucket_bytes(model: Any) -> int:
    """A quarter of the gradients' bytes, like DDP's 25 MB for ResNet-50."""
    return sum(p.size for p in model.parameters())


def torch_step(name: str, computation: str, comm: MPI, x: Any, y: Any) -> Callable[[], Any] | None:
    """The same step in torch under DistributedDataParallel over gloo; None without torch."""
    try:
        import torch
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel
    except ImportError:
        return None
    torch.set_num_threads(1)
    place = comm.gather(tempfile.mktemp(prefix="minidl-gloo-"))[0]
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)
    bucket = bucket_bytes(network(name)) / 2**20
    if computation == "waits":
        layers, after = torch_waits(recorded(name, comm.rank)[1])
        model, one = DistributedDataParallel(layers, bucket_cap_mb=bucket), torch.zeros(1, requires_grad=True)

        def wait_step() -> None:
            for p in layers.parameters():
                p.grad = None
            model(one).backward()
            CLOCK.wait(after)

        return wait_step
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    if name in MLPS:
        made: list[Any] = []
        for i, o in zip(MLPS[name][:-1], MLPS[name][1:], strict=True):
            made += [torch.nn.Linear(i, o), torch.nn.ReLU()]
        plain: Any = torch.nn.Sequential(*made[:-1])
    else:
        from torch_twins import images, twin

        inputs, plain = images(x), twin("resnet50", {**models.arguments("resnet50"), **RESNET}).to(
            memory_format=torch.channels_last)
    model = DistributedDataParallel(plain, bucket_cap_mb=bucket)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)

    def step() -> None:
        opt.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        opt.step()

    return step


def torch_waits(graph: Any) -> tuple[Any, float]:
    """A torch network whose layers wait like the graph's units, with as many parameters; and the seconds of its
    updates."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, parameter: Any, gradient: Any, seconds: tuple[float, float]) -> Any:
            ctx.gradient, ctx.seconds = gradient, seconds[1]
            CLOCK.wait(seconds[0])
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            CLOCK.wait(ctx.seconds)
            return dy, ctx.gradient, None, None

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(max(n, 1)) for n in sizes)
            self.gradients = [torch.zeros(max(n, 1)) for n in sizes]

        def forward(self, x: Any) -> Any:
            for layer in zip(self.weights, self.gradients, seconds, strict=True):
                x = Wait.apply(x, *layer)
            return x

    share, units = waited(graph) / 1e6, sorted(set(graph.unit.tolist()))
    bytes_of = {int(graph.unit[u]): int(graph.buffer_bytes[b].sum()) for u, b in gradients(graph).items()}
    sizes = [bytes_of.get(u, 0) // 4 for u in units]
    forward, update = graph.kind == Kind.F, graph.kind == Kind.U
    seconds = [tuple(float(share[(graph.unit == u) & which].sum()) for which in (forward, ~forward & ~update))
               for u in units]
    return Layers(), float(share[update].sum())


# --------------------------------------------------------------------------------------------------------------- driver
def limited(rate: str, *arguments: str) -> Any:
    """The output of rank 0. The benchmark ends if the system does not allow a namespace."""
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    command = [str(HERE / "limited_loopback.sh"), rate, mpiexec if os.path.exists(mpiexec) else "mpiexec", "-n", "2",
               sys.executable, __file__]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=list(BATCH))
    parser.add_argument("--ratio", type=float, action="append",
                        help="ratio of communication to computation (default 0.25, 0.5, 1, 2)")
    parser.add_argument("--computation", choices=["waits", "kernels"], default="waits")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.computation, arguments.rounds)
        return
    settings = []
    for name in arguments.network or BATCH:
        about = ["--work", name, "--computation", arguments.computation]
        size = parameters(name)
        compute = (WAITED_MS if arguments.computation == "waits"
                   else limited("unlimited", *about, "--rounds", "1")["compute_ms"])
        for wanted in arguments.ratio or (0.25, 0.5, 1.0, 2.0):
            # each of two ranks sends every byte once, and all of it goes through the one loopback
            rate = 2 * 4 * size * 8 / (wanted * compute / 1000)
            found = limited(f"{rate / 1e6:.1f}mbit", *about, "--rounds", str(arguments.rounds))
            settings.append({"ratio_wanted": wanted, "rate_mbit": rate / 1e6, **found})
            show(settings[-1])
            record = {"what": "two ranks of one thread over TCP on a shaped loopback",
                      "settings": settings, **machine()}
            save(f"data_parallel_{arguments.computation}", record, arguments.out)  # what is finished is not lost


def show(s: dict[str, Any]) -> None:
    print(f"\n{s['network']}: {s['parameters']:,} parameters, {s['rate_mbit']:.0f} Mb/s; computation "
          f"{s['compute_ms']:.1f} ms, communication {s['communication_ms']:.1f} ms, lower bound "
          f"{s['lower_bound_ms']:.1f} ms, ceiling over barrier {s['ceiling_over_barrier']:.2f}, k = {s['k']} (measured "
          f"best: {s['k_measured']}), bits equal: {s['bits_equal']}, sums in rank order cost "
          f"{s['cost_of_rank_order']['median']:.2f}x", file=sys.stderr)
    for arm, a in s["arms"].items():
        predicted = "" if a["predicted_ms"] is None else f"predicted {a['predicted_ms']:8.1f}"
        print(f"    {arm:26} {a['step_ms']['median']:8.1f} ms  (p10 {a['step_ms']['p10']:.1f}, p90 "
              f"{a['step_ms']['p90']:.1f})  over buckets {a['speed_up_over_buckets']['median']:.2f}  over barrier "
              f"{a['speed_up_over_barrier']['median']:.2f}  {predicted}", file=sys.stderr)


if __name__ == "__main__":
    main()
