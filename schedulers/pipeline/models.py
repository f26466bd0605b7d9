"""A recorded model as stages: where to cut it, and the resulting graph.

Cuts are between blocks, where one activation crosses them; the units of a block share all but the last part of their
names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...graph import ROLES, Floats, Ints, Role, StorageSpec, TaskGraph
from ...passes.boundary import Mask
from ...passes.rewrite import coarsen, sums
from ...pricing.cost import CostModel
from ...tasks import Kind, repack
from .both_ways import apart, together
from .placement import PipelineError
from .scaling import makers, unscaled_by_each
from .tied import at_home, sums_of_uses, with_copies


@dataclass(frozen=True)
class Stages:
    """A recorded step whose units are stages; `time` of each task."""

    graph: TaskGraph
    time: Floats

    def cost(self, merged: TaskGraph, cost: CostModel) -> CostModel:
        """The times of the tasks of `merged`, which is `graph` with some O and W as one B; links as in `cost`."""
        times = {self.graph.name(t): float(time) for t, time in enumerate(self.time)}
        for t in merged:
            if t.kind == Kind.B:  # late or not
                times[f"{t.unit}B{t.micro_batch}"] = sum(times.get(f"{t.unit}{k}{t.micro_batch}", 0.0) for k in "OW")
            elif t.kind == Kind.U:  # norms that are apart only for replicas take no time of their own
                times.setdefault(t.name, 0.0)
        return replace(cost, tasks=times, kinds={}, launch=0.0, source="given")


def cut(graph: TaskGraph, cost: CostModel, stages: int, stage_of_unit: Ints | None = None,
        rank_of_stage: Ints | None = None, stale: bool = False) -> Stages:
    """The step in stages, balanced by `cost` or given by `stage_of_unit`.

    `rank_of_stage`: by default each stage has its own rank; two rows for the two directions of a pipeline that holds
    every stage twice. `stale`: as for `with_copies`. Raises PipelineError or GraphError where the step cannot be cut in
    this way.
    """
    stage_of = balanced(graph, cost, stages) if stage_of_unit is None else np.asarray(stage_of_unit)
    time = cost.durations(graph) + cost.launch
    both = rank_of_stage is not None and np.size(rank_of_stage) == 2 * stages
    if len(stage_of) > graph.unit.max(initial=-1):  # else `coarsen` raises the error
        ranks = (np.arange(max(stages, int(stage_of.max(initial=0)) + 1)) if rank_of_stage is None
                 else np.ravel(rank_of_stage))
        if both:
            graph, stage_of = apart(graph, stage_of, stages)
            time = np.append(time, np.zeros(len(graph) - len(time)))
        stage_of = at_home(graph, stage_of)
        graph, stage_of, time = unscaled_by_each(graph, stage_of, time)
        graph, stage_of, tied = with_copies(graph, with_their_gradients(graph, stage_of), ranks, stale)
        graph, stage_of, origin = counted_by_each(graph, stage_of, ranks, stale)
        time = np.append(time, 0.0)[tied[origin]]  # new tasks take almost no time
    coarse, group = coarsen(graph, stage_of.tolist())
    time = np.bincount(group, time, len(coarse)).astype(np.float64)
    return Stages(together(coarse, stages) if both else coarse, time)


def with_their_gradients(graph: TaskGraph, stage_of_unit: Ints) -> Ints:
    """The stage of each unit, with the sum of a gradient's squares on the stage that computes the gradient."""
    stage_of, maker = np.array(stage_of_unit), makers(graph)
    for t in np.flatnonzero(sums(graph)).tolist():
        found = maker[graph.reads[t]]
        if (found >= 0).any():
            stage_of[graph.unit[t]] = stage_of[found[found >= 0][0]]
            maker[graph.writes[t]] = graph.unit[t]  # for example gradients in another type
    return stage_of


