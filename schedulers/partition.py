"""LayerPipe: spreads the forward, output-gradient and weight-gradient computations of layers over processors.

Delayed gradients break the loop of training, so that layers can work on different batches at the same time. The
remaining problem is to give all processors equal work. PipeDream assigns whole layers to processors. LayerPipe assigns
the three computations of a layer separately (intra-layer) and can also cut an output gradient between two neighbours
(inter-layer). Unnikrishnan and Parhi, ICCAD 2021; the partition model is reconstructed. This module knows neither order
nor clock: see `pipeline.ticks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.columns import Content, Floats
from ..core.tasks import Kind
from .pipeline.models import linear_partition

METHODS = ("pipedream", "intra", "inter")
ROUNDING = 1e-12


class PartitionError(ValueError):
    """Layers cannot be partitioned as asked. The message says why."""


@dataclass(frozen=True)
class LayerCosts(Content):
    """For each layer the times of F, O and W."""

    forward: Floats
    output_grad: Floats
    weight_grad: Floats

    @classmethod
    def given(cls, forward: Sequence[float], output_grad: Sequence[float], weight_grad: Sequence[float]) -> LayerCosts:
        """Costs from lists. Raises PartitionError for lists of unequal length, and for times that are negative or not
        finite."""
        times = [np.asarray(t, np.float64) for t in (forward, output_grad, weight_grad)]
        layers = len(times[0])
        if not layers or any(t.shape != (layers,) for t in times):
            raise PartitionError(f"the times of F, O and W are given for {', '.join(str(t.size) for t in times)} "
                                 f"layers; the three numbers must be equal, and at least 1")
        for what, values in zip("FOW", times, strict=True):
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise PartitionError(f"the {what} times are {values.tolist()}; they must be finite and not negative")
        if not sum(t.sum() for t in times) > 0:
            raise PartitionError("all times are 0; there is nothing to partition")
        return cls(*times)

    def __len__(self) -> int:
        return len(self.forward)


@dataclass(frozen=True)
class Piece:
    """A layer's computation, or a share of it, on a processor."""

    layer: int
    kind: Kind
    time: float
    share: float = 1.0
    processor: int = 0


@dataclass(frozen=True)
class Assignment:
    """The pieces of each processor, in pipeline order. `period`: the time per batch: the busiest processor's."""

    method: str
    processors: int
    parts: tuple[Piece, ...]

    @property
    def loads(self) -> Floats:
        owner, time = [p.processor for p in self.parts], [p.time for p in self.parts]
        return np.bincount(owner, time, self.processors).astype(np.float64)

    @property
    def period(self) -> float:
        return float(self.loads.max())


def atoms(costs: LayerCosts, method: str) -> list[list[Piece]]:
    """The pieces that stay together, in pipeline order: whole layers, or F, O, W of layer 0, of layer 1, and so on."""
    layers = [[Piece(i, Kind.F, float(costs.forward[i])), Piece(i, Kind.O, float(costs.output_grad[i])),
               Piece(i, Kind.W, float(costs.weight_grad[i]))] for i in range(len(costs))]
    return layers if method == "pipedream" else [[part] for layer in layers for part in layer if part.time > 0]


def assign(costs: LayerCosts, processors: int, method: str = "inter") -> Assignment:
    """The linear partition with the smallest period: each processor gets consecutive atoms, and `inter` may cut an O in
    two.

    Exact up to rounding. Output gradients are cut only if that shortens the period. Raises PartitionError for an
    unknown method or fewer than one processor.
    """
    if method not in METHODS:
        raise PartitionError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if processors < 1:
        raise PartitionError(f"{processors} processors; at least 1 is needed")
    units = atoms(costs, method)
    times = np.array([sum(part.time for part in unit) for unit in units])
    part_of = linear_partition(times, min(processors, len(units)))
    filled = _filled(units, processors, float(np.bincount(part_of, times).max()))  # each takes as much as fits
    assert filled is not None
    whole = Assignment(method, processors, tuple(filled))
    if method != "inter":
        return whole
    cut = Assignment(method, processors, tuple(_cut(units, processors)))
    return cut if cut.period < whole.period * (1 - 1e-9) else whole


def _cut(units: list[list[Piece]], processors: int) -> list[Piece]:
    """The best linear partition in which an O may be cut once, into parts for two consecutive processors."""
    high = sum(part.time for unit in units for part in unit)
    low = high / processors
    if found := _filled(units, processors, low, cuts=True):
        return found
    found = _filled(units, processors, high, cuts=True)
    while high - low > ROUNDING * high:
        middle = (low + high) / 2
        if tried := _filled(units, processors, middle, cuts=True):
            found, high = tried, middle
        else:
            low = middle
    assert found is not None
    return found


def _filled(units: list[list[Piece]], processors: int, period: float, cuts: bool = False) -> list[Piece] | None:
    """The pieces with their processors, each of which takes what fits into the period; None if some are left."""
    out, load, p = list[Piece](), 0.0, 0
    for unit in units:
        time = sum(part.time for part in unit)
        if load + time > period * (1 + ROUNDING):
            halves = cuts and unit[0].kind == Kind.O
            if load > 0 and not (halves and time <= (2 * period - load) * (1 + ROUNDING)):
                p, load = p + 1, 0.0  # from here on, two parts are not enough
            if halves and ROUNDING < (share := (period - load) / time) < 1:
                out.append(replace(unit[0], time=time * share, share=share, processor=p))
                time *= 1 - share
                unit = [replace(unit[0], time=time, share=1 - share)]
                p, load = p + 1, 0.0
            elif load > 0:
                p, load = p + 1, 0.0
        load += time
        if load > period * (1 + 2 * ROUNDING) or p >= processors:
            return None
        out += [replace(part, processor=p) for part in unit]
    return out
