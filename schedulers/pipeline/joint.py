"""Cut, placement and order chosen together, for layers that take different times: an embedding, a loss.

A pipeline is as fast as its slowest rank, so if layers differ, the best cut depends on which stages share a rank, and
the best order on both. `arrangements` tries all three: contiguous, interleaved and wave (V) placements, with one or
several stages per rank; cuts with equal numbers of layers, with equal times of stages, and with equal times of ranks;
and for each the policies below, timed by the simulator. The cuts of the fastest are then moved layer by layer while
that helps. Interleaved 1F1B is among the candidates, so the result is never slower. In the spirit of Piper
(Tarnawski et al., 2021) and AutoPipe (Liu et al., 2022), which search some of these; the search is our own.

Deterministic. It knows only the layers' times: the proof of the plan checks the bytes and the memory of a cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.columns import Content, Ints
from ...core.placement import PLACEMENTS, PipelineError, Placement
from ...core.schedule import Schedule
from ..ordered import Ordered, as_ordered
from .choice import Order, makespan, reason
from .fast_forward import fast_forward_greedy
from .flush import interleaved, one_f_one_b
from .looped import hanayo, modulo_greedy
from .models import linear_partition
from .peaks import CapError
from .problem import Problem, rounded
from .v_shape import zb_v
from .zb_auto import zb_auto
from .zero_bubble import interleaved_zb, zb_h1

#: placement -> the policies that are tried with it
ORDERS: dict[str, dict[str, Order]] = {
    "looped": {"interleaved": interleaved, "interleaved_zb": interleaved_zb, "modulo_greedy": modulo_greedy},
    "contiguous": {"one_f_one_b": one_f_one_b, "zb_h1": zb_h1, "fast_forward_greedy": fast_forward_greedy},
    "wave": {"hanayo": hanayo}}
#: policies that search themselves; they are tried only with the best cut for their placement and stages per rank
SEARCHES: tuple[tuple[str, int, str, Order], ...] = (("contiguous", 1, "zb_auto", zb_auto), ("wave", 2, "zb_v", zb_v))
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)  #: numbers of stages per rank that are tried
MOVED = 2  #: the number of fastest arrangements whose cuts are moved
EFFORT = 400_000  #: about so many tasks are timed for that


@dataclass(frozen=True)
class Arrangement(Content):
    """One candidate. `problem`: its stages' times and placement; `stage_of_layer`: the cut."""

    makespan: float
    policy: str
    stage_of_layer: Ints
    problem: Problem
    schedule: Schedule

    @property
    def time(self) -> float:
        return rounded(self.makespan)

    def as_json(self) -> dict[str, Any]:
        """Placement, and the number of layers of each stage."""
        return {"policy": self.policy, "placement": self.problem.placement.name,
                "layers": np.bincount(self.stage_of_layer, minlength=self.problem.stages).tolist(),
                "makespan": float(f"{self.makespan:.6g}")}


def joint(problem: Problem) -> Ordered:
    """Cut, placement and order by simulation, for layers with different times: never slower than interleaved 1F1B. The
    stages of the problem are its layers. Raises PipelineError if no candidate keeps the cap."""
    found = arrangements(problem)
    best, own = found[0], found[0].problem
    return Ordered(best.schedule, notes(found, best), own.placement, cost=own.cost)


def notes(found: list[Arrangement], best: Arrangement) -> dict[str, Any]:
    """A plan's notes: the choice, the number of candidates, and the fastest interleaved 1F1B for comparison."""
    plain = min((a.makespan for a in found if a.policy == "interleaved"), default=None)
    return {"joint": best.as_json() | {"tried": len(found),
                                       "interleaved": None if plain is None else float(f"{plain:.6g}")}}


