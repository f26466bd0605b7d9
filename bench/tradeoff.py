"""Accuracy against predicted time of every method that changes which values a backward pass reads.

    python bench/tradeoff.py [--only NETWORK] [--add] [--out FILE.json]

Each point is two commands: one trains, one predicts the step of the same plan on assumed costs and links. Predicted
times do not depend on a machine, and accuracies follow from bits, so a busy machine gives the same record. Staleness is
counted in the version log of the run, in updates between reading weights and changing them; a policy whose weights are
new but whose gradients are late has that delay. Where the command line can replay a log, the point is replayed, and its
parameters must have equal bits. Each method has the same few tries for its learning rate, judged on a fifth of the
training part; the best one trains on the whole part. `--add` keeps the points of the record whose commands are still
these, and says which ones it measured. `bench/plots.py tradeoff` draws the record.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import RESULTS, machine, save

from minidl import data
from minidl.cli import main as minidl
from minidl.cli import show
from minidl.core.tasks import Kind, unpack
from minidl.data.loader import fifth
from minidl.data.text import pydoc_text
from minidl.runtime.version_log import VersionRead, from_lines

LANES = "--scheduler multi_stream --streams 16"  #: as many as a sweep can use
RANKS = "--latency 1 --bandwidth 10GB"
HELD_OUT = f"{Path(__file__).resolve()}:held_out"


def held_out(split: str) -> tuple[Any, Any]:
    """The training part of the digits, of which a fifth is the test part. `--data` reads it."""
    whole = data.digits(1).dataset
    x, y = whole.rows(fifth(whole.samples, split))
    return x, y


def held_out_of(network: Network, folder: Path) -> str:
    """The value of `--data` for the training part of a network's data, of which a fifth is the test part: for text a
    file in this folder, of which minidl judges by the last fifth."""
    if network.metric == "accuracy":
        return HELD_OUT
    file = folder / "manual.txt"
    file.write_bytes(pydoc_text()[0])
    return str(file)


@dataclass(frozen=True)
class Point:
    """A method: its name and the flags of both commands. `batch`: the samples of a step. `plans`: flags for the
    prediction alone. `late`: how many updates late its gradients are, or None: the version log of its run says it."""

    name: str
    flags: str
    batch: int
    plans: str = ""
    late: float | None = 0.0

    def steps(self, network: Network) -> int:
        return network.samples // self.batch

    def train(self, network: Network, rate: float | None = None) -> str:
        """The command that trains; `rate` replaces the rate that the flags give."""
        flags = f"{network.flags} {self.flags}"
        if rate is not None:
            flags = re.sub(r" --lr \S+", "", flags) + f" --lr {rate:g}"
        return f"train {flags} --batch-size {self.batch} --costs analytic --steps {self.steps(network)}"

    def rates(self, network: Network) -> list[float]:
        """The learning rates to try."""
        own = float(re.findall(r" --lr (\S+)", f"{network.flags} {self.flags}")[-1])
        return [float(f"{factor * own:.2g}") for factor in network.tries]

    def plan(self, network: Network) -> str:
        flags = re.sub(r" --(data|lr|feed) \S+", "", f" {network.flags} {self.flags}")
        return f"plan{flags} --batch-size {self.batch} --costs analytic {self.plans}"


@dataclass(frozen=True)
class Network:
    """`metric` is of the test data; each point trains on `samples`, with so many `seeds`. `tries`: by which a point's
    rate is multiplied, of which the best on held-out data trains it; none: the rate is not tuned."""

    flags: str
    samples: int
    metric: str
    seeds: int
    points: tuple[Point, ...]
    tries: tuple[float, ...] = ()

    def worth(self, value: float | None) -> float:
        """What runs have learned, the more the better; a run that has diverged is worth least."""
        return -math.inf if value is None else value if self.metric == "accuracy" else -value


def pipelines(batch: int, together: int) -> list[Point]:
    """Pipelines on four ranks. Exact ones update after `batch` samples, stale ones after each of `together`
    micro-batches of so many, `adl` after two and `pipedream_2bw` after four."""
    def stale(name: str, told: str) -> Point:
        return Point(name, f"{four} --micro-batches {together} --scheduler {told}", batch * together, RANKS, None)

    four, told = "--parallel pipeline --ranks 4", " --scheduler-arg "
    return [*(Point(name, f"{four} --micro-batches 4 --scheduler {name}", batch, RANKS)
              for name in ("gpipe", "one_f_one_b", "zb_h1")),
            *(stale(f"{name}{', ' * bool(history)}{history}", name + (told + f"history={history}") * bool(history))
              for name in ("pipedream", "layerpipe2") for history in ("", "average", "predicted")),
            stale("layerpipe", "layerpipe"), stale("paci", f"paci{told}mini_batches={together}"),
            stale("pipedream_2bw", f"pipedream_2bw{told}mini_batches={together // 4}"),
            stale("adl", f"adl{told}mini_batches={together // 2}"),
            *(stale(f"pipedream, {name}", f"pipedream --optimizer {name} --lr 0.003") for name in ("adamw", "nadamw"))]


def on_ranks(batch: int, rate: float) -> list[Point]:
    """Four data-parallel ranks that take `batch` samples each, at the rate that suits their mean."""
    four = f"--parallel data --ranks 4 --lr {rate} --scheduler"
    return [*(Point(name, f"{four} {name} --micro-batches 2", 4 * batch, RANKS, late)
              for name, late in (("barrier", 0.0), ("acco", 0.0), ("delayed_update", 1.0))),
            *(Point(f"layup{', rank 0 four times slower' * bool(slow)}", f"{four} layup --micro-batches 4{slow}",
                    16 * batch, RANKS, None) for slow in ("", " --slow 0=4"))]


def sweeps(batch: int, name: str, counts: tuple[int, ...]) -> list[Point]:
    return [Point(f"{name}, {k} sweep{'s' * (k != 1)}", f"--backward {name} --sweeps {k}", batch, LANES)
            for k in counts]


MLP, SNN = "--model mlp --model-arg layers=5 --model-arg hidden=64", "--model snn"
REVERSIBLE = "--model revnet --model-arg blocks=6 --model-arg hidden=64 --lr 0.005"
DIGITS = 12 * 1437  #: samples of twelve epochs
TRIES = (1 / 9, 1 / 3, 1, 3, 9)
NETWORKS = {
    "digits": Network("--data digits --lr 0.02", DIGITS, "accuracy", 3, (
        Point("in_order", MLP, 16), *(Point(p.name, f"{MLP} {p.flags}", p.batch, p.plans) for p in (
            *sweeps(16, "jacobi", (1, 2, 4)), Point("deeppcr", "--backward deeppcr", 16, LANES),
            *(Point(f"deeppcr, {k} Newton iteration{'s' * (k > 1)}", f"--backward deeppcr --newton {k}", 16, LANES)
              for k in (1, 2)),
            *(Point(f"dither {s}", f"--dither {s}", 16) for s in (1, 4)))),
        *(Point(name, f"{SNN} {told}", 16) for name, told in (
            ("spiking, BPTT", "--model-arg backward=bptt"), ("spiking, SLTT", ""),
            ("spiking, SLTT-2", "--model-arg chosen=2"))),
        *(Point(f"PARTIME, {feed}", f"{MLP} --scheduler partime --scheduler-arg stages=4 --feed {feed} --lr 0.05 "
              "--momentum 0", 16, late=3.0)
          for feed in ("ring", "hold=16", "batches")),
        Point("PD-ASGD", f"{MLP} --scheduler pd_asgd --micro-batches 8", 128, late=None),
        *(Point(p.name, f"{MLP} {p.flags}", p.batch, p.plans, p.late)
          for p in (*pipelines(16, 8), *on_ranks(16, 0.04))),
        Point("reversible blocks, in_order", REVERSIBLE, 16),
        Point("reversible blocks, PETRA", f"{REVERSIBLE} --parallel pipeline --ranks 4 --micro-batches 8 "
              "--scheduler petra", 128, RANKS, None)), TRIES),
    "gpt": Network("--model gpt --model-arg preset=tiny --model-arg layers=4 --model-arg dropout=0 --data pydoc "
                   "--lr 0.1", 3200, "bits_per_byte", 1, (
        Point("in_order", "", 8), *sweeps(8, "highway", (0, 1, 2)), *sweeps(8, "jacobi", (4, 8)),
        Point("dither 4", "--dither 4", 8), Point("PD-ASGD", "--scheduler pd_asgd --micro-batches 8", 64, late=None),
        *pipelines(8, 8), *on_ranks(8, 0.2)), TRIES),
}

REPLAYED = ("pd_asgd", "layup")  #: whose logs the command line replays


def command(told: str) -> dict[str, Any]:
    """The JSON object that a command prints. Raises RuntimeError with its message if it fails."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = minidl([*shlex.split(told), "--json"])
    if code:
        raise RuntimeError(f"minidl {told}: {(errors.getvalue().splitlines() or ['no message'])[-1]}")
    return dict(json.loads(out.getvalue()))


