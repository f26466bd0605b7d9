"""Memory for time: steps that compute activations again, planned and run, beside torch's checkpointing.

    python bench/memory.py [--seconds 30] [--only gpt] [--busy] [--out FILE.json]      needs the extra `parity`
    mpiexec -n 2 python bench/memory.py --shards      the same GPT on ranks that share out, beside torch's fully_shard

GPT small (12 layers of 128, 8 rows of 128 tokens) and ResNet-20 (batch 64), one thread each. Arms: all activations
kept; sqrt; auto within sqrt's peak; `blocks`, which keeps the output of each block, as torch does if it checkpoints
each block; `offload`, which copies activations to a file and back. Peaks are planned and allocated; steps are predicted
from costs of the plain step, measured in turn with the arms.

Ranks: plain buckets, gradients in shards, and parameters too, a block ahead as torch's, also `within` its peak with
cheap activations computed again, or as the search finds, on half of the batch each; torch's `fully_shard` of each block
over gloo, whose peak torch's own tracker counts.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests" / "helpers")]

import cnn
import language
from against_torch import Case, Sides
from common import interleave, machine, prediction_errors, ratio, save, spread

import minidl as ml
from minidl.core.tasks import Kind
from minidl.devices.device import cpu
from minidl.devices.far import Mapped
from minidl.measuring.far import measure_far
from minidl.runtime.executors import Runtime, runtime

CASES = {"gpt": (language, Case("gpt", {"layers": 12, "dropout": 0.0}, 8, 1.0, False, "small"),
                 "torch_language", "GPTBlock", r"/h/(\d+)/"),
         "resnet20": (cnn, Case("resnet20", {}, 64, 1.0, False), "torch_twins", "Residual", r"/(layer\d+/\d+)/")}
BLOCK_BYTES = 12 * 4 * 128**2  #: the parameters of a block of the GPT


def checkpointed(name: str) -> Sides:
    """The torch side of a case, with each block checkpointed."""
    from importlib import import_module

    from torch.utils.checkpoint import checkpoint

    bench, case, where, block, _ = CASES[name]
    twins = import_module(where)
    plain = twins.load

    def load(twin: Any, model: Any) -> Any:
        network = plain(twin, model)
        for part in network.modules():
            if isinstance(part, getattr(twins, block)):
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        return network

    with mock.patch.object(twins, "load", load):
        return bench.sides(case)


def between_blocks(graph: Any, pattern: str) -> list[int]:
    """The layers that are in no block, and the last one of each block."""
    layers = np.unique(graph.unit[graph.kind == Kind.F]).tolist()
    block = {u: found[1] for u in layers if (found := re.search(pattern, graph.unit_names[u]))}
    last = {name: u for u, name in sorted(block.items())}
    return [u for u in layers if u not in block or last[block[u]] == u]


def allocated(run: Runtime) -> int:
    """Bytes of the memory that the tasks of a run use, but for the far one."""
    pieces: dict[int, Any] = {}
    for part in (*run._body, *run._prologue, *run._epilogue):
        pieces |= {id(memory): memory for memory in (part.bound.arena, *part.bound.persistent)}
    return sum(len(memory) for memory in pieces.values() if not isinstance(memory, Mapped))


def measured(name: str, seconds: float) -> dict[str, Any]:
    """The entry of one network."""
    bench, case, *_, pattern = CASES[name]
    first = bench.sides(case)
    x, y = first.inputs
    far = measure_far(cpu())
    cost = replace(ml.measure(first.graph, seconds=seconds / 10), far=far)
    limit = ml.plan(first.graph, "in_order", cost, recompute="sqrt").peak_bytes[0]
    told: dict[str, dict[str, Any]] = {
        "none": {}, "sqrt": {"recompute": "sqrt"},
        "auto": {"recompute": "auto", "machine": ml.Machine(memory_limit=limit)},
        "blocks": {"recompute": between_blocks(first.graph, pattern)}, "offload": {"offload": "activations"}}
    plans, runs = {}, {}
    for arm, options in told.items():
        graph = bench.sides(case).graph
        plans[arm] = ml.plan(graph, "in_order", cost, **options)
        runs[arm] = runtime(plans[arm].program())
    arms: dict[str, Any] = {arm: (lambda run=run: run(x, y)) for arm, run in runs.items()}
    peaks = {arm: {"planned": plans[arm].peak_bytes[0], "allocated": allocated(run),
                   "activations": plans[arm].as_json()["activation_peak_bytes"]} for arm, run in runs.items()}
    samples = interleave({**arms, "torch": first.step, "torch checkpoint": checkpointed(name).step}, seconds=seconds,
                         warm_up=2)
    errors = prediction_errors(first.graph, {arm: plan.schedule for arm, plan in plans.items()}, arms, seconds,
                               far=far)
    for run in runs.values():
        run.close()
    pairs = [*((arm, "none") for arm in ("sqrt", "auto", "blocks", "offload")), ("auto", "sqrt"),
             ("torch checkpoint", "torch"), ("blocks", "torch checkpoint")]
    return {"peak_bytes": peaks, "step_ms": {arm: spread(s) for arm, s in samples.items()},
            "predicted_against_none": {arm: round(plan.step / plans["none"].step, 4) for arm, plan in plans.items()},
            "against": {f"{a} / {b}": ratio(samples, a, b) for a, b in pairs}, "prediction_error": errors}


def of_shards(seconds: float) -> dict[str, Any] | None:
    """The entry of ranks that share out, on rank 0."""
    from minidl.measuring.links import among_ranks, measure_link
    from minidl.measuring.measure import measure
    from minidl.runtime.comm.mpi import MPI

    comm = MPI()
    bench, case, where, block, _ = CASES["gpt"]
    case = case._replace(batch=case.batch // comm.size)
    cost = among_ranks(comm.gather(measure(bench.sides(case).graph, seconds=seconds / 10))[0], comm)
    link = measure_link(comm, lane=cost.cores == 1)
    machine = ml.Machine(comm.size, collective=lambda sizes: link[0] + link[1] * sum(sizes.values()))
    step, torch_peak = fully_sharded(case, comm, where, block)
    block_ahead: dict[str, Any] = {"shard": "3,prefetch=1,keep=none"}
    within = {"machine": replace(machine, memory_limit=comm.gather(torch_peak)[0]), "recompute": "auto"}
    told: dict[str, dict[str, Any]] = {"whole": {}, "gradients": {"shard": 2}, "parameters": block_ahead,
                                       "within": block_ahead | within, "searched": {"shard": 3}}
    plans, runs, arms = {}, {}, dict[str, Any]()
    for arm, options in told.items():
        sides = bench.sides(case)
        plans[arm] = ml.plan(sides.graph, "buckets", cost, bucket_bytes=BLOCK_BYTES, **{"machine": machine} | options)
        runs[arm] = runtime(plans[arm].program(comm.rank), transport=comm)
        arms[arm] = partial(runs[arm], *sides.inputs)
    arms["torch"] = step
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    rounds = max(5, int(comm.gather(seconds)[0]))
    for _ in range(rounds):
        for arm, call in arms.items():
            call()
            comm.gather(None)
            begin = perf_counter()
            for _ in range(4):
                call()
            samples[arm].append((perf_counter() - begin) / 4)
            if arm in runs:
                runs[arm].settle()
    peaks = {arm: {"planned": run.peak_bytes, "allocated": allocated(run)} for arm, run in runs.items()}
    for run in runs.values():
        run.close()
    slowest = {arm: np.max(comm.gather(times), axis=0).tolist() for arm, times in samples.items()}
    return {"ranks": comm.size, "peak_bytes": {**peaks, "torch": {"tracked": torch_peak}},
            "searched": plans["searched"].schedule.notes["shards"],
            "step_ms": {arm: spread(s) for arm, s in slowest.items()},
            "prediction_error": {arm: spread([plan.period / 1e6 / t - 1 for t in slowest[arm]], 1.0)
                                 for arm, plan in plans.items()},
            "against": {f"{a} / {b}": ratio(slowest, a, b) for a, b in (
                ("parameters", "whole"), ("parameters", "torch"), ("within", "torch"), ("within", "parameters"))}
            } if not comm.rank else None


def fully_sharded(case: Case, comm: Any, where: str, block: str) -> tuple[Any, int]:
    """Torch's step of a network whose blocks are sharded over gloo, and the most bytes that its tracker has seen: of
    parameters, gradients, activations and the optimizer's states."""
    from importlib import import_module

    import torch
    from torch import distributed
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import fully_shard

    place = comm.gather(tempfile.mktemp(prefix="minidl-gloo-"))[0]
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)
    mesh = distributed.init_device_mesh("cpu", (comm.size,))
    twins, found = import_module(where), list[Any]()
    plain, adamw = twins.load, torch.optim.AdamW

    def optimizer(*arguments: Any, **more: Any) -> Any:
        found.append(adamw(*arguments, **more))
        return found[-1]

    def load(twin: Any, model: Any) -> Any:
        network = plain(twin, model)
        for part in network.modules():
            if isinstance(part, getattr(twins, block)):
                fully_shard(part, mesh=mesh)
        found.append(fully_shard(network, mesh=mesh))
        return network

    with mock.patch.object(twins, "load", load), mock.patch.object(torch.optim, "AdamW", optimizer):
        step = language.sides(case).step
    step()
    tracker = FSDPMemTracker(*found)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return step, int(next(n for name, n in peak.items() if str(name) == "Total"))