def counted_by_each(graph: TaskGraph, stage_of_unit: Ints, rank_of_stage: Ints | None = None,
                    stale: bool = False) -> tuple[TaskGraph, Ints, Ints]:
    """(the graph, the stage of each unit, the original of each task) in which every rank that needs a step's scalars
    computes them itself, on the first of its stages that needs them (by default each stage has its own rank), so that
    no rank waits for another's count. The scalars: the number of dropouts, Adam's powers, the clip factor (from the
    sums of squares of all stages), and the loss scale (from their flags).

    Copies have units and buffers of their own, but the same storage: each rank has its own memory for it. `stale`: in a
    step of a pipeline that never drains the last stage that needs them computes them, since its updates come first; but
    what only updates read, such as Adam's powers, each stage computes in memory of its own, since stages of one rank do
    not update at the same time.
    """
    scalar = graph.buffer_role == ROLES.index(Role.SCALAR)
    lasting = np.isin(graph.buffer_role, [i for i, role in enumerate(ROLES) if role.persistent]) & ~scalar
    known = scalar.copy()
    known[graph.writes.take(np.flatnonzero(sums(graph))).ids] = True
    counts: list[int] = []
    for t in np.flatnonzero(graph.kind == Kind.U).tolist():
        made = graph.writes[t]
        if scalar[made].any() and not lasting[made].any() and known[graph.reads[t]].all():
            counts.append(t)
            known[made] = True
    stage_of_unit, readers = stage_of_unit.copy(), graph.reads.transposed(len(graph.buffer_bytes))
    for t in reversed(counts):  # on the first stage that needs it: updates may wait only for stages in one direction
        needing = [u for b in graph.writes[t].tolist() for u in readers[b].tolist() if u != t]
        if needing and np.count_nonzero(graph.unit == graph.unit[t]) == 1:
            stage_of_unit[graph.unit[t]] = (max if stale else min)(stage_of_unit[graph.unit[needing]])
    counted = {b for t in counts for b in graph.writes[t].tolist()}
    stage = stage_of_unit[graph.unit].tolist()
    users: dict[int, set[int]] = {b: set() for b in counted}
    for t in range(len(graph)):
        for b in counted.intersection(graph.reads[t].tolist()):
            users[b].add(stage[t])
    stages = int(stage_of_unit.max(initial=0)) + 1
    rank = list(range(stages)) if rank_of_stage is None else np.asarray(rank_of_stage).tolist()
    forward = np.zeros(len(graph.buffer_bytes), bool)
    forward[graph.reads.take(np.flatnonzero(graph.kind == Kind.F)).ids] = True
    apart = set[tuple[int, int]]()  # (buffer, a stage that has it in memory of its own)
    home: dict[tuple[int, int], int] = {}  # (task, a stage that needs its count) -> the stage that counts for it
    for t in counts:
        needing = sorted(set[int]().union(*(users[b] for b in graph.writes[t].tolist())))
        first = {rank[s]: s for s in needing[:: 1 if stale else -1]} | {rank[stage[t]]: stage[t]}
        lone = stale and not forward[graph.writes[t]].any()
        apart |= {(b, s) for b in graph.writes[t].tolist() for s in needing if lone and s != first[rank[s]]}
        home |= {(t, s): s if lone else first[rank[s]] for s in needing}
    copies = sorted({(t, s) for (t, _), s in home.items()} - {(t, stage[t]) for t in counts})
    if not copies:
        return graph, stage_of_unit, np.arange(len(graph))
    units = len(stage_of_unit)
    rows = sorted([(t, stage[t], int(graph.unit[t])) for t in range(len(graph))]
                  + [(t, s, units + i) for i, (t, s) in enumerate(copies)])
    task, where, unit = (np.array(column) for column in zip(*rows, strict=True))
    own = sorted({(b, s) for t, s in copies for b in graph.writes[t].tolist()})
    old, of_stage = (np.array(column) for column in zip(*own, strict=True))
    number = np.repeat(np.arange(len(graph.buffer_bytes))[:, None], stages, axis=1)  # [buffer, stage] -> its copy
    number[old, of_stage] = len(graph.buffer_bytes) + np.arange(len(old))
    for (t, s), at in home.items():
        number[graph.writes[t], s] = number[graph.writes[t], at]
    names = (graph.unit_names + ("",) * (units - len(graph.unit_names))
             + tuple(graph.unit_names[graph.unit[t]] for t, _ in copies))
    copied = [f"{graph.buffer_names[b]} of stage {s}" for b, s in own] if graph.buffer_names else ()
    storage, specs = graph.buffer_storage[old].copy(), list[StorageSpec]()
    moves: list[dict[int, int]] = [{} for _ in range(stages)]
    for i, (b, s) in enumerate(own):
        if (b, s) in apart:
            source = int(graph.buffer_storage[b])
            if source not in moves[s]:
                moves[s][source] = len(graph.storages) + len(specs)
                spec = graph.storages[source]
                specs.append(replace(spec, name=f"{spec.name} of stage {s}", role=Role.STATE, live=None,
                                     filled=spec.live))
            storage[i] = moves[s][source]
    grown = graph.take(task, repack(graph.keys[task], unit=unit)).with_buffers(old, storage, copied, storages=specs)
    roles = grown.buffer_role.copy()
    roles[len(graph.buffer_bytes) :][[pair in apart for pair in own]] = ROLES.index(Role.STATE)
    grown = replace(grown, buffer_role=roles)
    reads, writes = (number[rows.ids, where[rows.row_of_each()]] for rows in (grown.reads, grown.writes))
    moved = grown.remap(reads, writes, moves, where)
    return replace(moved, unit_names=names), np.append(stage_of_unit, [s for _, s in copies]), task


