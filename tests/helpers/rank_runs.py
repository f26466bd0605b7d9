"""Small trainings on ranks, and the same in one process: settings say what is trained and how, and all that is left
has equal bits. `check(settings)` is the property; a job of the command line's trainers has `trained(job, ranks)`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from helpers import IMPORTABLE, PATIENCE, ROOT, deadline
from launcher import MPIEXEC, printed
from replays import replay_together

import minidl as ml
from minidl import models, nn, ops, optim, schedulers
from minidl.autograd.tape import Tape, current, use
from minidl.devices.far import Mapped
from minidl.kernels import vectors
from minidl.pricing.cost import Link
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, runtime
from minidl.schedulers import pipeline
from minidl.testing.replay import Replay
from minidl.training import checkpoint
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

RANKS, MICRO_BATCHES, SHARE, STEPS, WIDTH, CLASSES = 2, 4, 4, 3, 12, 5
COST = ml.CostModel.analytic()
OPTIMIZERS: dict[str, Any] = {"sgd": functools.partial(optim.SGD, lr=0.05, momentum=0.9),
                              "adam": functools.partial(optim.Adam, lr=0.01),
                              "adamw": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1),
                              "nadamw": functools.partial(optim.NAdamW, lr=0.003),
                              "muon": lambda parameters, **more: optim.Muon(
                                  [p for p in parameters if len(p.shape) == 2], 0.01,
                                  others=[p for p in parameters if len(p.shape) != 2], **more)}


# ------------------------------------------------------------------------------------------------------------- networks
class Network(nn.Module):
    """Layers, with a norm and dropout after each if wanted; the last one may have the weight of the first. A slice adds
    to the output of each layer the output that the slice before it had there, `past`; the first one adds its own."""

    def __init__(self, tied: bool = False, norm: bool = False, drop: bool = False) -> None:
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(WIDTH) for _ in range(7)] if norm else [])
        self.drop = nn.Dropout(0.25) if drop else None
        if tied:
            self.layers[7].weight = self.layers[0].weight

    def forward(self, x: Any, past: dict[int, Any] | None = None) -> Any:
        for i, layer in enumerate(self.layers):
            x = ops.tanh(layer(x))
            if past is not None:
                past[i] = x = x + past.get(i, x)
            if len(self.norms) and i < 7:
                x = self.norms[i](x.reshape(SHARE, 1, 1, WIDTH)).reshape(SHARE, WIDTH)
            if self.drop is not None and i < 7:
                x = self.drop(x)
        return x


class Shared(nn.Module):
    """The first layer's weight is the last one's, transposed; or is used in half of all layers, another in two more."""

    def __init__(self, everywhere: bool) -> None:
        width = WIDTH if everywhere else WIDTH - 2
        one, two = nn.Linear(WIDTH, width), nn.Linear(width, width)
        uses = {3: one, 4: two, 5: one, 6: two, 7: one} if everywhere else {}
        self.layers = nn.ModuleList([one, *(nn.Linear(width, width) for _ in range(7))])
        for i, used in uses.items():
            self.layers[i].weight = used.weight
        self.back = not everywhere

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return ops.matmul(x, self.layers[0].weight) if self.back else x


class Block(nn.Module):
    """A layer of the sum of its inputs and its activation, of one block, so that cuts lie between blocks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, *inputs: Any) -> Any:
        return ops.relu(self.linear(functools.reduce(ops.add, inputs)))


