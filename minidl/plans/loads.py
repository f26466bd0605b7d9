"""Uneven loads of experts: how long the tasks of each rank take if its experts get more tokens than others, or fewer.

Loads are the tokens that each expert has got, as the log of a run says. Rank r of p has experts r E/p to
(r + 1) E/p - 1 of E. The time of a task of experts follows the tokens of its rank, and the time of an exchange the
tokens of the fullest rank. Loads may be drawn: they vary from layer to layer and step to step, but not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.columns import Floats
from ..core.graph import TaskGraph
from ..core.machine import PlanError, shorten
from ..core.tasks import COMPUTE, Kind, unpack
from .ready import factors


def of_experts(graph: TaskGraph) -> np.ndarray:
    """Mask of the tasks of experts: with a product over all experts; on given times, in a layer with exchanges."""
    if graph.launches:
        return np.array([any(launch.kernel.startswith("grouped_") for launch in own) for own in graph.launches], bool)
    exchanges = graph.kind == Kind.X
    return np.isin(graph.unit, graph.unit[exchanges]) & np.isin(graph.kind, COMPUTE) & (graph.kind != Kind.U)


def checked(loads: Sequence[float], graph: TaskGraph, ranks: int) -> Floats:
    """The loads of experts as shares of the mean. Raises PlanError for loads that these ranks cannot have."""
    given = np.asarray(loads, np.float64).reshape(-1)
    if not (graph.kind == Kind.X).any():
        raise PlanError("the step exchanges nothing, so experts have no loads")
    counts = {launch.writes[3].shape[1] for own in graph.launches for launch in own if launch.kernel == "route"}
    if counts and counts != {len(given)}:
        raise PlanError(f"{len(given)} loads are given; the network has {max(counts)} experts in a layer")
    if not np.isfinite(given).all() or (given < 0).any() or not given.any():
        raise PlanError(f"loads are {shorten([*loads])}; they must be finite numbers >= 0, not all 0")
    if len(given) % ranks:
        raise PlanError(f"{len(given)} loads cannot be shared out among {ranks} ranks; give one for each expert")
    return given / given.mean()


def times_of(graph: TaskGraph, loads: Floats, ranks: int, sigma: float, random: np.random.Generator) -> Floats:
    """By how much longer each task of each rank takes (ranks, n) under loads of experts, which have the spread `sigma`
    in each layer and iteration."""
    own, found = unpack(graph.keys), np.ones((ranks, len(graph)))
    layer = own.iteration * (int(own.unit.max(initial=0)) + 1) + own.unit
    each = loads * factors(random, sigma, (int(layer.max(initial=0)) + 1, len(loads)))
    of_rank = (each / each.mean(1, keepdims=True)).reshape(len(each), ranks, -1).mean(2)
    mine, travels = of_experts(graph), own.kind == Kind.X
    found[:, mine] = of_rank[layer[mine]].T
    found[:, travels] = of_rank[layer[travels]].max(1)
    return found
