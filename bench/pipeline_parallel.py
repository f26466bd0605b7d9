"""Pipelines on ranks: schedules, also stale ones, measured on two ranks and compared with the simulator; and simulated
on 4 to 64 ranks.

    python bench/pipeline_parallel.py [--network mlp]... [--computation kernels] [--ranks 2] [--rounds 5] [--out FILE]
                                      [--micro-batches 8] [--chunks 2] [--layers N]
    python bench/pipeline_parallel.py --simulate bench/results/pipeline_parallel_kernels.json    (again, from its costs)

Each rank has its own core, if there are enough. Arms run in turn. A sample is the mean step of a group of steps without
a barrier between them, on the slowest rank; the prediction is the period of such iterations, from costs of single tasks
that each round measures in random orders. `bubble`: the share of time in which a rank does not compute, over all ranks,
measured in a traced group of steps; `wait` and `transfer`: their shares in the last of these steps. Peak bytes:
planned, and measured as NumPy's allocations for a run plus the parameters and states that it uses.

There are two kinds of computation, and a record says which it has:

- `kernels` (the default): the real kernels on the ranks' own cores, which also copy the messages;
- `waits`: each task waits for its share of the step's arithmetic, and uses no core, as if an accelerator computed. This
  measures schedule and transport, and can run on more ranks than there are cores. It adds deep networks on 8 ranks, few
  micro-batches and 8 chunks per rank, the setting that favours modulo allocation; and layers that take the times of
  VGG-16's, of which a few are heavy, which favours LayerPipe.

With `--rate` the ranks communicate over a loopback of that rate (bench/limited_loopback.sh), otherwise in shared
memory.

For comparison: torch.distributed.pipelining over gloo (extra `parity`), one thread per rank, on the same stages of an
MLP.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import machine, ratio, save, spread
from data_parallel import WAITED_MS, waiting
from layerpipe import by_hand

import minidl as ml
from minidl import models, ops, optim, schedulers
from minidl.core.schedule import RankGrid
from minidl.core.tasks import Kind, What
from minidl.core.timeline import Timeline
from minidl.measuring.links import measure_messages
from minidl.measuring.measure import Profile
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.mpi import MPI
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline
from minidl.training import objectives

STEPS = 3
#: and the options of schedulers that need them; the last ones train on older weights
POLICIES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "one_f_one_b": {}, "zb_h1": {}, "zb_auto": {}, "fast_forward": {}, "interleaved": {}, "modulo": {},
    "modulo_greedy": {}, "layerpipe": {}, "pipedream": {}, "pipedream_2bw": {"mini_batches": 2}, "layerpipe2": {}}
#: a network with a few heavy layers is there for LayerPipe
OF_UNEVEN = ("gpipe", "zb_h1", "pipedream", "layerpipe", "layerpipe2")
WIDTH, LAYERS = 512, 13  #: of the MLP
NARROW = 64  #: of the layers that take the times of VGG's: its messages are short beside its computation
CLASSES = 10
SHARE = {"mlp": 128, "vgg16": 128, "resnet20": 4, "gpt": 2, "bert": 2, "rnn": 8, "ffnn": 64}  #: of a micro-batch
PRESETS = {"gpt": "small", "bert": "small", "rnn": "small"}
TORCH = {"gpipe": "ScheduleGPipe", "one_f_one_b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
SIMULATED = (4, 8, 16, 32, 64)
VGG = by_hand(1)["VGG-16 by arithmetic"].forward  #: multiply-adds of its layers


class Setting(NamedTuple):
    """`layers` of the network, or its own number; `chunks` per rank of the policies that cut a rank's share."""

    network: str
    computation: str = "kernels"
    ranks: int = 2
    micro_batches: int = 8
    chunks: int = 2
    layers: int | None = None

    @property
    def samples(self) -> int:
        """Of a micro-batch. On more ranks than two to a core it is small, since the cores copy all messages."""
        return SHARE[self.network] if self.ranks <= 4 else max(SHARE[self.network] // 16, 1)

    @property
    def waits_ms(self) -> float:
        """Of a step, over all ranks."""
        return WAITED_MS * (1 if self.ranks <= 4 and self.network != "vgg16" else 2 * self.ranks)

    @property
    def width(self) -> int:
        """Of an MLP."""
        return NARROW if self.network == "vgg16" else WIDTH

    @property
    def policies(self) -> dict[str, dict[str, Any]]:
        return {s: POLICIES[s] for s in OF_UNEVEN} if self.network == "vgg16" else POLICIES


#: networks of 64 stages of about the same time; the ranks' links are fast beside a stage
DEEP = [Setting(name, "waits", 8, 4, 8, layers)
        for name, layers in (("mlp", 64), ("ffnn", 64), ("rnn", 32), ("bert", 16), ("gpt", 16))]
#: and a network with a few heavy layers
UNEVEN = [Setting("vgg16", "waits", ranks, 24, layers=len(VGG)) for ranks in (4, 8)]


def network(s: Setting) -> Any:
    ml.seed(0)
    if s.network in ("mlp", "vgg16"):  # whose waits alone are VGG's
        return models.mlp(*[s.width] * (s.layers or LAYERS), CLASSES)
    return models.create(s.network, preset=PRESETS.get(s.network), **({"layers": s.layers} if s.layers else {}))


def batch(s: Setting) -> list[Any]:
    """x and y of each micro-batch, alternately; the same on every rank."""
    random, model = np.random.default_rng(0), network(s)
    shape = (s.samples, *((s.width,) if s.network in ("mlp", "vgg16") else model.input_shape))
    found: list[Any] = []
    for _ in range(s.micro_batches):
        if model.input_dtype == "int64":
            found += [random.integers(0, model.classes, shape), random.integers(0, model.classes, shape)]
        else:
            found += [random.standard_normal(shape, np.float32), random.integers(0, CLASSES, s.samples)]
    return found


def recorded(s: Setting, every: int) -> Any:
    """A step that updates after `every` micro-batches."""
    model = network(s)
    loss_of = objectives.find(model.objective).loss
    opt = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(*parts: Any) -> Any:
        total = None
        for i in range(s.micro_batches):
            with ml.micro_batch(i, i * s.samples):
                loss = loss_of(model(parts[2 * i]), parts[2 * i + 1]) * (1 / every)
                loss.backward()
                total = loss.detach() if total is None else ops.add(total, loss.detach())
                if every < s.micro_batches and (i + 1) % every == 0:
                    opt.step()
        if every == s.micro_batches:
            opt.step()
        return total

    return ml.record(step, *batch(s))


def flops_of(s: Setting, graph: Any) -> Any:
    """The arithmetic of each task: its own, or that of VGG's layer in its place."""
    if s.network != "vgg16":
        return graph.flops
    layers, forward = np.unique(graph.unit[graph.kind == Kind.W]), graph.kind == Kind.F
    of_layer = np.bincount(graph.unit[forward], graph.flops[forward])[layers] / s.micro_batches
    factor = np.zeros(graph.unit.max() + 2)  # the last one is of tasks without a unit
    factor[layers] = VGG / of_layer
    return graph.flops * factor[graph.unit]


# --------------------------------------------------------------------------------------------------------- on each rank
class Arm:
    """A schedule on this rank: its plan, which is the same on all ranks, its run, and a traced run."""

    def __init__(self, s: Setting, scheduler: str, graph: Any, cost: CostModel, comm: MPI) -> None:
        self.comm, self.inputs, self.graph = comm, batch(s), graph
        options, staged = POLICIES[scheduler], schedulers.find(scheduler).staged
        chunks = s.chunks if staged.chunks > 1 and not staged.chunks_fixed else staged.chunks
        self.placement = staged.place(comm.size, chunks)
        self.stage_of_unit = pipeline.balanced(self.graph, cost, self.placement.stages)
        self.planned = lambda cost: ml.plan(graph, scheduler, cost, ml.Machine(comm.size), chunks=chunks,
                                            stage_of_unit=self.stage_of_unit, **options)
        self.plan = self.planned(cost)
        talking = self.plan.with_messages
        self.traced = DistributedExecutor(*talking, comm, trace=True)  # first: it draws the weights
        tracemalloc.start()
        self.run = DistributedExecutor(*talking, comm)
        self.run(*self.inputs)
        allocated = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(
            True, np.lib.tracemalloc_domain)])
        tracemalloc.stop()
        held = {id(s.live): s.bytes for s in self.run.program.graph.storages if s.live is not None}
        self.peaks = self.run.peak_bytes, sum(t.size for t in allocated.traces) + sum(held.values())
        #: seconds that this rank's tasks wait in a step; stamps tell less, as a wait makes up for what polling took
        self.waits_for = (float(self.plan.cost.durations(self.traced.graph)[self.traced.graph.kind < Kind.A].sum())
                          / 1e6 if s.computation == "waits" else 0.0)

    def predicted(self, cost: CostModel) -> tuple[float, float]:
        """(microseconds per step, share of them in which the ranks do not compute)."""
        if self.plan.versions is None:
            stages = pipeline.cut(self.graph, cost, self.placement, self.stage_of_unit)
            plan = replace(self.plan, cost=stages.price(self.plan.graph))
        else:
            plan = self.planned(cost)  # it has late tasks
        period = pipeline.price(plan).period + cost.step
        return period, 1 - plan.cost.durations(self.plan.graph).sum() / (self.placement.ranks * period)

    def step(self, run: Any) -> float:
        """Seconds per step of a group, of which a stale run is in the middle."""
        run(*self.inputs)
        self.comm.gather(None)
        begin = perf_counter()
        for _ in range(STEPS):
            run(*self.inputs)
        self.took = (perf_counter() - begin) / STEPS
        return max(self.comm.gather(self.took))

    def shares(self) -> dict[str, list[float]]:
        """Shares of each rank's time in a group of traced steps: compute, and the rest; for the last step also wait and
        transfer. If tasks wait, the share of computation is from the untraced steps before."""
        self.comm.gather(None)
        took = computed = last = 0.0
        for _ in range(STEPS):
            begin = perf_counter()
            self.traced(*self.inputs)
            took += (last := perf_counter() - begin)
            t = self.traced.timeline
            computed += float((t.end - t.start)[t.tasks][_on_main(t)[t.tasks]].sum()) / 1e6
        compute = self.comm.gather(self.waits_for / self.took if self.waits_for else computed / took)
        t, period = self.traced.timeline_of_all(), np.array(self.comm.gather(last)) * 1e6
        rank, length = np.array([lane.rank for lane in t.lanes])[t.lane], np.where(_on_main(t), t.end - t.start, 0.0)
        found = {what.name.lower(): (np.bincount(rank, length * (t.what == what), self.comm.size) / period).tolist()
                 for what in (What.WAIT, What.TRANSFER)}
        return {"compute": compute, **found, "bubble": [1 - x for x in compute]}