class Experts(nn.Module):
    """Layers, every second of which has experts; `told` gives their number, top_k, capacity and so on. With `ties` all
    experts have equal scores in the first step. The rest is as in `Network`."""

    def __init__(self, tied: bool = False, norm: bool = False, drop: bool = False, layers: int = 4, ties: bool = False,
                 **told: Any) -> None:
        told = {"experts": 6, "top_k": 2, **told}
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.experts = nn.ModuleList([nn.MoE(WIDTH, 8, **told) for _ in range(layers // 2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(WIDTH) for _ in range(layers)] if norm else [])
        self.drop = nn.Dropout(0.25) if drop else None
        if tied:
            self.layers[layers - 1].weight = self.layers[0].weight
        for each in self.experts if ties else ():
            each.router.weight.assign(np.zeros(each.router.weight.shape, "f"))

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = ops.tanh(layer(x))
            x = x + self.experts[i // 2](x) if i % 2 else x
            if len(self.norms):
                x = self.norms[i](x.reshape(x.shape[0], 1, 1, WIDTH)).reshape(x.shape[0], WIDTH)
            if self.drop is not None:
                x = self.drop(x)
        return x


class Skipping(nn.Module):
    """Blocks in a row, of which each reads the result before it, and those that `reads` gives besides."""

    def __init__(self, blocks: int, reads: dict[int, list[int]]) -> None:
        sizes = [WIDTH, *[64] * (blocks - 1), WIDTH]  # all blocks about alike, so that each is a stage
        self.reads, self.blocks = reads, nn.ModuleList([Block(*pair) for pair in pairwise(sizes)])

    def forward(self, x: Any) -> Any:
        made = [x]
        for i, block in enumerate(self.blocks):
            made.append(block(*(made[j + 1] for j in self.reads.get(i, [])), made[-1]))
        return made[-1]


class Joining(nn.Module):
    """Blocks that read joined results: the weighed sum of "all" earlier ones, features that have "grown", or a "U"."""

    def __init__(self, how: str, blocks: int = 8) -> None:
        self.how, up = how, blocks // 2
        widths = [WIDTH + 4 * i if how == "grown" else WIDTH * (1 + (how == "U" and i >= up)) for i in range(blocks)]
        self.blocks = nn.ModuleList([Block(width, 4 if how == "grown" else WIDTH) for width in widths])
        self.weights = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(blocks if how == "all" else 0)])

    def forward(self, x: Any) -> Any:
        made, count = [x], len(self.blocks)
        for i, block in enumerate(self.blocks):
            if self.how == "all":
                every = ops.stack(made, 0)
                x = block((every * ops.sigmoid(self.weights[i](every))).sum(0))
            elif self.how == "grown":
                x = nn.concat([x, block(x)], axis=1)
            else:
                x = block(x if i < count // 2 else nn.concat([x, made[count - i]], axis=1))
            made.append(x)
        return x


#: by name: what `network` of the settings may be; each is made without arguments
NETWORKS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: models.mlp(WIDTH, *[16] * 7, CLASSES), "experts": Experts, "transposed": lambda: Shared(False),
    "everywhere": lambda: Shared(True),
    "odd widths": lambda: models.mlp(WIDTH, 40, 40, 36, 40, 40, CLASSES),
    "over a stage": lambda: Skipping(3, {2: [0]}), "to every stage": lambda: Skipping(4, {2: [0], 3: [0, 1]}),
    "within chunks": lambda: Skipping(4, {3: [0, 1]}),
    **{how: functools.partial(Joining, how) for how in ("all", "grown", "U")}}


# ---------------------------------------------------------------------------------------------------------- one process
def batches(replica: int, micro_batches: int = MICRO_BATCHES, bad: tuple[int, ...] = (), rows: int = SHARE
            ) -> list[list[np.ndarray]]:
    """Of each step x and y of every micro-batch; in steps `bad` a number of one micro-batch of the first replica is
    infinite."""
    random = np.random.default_rng(5 + replica)
    found = [[part for _ in range(micro_batches)
              for part in (random.standard_normal((rows, WIDTH)).astype("f"), random.integers(0, CLASSES, rows))]
             for _ in range(STEPS)]
    for step in bad if replica == 0 else ():
        found[step][2 * (step % micro_batches)][0, 0] = np.inf
    return found


class Run:
    """One process's network and step under these settings."""

    def __init__(self, settings: dict[str, Any], replica: int = 0) -> None:
        ml.seed(1)
        self.settings, self.replica, self.count = settings, replica, settings.get("micro_batches", MICRO_BATCHES)
        self.rows = settings.get("rows", SHARE)
        network = settings.get("network", Network)
        flags = (bool(settings.get(name)) for name in ("tied", "norm", "drop"))
        self.model = (Experts(*flags, **settings.get("told", {})) if network == "experts"
                      else NETWORKS[network]() if isinstance(network, str) else network(*flags))
        self.scaler = optim.GradScaler(8.0, growth_interval=2) if settings.get("scaled") else None
        self.optimizer = OPTIMIZERS[settings.get("optimizer", "sgd")](
            self.model.parameters(), max_norm=settings.get("clip"), scaler=self.scaler)
        self.every: int = settings.get("every", self.count)  # micro-batches of an update
        self.totals: dict[int, Any] = {}

    def backward(self, i: int, parts: tuple[Any, ...]) -> None:
        """Of a micro-batch, or of a slice: the last one's is that of all."""
        group = 2 * i // self.count if self.settings.get("groups") else 0
        slices = self.settings.get("slices", 1)
        follows = i % slices > 0
        with ml.micro_batch(i, (self.replica * self.count + i) * self.rows, follows=follows,
                            **({"group": group} if self.settings.get("groups") else {})):
            past = None if slices == 1 else self.past if follows else {}
            loss = nn.cross_entropy(self.model(parts[2 * i], *([past] if slices > 1 else [])), parts[2 * i + 1])
            more = nn.balance_loss(self.model)
            loss = loss if more is None else loss + more
            if follows:
                loss = self.loss + loss
            if (i + 1) % slices:
                self.past, self.loss = past, loss
                return
            with ml.dither(self.settings.get("dither", 0)):
                (loss * (1 / self.every)).backward(self.scaler and self.scaler.scale)
            if self.settings.get("loss"):
                part = loss.detach() * (1 / self.count)
                self.totals[group] = ops.add(self.totals[group], part) if group in self.totals else part
                if i + 1 == self.count:
                    self.total = functools.reduce(ops.add, self.totals.values())
                    self.totals = {}
            if self.every < self.count and (i + 1) % self.every == 0:
                self.optimizer.step()

    def step(self, *parts: Any) -> Any:
        for i in range(self.count):
            self.backward(i, parts)
        if self.every == self.count:
            self.optimizer.step()
        return self.total if self.settings.get("loss") else None

    def batches(self) -> list[list[np.ndarray]]:
        return batches(self.replica, self.count, self.settings.get("bad", ()), self.rows)

    def recorded(self) -> Any:
        return ml.record(self.step, *batches(0, self.count, rows=self.rows)[0])

    def tensors(self, held: set[int] | None = None) -> dict[str, bytes]:
        """By name, of storages that are `held`: all parameters; running statistics, of which each replica has its own,
        of a single one; states of the optimizer, of which ranks may have shares, if they are whole."""
        shares = any(self.settings.get(name) for name in ("shard", "placed", "experts_over"))
        owners = [self.model] if shares else [self.model, self.optimizer]
        return {name: t.numpy().tobytes() for owner in owners for name, t in owner.named_tensors()
                if (held is None or id(t.storage) in held)
                and (self.settings.get("replicas", 1) == 1 or isinstance(t, ml.Parameter) or owner is self.optimizer)}


@dataclass(frozen=True)
class Left:
    """What a training leaves: losses of each replica, all tensors by name, and of a stale one its log of versions."""

    losses: list[list[bytes]]
    tensors: dict[str, bytes]
    log: Any = ()


#: what only ranks and their plans know
OF_RANKS = {"scheduler", "ranks", "options", "recompute", "offload", "split", "saved", "limit"}
_left: dict[str, Left] = {}


def alone(settings: dict[str, Any], log: Any = ()) -> Left:
    """What one process leaves: by the log of a stale run, or one share after the other, of which it adds up the
    gradients in this order. Settings that differ only in their plans share it."""
    if "every" in settings or callable(settings.get("network")):
        return trained_alone(settings, log)
    key = repr(sorted((name, value) for name, value in settings.items() if name not in OF_RANKS))
    if key not in _left:
        _left[key] = trained_alone(settings)
    return _left[key]


def trained_alone(settings: dict[str, Any], log: Any = ()) -> Left:
    replicas = settings.get("replicas", 1)
    losses = [list[bytes]() for _ in range(replicas)]
    if "every" in settings:
        stages = settings.get("ranks", RANKS) * settings.get("options", {}).get("chunks", 1)
        runs = [((run := Run(settings, r)), run.recorded()) for r in range(replicas)]
        replays = [Replay(graph, pipeline.balanced(graph, COST, stages)) for _, graph in runs]
        for step, parts in enumerate(zip(*(run.batches() for run, _ in runs), strict=True)):
            found = replay_together(replays, [tuple(p) for p in parts], [e for e in log if e.step == step])
            for own, loss in zip(losses, found, strict=True):
                own += [] if loss is None else [np.asarray(loss).tobytes()]
        return Left(losses, runs[0][0].tensors())
    if replicas == 1:
        run = Run(settings)
        execute = ml.SequentialExecutor(run.recorded())
        for parts in run.batches():
            loss = execute(*parts)
            losses[0] += [] if loss is None else [np.asarray(loss).tobytes()]
        return Left(losses, run.tensors())
    with use(Tape()):
        run = Run(settings)
        counter = ml.autograd.random.dropout_counter()
        for step in range(STEPS):
            shares, began = [], np.array(counter.data)
            for run.replica in range(replicas):
                counter.data[...] = began  # all replicas are in the same step
                for p in run.model.parameters():
                    p.grad = None
                for i in range(run.count):
                    run.backward(i, tuple(run.batches()[step]))
                if settings.get("loss"):
                    losses[run.replica].append(np.asarray(run.total).tobytes())
                shares.append([p.grad.numpy().copy() for p in run.model.parameters()])
            for p, *grads in zip(run.model.parameters(), *shares, strict=True):
                p.grad.assign(functools.reduce(np.add, grads) * np.float32(1 / replicas))
            run.optimizer.step()
        return Left(losses, run.tensors())


def recorded(**settings: Any) -> tuple[Run, Any]:
    """A run of a plain network of eight layers, and the graph of its step, which returns the loss."""
    run = Run({"loss": True, "network": "mlp", **settings})
    return run, run.recorded()


# ---------------------------------------------------------------------------------------------------------------- ranks
def planned(graph: Any, settings: dict[str, Any]) -> ml.Plan:
    name = settings.get("scheduler", "zb_h1")
    kind = schedulers.find(name).parallel if isinstance(name, str) and not name.endswith(".csv") else "pipeline"
    replicas = settings.get("replicas", 1)
    machine = ml.Machine(replicas) if kind == "data" else ml.Machine(settings.get("ranks", RANKS), replicas=replicas)
    if isinstance(name, str) and name.endswith(".csv"):
        name = schedulers.find(name, kind)
    if "limit" in settings:  # a share of the bytes that the plain plan needs
        most = max(ml.plan(graph, name, COST, machine, **settings.get("options", {})).peak_bytes)
        machine = replace(machine, memory_limit=int(most * settings["limit"]))
    plan = ml.plan(graph, name, COST, machine, recompute=settings.get("recompute", "none"),
                   split=settings.get("split", 1), offload=settings.get("offload", "none"),
                   shard=settings.get("shard", 0), experts_over=settings.get("experts_over", "none"),
                   **settings.get("options", {}))
    if not settings.get("saved"):
        return plan
    with tempfile.TemporaryDirectory() as folder:
        file, again = f"{folder}/plan.csv", {}
        if settings["saved"] == "torch":
            Path(file).write_text(pipeline.for_torch(plan))
            again = {"recompute": settings.get("recompute", "none")}
        else:
            plan.schedule.save(file)
        read = schedulers.find(file, kind)
        chunks = {} if kind == "data" else read.known(chunks=plan.placement.chunks)
        return ml.plan(graph, read, COST, machine, **again, **chunks)


def prepared(settings: dict[str, Any], only: int | None = None) -> list[tuple[Run, ml.Plan]]:
    """The run and the plan of each rank. In one process there is one recording and one plan; each rank has them on data
    of its own. `only` one rank, a process of its own, records and plans for itself."""
    ranks = settings.get("ranks", RANKS)
    run = Run(settings, (only or 0) // ranks)
    graph = run.recorded()
    plan = planned(graph, settings)
    others = range(1, ranks * settings.get("replicas", 1)) if only is None else ()
    return [(run, plan), *(on_data_of_its_own(run, graph, plan, rank // ranks) for rank in others)]


def on_data_of_its_own(run: Run, graph: Any, plan: ml.Plan, replica: int) -> tuple[Run, ml.Plan]:
    """A copy for another rank."""
    own, memo = copy(run), {id(device := current().device): device}
    own.replica, (own.model, own.optimizer) = replica, deepcopy((run.model, run.optimizer), memo)
    live = {id(spec.live): deepcopy(spec.live, memo) for spec in graph.storages if spec.live is not None}
    talking, schedule = plan.with_messages
    talking = talking.with_live(live, (replica - run.replica) * run.count * run.rows)
    return own, replace(plan).with_known(with_messages=(talking, schedule))


def held_by(run: DistributedExecutor) -> set[int]:
    """The ids of the live storages of which a rank has the whole, or has had it gathered."""
    return {id(live) for s in run.program.graph.storages for live in (s.live, s.share_of) if live is not None}


def train(communicator: Any, run: Run, plan: ml.Plan) -> tuple[list[bytes], dict[str, bytes], list[Any]]:
    """A rank's losses, tensors and log. Planned and allocated bytes must be equal."""
    stale = "every" in run.settings
    hint = getattr(plan, "hint", None) is not None or plan.chosen_sums
    execute = (runtime(plan.program(communicator.rank), transport=communicator) if hint
               else DistributedExecutor(*plan.with_messages, communicator, logged=stale))
    losses = [execute(*parts) for parts in run.batches()]
    execute.settle()
    parts = [part.bound for part in (*execute._body, *execute._prologue, *execute._epilogue)]
    memory = {id(m): m for bound in parts for m in (bound.arena, *bound.persistent) if not isinstance(m, Mapped)}
    assert sum(map(len, memory.values())) == execute.peak_bytes
    execute.whole(everywhere=True)
    execute.close()
    return ([np.asarray(loss).tobytes() for loss in losses if loss is not None],
            run.tensors(held_by(execute)), execute.log.entries if stale else [])


def merged(settings: dict[str, Any], found: list[tuple[list[bytes], dict[str, bytes], list[Any]]]) -> Left:
    """What all ranks leave together: one rank of each replica has its losses; those that hold a tensor hold the same
    bits, on all replicas."""
    ranks = settings.get("ranks", RANKS)
    every, losses = list[dict[str, bytes]](), list[list[bytes]]()
    for first in range(0, len(found), ranks):
        own, mine = found[first : first + ranks], dict[str, bytes]()
        for _, tensors, _ in own:
            for name, bits in tensors.items():
                assert mine.setdefault(name, bits) == bits, f"ranks have other bits of {name}"
        every.append(mine)
        losses.append([loss for each, *_ in own for loss in each])
    assert all(tensors == every[0] for tensors in every), "replicas have other bits"
    return Left(losses, every[0], [entry for *_, log in found[:ranks] for entry in log])


def on_ranks(settings: dict[str, Any], own: list[tuple[Run, ml.Plan]] | None = None) -> Left:
    """What loop-back ranks leave, whose replicas leave equal bits."""
    own = own or prepared(settings)
    with deadline():
        return merged(settings, run_ranks(len(own), lambda comm: train(comm, *own[comm.rank])))


def check(settings: dict[str, Any]) -> Left:
    """Ranks leave the losses, parameters and states of one process."""
    settings = {"loss": True, **settings}
    found = on_ranks(settings)
    wanted = alone(settings, found.log)
    differ = [name for name, bits in wanted.tensors.items() if bits != found.tensors[name]]
    assert equal(found, wanted, settings), differ
    return found


def equal(found: Left, wanted: Left, settings: dict[str, Any]) -> bool:
    """Whether losses and tensors have equal bits. Of tasks in parts the last bits may differ where products are the
    library's, so there numbers that are not equal are close."""
    if (found.losses, found.tensors) == (wanted.losses, wanted.tensors) or "split" not in settings or vectors.WIDE:
        return (found.losses, found.tensors) == (wanted.losses, wanted.tensors)
    pairs = [*zip(*(chain.from_iterable(left.losses) for left in (found, wanted)), strict=True),
             *((bits, wanted.tensors[name]) for name, bits in found.tensors.items())]
    return found.tensors.keys() == wanted.tensors.keys() and all(a == b or np.allclose(
        *(np.frombuffer(bits, np.float32) for bits in (a, b)), rtol=1e-5, atol=1e-6) for a, b in pairs)


# ------------------------------------------------------------------------------------------------------------------ MPI
def command(ranks: int, *flags: str) -> tuple[int, Any, str]:
    """Runs `train --json` on so many ranks; its exit code, its record (None without one) and its errors."""
    launch = [str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run([*launch, sys.executable, "-m", "minidl", "train", *flags, "--json", "--costs", "analytic"],
                          capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    said = printed(done)
    return done.returncode, json.loads(said) if said else None, done.stderr


UNDER_MPI = """
import sys
import rank_runs as r
from minidl.runtime.comm.mpi import MPI

comm = MPI()
for settings in eval(sys.argv[1]):
    settings = {"loss": True, "ranks": comm.size // settings.get("replicas", 1), **settings}
    found = comm.gather(r.train(comm, *r.prepared(settings, comm.rank)[0]))
    if comm.rank == 0:
        left = r.merged(settings, found)
        wanted = r.alone(settings, left.log)
        assert (left.losses, left.tensors) == (wanted.losses, wanted.tensors), settings
        print("equal", flush=True)
comm.gather(None)
comm.close()
"""


def check_under_mpi(ranks: int, *every: dict[str, Any]) -> None:
    """`check`, on ranks that are processes of MPI."""
    done = subprocess.run([str(MPIEXEC), "-n", str(ranks), sys.executable, "-c", UNDER_MPI, repr(every)],
                          capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": IMPORTABLE, "MINIDL_MPI_SILENT_SECONDS": "60"})
    assert (done.returncode, done.stdout) == (0, "equal\n" * len(every)), done.stderr


# ------------------------------------------------------------------------------------------------------------- trainers
def trained(job: Job, ranks: int = 1, replicas: int = 1, result: Callable[[Trainer], Any] | None = None,
            load: Path | None = None) -> list[Any]:
    """`result(trainer)` of each rank after some steps, by default losses and the digest of all parameters; of one
    process if the job is not parallel. `load`: the checkpoint that it goes on from."""
    first = Recorded(job, 0, replicas)
    own = [first.copy(rank // ranks) for rank in range(ranks * replicas)]
    for recorded in own if load else ():
        checkpoint.load(load, recorded.model, recorded.optimizer, loader=recorded.train_data)

    def finished(trainer: Trainer) -> Any:
        for _ in range(STEPS):
            trainer.step()
        trainer.settle() if job.parallel == "none" else trainer.finish()
        return result(trainer) if result else (trainer.losses, trainer.params_sha256())

    def work(communicator: Any) -> Any:
        mine = own[communicator.rank]
        return finished(RankTrainer(mine, COST, communicator, (1.0, 1e-3)) if job.parallel == "data"
                        else PipelineTrainer(mine, COST, communicator, Link(50.0, 1e3)))

    if job.parallel == "none":
        return [finished(Trainer(own[0], COST))]
    with deadline():
        return run_ranks(len(own), work)
