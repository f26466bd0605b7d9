"""Pipelines that never drain: PipeDream, PipeDream-2BW, PACI. Gradients are computed with older weights.

Their order is 1F1B without a flush; they differ in the version of the weights that a task reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...core.columns import Ints
from ...core.placement import DECAYS, HISTORIES, PipelineError, Versions
from ...core.tasks import Identity, Kind, unpack
from ...pricing.simulation import Clock, Lanes
from ..ordered import Ordered
from .flush import one_f_one_b
from .problem import Problem


def pipedream(problem: Problem, history: str = "exact", decay: str | None = None, p: float = 1.0) -> Ordered:
    """1F1B without a flush, an update after every micro-batch, PipeDream's mini-batch (Narayanan et al., 2019). Rank s
    has p - s in flight, so F and backward of micro-batch i read version i - (p - s) + 1: the newest one when F runs,
    stashed until the backward. `history`: "exact" keeps the old versions, "average" one moving average of updates in
    their place, "predicted" none: F runs on w + `p` d (w - w of an update ago), where d = ranks - s - 1, which predicts
    the newest weights of its backward (SpecTrain, 2018; `p` as in arXiv 2606.30634). The `decay` of an average is "age"
    (the default), "window" or "pipemare" for (d - 1) / d, (d - 1) / (d + 1) or 0.135^(1 / d), where d is the age of the
    weights, or "last" for 0. Predictions have "last" by default; with another decay they follow an average of the last
    updates: error feedback, by the mean of what late updates moved (reconstructed)."""
    schedule = one_f_one_b(problem)
    own = unpack(schedule.keys)
    versions = Versions(read_after(own, problem.stages - own.unit - 1, history), **how_kept(history, decay, p))
    return Ordered(schedule, versions=versions, steady=pipedream_steady(problem))


def read_after(own: Identity, delay: Ints, history: str) -> Ints:
    """The versions that entries read if they are this old; if forwards predict them, backwards read the newest."""
    return np.maximum(0, own.micro_batch - np.where((own.kind != Kind.F) & (history == "predicted"), 0, delay))


def how_kept(history: str, decay: str | None, p: float = 1.0) -> dict[str, Any]:
    """These fields of `Versions`, if they are valid: they say how a backward gets its forward's weights. Raises
    PipelineError if not."""
    for name, value, known in (("history", history, HISTORIES[:3]), ("decay", decay or "age", [*DECAYS])):
        if value not in known:
            raise PipelineError(f"{name} is {value!r}; it must be {' or '.join(map(repr, known))}")
    if decay is not None and history == "exact":
        raise PipelineError("decay has no effect if old weights are kept; give history=average or predicted too")
    if not 0 <= p <= 4 or (p != 1 and history != "predicted"):
        raise PipelineError(f"p is {p:g}; it must be from 0 to 4, and goes with history=predicted")
    return {"history": history, "decay": decay or ("last" if history == "predicted" else "age"), "p": float(p)}


def pipedream_2bw(problem: Problem, mini_batches: int = 1) -> Ordered:
    """1F1B over `mini_batches` mini-batches in a row, without a flush between them (Narayanan et al., 2020). A step of
    training is divided into so many; by default it is one, with one update. The next mini-batch still reads the weights
    before it: two versions, stale by one."""
    every = problem.micro_batches
    schedule = one_f_one_b(replace(problem, micro_batches=every * mini_batches))
    read = np.maximum(0, unpack(schedule.keys).micro_batch // every - 1)
    return Ordered(schedule, versions=Versions(read, every), steady=every * pipedream_steady(problem))


def paci(problem: Problem, mini_batches: int = 1) -> Ordered:
    """1F1B without a flush over `mini_batches` mini-batches, an update after each, no weights kept (PACI, 2026). A step
    of training is divided into so many; by default it is one.

    A backward reads the newest weights, not its forward's: on rank s the forward of micro-batch i comes after
    i - (p - s) + 1 backwards, its own backward after i. Between the two come p - s - 1 other backwards, so at most
    ceil((p - s - 1) / m) updates, where m is the micro-batches of a mini-batch: a larger m limits the drift. Peak
    min(p - s, micro-batches) activations and one version of the weights on rank s. Reconstructed.
    """
    every = problem.micro_batches
    schedule = one_f_one_b(replace(problem, micro_batches=every * mini_batches))
    own = unpack(schedule.keys)
    between = np.where(own.kind == Kind.F, problem.stages - own.unit - 1, 0)
    versions = Versions(np.maximum(0, own.micro_batch - between) // every, every, "none")
    return Ordered(schedule, versions=versions, steady=every * pipedream_steady(problem))


def pipedream_steady(problem: Problem) -> float:
    """Time per micro-batch of 1F1B that never drains; rank s has p - s micro-batches in flight.

    In one round of the loop rank s runs B of some micro-batch i, then F of i + p - s.
    """
    p = problem.stages
    f = np.arange(p)
    b = f + p
    duration = np.concatenate([problem.forward, problem.fused])
    source, target = np.concatenate([b[1:], f]), np.concatenate([b[:-1], f[1:], b[-1:]])
    clock = Clock.of_loop(duration, source, target, np.repeat([0, 1], [p - 1, p]), problem.latency)
    return clock.exact_period(Lanes.of_tasks(np.stack([b, f], axis=1).tolist(), f.tolist()))
