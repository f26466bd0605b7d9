"""The input of a pipeline policy: ranks, micro-batches, the placement of stages, and the costs of their tasks.

It knows no order: that is the policy's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ...core.columns import Content, Floats
from ...core.graph import TaskGraph
from ...core.machine import is_number, shorten
from ...core.placement import PipelineError, Placement, check_numbers
from ...core.schedule import Lane, Schedule
from ...core.tasks import Kind, pack
from ...pricing.cost import CostError, CostModel, Link
from .stages import stage_graph


def rounded(time: float) -> float:
    """The time, so that times which are equal up to rounding compare equal."""
    return float(f"{time:.11g}")


@dataclass(frozen=True)
class Problem(Content):
    """`forward`, `output_grad`, `weight_grad`: one time per stage. `cap`: the most live activations per rank, in units
    of a full stage. `recorded`: a network's, whose tasks are whole stages. `backward`: the time of a fused backward per
    stage, if it is not the sum of both gradients."""

    placement: Placement
    micro_batches: int
    forward: Floats
    output_grad: Floats
    weight_grad: Floats
    latency: float = 0.0
    cap: float | None = None
    recorded: bool = False
    backward: Floats | None = None
    ranks: int = field(init=False)
    chunks: int = field(init=False)  #: stages per rank
    stages: int = field(init=False)

    def __post_init__(self) -> None:
        place = self.placement
        vars(self).update(ranks=place.ranks, chunks=place.chunks, stages=place.stages)
        check_numbers(self.stages, self.micro_batches, self.cap)

    @classmethod
    def of(cls, placement: Placement, micro_batches: int, cost: CostModel, cap: float | None = None,
           graph: TaskGraph | None = None) -> Problem:
        """The problem on these costs. `graph`: of one micro-batch in stages, if it is there. Raises PipelineError for
        fewer than one micro-batch, too many tasks, and a cap or a time that is not positive."""
        one = stage_graph(placement.stages, 1) if graph is None else graph
        place = [one.find(pack(np.arange(placement.stages), kind)) for kind in (Kind.F, Kind.O, Kind.W)]
        time = cost.durations(one) + cost.launch
        forward, output_grad, weight_grad = (time[tasks] for tasks in place)
        for what, times in (("forward", forward), ("output_grad", output_grad), ("weight_grad", weight_grad)):
            if not (times > 0).all():
                stage = int(np.argmin(times))
                raise PipelineError(f"the {what} time of stage {stage} is {times[stage]:g}; it must be positive")
        return cls(placement, micro_batches, forward, output_grad, weight_grad, float(cost.link.latency), cap,
                   backward=cost.durations(one.take(place[1], pack(np.arange(placement.stages), Kind.B))) + cost.launch
                   if "B" in cost.kinds else None)

    @property
    def fused(self) -> Floats:
        """The time of a fused backward per stage."""
        return self.output_grad + self.weight_grad if self.backward is None else self.backward

    @property
    def cost(self) -> CostModel:
        """The times as costs."""
        times = {"F": self.forward, "O": self.output_grad, "W": self.weight_grad, "B": self.fused}
        return CostModel(kinds={kind: t.tolist() for kind, t in times.items()}, link=Link(self.latency), unit="")


def costs(placement: Placement, forward: float | Sequence[float], output_grad: float | Sequence[float],
          weight_grad: float | Sequence[float], latency: float = 0.0, bandwidth: float | None = None) -> CostModel:
    """Costs per stage. A number is the time of a rank, shared by its chunks; a sequence has one time per stage. Raises
    PipelineError for a sequence of another length than there are stages, CostError for bad numbers."""
    def number(what: str, value: float) -> float:
        if not isinstance(value, float) and not is_number(value):  # the cost model names one that is not finite
            raise CostError(f"a {what} time is {shorten(value)}; it must be a number")
        return float(value)

    def per_stage(what: str, value: float | Sequence[float]) -> float | list[float]:
        if np.ndim(value) == 0:
            return number(what, value) * placement.share  # type: ignore[arg-type]
        if len(value) != placement.stages:  # type: ignore[arg-type]
            raise PipelineError(f"{len(value)} {what} times are given for {placement.stages} stages; give 1 or as many")  # type: ignore[arg-type]
        return [number(what, v) for v in value]  # type: ignore[union-attr]

    return CostModel.given(per_stage("forward", forward), per_stage("output_grad", output_grad),
                           per_stage("weight_grad", weight_grad), latency, bandwidth)


@dataclass(frozen=True)
class RankOrder:
    """The tasks of one rank in order: columns kind, stage, micro-batch, part. `joined`: whether an entry is one action
    with the entry before."""

    kind: Sequence[int] | np.ndarray
    stage: Sequence[int] | np.ndarray | int
    micro_batch: Sequence[int] | np.ndarray
    joined: Sequence[bool] | np.ndarray | None = None
    part: Sequence[int] | int = 0


def spelled(text: str, streams: Sequence[tuple[int, int]], most: int | None = None) -> RankOrder:
    """The order that a text spells: f forward, b whole backward, o output gradient and w weight gradient of the first
    of two streams, capitals of the second; & joins two tasks as a pair. A stream is (stage, first micro-batch); each of
    its kinds takes micro-batches in ascending order, o and b together, the first `most` of them."""
    taken, left = Counter[tuple[bool, bool]](), (list[int](), list[int]())
    entries = list[tuple[int, int, int, bool]]()
    for before, letter in pairwise(f" {text}"):
        if letter == "&":
            continue
        second, forward = letter.isupper(), letter in "fF"
        if letter in "wW":
            number = left[second].pop(0)
        else:
            number = taken[second, forward]
            taken[second, forward] += 1
            left[second].extend([number] * (letter in "oO"))
        stage, first = streams[second]
        if most is None or number < most:
            entries.append((Kind[letter.upper()], stage, first + number, before == "&"))
    return RankOrder(*zip(*entries, strict=True))


def schedule_of(orders: Sequence[RankOrder]) -> Schedule:
    """The schedule with one `main` lane per rank."""
    keys = [pack(o.stage, o.kind, o.micro_batch, part=o.part) for o in orders]
    joined = [np.zeros(len(k), bool) if o.joined is None else o.joined for o, k in zip(orders, keys, strict=True)]
    return Schedule.of_keys(map(Lane, range(len(orders))), keys,
                            np.concatenate(joined) if any(map(np.any, joined)) else None)