def _on_main(t: Timeline) -> Any:
    """Mask of the records on the lanes that compute."""
    return np.array([lane.name == "main" for lane in t.lanes])[t.lane]


def work(setting: Setting, rounds: int, rate: str | None) -> None:
    waits = setting.computation == "waits"
    comm = MPI()
    cores = sorted(os.sched_getaffinity(0))
    if not waits:
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    link = replace(measure_messages(comm, RankGrid(comm.size)), core=rate is None and not waits)
    every = {s: schedulers.find(s).staged.update_every(setting.micro_batches, options.get("mini_batches", 1))
             for s, options in setting.policies.items()}
    graphs: dict[int, Any] = {}  # by the number of micro-batches between updates
    costs: dict[int, CostModel] = {}
    for a in sorted(set(every.values()), reverse=True):
        graph = recorded(setting, a)
        graphs[a], cost = (waiting(graph, setting.waits_ms, flops_of(setting, graph)) if waits else
                           (graph, shared(comm, ml.measure(graph, seconds=2.0))))
        costs[a] = replace(cost, link=link)
    arms: dict[str, Arm] = {}
    left_out = {}
    for s in setting.policies:
        try:
            arms[s] = Arm(setting, s, graphs[every[s]], costs[every[s]], comm)
        except pipeline.PipelineError as error:  # on every rank, before anything runs
            left_out[s] = str(error)
    peers = torch_arms(comm, setting, arms) if setting.network == "mlp" and not waits else {}
    samples: dict[str, list[float]] = {key: [] for key in (*arms, *peers)}
    predicted: dict[str, list[tuple[float, float]]] = {s: [] for s in arms}
    shares: dict[str, list[dict[str, list[float]]]] = {s: [] for s in arms}
    for seed in range(rounds):
        profiles = {a: Profile(graphs[a], seed=seed) for a in {every[s] for s in arms} if not waits}
        for s, arm in arms.items():
            for profile in profiles.values():
                comm.gather(None)
                profile.run()
                profile.run()
            samples[s].append(arm.step(arm.run))
            shares[s].append(arm.shares())
        for key, call in peers.items():
            call()
            comm.gather(None)
            begin = perf_counter()
            for _ in range(STEPS):
                call()
            samples[key].append(max(comm.gather((perf_counter() - begin) / STEPS)))
        now = costs | {a: replace(shared(comm, profile.costs()), link=link) for a, profile in profiles.items()}
        for s, arm in arms.items():
            predicted[s].append(arm.predicted(now[every[s]]))
    peaks = {s: comm.gather(arm.peaks) for s, arm in arms.items()}
    if comm.rank == 0:
        print(json.dumps({
            **setting._asdict(), "samples_a_micro_batch": setting.samples, "rounds": rounds,
            "link": {"latency_us": link.latency, "bytes_per_us": link.bandwidth},
            "block": block(setting, graphs[setting.micro_batches], costs[setting.micro_batches]),
            "left_out": left_out,
            "arms": {s: record(samples, s, predicted[s], shares[s], peaks[s], arms[s]) for s in arms}, "torch": {
                key: {"step_ms": spread(samples[key]), "torch_over_minidl": ratio(samples, key, key.split(", ")[1])}
                for key in peers}}))
    comm.gather(None)
    for arm in arms.values():
        arm.run.close()
        arm.traced.close()
    comm.close()


