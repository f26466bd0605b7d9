"""All passes over a step, in their order. Each is one function of one file.

A policy orders the tasks between the first two lists; the last one is of a plan. Nothing else rewrites a step before it
is proved; messages are added to the result (`send_receive.py`). A backward pass in sweeps is another step, made when it
is recorded (`sweeps.py`). A step on one device, or on ranks that are all alike, is not cut into stages: of these passes
it goes through `WHOLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

from .backward import backwards_apart, fused_backwards
from .copies import copies_of_weights
from .counts import counted_by_each
from .directions import two_directions
from .draft import Draft
from .followers import followers
from .loss_scale import loss_scale_by_stage
from .norms import norms_by_stage
from .offload import offload
from .overlap import more_overlap
from .recompute import recompute
from .replicas import replicas, sums_asked_for
from .reverse import reverse
from .shard import shard
from .side_by_side import side_by_side
from .split import split
from .stages import in_stages
from .statistics import running_statistics
from .steady import steady_state
from .synchronise import summed_by_all
from .together import updates_together
from .updates_last import updates_last
from .uses import at_home
from .versions import weight_versions

Pass = Callable[..., Draft]

BEFORE_THE_ORDER: tuple[Pass, ...] = (
    summed_by_all,  # of a step that is not cut; the others work on stages
    two_directions,  # first: for all others a stage of the second direction is a stage like any other
    running_statistics,  # adds updates of the first direction, which are like the step's own
    at_home,  # before gradients are divided or measured, which is where they are summed
    loss_scale_by_stage,  # before norms, which are of gradients that are divided
    norms_by_stage,  # before copies: a sum of uses is still a weight gradient then, so its norm is found
    copies_of_weights,  # before counts, which each rank does for its own updates
    counted_by_each,
    reverse,  # before recompute, which may take other layers
    recompute,  # when each F has its final reads: an R has the same
    split,  # an R is cut as well; stages are cut below
    in_stages,  # last: the others work on units
)
AFTER_THE_ORDER: tuple[Pass, ...] = (
    sums_asked_for,  # first: refuses what has no effect, whatever else a step lacks
    followers,  # before O and W become one task: the rank of W decides where weights live
    fused_backwards,
    updates_last,  # for pipelines that drain;
    updates_together,  # and for those that never do: first the updates that wait for all stages,
    steady_state,  # then all others, as soon as they can
    weight_versions,  # by the order of all tasks
    replicas,  # after versions: what is summed is not a version
    shard,  # when sums have their place
    side_by_side,  # of a step that is not cut, which has all its tasks now: parts get lanes
    more_overlap,  # last: when all that talks has its place
)
OF_A_PLAN: tuple[Pass, ...] = (offload,)  #: when the bytes of a plan are known, which say what must leave
#: of stages in order, if they shall be cut: before all passes over an order, and after them
WIDE: tuple[tuple[Pass, ...], ...] = ((backwards_apart,), (split, side_by_side))
#: the passes for a step that is not cut
WHOLE = (summed_by_all, recompute, split, shard, side_by_side, offload)
#: the options of the passes after the order, each by its name; all plans have the others
OPTIONS: dict[str, Parameter] = {
    option: parameter for each in AFTER_THE_ORDER
    for option, parameter in [*signature(each, eval_str=True).parameters.items()][1:]
    if option not in ("dropped", "shard")}


def through(passes: tuple[Pass, ...], draft: Draft, options: Mapping[str, Any]) -> Draft:
    """The draft after these passes, each with the options that it has."""
    for each in (p for p in passes if draft.staged or p in WHOLE):
        known = signature(each).parameters
        draft = each(draft, **{name: value for name, value in options.items() if name in known})
    return draft
