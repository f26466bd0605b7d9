"""Which activations a step keeps; all others are computed again (`minidl.passes.recompute`).

A network is a chain of blocks, cut wherever one activation crosses. A block keeps all of its activations, or all but
the cheap ones, or its output, or none. `all`: each keeps its output; `sqrt`: about sqrt(L) of L blocks do (Chen et al.,
2016). `optimal`: the least time within a limit, by dynamic programming (rotor: Beaumont et al., 2019; here a forward
runs at most twice). Cheap are the units that compute their activations from kept ones in less time per byte than their
block does, such as activation functions and norms (selective recomputation: Korthikanti et al., 2022).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.columns import Content, Floats, Ints, spread
from ...core.graph import Role, TaskGraph
from ...core.machine import PlanError
from ...core.placement import Refused
from ...core.tasks import Kind
from ...passes.boundary import Mask
from ...passes.recompute import runs_again
from ...plans.memory import MemoryLimitError, rounded
from ...plans.plan import Plan
from ...pricing.cost import CostModel

SLOTS = 1024  #: into which the bytes of a limit are divided; sizes are rounded up
WHOLE, MOST, OUTPUT, NOTHING = range(4)  #: the activations that a block keeps


@dataclass(frozen=True)
class Chain(Content):
    """Blocks in the order of their forwards. Each has its `units`, those that are `cheap`, and the one that makes its
    output; in bytes, `whole`: its activations that the backward pass reads, `most`: these without cheap ones, `output`:
    its output, `backward`: the other memory of its backward; and the time to compute all of its activations `again`, or
    all but its output (`partly`), or cheap ones (`little`)."""

    units: Sequence[Sequence[int]]
    cheap: Sequence[Sequence[int]]
    maker: Sequence[int]
    whole: Ints
    most: Ints
    output: Ints
    backward: Ints
    again: Floats
    partly: Floats
    little: Floats

    def dropped(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The units whose activations are not kept."""
        return tuple(sorted(u for b, how in enumerate(choice) if how != WHOLE
                            for u in (self.cheap if how == MOST else self.units)[b]
                            if how in (MOST, NOTHING) or u != self.maker[b]))


def chain(graph: TaskGraph, cost: CostModel) -> Chain:
    """The chain of a recorded step: the memory of its first micro-batch, the times of all."""
    count, first = len(graph), graph.micro_batch == 0
    forward = np.flatnonzero((graph.kind == Kind.F) & first)
    backward = np.flatnonzero(np.isin(graph.kind, (Kind.O, Kind.W)) & first & np.isin(graph.unit, graph.unit[forward]))
    storage, user = graph.storage_users.row_of_each(), graph.storage_users.ids
    size = rounded(np.array([s.bytes for s in graph.storages], np.int64))
    born, dies = spread(storage, user, len(size), count, np.minimum), spread(storage, user, len(size), -1, np.maximum)
    ahead = np.isin(user, forward)
    last = spread(storage[ahead], user[ahead], len(size), -1, np.maximum)  # the last forward that uses it
    made = np.array([s.role == Role.ACTIVATION for s in graph.storages], bool) & np.isin(born, forward)
    saved = made & (dies > last)
    free = saved & np.isin(born, [*runs_again(graph, np.unique(graph.unit).tolist())])
    over = {t: np.flatnonzero(made & (born <= t) & (last > t)) for t in forward[:-1].tolist()}
    crossing = {int(some[0]): t for t, some in over.items() if len(some) == 1 and saved[some[0]]}  # the last it crosses
    block, n = np.searchsorted([*crossing.values()], np.arange(count + 1)), len(crossing) + 1
    home = spread(graph.unit[forward], block[forward], int(graph.unit.max()) + 1)
    other = ~free & (dies >= 0) & ~np.array([s.role.persistent for s in graph.storages], bool)
    change = spread(np.append(born[other], dies[other] + 1), np.append(size[other], -size[other]), count + 1, 0, np.add)
    needs = spread(home[graph.unit[backward]], np.cumsum(change)[backward], n, 0, np.maximum)
    outputs = [*crossing, -1]
    time = np.bincount(graph.unit, (cost.durations(graph) + cost.launch) * (graph.kind == Kind.F))

    def takes(without: Sequence[int]) -> Any:
        own = np.setdiff1d(np.flatnonzero(free), without)
        needed = forward[forward <= spread(block[born[own]], born[own], n, -1, np.maximum)[block[forward]]]
        return np.bincount(block[needed], time[graph.unit[needed]], n)

    units = [np.unique(graph.unit[forward[block[forward] == b]]).tolist() for b in range(n)]
    makers = [int(graph.unit[born[s]]) if s >= 0 else -1 for s in outputs]
    whole = np.bincount(block[born[free]], size[free], n).astype(np.int64)
    output = np.array([size[s] if s >= 0 and free[s] else 0 for s in outputs], np.int64)
    partly = takes(outputs)
    own, rate = np.bincount(graph.unit[born[free]], size[free], len(home)).astype(np.int64), np.zeros(len(home))
    rate[graph.unit[forward]] = (partly / np.maximum(whole - output, 1))[block[forward]]
    rate[makers[:-1]] = 0.0
    some = _cheap(graph, forward, np.where(saved, graph.unit[born % count], -1), own * rate > time)
    cheap = [[u for u in of if u in some] for of in units]
    return Chain(units, cheap, makers, whole, whole - [own[of].sum() for of in cheap], output, needs,
                 takes([]), partly, np.array([time[of].sum() for of in cheap]))


