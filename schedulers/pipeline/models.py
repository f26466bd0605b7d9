"""A recorded model as stages: where to cut it, and the resulting draft.

Cuts are between blocks, where one activation crosses them; the units of a block share all but the last part of their
names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.columns import Floats, Ints, spread
from ...core.graph import TaskGraph
from ...core.machine import Machine, shorten
from ...core.placement import PipelineError, Placement
from ...core.tasks import GraphError, Kind
from ...passes.boundary import Mask
from ...passes.choices import Choices
from ...passes.copies import sums_of_uses
from ...passes.draft import Draft
from ...passes.every import BEFORE_THE_ORDER, through
from ...plans.plan import Plan
from ...pricing.cost import CostModel


def cut(graph: TaskGraph, cost: CostModel, placement: Placement | int, stage_of_unit: Ints | None = None,
        *, dropped: Collection[int] = (), options: Mapping[str, Any] | None = None, **facts: Any) -> Draft:
    """The step in stages, after all passes that come before an order. `dropped`: units that are computed again;
    `options`: of these passes. The other arguments are as in `begun`; it raises as that does, and as passes do."""
    draft = begun(graph, cost, placement, stage_of_unit, **facts)
    made = through(BEFORE_THE_ORDER, draft, Choices(tuple(dropped), options=options or {}))
    return made if isinstance(placement, int) else replace(made, placement=placement)


def begun(graph: TaskGraph, cost: CostModel, placement: Placement | int, stage_of_unit: Ints | None = None,
          *, name: str = "plan", machine: Machine | None = None, **facts: Any) -> Draft:
    """The step whose tasks know their stage, balanced by `cost` or given by `stage_of_unit`, before all passes.

    `placement`: or the number of stages, each on its own rank. `facts`: of the draft. Raises PipelineError or
    GraphError if the step cannot be cut in this way.
    """
    if isinstance(placement, int):
        placement = Placement("stages", placement, np.arange(placement)[None])
    stage_of = balanced(graph, cost, placement.stages) if stage_of_unit is None else np.asarray(stage_of_unit)
    if stage_of.ndim != 1 or stage_of.dtype.kind not in "iu" or len(stage_of) <= graph.unit.max(initial=-1):
        raise GraphError(f"stage_of_unit is {shorten(stage_of_unit)}; it must have a whole number for each of the "
                         f"graph's {graph.unit.max(initial=-1) + 1} units")
    outside = np.flatnonzero((stage_of < 0) | (stage_of >= placement.stages))
    if len(outside):
        raise PipelineError(f"unit {outside[0]} is on stage {stage_of[outside[0]]}; stages are 0.."
                            f"{placement.stages - 1}")
    home = placement if placement.parts is None else replace(
        placement, table=placement.parts[Kind.U, : 1 + placement.apart], parts=None)
    return Draft(name, graph, machine or Machine(placement.ranks), cost, home, cost.durations(graph) + cost.launch,
                 stage_of[graph.unit], planned=Plan, **facts)


def balanced(graph: TaskGraph, cost: CostModel, stages: int | None = None) -> Ints:
    """The stage of each unit: consecutive blocks, with the largest stage as small as possible (forward and backward
    time); by default each block is a stage. Raises PipelineError for more stages than blocks."""
    units = int(graph.unit.max(initial=-1)) + 1
    work = np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    time = np.bincount(graph.unit[work], cost.durations(graph)[work], units)
    names = [graph.unit_names[u] if u < len(graph.unit_names) else "" for u in range(units)]
    # units with updates only, with sums of uses, or without tasks go with the unit before
    works = np.bincount(graph.unit[work & ~sums_of_uses(graph)], minlength=units) > 0
    within = [name.rsplit("/", 1)[0] for name in names]  # `resnet/layer1/0` of `resnet/layer1/0/conv1`
    begins = works & ~_inside(graph, units) & np.array(
        [u == 0 or not names[u - 1] or within[u - 1] != within[u] for u in range(units)], bool)
    block = np.maximum(np.cumsum(begins) - 1, 0)
    of_block = np.bincount(block, time).astype(np.float64)
    if stages is None:
        return block
    if len(of_block) < stages:
        raise PipelineError(f"{stages} stages are asked for, but the model has only "
                            f"{len(of_block)} blocks to cut between; take fewer ranks, --chunks or stages")
    return linear_partition(of_block, stages)[block]


def in_stages(cost: CostModel, placement: Placement) -> CostModel:
    """The costs of a network's layers, summed over consecutive blocks of them, one per stage, with the largest block as
    small as possible. A step ends with the updates of the rank that takes longest. Raises PipelineError for fewer
    layers than stages, and for times of single tasks, which a sum would lose."""
    kinds = {name: np.asarray(value, np.float64) for name, value in cost.kinds.items()}
    found = {len(value) for value in kinds.values() if value.ndim} | {len(value) for value in cost.sizes.values()}
    if not found:
        return cost
    layers, stages = min(found), placement.stages
    if len(found) > 1 or layers < stages:
        raise PipelineError(f"the costs are of {' and '.join(map(str, sorted(found)))} stages, and {stages} are "
                            f"needed: give as many or more, of one number in all lists, or fewer --chunks")
    if cost.tasks and layers > stages:
        raise PipelineError(f"the costs have times of {layers} stages, which are summed for {stages}, and one of task "
                            f"{next(iter(cost.tasks))} alone: leave `tasks` out, or give --chunks for all stages")
    block = linear_partition(sum((kinds[name] for name in "FOW" if name in kinds), np.zeros(layers)), stages)
    kinds = {name: np.bincount(block, value, stages).astype(np.float64) if value.ndim else value
             for name, value in kinds.items()}
    if {"O", "W"} <= kinds.keys() and "B" not in kinds:
        kinds["B"] = kinds["O"] + kinds["W"]
    updates = np.bincount(placement.table[0], np.broadcast_to(kinds.pop("U", np.zeros(1)), stages))
    last = np.searchsorted(block, np.arange(stages), "right") - 1  # a block sends the output of its last layer
    sizes = {name: np.asarray(value)[last] if name == "message_bytes" else np.bincount(block, value, stages)
             for name, value in cost.sizes.items()}
    return replace(cost, kinds={name: value.tolist() for name, value in kinds.items()}, step=cost.step + updates.max(),
                   sizes={name: value.astype(np.int64).tolist() for name, value in sizes.items()})


def _inside(graph: TaskGraph, units: int) -> Mask:
    """For each unit, whether a cut before it would divide the writers of one storage, as of concatenated results or a
    gradient that is added in place, or put a forward that another one needs behind it, as fusion with a sum does."""
    writer, storage = graph.writes.row_of_each(), graph.buffer_storage[graph.writes.ids]
    several = np.bincount(graph.buffer_storage, minlength=len(graph.storages)) > 1
    shared = (several[storage] | (graph.kind[writer] == Kind.O)) & ~graph.persistent[graph.writes.ids]
    of, made = storage[shared], graph.unit[writer[shared]]
    first, last = (spread(of, made, len(several), rest, by)[of] for rest, by in ((units, np.minimum), (-1, np.maximum)))
    source, target = graph.preds.ids, graph.preds.row_of_each()
    back = (graph.kind[target] == Kind.F) & (graph.kind[source] == Kind.F) & (graph.unit[source] > graph.unit[target])
    begin, end = np.append(first, graph.unit[target[back]]), np.append(last, graph.unit[source[back]])
    open_ones = np.cumsum(np.bincount(begin, minlength=units) - np.bincount(end, minlength=units))
    return np.append(False, open_ones > 0)[:units]


def linear_partition(time: Floats, parts: int) -> Ints:
    """The part of each item: consecutive, none empty, the largest sum as small as possible (dynamic programming)."""
    n = len(time)
    total = np.concatenate([[0.0], np.cumsum(time)])
    best, cut = total[1:].copy(), np.zeros((parts, n), np.int64)
    for part in range(1, parts):
        now = np.full(n, np.inf)
        for end in range(part, n):
            worst = np.maximum(best[part - 1 : end], total[end + 1] - total[part : end + 1])
            at = int(np.argmin(worst))
            now[end], cut[part, end] = worst[at], at + part
        best = now
    begins = [n]  # of the parts, the last one first
    for part in range(parts - 1, 0, -1):
        begins.append(int(cut[part, begins[-1] - 1]))
    return np.searchsorted(begins[:0:-1], np.arange(n), "right")
