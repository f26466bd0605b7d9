"""What travels between the ranks of a pipeline, and how long ranks wait for it: before and after three choices.

    python bench/messages.py [--rounds 5] [--out FILE]

- `only_new`: the bytes that ranks send in a step, of networks whose layers read joined results of earlier ones;
- `fill`: steps predicted and measured, with a slow link, where every layer but the last of a rank is computed again;
- `prefetch`: the same for stages that are gathered at one distance, or at another on each rank.

Bytes are counted in plans, and steps predicted from given times. Measured steps are of two ranks (of each replica)
under MPI, one by one, the slowest rank's: each task waits for its time and uses no core, and each message or gather
takes the link's time. Arms run in turn. `waits`: the share of a step in which the mean rank does not compute. Predicted
steps follow each other without a barrier.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]

from common import machine, ratio, save, spread
from data_parallel import waiting

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.tasks import SENDS, Kind
from minidl.pricing.cost import CostModel, Link
from minidl.runtime.comm.mpi import MPI
from minidl.runtime.executors import DistributedExecutor

BLOCKS, WIDTH, SHARE, MICRO_BATCHES = 16, 32, 8, 8
LAYERS = 8  #: of the network whose tasks wait
LINK = Link(10000.0, 100.0)  #: microseconds, bytes per microsecond
RANK_MS = 400.0  #: of a rank's tasks in a step


# ------------------------------------------------------------------------------------------------------------- networks
class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Any) -> Any:
        return ops.tanh(self.linear(x))


class AllEarlier(nn.Module):
    """Each block reads all earlier results, and weighs them by its own query."""

    def __init__(self) -> None:
        self.blocks = nn.ModuleList([Block(WIDTH, WIDTH) for _ in range(BLOCKS)])
        self.queries = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(BLOCKS)])

    def forward(self, x: Any) -> Any:
        made = [x]
        for block, query in zip(self.blocks, self.queries, strict=True):
            every = ops.stack(made, 0)
            made.append(block((every * ops.sigmoid(query(every))).sum(0)))
        return made[-1]


class Growing(nn.Module):
    """Each block adds features to those that it reads, in new memory."""

    def __init__(self) -> None:
        self.blocks = nn.ModuleList([Block(WIDTH + 8 * i, 8) for i in range(BLOCKS)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = nn.concat([x, block(x)], axis=1)
        return x


class UNet(nn.Module):
    """The later half of the blocks also reads the earlier half's results, the last one first."""

    def __init__(self) -> None:
        self.blocks = nn.ModuleList([Block(WIDTH * (1 + (i >= BLOCKS // 2)), WIDTH) for i in range(BLOCKS)])

    def forward(self, x: Any) -> Any:
        made = [x]
        for i, block in enumerate(self.blocks):
            made.append(block(made[-1] if i < BLOCKS // 2 else nn.concat([made[-1], made[BLOCKS - i]], axis=1)))
        return made[-1]


JOINING = {"all earlier results": AllEarlier, "growing features": Growing, "U-Net": UNet}


def batch() -> list[Any]:
    random = np.random.default_rng(0)
    return [part for _ in range(MICRO_BATCHES) for part in (
        random.standard_normal((SHARE, WIDTH), np.float32), random.integers(0, 8, SHARE))]


def recorded(network: Any) -> Any:
    ml.seed(0)
    model = network()
    opt = optim.SGD(model.parameters(), lr=0.01)

    def step(*parts: Any) -> None:
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE):
                (nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / MICRO_BATCHES)).backward()
        opt.step()

    return ml.record(step, *batch())


# ---------------------------------------------------------------------------------------------------------------- bytes
def bytes_sent(plan: Any) -> dict[str, int]:
    """Forward, backward, and the most of a hop."""
    graph = plan.with_messages[0]
    kinds = {name: int(graph.bytes[graph.kind == kind].sum()) for name, kind in zip(("forward", "backward"), SENDS,
                                                                                    strict=True)}
    return {**kinds, "largest_hop": max(plan.sent_bytes.values()), "peak_bytes": max(plan.peak_bytes)}


def only_new() -> Iterator[dict[str, Any]]:
    for name, network in JOINING.items():
        graph = recorded(network)
        for policy, ranks, chunks in (("one_f_one_b", 4, 1), ("interleaved", 4, 2), ("interleaved", 4, 4),
                                      ("interleaved", 2, 8)):
            options = {"chunks": chunks} if chunks > 1 else {}
            found = [bytes_sent(ml.plan(graph, policy, CostModel.analytic(), ml.Machine(ranks), **options, **more))
                     for more in ({}, {"only_new": True})]
            yield {"network": name, "scheduler": policy, "ranks": ranks, "chunks": chunks, "before": found[0],
                   "after": found[1]}


# ---------------------------------------------------------------------------------------------------------------- waits
class Slow(MPI):
    """Ranks whose messages and gathers take a link's time."""

    def _after(self, nbytes: float, transfer: Any) -> Iterator[None]:
        end = perf_counter() + LINK.time(nbytes) / 1e6
        while (left := end - perf_counter()) > 0:
            sleep(min(left, 2e-4))
            yield
        yield from transfer

    def _send(self, array: Any, peer: int, number: int) -> Any:
        send = super()._send(array, peer, number)
        return lambda: self._after(array.nbytes, send())

    def _collect(self, array: Any, bounds: Any, slot: int) -> Any:
        return self._after(array.nbytes, super()._collect(array, bounds, slot))


def times(ranks: int) -> tuple[Any, CostModel]:
    """A network of tasks that wait, and their times."""
    graph, cost = waiting(recorded(lambda: models.mlp(*[WIDTH] * (LAYERS * ranks // 2 + 1))), RANK_MS * ranks)
    return graph, replace(cost, link=LINK)


def fill(policy: str, ranks: int) -> dict[str, Any]:
    """Plans whose ranks compute all layers but the last one again."""
    graph, cost = times(ranks)
    choices = ("R",) if policy == "zb_h1" else ("W", "R", "W+R")
    return {"as before" if each is None else f"fill={each}": ml.plan(
        graph, policy, cost, ml.Machine(ranks), recompute=[int(graph.unit.max())], **({"fill": each} if each else {}))
        for each in (None, *choices)}


def prefetch(policy: str, ranks: int) -> dict[str, Any]:
    """Plans of two replicas whose ranks share out four stages each."""
    machine = ml.Machine(ranks, replicas=2, collective=lambda sizes: LINK.time(sum(sizes.values())))
    each = {d: times(ranks) for d in ("0", "1", "+".join(map(str, range(ranks))), "auto", "full")}  # with own shares
    return {f"prefetch={d}": ml.plan(graph, policy, cost, machine, chunks=4, shard=f"3,prefetch={d},keep=none")
            for d, (graph, cost) in each.items()}


CHOICES = {"fill": (fill, ("one_f_one_b", "interleaved", "zb_h1")), "prefetch": (prefetch, ("interleaved",))}


def work(what: str, policy: str, ranks: int, rounds: int) -> None:
    """Times all arms on this rank; rank 0 writes the samples to standard output."""
    comm = Slow()
    plans = CHOICES[what][0](policy, ranks)
    runs = {name: DistributedExecutor(*plan.with_messages, comm) for name, plan in plans.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            comm.gather(None)
            begin = perf_counter()
            run(*batch())
            took = max(comm.gather(perf_counter() - begin))
            samples[name] += [took] * (turn > 0)
    if comm.rank == 0:
        print(json.dumps(samples))
    comm.gather(None)
    for run in runs.values():
        run.close()
    comm.close()


def arms(what: str, policy: str, ranks: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each plan its steps, predicted and, if there are rounds, measured, and the shares of them in which the mean
    rank waits."""
    plans, samples = CHOICES[what][0](policy, ranks), dict[str, list[float]]()
    if rounds:
        mpiexec, count = Path(sys.executable).parent / "mpiexec", next(iter(plans.values())).ranks
        done = subprocess.run([str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", str(count), sys.executable,
                               __file__, "--work", what, policy, str(ranks), "--rounds", str(rounds)],
                              capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        samples = json.loads(done.stdout.splitlines()[-1])
    found, first = dict[str, dict[str, Any]](), next(iter(plans))
    for name, plan in plans.items():
        busy = float(plan.cost.durations(plan.graph)[plan.graph.kind < Kind.A].sum()) / plan.schedule.ranks
        found[name] = {"predicted_ms": round(plan.period / 1e3, 3), "predicted_waits": round(1 - busy / plan.period, 4),
                       "peak_bytes": list(plan.peak_bytes)}
        if rounds:
            found[name] |= {"step_ms": spread(samples[name]), "times_faster": ratio(samples, first, name),
                            "waits": round(1 - busy / 1e6 / float(np.median(samples[name])), 4)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of measured arms, in turn; 0: predict only (default: 5)")
    parser.add_argument("--out", help="file for the record; default bench/results/messages.json")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work[:2], int(options.work[2]), options.rounds)
        return 0
    record: dict[str, Any] = {
        "machine": machine(), "blocks": BLOCKS, "micro_batches": MICRO_BATCHES, "rounds": options.rounds,
        "link": {"latency_us": LINK.latency, "bytes_per_us": LINK.bandwidth}, "only_new": [*only_new()]}
    for row in record["only_new"]:
        print(f"{row['network']}, {row['scheduler']} on {row['ranks']} ranks of {row['chunks']}: " + ", ".join(
            f"{way} {row['before'][way]:,} -> {row['after'][way]:,} ({row['after'][way] / row['before'][way]:.2f})"
            for way in ("forward", "backward", "peak_bytes")), flush=True)
    for what, (_, policies) in CHOICES.items():
        record[what] = []
        for policy, ranks in ((policy, ranks) for policy in policies for ranks in (2, 4)):
            found = arms(what, policy, ranks, options.rounds * (ranks == 2))
            record[what].append({"scheduler": policy, "ranks": ranks, "arms": found})
            for name, arm in found.items():
                seen = (f", measured {arm['step_ms']['median']:.1f} ms, waits {arm['waits']:.1%}, "
                        f"{arm['times_faster']['median']:.2f}x" if "step_ms" in arm else "")
                print(f"{policy} on {ranks} ranks, {name}: predicted {arm['predicted_ms']:.1f} ms, waits "
                      f"{arm['predicted_waits']:.1%}, peak {max(arm['peak_bytes']):,} bytes{seen}", flush=True)
    save("messages", record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
