"""Pipelines that never drain: PipeDream and PipeDream-2BW. Gradients are taken at older weights, kept in versions.

Their order is 1F1B without a flush; what is new is which version of the weights a task reads.
"""

from __future__ import annotations

import numpy as np

from ...graph import unpack
from ...schedule import Schedule
from .flush import one_f_one_b
from .plan import Versions
from .problem import Problem
from .steady import cycle_time


def pipedream_versions(problem: Problem, schedule: Schedule) -> Versions:
    """An update after every micro-batch (PipeDream's mini-batch). Rank s has p - s in flight, so F and backward of
    micro-batch i read version i - (p - s) + 1: the newest one when F runs, stashed until the backward."""
    stage, _, micro_batch, _ = unpack(schedule.keys)
    return Versions(np.maximum(0, micro_batch - (problem.stages - stage) + 1))


def two_buffered_versions(problem: Problem, schedule: Schedule) -> Versions:
    """One update per mini-batch; the mini-batch after it still reads the weights before: two versions, stale by one."""
    every = problem.micro_batches
    _, _, micro_batch, _ = unpack(schedule.keys)
    return Versions(np.maximum(0, micro_batch // every - 1), every)


def pipedream_2bw(problem: Problem, mini_batches: int = 1) -> Schedule:
    """1F1B over `mini_batches` mini-batches in a row, without a flush between them (Narayanan et al., 2020)."""
    from dataclasses import replace

    return one_f_one_b(replace(problem, micro_batches=problem.micro_batches * mini_batches))


def pipedream_steady(problem: Problem) -> float:
    """Time per micro-batch of 1F1B that never drains: the slowest circuit of its tasks.

    Nodes are F and B of every stage; F of micro-batch i on rank s waits for B of micro-batch i - (p - s).
    """
    p = problem.stages
    stage = np.arange(p)
    forward, backward = problem.forward, problem.output_grad + problem.weight_grad
    c = problem.latency
    f, b = stage, stage + p
    source = np.concatenate([f[:-1], b[1:], f[-1:], b, f])
    target = np.concatenate([f[1:], b[:-1], b[-1:], f, b])
    weight = np.concatenate([forward[:-1] + c, backward[1:] + c, forward[-1:], backward, forward])
    # lane order: B(i) then F(i + p - s), and F(i + p - s - 1) then B(i)
    shift = np.concatenate([np.zeros(2 * p - 1), p - stage, stage - p + 1])
    return cycle_time(source, target, weight, shift)


def two_buffered_steady(problem: Problem) -> float:
    """Time per mini-batch: m times PipeDream's time per micro-batch."""
    return problem.micro_batches * pipedream_steady(problem)
