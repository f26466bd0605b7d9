"""Updates that wait for the gradients of all stages, in a pipeline that never drains: to clip, or for a loss scale.

The norm covers all stages' gradients of one mini-batch, and the update of that mini-batch waits for it. If a policy
lets later stages update at once and read the newest weights, they would stop until the first stage is done. So a
micro-batch reads, on all stages, the version that is the oldest of those that the policy gives its forwards: the one of
the first stage (vertical sync in PipeDream's paper). Then its gradient is taken at one point, and no stage waits longer
than a message takes: an update comes before the first forward that could read it on every stage. If no old weights are
kept, or only an average, tasks read the newest ones that are there.

A loss scale is not stale. Whether all gradients of a mini-batch are finite decides its update and the scale of the next
backward, so backward passes follow each other over all stages, and only forwards overlap. If a step has one update, its
gradients have one place, so the update also comes before the next backward of its stage.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..core.columns import offsets, spread
from ..core.graph import Role, TaskGraph
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import Kind, repack, unpack
from .boundary import Mask
from .draft import Draft
from .loss_scale import scales
from .rewrite import sums
from .versions import newest


def updates_together(draft: Draft) -> Draft:
    """The order with the updates that wait, and the versions that tasks read then. Raises Refused if an update would
    come more than a step after its gradients."""
    versions, graph, waits = draft.versions, draft.graph, _waiting(draft.graph)
    if versions is None or not waits.any():
        return draft
    schedule, own, count = draft.order, unpack(draft.order.keys), draft.micro_batches
    of_step, forward = count // versions.every, own.kind == Kind.F
    # mini-batches until a backward needs the new scale, or overwrites the gradients
    until = 1 if scales(graph)[waits].any() else of_step

    def on_all_stages(found: np.ndarray) -> np.ndarray:
        """The least of a micro-batch's forwards."""
        return spread(own.micro_batch[forward], found[forward], count, np.iinfo(np.int64).max, np.minimum)

    apart = draft.placement.parts is not None  # then a lane of forwards does not say when there are new weights
    ends = (own.kind == Kind.W) | (own.kind == Kind.B)
    oldest = on_all_stages(versions.read)
    known = oldest if apart else on_all_stages(newest(schedule, ends, count) // versions.every)
    of_forward = spread((own.unit[forward], own.micro_batch[forward]), versions.read[forward],
                        (int(own.unit.max()) + 1, count))
    read = versions.read - of_forward[own.unit, own.micro_batch] + oldest[own.micro_batch]
    columns = (schedule.keys, read, known[own.micro_batch] - own.late * of_step, np.where(forward, -1, own.unit),
               own.micro_batch // versions.every - own.late * of_step)
    lanes = [[*zip(*(column[a:b].tolist() for column in columns), strict=True)]
             for a, b in pairwise(schedule.ptr.tolist())]
    main = {lane.rank: entries for lane, entries in zip(schedule.lanes, lanes, strict=True)}
    for t in np.flatnonzero(waits).tolist():
        entries, number, stage = main[int(draft.rank[t])], int(graph.micro_batch[t]) // versions.every, graph.unit[t]
        late, at = min(((late, i) for i, (_, _, version, backward, batch) in enumerate(entries) for late in (0, 1)
                        if version > number - late * of_step
                        or (backward == stage and batch >= number + until - late * of_step)), default=(-1, -1))
        if at < 0:
            raise Refused(draft.name, f"{graph.name(t)} waits for all stages until the step after the next one",
                          "take more micro-batches, or do not clip")
        entries.insert(at, (int(repack(graph.keys[t], late=late)), number, -of_step, -1, -of_step))
    keys, read = (np.array([entry[i] for entries in lanes for entry in entries], np.int64) for i in (0, 1))
    ordered = Schedule(schedule.lanes, offsets([*map(len, lanes)]), keys)
    if versions.history != "exact":  # then forwards must read what is there
        read = newest(ordered, unpack(keys).kind == Kind.U, of_step)
    if versions.history == "average":
        own = unpack(keys)
        forward = own.kind == Kind.F
        of_forward[own.unit[forward], own.micro_batch[forward]] = read[forward]
        read = np.where(own.kind == Kind.U, read, of_forward[own.unit, own.micro_batch % count])
    return replace(draft, schedule=ordered, versions=replace(versions, read=read))


def _waiting(graph: TaskGraph) -> Mask:
    """Mask of the updates that need sums of other stages' gradients."""
    summing, reader = sums(graph), graph.preds.row_of_each()
    across = summing[graph.preds.ids] & (graph.unit[graph.preds.ids] != graph.unit[reader])
    return spread(reader[across], True, len(graph)) & graph.changed_by(graph.role_is(Role.PARAMETER))
