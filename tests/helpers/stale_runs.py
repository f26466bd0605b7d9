"""Networks and runs of stale pipelines on ranks, and the replay of their logs in one process."""

from __future__ import annotations

import functools

import numpy as np
import pipelines
from helpers import deadline

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.tasks import unpack
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline
from minidl.schedulers.ordered import Ordered
from minidl.schedulers.pipeline import add_communication
from minidl.schedulers.pipeline.flush import one_f_one_b
from minidl.testing.replay import Replay

MICRO_BATCHES, SHARE, STEPS = 8, 4, 3
COST = ml.CostModel.analytic()
OPTIMIZERS = {"sgd": lambda p: optim.SGD(p, 0.02, momentum=0.9), "adamw": lambda p: optim.AdamW(p, 0.003),
              "nadamw": lambda p: optim.NAdamW(p, 0.003),
              "sgd, clipped": lambda p: optim.SGD(p, 0.02, momentum=0.9, max_norm=0.1),
              "adamw, clipped": lambda p: optim.AdamW(p, 0.003, max_norm=0.1),
              "adamw, scaled": lambda p: optim.AdamW(p, 0.003, max_norm=0.1,
                                                     scaler=optim.GradScaler(8.0, growth_interval=2))}
POLICIES = {"pipedream": ("pipedream", {}), "pipedream, averaged": ("pipedream", {"history": "average"}),
            "pipedream_2bw": ("pipedream_2bw", {"mini_batches": 2}), "paci": ("paci", {"mini_batches": 4}),
            "pipedream_2bw, whole": ("pipedream_2bw", {}), "paci, whole": ("paci", {}),
            "layerpipe": ("layerpipe", {}), "layerpipe2": ("layerpipe2", {}),
            "layerpipe2, averaged": ("layerpipe2", {"history": "average"}),
            "adl": ("adl", {"mini_batches": 4}), "adl, whole": ("adl", {}),
            "pipedream, predicted": ("pipedream", {"history": "predicted"}),
            "layerpipe2, predicted": ("layerpipe2", {"history": "predicted"})}
IN_HALVES = "layerpipe, in halves"
CUT = {IN_HALVES: ("layerpipe", {"method": "inter"})}


class Mixed(nn.Module):
    """Batch norm, dropout, and layers with parameters of their own, over several blocks."""

    def __init__(self):
        self.layers = nn.ModuleList([nn.Linear(12, 16), *(nn.Linear(16, 16) for _ in range(5)), nn.Linear(16, 5)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16) for _ in range(6)])
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = self.drop(ops.relu(ops.reshape(norm(ops.reshape(layer(x), (SHARE, 1, 1, 16))), (SHARE, 16))))
        return self.layers[len(self.layers) - 1](x)


class Normed(Mixed):
    """The same without dropout, whose count LayerPipe cannot keep on two ranks."""

    def __init__(self):
        super().__init__()
        self.drop = lambda x: x


def heavy():
    """A layer in the middle that costs more than the others together: its F, O and W are on a rank each of three."""
    return models.mlp(12, 16, 256, 256, 16, 5)


def bare():
    """On three ranks the middle stage has no parameters."""
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.GELU(), nn.Softplus(), nn.Linear(16, 5))


class Tied(nn.Module):
    """The first layer's weight is the last one's, transposed; or is used in half of all layers, another in two more."""

    def __init__(self, everywhere=False):
        one, two = nn.Linear(12, 12), nn.Linear(12, 12)
        uses = {3: one, 4: two, 5: one, 6: two, 7: one} if everywhere else {}
        self.layers = nn.ModuleList([one, *(nn.Linear(12, 12) for _ in range(7))])
        for i, used in uses.items():
            self.layers[i].weight = used.weight
        self.back = not everywhere

    def forward(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return ops.matmul(x, self.layers[0].weight) if self.back else x


def everywhere():
    return Tied(True)


class Drawn:
    """Layers of random widths."""

    def __init__(self, seed):
        self.widths, self.__name__ = np.random.default_rng(seed).integers(4, 80, 6).tolist(), f"drawn {seed}"

    def __call__(self):
        return models.mlp(12, *self.widths, 5)


def batches():
    random = np.random.default_rng(3)
    return [[part for _ in range(MICRO_BATCHES) for part in (random.standard_normal((SHARE, 12)).astype("f"),
                                                             random.integers(0, 5, SHARE))] for _ in range(STEPS)]


def recorded(every, optimizer="sgd", network=lambda: models.mlp(12, *[16] * 7, 5)):
    ml.seed(1)
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())

    def step(*parts):
        total = None
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / every)
                loss.backward(opt.scaler and opt.scaler.scale)
                part = loss.detach() * (every / MICRO_BATCHES)
                total = part if total is None else ops.add(total, part)
                if every < MICRO_BATCHES and (i + 1) % every == 0:
                    opt.step()
        if every == MICRO_BATCHES:
            opt.step()
        return total

    return model, ml.record(step, *batches()[0])


def update_every(name):
    policy, told = (POLICIES | CUT)[name]
    return pipelines.policy(policy).update_every(MICRO_BATCHES, told.get("mini_batches", 1))


def run(name, ranks, **options):
    """Of a stale run on ranks: losses, each parameter as its rank left it, the log of all ranks, and the plan."""
    policy, told = (POLICIES | CUT)[name]
    every = update_every(name)
    own = []
    for _ in range(ranks):
        model, graph = recorded(every, **options)
        plan = ml.plan(graph, policy, COST, ml.Machine(ranks), **told)
        own.append((model, *add_communication(plan.graph, plan.schedule)))

    def work(communicator):
        model, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator, logged=True)
        losses = [run(*parts) for parts in batches()]
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        return losses, [p.numpy().tobytes() if id(p.storage) in held else None
                        for p in model.parameters()], run.log.entries

    with deadline():
        found = run_ranks(ranks, work)
    losses = [float(value) for value in next(f[0] for f in found if f[0][0] is not None)]
    return losses, [next(b for b in bits if b is not None)
                    for bits in zip(*(f[1] for f in found), strict=True)], [e for f in found for e in f[2]], plan


@functools.cache
def ran(name, ranks):
    """The same, once for all tests that look at it."""
    return run(name, ranks)


def replayed(name, ranks, log, **options):
    """Losses and parameters of one process that does what the log says."""
    model, graph = recorded(update_every(name), **options)
    replay = Replay(graph, pipeline.balanced(graph, COST, ranks))
    losses = [float(replay(tuple(parts), [e for e in log if e.step == i])) for i, parts in enumerate(batches())]
    return losses, [p.numpy().tobytes() for p in model.parameters()]


def planned(name, ranks, **options):
    policy, told = POLICIES[name]
    return ml.plan(recorded(update_every(name), **options)[1], policy, COST, ml.Machine(ranks), **told)


def drawn_versions(seed, history="exact"):
    """A policy that takes any older version for each stage and micro-batch, in the order of 1F1B."""
    def older(problem):
        schedule = one_f_one_b(problem)
        own = unpack(schedule.keys)
        newest = own.micro_batch - (problem.stages - own.unit) + 1
        back = np.random.default_rng(seed).integers(0, 4, (problem.stages, MICRO_BATCHES))
        return Ordered(schedule, versions=pipeline.Versions(
            np.maximum(0, newest - back[own.unit, own.micro_batch % MICRO_BATCHES]), history=history))

    return pipeline.Policy(older, "contiguous", stale=True)