def _cheap(graph: TaskGraph, forward: Ints, maker: Ints, quick: Mask) -> set[int]:
    """The quick units that can compute their activations again from activations which the backward pass reads anyway,
    and which units make that are not cheap. `maker`: the unit that makes each of these storages, -1 for others."""
    found, active = set[int](), graph.role_is(Role.ACTIVATION)
    for t in forward[quick[graph.unit[forward]]].tolist():
        made = maker[graph.buffer_storage[[b for b in graph.reads[t].tolist() if active[b]]]]
        if not {-1, *found}.intersection(made.tolist()):
            found.add(int(graph.unit[t]))
    return found & {*graph.unit[[*runs_again(graph, found)]].tolist()}


def spaced(of: Chain, parts: int) -> list[int]:
    """The last block of each part keeps its output; blocks of the last part, needed again at once, keep everything."""
    part = (np.arange(len(of.whole) + 1) * parts // len(of.whole)).tolist()
    return [WHOLE if p == parts - 1 else OUTPUT if p != after else NOTHING for p, after in pairwise(part)]


def optimal(of: Chain, limit: int) -> list[int] | None:
    """Which part each block keeps, so that the least is computed again and no moment needs more than `limit` bytes;
    None if nothing is within the limit. Exact for limits up to SLOTS, else sizes are rounded up to a SLOTS-th of it."""
    slot, n = max(1, -(-limit // SLOTS)), len(of.whole)
    top = limit // slot
    best, came = np.full((n + 1, top + 1), np.inf), np.zeros((n + 1, top + 1, 3), np.int64)  # what last, from where
    best[0, 0] = 0.0

    def step(i: int, j: int, how: int, kept: int, needed: int, time: float) -> None:
        """Blocks i to j, if before them so much is kept that what they need is within the limit."""
        kept, count = -(-int(kept) // slot), top + 1 + -int(needed) // slot
        if count > 0:
            new, at = best[i, :count] + time, slice(kept, kept + count)
            better = np.flatnonzero(new < best[j, at])
            best[j, at][better] = new[better]
            came[j, at][better] = np.stack([np.full_like(better, how), np.full_like(better, i), better], axis=1)

    for i in range(n):
        step(i, i + 1, WHOLE, of.whole[i], of.whole[i] + of.backward[i], 0.0)
        step(i, i + 1, MOST, of.most[i], of.whole[i] + of.backward[i], float(of.little[i]))
        run = most = 0
        for j in range(i, n):
            run += of.whole[j]
            most = max(most, run + of.backward[j])
            step(i, j + 1, OUTPUT, of.output[j], most, float(of.again[i:j].sum() + of.partly[j]))
    if not np.isfinite(best[n]).any():
        return None
    choice, j, kept = [NOTHING] * n, n, int(np.argmin(best[n]))
    while j:
        choice[j - 1], j, kept = came[j, kept].tolist()
    return choice


def dropped(graph: Any, cost: Any, recompute: str | Collection[int]) -> tuple[int, ...]:
    """The units whose activations are not kept. `recompute`: all, sqrt, or the units that are kept, as numbers or
    as text with commas, such as 3,5-8. Raises PlanError for a layer that does not exist."""
    if not isinstance(graph, TaskGraph):
        raise PlanError("recompute needs a recorded step: tasks on given times have no activations")
    if recompute in ("all", "sqrt"):
        of = chain(graph, cost)
        return of.dropped(spaced(of, round(len(of.whole) ** 0.5) if recompute == "sqrt" else len(of.whole)))
    layers = {*graph.unit[graph.kind == Kind.F].tolist()}
    kept = set[int]()
    for word in recompute.split(",") if isinstance(recompute, str) else map(str, recompute):
        ends = [int(end) if end.isdecimal() and len(end) < 10 else -1 for end in word.strip().split("-", 1)]
        own = layers & {*range(ends[0], ends[-1] + 1)} if {*ends} <= layers else None
        if not own:
            raise PlanError(f"recompute: there is no layer {word.strip()[:40]!r} to keep; give none, all, sqrt, auto, "
                            f"or layers with commas, such as 3,5-8, from {min(layers)} to {max(layers)}")
        kept |= own
    return tuple(sorted(layers - kept))


def planned(graph: Any, cost: Any, limit: int | None, recompute: str | Collection[int],
            make: Callable[[Collection[int], int | None], Plan]) -> Plan:
    """The plan with the activations that `recompute` says; "auto": the fastest within the limit, where all activations
    are kept if they fit, or a MemoryLimitError with the least that can be had. `make`: from the units that are computed
    again and a limit to a plan."""
    if recompute == "none":
        return make((), limit)
    if recompute != "auto" or not isinstance(graph, TaskGraph):
        return make(dropped(graph, cost, recompute), limit)
    if limit is None:
        raise PlanError("recompute auto finds the fastest plan within a memory limit; give one, or all or sqrt")
    whole = make((), None)
    if (peak := max(whole.peak_bytes)) <= limit:
        return whole.with_known(limit=limit)
    least = list[int]()  #: of the plans that are above the limit

    @cache
    def within(units: tuple[int, ...]) -> Plan | None:
        try:
            return make(units, limit)
        except MemoryLimitError as error:
            least.append(error.least or max(make(units, None).peak_bytes))
        except Refused:
            pass
        return None

    of = chain(graph, cost)
    most = int(of.whole.sum() + of.backward.max())
    low = bisect_left(range(most), True, key=lambda n: optimal(of, n) is not None)
    limits = range(low, most + 1, max(1, (most - low) // 256))
    above = bisect_left(limits, True, key=lambda n: within(of.dropped(optimal(of, n) or [])) is None)
    choices = optimal(of, limits[max(above - 1, 0)]), spaced(of, round(len(of.whole) ** 0.5)), spaced(of, len(of.whole))
    tried = sorted({(), *(of.dropped(choice) for choice in choices if choice)})
    fit = [(plan, one) for one in tried if (plan := within(one)) is not None]
    if not fit:
        raise MemoryLimitError(f"no plan fits the limit of {limit:,} bytes: with all activations kept it needs "
                               f"{peak:,}, and the least that can be had is {min(least):,}", min(least))
    best, units = min(fit, key=lambda found: found[0].step)
    if not units:
        return best
    return best.with_known(remarks=(
        *best.remarks, f"to fit {limit:,} bytes, activations of {len(units)} of {sum(map(len, of.units))} layers are "
        f"computed again: {max(best.peak_bytes):,} bytes in place of {peak:,}, and {best.step / whole.step - 1:.1%} "
        f"more time a step predicted"))