def lateness(log: list[VersionRead]) -> float:
    """The mean number of versions of a layer between the one that a forward read and the one that its gradient changed:
    updates, and layers of other ranks that were mixed in."""
    made: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    read = []
    for e in log:
        task = unpack(e.key)
        if task.kind == Kind.U and e.source < 0:
            made.setdefault((e.step, e.rank, task.unit), []).append((task.micro_batch, e.version - 1))
        elif task.kind == Kind.F and e.stage == task.unit:
            read.append(((e.step, e.rank, task.unit), task.micro_batch, e.version))
    return float(np.mean([min(update for update in made[place] if update[0] >= batch)[1] - version
                          for place, batch, version in read]))


def ran(told: str) -> dict[str, Any] | None:
    """The JSON object of a run; None if it has diverged. Raises RuntimeError if it fails otherwise."""
    try:
        return command(told)
    except RuntimeError as error:
        if not re.search("the loss( on test data)? is nan", str(error)):
            raise
        return None


def tried(network: Network, point: Point) -> dict[float, float | None]:
    """The mean of what runs of all seeds with each rate learned on held-out data; None if one of them has diverged."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        held_out = held_out_of(network, Path(folder))
        for rate in point.rates(network):
            train = re.sub(r"--data \S+", f"--data {held_out}", point.train(network, rate))
            runs = [ran(f"{train} --seed {seed}") for seed in range(network.seeds)]
            found[rate] = None if None in runs else float(np.mean([run["test"][network.metric] for run in runs if run]))
    return found


def measured(network: Network, point: Point) -> dict[str, Any]:
    """The record of a point: its commands, what its runs of all seeds learned, predicted milliseconds and lateness, and
    what its rates learned on held-out data."""
    tries = tried(network, point)
    rate = max(tries, key=lambda rate: network.worth(tries[rate])) if tries else None
    train, plan = point.train(network, rate), point.plan(network)
    found, late, same = list[float | None](), point.late, None
    for seed in range(network.seeds):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            kept = f" --log-versions {log}" if point.late is None else ""
            if (run := ran(f"{train} --seed {seed}{kept}")) is None:
                found.append(None)
                continue
            found.append(run["test"][network.metric])
            if kept and late is None:
                late = lateness(from_lines(log.read_text().splitlines(), "the log"))
                if any(name in train for name in REPLAYED):
                    again = command(f"{train} --seed {seed} --replay {log}")
                    same = again["params_sha256"] == run["params_sha256"]
                    if not same:
                        raise RuntimeError(f"minidl {train}: a replay of the log has other parameters")
    step = command(plan)["predicted_step_ms"]
    return {"train": f"minidl {train}", "plan": f"minidl {plan}".strip(), network.metric: found, "step_ms": step,
            "ms": round(step * point.steps(network), 3), "late": None if late is None else round(late, 2),
            "replayed": same, **({"tries": {f"{rate:g}": seen for rate, seen in tries.items()}} if tries else {})}


def known(network: Network, point: Point) -> list[str]:
    """The commands that train a point, one for each rate to try."""
    return [f"minidl {point.train(network, rate)}" for rate in point.rates(network) or [None]]


def diverges(values: list[float | None], metric: str) -> bool:
    """Whether a run ended without a loss, or has learned less than that all bytes are alike, which is 8 bits."""
    return any(value is None or (metric == "bits_per_byte" and value > 8) for value in values)


def rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of each point: network, method, what it learned, predicted time, updates late, command."""
    for name, network in record["networks"].items():
        for point, found in network["points"].items():
            values = found[network["metric"]]
            seen = "diverges"
            if not diverges(values, network["metric"]):
                mean, low, high = (100 * number for number in (np.mean(values), min(values), max(values)))
                seen = (f"{mean:.1f} % ({low:.1f} to {high:.1f})" if network["metric"] == "accuracy"
                        else f"{mean / 100:.3f} bits per byte")
            late = "" if found["late"] is None else f"{found['late']:.2f}"
            yield name, point, seen, f"{found['ms']:.4g} ms", late, found["train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=NETWORKS, help="one network")
    parser.add_argument("--add", action="store_true", help="measure only what the record lacks")
    parser.add_argument("--out", metavar="FILE.json", help="file for the record")
    arguments = parser.parse_args()
    networks, about, found, added = NETWORKS, machine(), dict[str, Any](), list[str]()
    before = json.loads((RESULTS / "tradeoff.json").read_text()) if arguments.add else {"networks": {}}
    if arguments.only:
        networks = {arguments.only: NETWORKS[arguments.only]}
    with show.progress("training", sum(len(n.points) for n in networks.values())) as done:
        for name, network in networks.items():
            points, kept = dict[str, Any](), before["networks"].get(name, {"points": {}})["points"]
            found[name] = {"metric": network.metric, "samples": network.samples, "seeds": network.seeds,
                           "points": points}
            for point in network.points:
                points[point.name] = kept.get(point.name, {})
                if points[point.name].get("train") not in known(network, point):
                    points[point.name] = measured(network, point)
                    added.append(f"{name}, {point.name}")
                done(sum(len(n["points"]) for n in found.values()))
    record = {"machine": about, "networks": found}
    if arguments.add:
        record = {**before, "networks": before["networks"] | found,
                  "added": [*before.get("added", []), {"points": added, **about}]}
    print(show.table(("network", "method", "learned", "predicted time", "updates late"),
                     [row[:-1] for row in rows(record)]))
    save("tradeoff", record, arguments.out)


if __name__ == "__main__":
    main()