def arrangements(problem: Problem) -> list[Arrangement]:
    """All candidates that keep the cap, the fastest first. Raises PipelineError if there is none."""
    made = [_tried(problem, place, cut, policy, order) for kind, place in _placements(problem)
            for cut in _cuts(problem, place) for policy, order in ORDERS[kind].items()]
    found = _fastest_first(made)
    for kind, chunks, policy, order in SEARCHES:
        if chunks * problem.ranks <= problem.stages:
            place = PLACEMENTS[kind](problem.ranks, chunks)
            cut = next((a.stage_of_layer for a in found if a.problem.chunks == chunks and a.policy in ORDERS[kind]),
                       _cuts(problem, place)[-1])
            made.append(_tried(problem, place, cut, policy, order))
    if not (found := _fastest_first(made)):
        raise PipelineError(f"joint: {made[-1] if made else 'no policy accepts these numbers'}")
    return _fastest_first([*found, *_moved(problem, found[:MOVED])])


def _fastest_first(made: Sequence[Arrangement | str]) -> list[Arrangement]:
    return sorted((each for each in made if isinstance(each, Arrangement)), key=lambda each: each.time)


def _placements(problem: Problem) -> Iterator[tuple[str, Placement]]:
    """(name, placement) for all numbers of stages that the layers allow."""
    for chunks in CHUNKS:
        if chunks * problem.ranks <= problem.stages:
            for kind in ["contiguous", "looped"] if chunks == 1 else ["looped", "wave"][: 2 - chunks % 2]:
                yield kind, PLACEMENTS[kind](problem.ranks, chunks)


def _cuts(problem: Problem, place: Placement) -> list[Ints]:
    """The stage of each layer: equal numbers of layers, equal times of stages, and equal times of ranks."""
    time = problem.forward + problem.output_grad + problem.weight_grad
    found = [np.arange(len(time)) * place.stages // len(time), linear_partition(time, place.stages)]
    found.append(_even_ranks(time, found[-1], place))
    return [each for i, each in enumerate(found) if not any((each == other).all() for other in found[:i])]


def _even_ranks(time: np.ndarray, stage_of_layer: Ints, place: Placement) -> Ints:
    """The cut after moves of single layers over its borders, while the busiest rank, then the largest stage shrinks."""
    def load(stage_of_layer: Ints) -> tuple[float, float]:
        stage = np.bincount(stage_of_layer, time, place.stages)
        return float(np.bincount(place.table[0], stage).max()), float(stage.max())

    best = stage_of_layer
    while load(best := min(_neighbours(stage_of_layer), key=load, default=best)) < load(stage_of_layer):
        stage_of_layer = best
    return stage_of_layer


def _neighbours(stage_of_layer: Ints) -> Iterator[Ints]:
    """All cuts without empty stages in which one border is moved by one layer."""
    size = np.bincount(stage_of_layer)
    for border in np.flatnonzero(np.diff(stage_of_layer)).tolist():
        for layer, stage in ((border, stage_of_layer[border + 1]), (border + 1, stage_of_layer[border])):
            if size[stage_of_layer[layer]] > 1:
                other = stage_of_layer.copy()
                other[layer] = stage
                yield other


def _tried(problem: Problem, place: Placement, stage_of_layer: Ints, policy: str, order: Order) -> Arrangement | str:
    """The policy's arrangement for this cut; or, for numbers that it does not accept and above the cap, the reason."""
    times: dict[str, Any] = {
        name: np.bincount(stage_of_layer, layers, place.stages).astype(np.float64)
        for name in ("forward", "output_grad", "weight_grad", "backward")
        if (layers := getattr(problem, name)) is not None}
    own = replace(problem, placement=place, **times)
    try:
        schedule = as_ordered(order(own), policy, order).schedule
        return Arrangement(makespan(own, schedule), policy, stage_of_layer, own, schedule)
    except (PipelineError, CapError) as error:
        return reason(error)


def _moved(problem: Problem, starts: Sequence[Arrangement]) -> Iterator[Arrangement]:
    """Ever faster arrangements whose cuts differ by a layer, from each start by a policy that does not search."""
    room, orders = EFFORT, {policy: order for kind in ORDERS.values() for policy, order in kind.items()}
    for best in starts:
        while best.policy in orders:
            step = best
            for stage_of_layer in _neighbours(best.stage_of_layer):
                room -= 3 * best.problem.stages * problem.micro_batches
                if room < 0:
                    return
                other = _tried(problem, best.problem.placement, stage_of_layer, best.policy, orders[best.policy])
                if isinstance(other, Arrangement) and other.time < step.time:
                    step = other
            if step is best:
                break
            best = step
            yield best