def shared(comm: MPI, cost: CostModel) -> CostModel:
    """The mean of all ranks' measurements; all ranks get it."""
    every = comm.gather(cost)
    return replace(every[0], tasks={name: float(np.mean([c.tasks[name] for c in every])) for name in every[0].tasks},
                   step=float(np.mean([c.step for c in every])))


def record(samples: dict[str, list[float]], s: str, predicted: list[tuple[float, float]],
           shares: list[dict[str, list[float]]], peaks: list[tuple[int, int]], arm: Arm) -> dict[str, Any]:
    """An arm's record. Errors are computed for each round, since a machine's speed drifts."""
    errors = [p / 1e6 / seconds - 1 for (p, _), seconds in zip(predicted, samples[s], strict=True)]
    middle = {what: np.median([each[what] for each in shares], axis=0).round(4).tolist() for what in shares[0]}
    return {"step_ms": spread(samples[s]), "speed_up_over_gpipe": ratio(samples, "gpipe", s),
            "predicted_ms": spread([p / 1e6 for p, _ in predicted]),
            "prediction_error": {"median": round(float(np.median(errors)), 4), "worst": round(max(errors, key=abs), 4)},
            "shares_of_ranks": middle, "bubble": round(float(np.mean(middle["bubble"])), 4),
            "bubble_predicted": round(float(np.median([b for _, b in predicted])), 4),
            "peak_bytes": {"planned": [a for a, _ in peaks], "measured": [b for _, b in peaks]},
            "stages": arm.placement.stages}


