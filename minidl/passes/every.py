"""All passes over a step, in their order, and when each has something to do. Each is one function.

A policy orders the tasks between the first two lists; the last one is of a plan. Nothing else rewrites a step before it
is proved; messages are added to the result (`send_receive.py`). A backward pass in sweeps is another step, made when it
is recorded (`sweeps.py`). A step on one device, or on ranks that are all alike, is not cut into stages: its placement
is `ALONE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from inspect import Parameter, signature
from typing import Any

import numpy as np

from ..core.columns import spread
from ..core.graph import Role
from ..core.tasks import Kind, unpack
from .backward import backwards_apart, fused_backwards
from .choices import NOTHING, Choices
from .copies import at_home, copies_of_weights
from .counts import counted_by_each
from .directions import forwards_apart, running_statistics, two_directions
from .draft import ALONE, Draft
from .experts import experts_over_ranks
from .fill import waits_filled
from .followers import followers
from .group import grouped
from .held import only_new_travels
from .hide import exchanges_hidden
from .lag import fenced, in_time
from .loss_scale import loss_scale_by_stage, norms_by_stage
from .offload import offload
from .overlap import more_overlap
from .recompute import recompute
from .replicas import replicas, sums_asked_for
from .reverse import reverse
from .shard import shard
from .split import side_by_side, split
from .stages import in_stages
from .steady import steady_state
from .synchronise import summed_by_all
from .together import updates_together
from .updates_last import updates_last, updates_soon
from .versions import weight_versions

Pass = Callable[..., Draft]
When = Callable[[Draft, Choices], Any]
#: a pass; whether it is of steps that are not cut (True), of stages (False), or of both; when it has something to do
Step = tuple[Pass, tuple[bool, ...], When]
WHOLE, STAGES, BOTH = (True,), (False,), (True, False)


def _updates_by(kernel: str) -> When:
    """Whether an update launches this kernel."""
    return lambda draft, choices: any(launch.kernel == kernel for kind, launches in zip(
        draft.graph.kind.tolist(), draft.graph.launches, strict=False) if kind == Kind.U for launch in launches)


def _shares_weights(draft: Draft, choices: Choices) -> bool:
    """Whether stages read the same parameters, or a unit adds the gradients of several uses."""
    graph, reader = draft.graph, draft.graph.reads.row_of_each()
    weight = graph.role_is(Role.PARAMETER)[graph.reads.ids] & (graph.kind[reader] != Kind.U)
    lowest, highest = (spread(graph.reads.ids[weight], draft.stage[reader[weight]], len(graph.buffer_bytes), rest, by)
                       for rest, by in ((len(graph), np.minimum), (-1, np.maximum)))
    alone = np.isin(graph.unit[graph.kind == Kind.W], graph.unit[graph.kind == Kind.F], invert=True)
    return bool((lowest < highest).any() or alone.any())


def _counts(draft: Draft, choices: Choices) -> bool:
    made = draft.graph.writes.take(np.flatnonzero(draft.graph.kind == Kind.U)).ids
    return bool(draft.graph.role_is(Role.SCALAR)[made].any())


def _cut(draft: Draft, choices: Choices) -> bool:
    return choices.parts not in (1, {})


def _asked(option: str) -> When:
    """Whether an option is given."""
    return lambda draft, choices: choices.options.get(option) is not None


_bounded = _asked("lag")


BEFORE_THE_ORDER: tuple[Step, ...] = (
    (summed_by_all, WHOLE, lambda draft, choices: draft.sums),
    # after sums, which groups name by tasks of the recorded step, and before what runs or cuts tasks again
    (experts_over_ranks, BOTH, lambda draft, choices: choices.experts_over != "none"),
    # first: for all others a stage of the second direction is like any other
    (two_directions, STAGES, lambda draft, choices: draft.placement.directions > 1),
    # before forwards are apart: an R is where its readers are, and reads their weights
    (recompute, STAGES, lambda draft, choices: draft.placement.apart and choices.dropped),
    (forwards_apart, STAGES, lambda draft, choices: draft.placement.apart),
    # adds updates of the first direction, which are like the step's own
    (running_statistics, STAGES, lambda draft, choices: draft.placement.directions > 1),
    (at_home, STAGES, _shares_weights),  # before gradients are divided or measured, which is where they are summed
    (loss_scale_by_stage, STAGES, _updates_by("unscale")),  # before norms, which are of gradients that are divided
    # before copies: a sum of uses is still a weight gradient then, so its norm is found
    (norms_by_stage, STAGES, _updates_by("square_sum")),
    (copies_of_weights, STAGES, _shares_weights),  # before counts, which each rank does for its own updates
    (counted_by_each, STAGES, _counts),
    # before recompute: a join that is made again is not computed again, and an R has the final reads of its F
    (only_new_travels, STAGES, _asked("only_new")),
    (reverse, STAGES, lambda draft, choices: draft.reverses),  # before recompute, which may take other layers
    # when each F has its final reads: an R has the same
    (recompute, BOTH, lambda draft, choices: choices.dropped and not draft.placement.apart),
    (split, WHOLE, _cut),  # an R is cut as well; stages are cut when they are in order
    # after all that adds or cuts weight gradients, and
    (grouped, WHOLE, _asked("group_weights")),
    (fenced, WHOLE, _bounded),  # after groups, which wait as one
    (in_stages, STAGES, lambda draft, choices: True),  # last: the others work on units
)
AFTER_THE_ORDER: tuple[Step, ...] = (
    # first: a B cannot be cut
    (backwards_apart, STAGES, lambda draft, choices: not draft.read and _cut(draft, choices)),
    # refuses what has no effect, whatever else a step lacks
    (sums_asked_for, STAGES, lambda draft, choices: {"all_reduces", "part_bytes"} & choices.options.keys()),
    # before the bound on W, which then holds for what was joined
    (waits_filled, STAGES, _asked("fill")),
    # before O and W become one task: the rank of W decides where weights live
    (followers, STAGES, lambda draft, choices: draft.stale),
    (in_time, STAGES, _bounded),  # while O and W are apart
    (fused_backwards, STAGES, lambda draft, choices: not draft.read and (
        unpack(draft.order.keys).kind == Kind.B).any()),
    (updates_soon, STAGES, lambda draft, choices: draft.placement.apart and not draft.read),
    # for other pipelines that drain;
    (updates_last, STAGES, lambda draft, choices: not (draft.stale or draft.read or draft.placement.apart)),
    # and for those that never do: first the updates that wait for all stages,
    (updates_together, STAGES, lambda draft, choices: draft.versions is not None),
    (steady_state, STAGES, lambda draft, choices: draft.stale),  # then all others, as soon as they can
    (weight_versions, STAGES, lambda draft, choices: draft.versions is not None),  # by the order of all tasks
    # before shares of parameters get their places, which follow the order
    (exchanges_hidden, WHOLE, _asked("hide")),
    # after versions: what is summed is not a version
    (replicas, STAGES, lambda draft, choices: draft.machine.replicas > 1 and not draft.read),
    (shard, BOTH, lambda draft, choices: choices.shard.level),  # when sums have their place
    # of a step that is not cut, which has all its tasks now: parts get lanes
    (side_by_side, BOTH, lambda draft, choices: not draft.read and draft.schedule is not None and (
        unpack(draft.schedule.keys).part > 1).any()),
    (more_overlap, STAGES, lambda draft, choices: choices.options.get("overlap")),  # when all that talks has its place
    (in_time, STAGES, lambda draft, choices: _bounded(draft, choices) and choices.options.get("overlap")),
    (split, STAGES, _cut),  # last: stages in order, and
    (side_by_side, STAGES, _cut),  # lanes of their parts, which edges keep
    (fenced, STAGES, lambda draft, choices: _bounded(draft, choices) and _cut(draft, choices)),
)
OF_A_PLAN: tuple[Step, ...] = ((offload, BOTH, lambda draft, choices: True),)  #: when the bytes of a plan are known


@cache
def options_of_passes(whole: bool) -> Mapping[str, Parameter]:
    """The options, besides choices, of the passes over steps that are not cut, or over stages."""
    return {name: parameter for each, where, _ in (*BEFORE_THE_ORDER, *AFTER_THE_ORDER) if whole in where
            for name, parameter in [*signature(each, eval_str=True).parameters.items()][1:]
            if name not in {field.name for field in fields(Choices)} | {"shard"}}


@cache
def _options(each: Pass) -> tuple[str, ...]:
    return tuple([*signature(each).parameters][1:])


def through(passes: Iterable[Step], draft: Draft, choices: Choices = NOTHING) -> Draft:
    """The draft after the passes that have something to do with it, each with the options that it has."""
    whole = draft.placement is ALONE
    for each, where, has_work in passes:
        if whole in where and has_work(draft, choices):
            known = {**choices.options, **vars(choices)}
            draft = each(draft, **{name: known[name] for name in _options(each) if name in known})
    return draft
