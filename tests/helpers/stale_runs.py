"""Runs of stale pipelines on ranks, and the replay of their logs in one process (`rank_runs`), by short names."""

from __future__ import annotations

import functools

import numpy as np
import pipelines
import rank_runs
from rank_runs import CLASSES, COST, STEPS, Network

import minidl as ml
from minidl import models, nn
from minidl.core.tasks import unpack
from minidl.schedulers import pipeline
from minidl.schedulers.ordered import Ordered
from minidl.schedulers.pipeline.flush import one_f_one_b

__all__ = ["COST", "STEPS"]  # for those who use the names below
MICRO_BATCHES = 8
OPTIMIZERS = {"sgd": {}, "adamw": {"optimizer": "adamw"}, "nadamw": {"optimizer": "nadamw"},
              "muon": {"optimizer": "muon"}, "muon, clipped": {"optimizer": "muon", "clip": 0.1},
              "sgd, clipped": {"clip": 0.1}, "adamw, clipped": {"optimizer": "adamw", "clip": 0.1},
              "adamw, scaled": {"optimizer": "adamw", "clip": 0.1, "scaled": True}}
POLICIES = {"pipedream": ("pipedream", {}), "pipedream, averaged": ("pipedream", {"history": "average"}),
            "pipedream_2bw": ("pipedream_2bw", {"mini_batches": 2}), "paci": ("paci", {"mini_batches": 4}),
            "pipedream_2bw, whole": ("pipedream_2bw", {}), "paci, whole": ("paci", {}),
            "layerpipe": ("layerpipe", {}), "layerpipe2": ("layerpipe2", {}),
            "layerpipe2, averaged": ("layerpipe2", {"history": "average"}),
            "adl": ("adl", {"mini_batches": 4}), "adl, whole": ("adl", {}),
            "pipedream, predicted": ("pipedream", {"history": "predicted"}),
            "layerpipe2, predicted": ("layerpipe2", {"history": "predicted"}),
            "layerpipe2, half predicted": ("layerpipe2", {"history": "predicted", "p": 0.5, "decay": "age"})}
IN_HALVES = "layerpipe, in halves"
CUT = {IN_HALVES: ("layerpipe", {"method": "inter"})}


#: networks of `rank_runs`; LayerPipe cannot keep the count of dropouts on two ranks
NORMED = {"network": Network, "norm": True}
MIXED = {**NORMED, "drop": True}


def heavy(*_):
    """A layer in the middle that costs more than the others together: its F, O and W are on a rank each of three."""
    return models.mlp(12, 16, 256, 256, 16, CLASSES)


def bare(*_):
    """On three ranks the middle stage has no parameters."""
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.GELU(), nn.Softplus(), nn.Linear(16, CLASSES))


class Drawn:
    """Layers of random widths."""

    def __init__(self, seed):
        self.widths, self.__name__ = np.random.default_rng(seed).integers(4, 80, 6).tolist(), f"drawn {seed}"

    def __call__(self, *_):
        return models.mlp(12, *self.widths, CLASSES)


def update_every(name):
    policy, told = (POLICIES | CUT)[name]
    return pipelines.policy(policy).update_every(MICRO_BATCHES, told.get("mini_batches", 1))


def settings_of(name, ranks, *, optimizer="sgd", **more):
    """Of a stale run under a policy of POLICIES."""
    policy, told = (POLICIES | CUT)[name]
    return {"loss": True, "scheduler": policy, "ranks": ranks, "options": told, "every": update_every(name),
            "micro_batches": MICRO_BATCHES, "network": "mlp", **OPTIMIZERS[optimizer], **more}


def recorded(every, optimizer="sgd", **more):
    """A model, and its step with an update after so many micro-batches."""
    run, graph = rank_runs.recorded(every=every, micro_batches=MICRO_BATCHES, **OPTIMIZERS[optimizer], **more)
    return run.model, graph


def run(name, ranks, **options):
    """Of a stale run on ranks: losses and tensors, as bytes, the log of all ranks, and the plan."""
    settings = settings_of(name, ranks, **options)
    own = rank_runs.prepared(settings)
    found = rank_runs.on_ranks(settings, own)
    return found.losses[0], found.tensors, found.log, own[0][1]


@functools.cache
def ran(name, ranks):
    """The same, once for all tests that look at it."""
    return run(name, ranks)


def replayed(name, ranks, log, **options):
    """Losses and tensors of one process that does what the log says."""
    found = rank_runs.alone(settings_of(name, ranks, **options), log)
    return found.losses[0], found.tensors


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
