"""Pipelines on ranks: schedules, also stale ones, measured on two ranks and compared with the simulator; and simulated
on 4 to 64 ranks.

    python bench/pipeline_parallel.py [--network mlp]... [--computation kernels] [--ranks 2] [--rounds 5] [--out FILE]
    python bench/pipeline_parallel.py --simulate bench/results/pipeline_parallel_kernels.json    (again, from its costs)

Each rank has its own core, if there are enough. Arms run in turn. A sample is the mean step of a group of steps without
a barrier between them, on the slowest rank; the prediction is the period of such iterations, from costs of single tasks
that each round measures in random orders. `bubble`: the share of time in which a rank does not compute, over all ranks,
measured in a traced group of steps; `wait` and `transfer`: their shares in the last of these steps. Peak bytes:
planned, and measured as NumPy's allocations for a run plus the parameters and states that it uses.

There are two kinds of computation, and a record says which it has:

- `kernels` (the default): the real kernels on the ranks' own cores, which also copy the messages;
- `waits`: each task waits for its share of the step's arithmetic, and uses no core, as if an accelerator computed. This
  measures schedule and transport, and can run on more ranks than there are cores.

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
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from common import machine, ratio, save, spread
from data_parallel import waiting

import minidl as ml
from minidl import models, ops, optim, schedulers
from minidl.core.schedule import RankGrid
from minidl.core.tasks import Kind
from minidl.core.timeline import Timeline, What
from minidl.measuring.measure import Profile
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.mpi import MPI
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline
from minidl.training import objectives
from minidl.training.pipeline_trainer import measure_messages

MICRO_BATCHES, STEPS = 8, 3
#: and the options of schedulers that need them; the last ones train on older weights
POLICIES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "one_f_one_b": {}, "zb_h1": {}, "zb_auto": {}, "fast_forward": {}, "interleaved": {}, "modulo": {},
    "pipedream": {}, "pipedream_2bw": {"mini_batches": 2}, "layerpipe2": {}}
BASE = "one_f_one_b"
WIDTHS = [512] * 13  #: of the MLP: inputs, hidden layers
CLASSES = 10
SHARE = {"mlp": 128, "resnet20": 4, "gpt": 2, "bert": 2, "rnn": 8, "ffnn": 64}  #: samples of a micro-batch
PRESETS = {"gpt": "small", "bert": "small", "rnn": "small"}
TORCH = {"gpipe": "ScheduleGPipe", "one_f_one_b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
SIMULATED = (4, 8, 16, 32, 64)


def network(name: str) -> Any:
    ml.seed(0)
    return models.mlp(*WIDTHS, CLASSES) if name == "mlp" else models.create(name, preset=PRESETS.get(name))


def batch(name: str) -> list[Any]:
    """x and y of each micro-batch, alternately; the same on every rank."""
    random, model = np.random.default_rng(0), network(name)
    shape = (SHARE[name], *((WIDTHS[0],) if name == "mlp" else model.input_shape))
    found: list[Any] = []
    for _ in range(MICRO_BATCHES):
        if model.input_dtype == "int64":
            found += [random.integers(0, model.classes, shape), random.integers(0, model.classes, shape)]
        else:
            found += [random.standard_normal(shape, np.float32), random.integers(0, CLASSES, SHARE[name])]
    return found


def recorded(name: str, every: int = MICRO_BATCHES) -> Any:
    """A step that updates after `every` micro-batches."""
    model = network(name)
    loss_of = objectives.find(model.objective).loss
    opt = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(*parts: Any) -> Any:
        total = None
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE[name]):
                loss = loss_of(model(parts[2 * i]), parts[2 * i + 1]) * (1 / every)
                loss.backward()
                total = loss.detach() if total is None else ops.add(total, loss.detach())
                if every < MICRO_BATCHES and (i + 1) % every == 0:
                    opt.step()
        if every == MICRO_BATCHES:
            opt.step()
        return total

    return ml.record(step, *batch(name))


# --------------------------------------------------------------------------------------------------------- on each rank
class Arm:
    """A schedule on this rank: its plan, which is the same on all ranks, its run, and a traced run."""

    def __init__(self, name: str, scheduler: str, graph: Any, cost: CostModel, waits: bool, comm: MPI) -> None:
        self.comm, self.inputs, self.graph = comm, batch(name), graph
        options = POLICIES[scheduler]
        self.placement = schedulers.find(scheduler).staged.place(comm.size)
        self.stage_of_unit = pipeline.balanced(self.graph, cost, self.placement.stages)
        self.planned = lambda cost: ml.plan(graph, scheduler, cost, ml.Machine(comm.size),
                                            stage_of_unit=self.stage_of_unit, **options)
        self.plan = self.planned(cost)
        talking = self.plan.with_messages
        tracemalloc.start()
        self.run = DistributedExecutor(*talking, comm)
        self.run(*self.inputs)
        allocated = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(
            True, np.lib.tracemalloc_domain)])
        tracemalloc.stop()
        held = {id(s.live): s.bytes for s in self.run.program.graph.storages if s.live is not None}
        self.peaks = self.run.peak_bytes, sum(t.size for t in allocated.traces) + sum(held.values())
        self.traced = DistributedExecutor(*talking, comm, trace=True)
        #: seconds that this rank's tasks wait in a step; stamps tell less, as a wait makes up for what polling took
        self.waits_for = (float(self.plan.cost.durations(self.traced.graph)[self.traced.graph.kind < Kind.A].sum())
                          / 1e6 if waits else 0.0)

    def predicted(self, cost: CostModel) -> tuple[float, float]:
        """(microseconds per step, share of them in which the ranks do not compute)."""
        stages = pipeline.cut(self.graph, cost, self.placement, self.stage_of_unit)
        plan = (replace(self.plan, cost=stages.price(self.plan.graph)) if self.plan.versions is None
                else self.planned(cost))  # which has late tasks
        period = pipeline.price(plan).period + cost.step
        return period, 1 - plan.cost.durations(self.plan.graph).sum() / (self.placement.ranks * period)

    def step(self, run: Any) -> float:
        """Seconds per step of a group, of which a stale run is in the middle."""
        run(*self.inputs)
        self.comm.gather(None)
        begin = perf_counter()
        for _ in range(STEPS):
            run(*self.inputs)
        return max(self.comm.gather((perf_counter() - begin) / STEPS))

    def shares(self) -> dict[str, list[float]]:
        """Shares of each rank's time in a group of traced steps: compute, and the rest; for the last step also wait and
        transfer."""
        self.comm.gather(None)
        took = computed = last = 0.0
        for _ in range(STEPS):
            begin = perf_counter()
            self.traced(*self.inputs)
            took += (last := perf_counter() - begin)
            t = self.traced.timeline
            computed += self.waits_for or float((t.end - t.start)[t.tasks][_on_main(t)[t.tasks]].sum()) / 1e6
        compute = self.comm.gather(computed / took)
        t, period = self.traced.timeline_of_all(), np.array(self.comm.gather(last)) * 1e6
        rank, length = np.array([lane.rank for lane in t.lanes])[t.lane], np.where(_on_main(t), t.end - t.start, 0.0)
        found = {what.name.lower(): (np.bincount(rank, length * (t.what == what), self.comm.size) / period).tolist()
                 for what in (What.WAIT, What.TRANSFER)}
        return {"compute": compute, **found, "bubble": [1 - x for x in compute]}


def _on_main(t: Timeline) -> Any:
    """Mask of the records on the lanes that compute."""
    return np.array([lane.name == "main" for lane in t.lanes])[t.lane]


def work(name: str, computation: str, rounds: int, rate: str | None) -> None:
    comm = MPI()
    cores = sorted(os.sched_getaffinity(0))
    if computation == "kernels":
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    link = replace(measure_messages(comm, RankGrid(comm.size)), core=rate is None and computation == "kernels")
    every = {s: schedulers.find(s).staged.update_every(MICRO_BATCHES, options.get("mini_batches", 1))
             for s, options in POLICIES.items()}
    graphs: dict[int, Any] = {}  # by the number of micro-batches between updates
    costs: dict[int, CostModel] = {}
    for a in sorted(set(every.values()), reverse=True):
        graph = recorded(name, a)
        graphs[a], cost = (waiting(graph) if computation == "waits"
                           else (graph, shared(comm, ml.measure(graph, seconds=2.0))))
        costs[a] = replace(cost, link=link)
    arms: dict[str, Arm] = {}
    left_out = {}
    for s in POLICIES:
        try:
            arms[s] = Arm(name, s, graphs[every[s]], costs[every[s]], computation == "waits", comm)
        except pipeline.PipelineError as error:  # on every rank, before anything runs
            left_out[s] = str(error)
    peers = torch_arms(comm, arms) if name == "mlp" and computation == "kernels" else {}
    samples: dict[str, list[float]] = {key: [] for key in (*arms, *peers)}
    predicted: dict[str, list[tuple[float, float]]] = {s: [] for s in arms}
    shares: dict[str, list[dict[str, list[float]]]] = {s: [] for s in arms}
    for seed in range(rounds):
        profiles = {a: Profile(graphs[a], seed=seed) for a in {every[s] for s in arms} if computation == "kernels"}
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
            "network": name, "computation": computation, "ranks": comm.size, "micro_batches": MICRO_BATCHES,
            "samples_a_micro_batch": SHARE[name], "rounds": rounds,
            "link": {"latency_us": link.latency, "bytes_per_us": link.bandwidth},
            "block": block(graphs[MICRO_BATCHES], costs[MICRO_BATCHES]),
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


def block(graph: Any, cost: CostModel) -> dict[str, float]:
    """Mean microseconds of a micro-batch on a unit with parameters, from which the simulated pipelines are made."""
    time = cost.durations(graph)
    units = len(set(graph.unit[graph.kind == Kind.W].tolist())) * MICRO_BATCHES
    return {kind: float(time[graph.kind == Kind[kind]].sum() / units) for kind in "FOW"}


def torch_arms(comm: MPI, arms: dict[str, Arm]) -> dict[str, Callable[[], Any]]:
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
    parts = batch("mlp")
    x, y = torch.from_numpy(np.concatenate(parts[::2])), torch.from_numpy(np.concatenate(parts[1::2]))
    calls: dict[str, Callable[[], Any]] = {}
    for ours, theirs in TORCH.items():
        arm = arms[ours]
        weights = sorted({int(u) for u in arm.graph.unit[arm.graph.kind == Kind.W]})  # one unit per linear layer
        stage_of_layer = [int(arm.stage_of_unit[u]) for u in weights]
        stages, parameters = [], []
        for s in range(comm.rank, arm.placement.stages, comm.size):
            layers: list[Any] = []
            for i, of in enumerate(stage_of_layer):
                if of == s:
                    out = [*WIDTHS[1:], CLASSES][i]
                    layers += [torch.nn.Linear(WIDTHS[i], out), *([torch.nn.ReLU()] if i + 1 < len(weights) else [])]
            module = torch.nn.Sequential(*layers)
            parameters += list(module.parameters())
            stages.append(pipelining.PipelineStage(module, s, arm.placement.stages, torch.device("cpu")))
        schedule = getattr(pipelining, theirs)(stages if arm.placement.chunks > 1 else stages[0], MICRO_BATCHES,
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
    parser.add_argument("--out")
    parser.add_argument("--simulate", metavar="RECORD")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.computation, arguments.rounds, arguments.rate)
        return
    if arguments.simulate:
        for s in json.loads(Path(arguments.simulate).read_text())["settings"]:
            show_simulated(s["network"], simulated(s["block"], s["link"]["latency_us"]))
        return
    settings: list[dict[str, Any]] = []
    for name, ranks in itertools.product(arguments.network or SHARE,
                                         arguments.ranks or ([2] if arguments.computation == "kernels" else [2, 4])):
        mpiexec = str(Path(sys.executable).parent / "mpiexec")
        limited, rate = (([str(HERE / "limited_loopback.sh"), arguments.rate], ["--rate", arguments.rate])
                         if arguments.rate else ([], []))
        done = subprocess.run([*limited, mpiexec if os.path.exists(mpiexec) else "mpiexec", "-n", str(ranks),
                               sys.executable, __file__, "--work", name, "--computation", arguments.computation,
                               "--rounds", str(arguments.rounds), *rate], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        found = json.loads(done.stdout.splitlines()[-1])
        settings.append({**found, "rate": arguments.rate,
                         "simulated": simulated(found["block"], found["link"]["latency_us"])})
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
    show_simulated(s["network"], s["simulated"])


def show_simulated(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"{name}, simulated, times faster than gpipe:", file=sys.stderr)
    for row in rows:
        ups = ", ".join(f"{s} {x:.2f}" for s, x in row["speed_up_over_gpipe"].items() if s != "gpipe")
        print(f"    {row['ranks']:3} ranks, m = {row['micro_batches']:3}: {ups}"
              + (f"; ceiling {row['ceiling']:.2f}" if row["ceiling"] else ""), file=sys.stderr)


if __name__ == "__main__":
    main()