def block(s: Setting, graph: Any, cost: CostModel) -> dict[str, float]:
    """Mean microseconds of a micro-batch on a unit with parameters, from which the simulated pipelines are made."""
    time = cost.durations(graph)
    units = len(set(graph.unit[graph.kind == Kind.W].tolist())) * s.micro_batches
    return {kind: float(time[graph.kind == Kind[kind]].sum() / units) for kind in "FOW"}


def torch_arms(comm: MPI, s: Setting, arms: dict[str, Arm]) -> dict[str, Callable[[], Any]]:
    """The schedules of torch.distributed.pipelining on our stages; empty without torch."""
    try:
        import torch
        from torch import distributed
        from torch.distributed import pipelining
    except ImportError:
        return {}
    torch.set_num_threads(1)
    place = comm.gather(tempfile.mktemp(prefix="minidl-gloo-"))[0]
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)
    parts = batch(s)
    widths = [WIDTH] * (s.layers or LAYERS)
    x, y = torch.from_numpy(np.concatenate(parts[::2])), torch.from_numpy(np.concatenate(parts[1::2]))
    calls: dict[str, Callable[[], Any]] = {}
    for ours, theirs in TORCH.items():
        arm = arms[ours]
        weights = sorted({int(u) for u in arm.graph.unit[arm.graph.kind == Kind.W]})  # one unit per linear layer
        stage_of_layer = [int(arm.stage_of_unit[u]) for u in weights]
        stages, parameters = [], []
        for stage in range(comm.rank, arm.placement.stages, comm.size):
            layers: list[Any] = []
            for i, of in enumerate(stage_of_layer):
                if of == stage:
                    out = [*widths[1:], CLASSES][i]
                    layers += [torch.nn.Linear(widths[i], out), *([torch.nn.ReLU()] if i + 1 < len(weights) else [])]
            module = torch.nn.Sequential(*layers)
            parameters += list(module.parameters())
            stages.append(pipelining.PipelineStage(module, stage, arm.placement.stages, torch.device("cpu")))
        schedule = getattr(pipelining, theirs)(stages if arm.placement.chunks > 1 else stages[0], s.micro_batches,
                                               loss_fn=torch.nn.functional.cross_entropy)
        opt = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)

        def step(schedule: Any = schedule, opt: Any = opt) -> None:
            opt.zero_grad(set_to_none=True)
            first, last = comm.rank == 0, comm.rank == comm.size - 1
            schedule.step(*([x] if first else []), **({"target": y} if last else {}))
            opt.step()

        step()
        calls[f"torch, {ours}"] = step
    return calls


