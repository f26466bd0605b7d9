"""LayerPipe, LayerPipe2, ADL and PETRA as plans: delayed gradients, every rank works on several batches at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.columns import Ints
from ...core.placement import Versions
from ...core.schedule import Schedule
from ...core.tasks import Kind, unpack
from ..ordered import Ordered
from ..partition import LayerCosts, Piece, assign
from .problem import Problem, schedule_of
from .stale import how_kept, read_after
from .ticks import Ticks


def layerpipe(problem: Problem, method: str | None = None) -> Ordered:
    """F, O and W of layers spread over ranks by linear partition; `inter` (the default) cuts an O in two if that evens
    the loads. Reconstructed.

    A layer is a stage of the problem. The two parts of a cut O are `4O0` and `4O0/1`. The graph holds a ring of weight
    versions per layer, so its edges prove that a version exists when it is read and lasts until its last read. A stage
    of a recorded network has several layers, so its O is cut between two of them, and its second half needs the first
    (`intra`, the default there, cuts none); ranks that read the weights of others have copies
    (`minidl.passes.followers`).
    """
    method = method or ("intra" if problem.recorded else "inter")
    found = assign(LayerCosts(problem.forward, problem.output_grad, problem.weight_grad), problem.ranks, method)
    ticks = Ticks(problem.stages, found.parts, problem.latency, problem.recorded)
    schedule = schedule_of(ticks.orders(problem.ranks, problem.micro_batches))
    own = unpack(schedule.keys)
    versions = Versions(np.maximum(0, own.micro_batch - np.array(ticks.delays)[own.unit]))
    if not problem.recorded:
        return Ordered(schedule, {"method": found.method}, replace(problem.placement, parts=ticks.homes()), versions,
                       ticks.steady(), ticks.graph(problem.micro_batches), ticks.cost())
    homes = np.zeros((Kind.U + 1, 2, problem.stages), np.int64)
    homes[: Kind.B] = ticks.homes()
    homes[Kind.U] = homes[Kind.W]
    halves = {part.layer: 1 - part.share for i, part in enumerate(found.parts) if ticks.part(i)}
    return Ordered(schedule, placement=replace(problem.placement, parts=homes, halves=halves), versions=versions)


def layerpipe2(problem: Problem, history: str = "exact", decay: str | None = None, p: float = 1.0) -> Ordered:
    """Whole stages: every tick a rank runs F of one batch and O, W of another, 2 S batches earlier (2025). Delay(l) =
    2 S(l): the weights of 2 S updates ago, where S is the number of ranks after the stage's. `history`: "exact" keeps
    the 2 S old versions, "average" one moving average of updates in their place (reconstructed), "predicted" none: F
    runs on w + `p` 2 S (w - w of an update ago). The `decay` of an average is "age" (the default), "window", "pipemare"
    or "last" for (d - 1) / d, (d - 1) / (d + 1), 0.135^(1 / d) or 0, where d = 2 S; predictions have "last" by default,
    and follow an average of the last updates with another (see `pipedream`). Time per batch: the busiest rank's
    work, or more if the latency is long."""
    ticks, schedule, delay = _ticked(problem)
    versions = Versions(read_after(unpack(schedule.keys), delay, history), **how_kept(history, decay, p))
    return Ordered(schedule, versions=versions, steady=ticks.steady())


def adl(problem: Problem, mini_batches: int = 1) -> Ordered:
    """The ticks of `layerpipe2` and an update after each mini-batch, of the mean of its micro-batches' gradients, each
    at the weights that its forward read, 2 S micro-batches ago (accumulated decoupled learning, 2020; with one
    micro-batch the delays of DDG, 2018). A step of training is divided into so many mini-batches; by default it is one.
    So weights are at most ceil(2 S / m) updates old with m micro-batches."""
    every = problem.micro_batches
    ticks, schedule, delay = _ticked(replace(problem, micro_batches=every * mini_batches))
    read = np.maximum(0, unpack(schedule.keys).micro_batch - delay) // every
    return Ordered(schedule, versions=Versions(read, every), steady=every * ticks.steady())


def petra(problem: Problem) -> Ordered:
    """The ticks of `layerpipe2` for reversible networks such as revnet, without old weights or activations (PETRA,
    2406.02052): a backward computes its stage's inputs from its outputs, which come down with the gradients, on the
    newest weights; its forward ran on weights of 2 S updates ago. Time per batch: as `layerpipe2`, with a forward more
    in O."""
    ticks, schedule, delay = _ticked(problem)
    read = read_after(unpack(schedule.keys), delay, "predicted")
    return Ordered(schedule, versions=Versions(read, history="none"), steady=ticks.steady())


def _ticked(problem: Problem) -> tuple[Ticks, Schedule, Ints]:
    """The ticks of whole stages, their order, and how many ticks after its forward each entry's backward runs."""
    times = {Kind.F: problem.forward, Kind.O: problem.output_grad, Kind.W: problem.weight_grad}
    ticks = Ticks(problem.stages, [Piece(stage, kind, float(time[stage]), processor=int(rank)) for stage, rank in
                                   enumerate(problem.placement.table[0]) for kind, time in times.items()],
                  problem.latency)
    schedule = schedule_of(ticks.orders(problem.ranks, problem.micro_batches))
    delay: Ints = 2 * (problem.ranks - 1 - problem.placement.table[0, unpack(schedule.keys).unit])
    return ticks, schedule, delay