def show(name: str, entry: dict[str, Any]) -> None:
    """Prints a network's results."""
    print(f"\n{name}")
    for arm, s in entry["step_ms"].items():
        peak = entry["peak_bytes"].get(arm, {})
        print(f"  {arm:18} {s['median']:9.3f} ms   " + ", ".join(f"{what} {n:,}" for what, n in peak.items()))
    for what, r in entry["against"].items():
        print(f"  {what:28} {r['median']:6.3f}   p10 {r['p10']:6.3f}   p90 {r['p90']:6.3f}")
    print("  prediction error: " + ", ".join(f"{a} {e['median']:+.1%}" for a, e in entry["prediction_error"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds per network, at least")
    parser.add_argument("--only", choices=CASES, help="one of the networks")
    parser.add_argument("--busy", action="store_true", help="the record says that other processes used the machine")
    parser.add_argument("--shards", action="store_true", help="ranks of mpiexec that share out")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "busy": arguments.busy, "networks": {}}
    if arguments.shards:
        if entry := of_shards(arguments.seconds):
            show("gpt on ranks", entry)
            save("memory_shards", {**record, "networks": {"gpt": entry}}, arguments.out)
        return
    for name in [arguments.only] if arguments.only else CASES:
        record["networks"][name] = measured(name, arguments.seconds)
        show(name, record["networks"][name])
    save("memory", record, arguments.out)


if __name__ == "__main__":
    main()