# --------------------------------------------------------------------------------------------------------- more ranks
def simulated(unit: dict[str, float], latency: float) -> list[dict[str, Any]]:
    """Makespans on more ranks, each with 8 blocks of these costs, relative to GPipe's; the issue gives the bounds."""
    whole = {kind: 8 * unit[kind] for kind in "FOW"}
    found = []
    for p in SIMULATED:
        for m in (1, p // 2, 2 * p):
            rows: dict[str, float] = {}
            for s, chunks in (("gpipe", None), ("one_f_one_b", None), ("zb_h1", None), ("fast_forward", None),
                              ("fast_forward_greedy", None), ("interleaved", 8), ("modulo", 8), ("modulo_greedy", 8)):
                try:
                    times = ml.Pipeline(m, whole["F"], whole["O"], whole["W"], latency)
                    rows[s] = pipeline.price(ml.plan(times, s, machine=ml.Machine(p), chunks=chunks)).makespan
                except pipeline.PipelineError:
                    continue  # numbers that the policy does not accept
            best = min(rows, key=lambda s: rows[s])
            found.append({"ranks": p, "micro_batches": m,
                          "speed_up_over_gpipe": {s: round(rows["gpipe"] / t, 4) for s, t in rows.items()},
                          "best": best, "ceiling": round((unit["F"] + unit["O"] + unit["W"]) / (unit["F"] + unit["O"]),
                                                         4) if m == 1 else None})
    return found


# --------------------------------------------------------------------------------------------------------------- driver
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=list(SHARE))
    parser.add_argument("--computation", choices=["kernels", "waits"], default="kernels")
    parser.add_argument("--ranks", type=int, action="append", help="number of ranks (default 2, with waits also 4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", help="rate of a limited loopback between the ranks, in tc's form: 1gbit (needs root)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="per rank, for policies that cut a rank's share")
    parser.add_argument("--layers", type=int, help="of the networks")
    parser.add_argument("--out")
    parser.add_argument("--simulate", metavar="RECORD")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(Setting(*json.loads(arguments.work)), arguments.rounds, arguments.rate)
        return
    if arguments.simulate:
        for s in json.loads(Path(arguments.simulate).read_text())["settings"]:
            show_simulated(s["network"], simulated(s["block"], s["link"]["latency_us"]))
        return
    waits = arguments.computation == "waits"
    networks, ranks = arguments.network or SHARE, arguments.ranks or ([2, 4] if waits else [2])
    asked = [Setting(name, arguments.computation, count, arguments.micro_batches, arguments.chunks, arguments.layers)
             for name, count in itertools.product(networks, ranks) if name != "vgg16" or arguments.ranks]
    if waits and not arguments.ranks:
        asked += [s for s in (*DEEP, *UNEVEN) if s.network in networks]
    settings: list[dict[str, Any]] = []
    for setting in asked:
        mpiexec = str(Path(sys.executable).parent / "mpiexec")
        limited, rate = (([str(HERE / "limited_loopback.sh"), arguments.rate], ["--rate", arguments.rate])
                         if arguments.rate else ([], []))
        done = subprocess.run([*limited, mpiexec if os.path.exists(mpiexec) else "mpiexec", "-n", str(setting.ranks),
                               sys.executable, __file__, "--work", json.dumps(setting), "--rounds",
                               str(arguments.rounds), *rate], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        found = json.loads(done.stdout.splitlines()[-1])
        more = {"simulated": simulated(found["block"], found["link"]["latency_us"])} if setting.ranks == 2 else {}
        settings.append({**found, "rate": arguments.rate, **more})
        show(settings[-1])
        record = {"what": "pipelines on ranks of one core each, over MPI "
                          + (f"on a loopback limited to {arguments.rate}" if arguments.rate else "in shared memory"),
                  "settings": settings, **machine()}
        save(f"pipeline_parallel_{arguments.computation}{'_limited' if arguments.rate else ''}", record,
             arguments.out)  # what is finished is not lost


def show(s: dict[str, Any]) -> None:
    print(f"\n{s['network']}, {s['computation']}, {s['ranks']} ranks, {s['micro_batches']} micro-batches of "
          f"{s['samples_a_micro_batch']}", file=sys.stderr)
    for arm, a in s["arms"].items():
        waited = [f"{w:.1%}/{t:.1%}"
                  for w, t in zip(a["shares_of_ranks"]["wait"], a["shares_of_ranks"]["transfer"], strict=True)]
        print(f"    {arm:14} {a['step_ms']['median']:8.1f} ms  over gpipe {a['speed_up_over_gpipe']['median']:.2f}  "
              f"predicted {a['prediction_error']['median']:+.1%} (worst {a['prediction_error']['worst']:+.1%})  bubble "
              f"{a['bubble']:.1%}, predicted {a['bubble_predicted']:.1%}  wait/transfer {', '.join(waited)}  peak "
              f"{max(a['peak_bytes']['planned']) / 2**20:.1f} MiB, measured "
              f"{max(a['peak_bytes']['measured']) / 2**20:.1f}", file=sys.stderr)
    for arm, why in s["left_out"].items():
        print(f"    {arm:14} left out: {why}", file=sys.stderr)
    for arm, a in s["torch"].items():
        print(f"    {arm:20} {a['step_ms']['median']:8.1f} ms, torch / minidl {a['torch_over_minidl']['median']:.2f}",
              file=sys.stderr)
    show_simulated(s["network"], s.get("simulated", []))


def show_simulated(name: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        print(f"{name}, simulated, times faster than gpipe:", file=sys.stderr)
    for row in rows:
        ups = ", ".join(f"{s} {x:.2f}" for s, x in row["speed_up_over_gpipe"].items() if s != "gpipe")
        print(f"    {row['ranks']:3} ranks, m = {row['micro_batches']:3}: {ups}"
              + (f"; ceiling {row['ceiling']:.2f}" if row["ceiling"] else ""), file=sys.stderr)


if __name__ == "__main__":
    main()
