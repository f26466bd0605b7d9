"""Pipelines that never drain: PipeDream, PipeDream-2BW, PACI. Gradients are computed with older weights.

Their order is 1F1B without a flush; they differ in the version of the weights that a task reads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...plans import HISTORIES, Versions
from ...pricing.simulation import Clock, Lanes
from ...schedule import Schedule
from ...tasks import Kind, unpack
from .flush import one_f_one_b
from .placement import PipelineError
from .problem import Problem


def pipedream_versions(problem: Problem, schedule: Schedule, history: str = "exact") -> Versions:
    """An update after every micro-batch (PipeDream's mini-batch). Rank s has p - s in flight, so F and backward of
    micro-batch i read version i - (p - s) + 1: the newest one when F runs, stashed until the backward. `history`:
    "exact" keeps the old versions, "average" one moving average in their place."""
    own = unpack(schedule.keys)
    stage, micro_batch = own.unit, own.micro_batch
    return Versions(np.maximum(0, micro_batch - (problem.stages - stage) + 1), history=checked_history(history))


def checked_history(history: str) -> str:
    """`history`, if it is valid: what a backward reads as its forward's weights. Raises PipelineError otherwise."""
    if history not in (kept := HISTORIES[:2]):
        raise PipelineError(f"history is {history!r}; it must be {' or '.join(map(repr, kept))}")
    return history


def two_buffered_versions(problem: Problem, schedule: Schedule) -> Versions:
    """One update per mini-batch; the next mini-batch still reads the weights before it: two versions, stale by one."""
    every = problem.micro_batches
    micro_batch = unpack(schedule.keys).micro_batch
    return Versions(np.maximum(0, micro_batch // every - 1), every)


def paci_versions(problem: Problem, schedule: Schedule) -> Versions:
    """All tasks read the newest version: on rank s the forward of micro-batch i comes after i - (p - s) + 1 backwards,
    its own backward after i, and an update after every m."""
    every = problem.micro_batches
    own = unpack(schedule.keys)
    between = np.where(own.kind == Kind.F, problem.stages - own.unit - 1, 0)
    return Versions(np.maximum(0, own.micro_batch - between) // every, every, "none")


def pipedream_2bw(problem: Problem, mini_batches: int = 1) -> Schedule:
    """1F1B over `mini_batches` mini-batches in a row, without a flush between them (Narayanan et al., 2020). A step of
    training is divided into so many; by default it is one, with one update."""
    return one_f_one_b(replace(problem, micro_batches=problem.micro_batches * mini_batches))


def paci(problem: Problem, mini_batches: int = 1) -> Schedule:
    """1F1B without a flush over `mini_batches` mini-batches, an update after each, no weights kept (PACI, 2026). A step
    of training is divided into so many; by default it is one.

    A backward reads the newest weights, not its forward's. Between the two come p - s - 1 other backwards on rank s, so
    at most ceil((p - s - 1) / m) updates, where m is the micro-batches of a mini-batch: a larger m limits the drift.
    Peak min(p - s, micro-batches) activations and one version of the weights on rank s. Reconstructed.
    """
    return pipedream_2bw(problem, mini_batches)


def pipedream_steady(problem: Problem) -> float:
    """Time per micro-batch of 1F1B that never drains; rank s has p - s micro-batches in flight.

    In one round of the loop rank s runs B of some micro-batch i, then F of i + p - s.
    """
    p = problem.stages
    f = np.arange(p)
    b = f + p
    duration = np.concatenate([problem.forward, problem.output_grad + problem.weight_grad])
    source, target = np.concatenate([b[1:], f]), np.concatenate([b[:-1], f[1:], b[-1:]])
    clock = Clock.of_loop(duration, source, target, np.repeat([0, 1], [p - 1, p]), problem.latency)
    return clock.exact_period(Lanes.of_tasks(np.stack([b, f], axis=1).tolist(), f.tolist()))


def two_buffered_steady(problem: Problem) -> float:
    """Time per mini-batch: m times PipeDream's time per micro-batch."""
    return problem.micro_batches * pipedream_steady(problem)