def balanced(graph: TaskGraph, cost: CostModel, stages: int) -> Ints:
    """The stage of each unit: consecutive blocks, with the largest stage as small as possible (forward and backward
    time). Raises PipelineError for more stages than blocks."""
    units = int(graph.unit.max(initial=-1)) + 1
    work = np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    time = np.bincount(graph.unit[work], cost.durations(graph)[work], units)
    names = [graph.unit_names[u] if u < len(graph.unit_names) else "" for u in range(units)]
    # units with updates only, with sums of uses, or without tasks go with the unit before
    works = np.bincount(graph.unit[work & ~sums_of_uses(graph)], minlength=units) > 0
    begins = works & np.array([u == 0 or not names[u - 1] or _block(names[u - 1]) != _block(names[u])
                               for u in range(units)], bool)
    begins &= ~_inside_storages(graph, units)
    block = np.maximum(np.cumsum(begins) - 1, 0)
    of_block = np.bincount(block, time).astype(np.float64)
    if len(of_block) < stages:
        raise PipelineError(f"{stages} stages are asked for, but the model has only "
                            f"{len(of_block)} blocks to cut between")
    return linear_partition(of_block, stages)[block]


def _inside_storages(graph: TaskGraph, units: int) -> Mask:
    """For each unit, whether a cut before it would divide the writers of one storage, as with layers that concatenate
    their results."""
    inside = np.zeros(units + 1, np.int64)
    writer, storage = graph.writes.row_of_each(), graph.buffer_storage[graph.writes.ids]
    several = np.bincount(graph.buffer_storage, minlength=len(graph.storages)) > 1
    lasting = np.isin(graph.buffer_role[graph.writes.ids], [i for i, role in enumerate(ROLES) if role.persistent])
    for s in np.unique(storage[several[storage] & ~lasting]).tolist():
        made = graph.unit[writer[storage == s]]
        inside[made.min() + 1] += 1
        inside[made.max() + 1] -= 1
    found: Mask = np.cumsum(inside)[:units] > 0
    return found


def _block(name: str) -> str:
    """`resnet/layer1/0/conv1` belongs to the block `resnet/layer1/0`: all but the last part of the name."""
    return name.rsplit("/", 1)[0] if "/" in name else name


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
    part_of = np.zeros(n, np.int64)
    end = n
    for part in range(parts - 1, 0, -1):
        begin = int(cut[part, end - 1])
        part_of[begin:end] = part
        end = begin
    return part_of
