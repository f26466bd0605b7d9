"""Every scheduler by its name: the one registry.

A policy is a function `(graph, cost, machine, **options)` to a Schedule, or to an `Ordered` with notes. For ranks that
are all alike it is a `data_parallel.Policy`, which also says how they sum gradients; for a pipeline it is a
`pipeline.Policy`, a function of the problem with facts beside, or of a comparison of two tasks (`compared`). A new
policy is one line in SCHEDULERS, or stays in a file of its own: wherever a scheduler is named, `file.py:function` and
`package.module:function` work too, and so does the CSV of a plan. `minidl.plan` (planner.py) makes plans by them.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from ..core.machine import PlanError, shorten
from ..core.placement import PipelineError
from ..core.schedule import Schedule, ScheduleError
from ..passes.delayed import delayed
from ..passes.draft import Draft, Sums
from ..passes.every import options_of_passes
from ..passes.halves import in_halves
from ..system.loading import foreseen, function_of, line_of, needs_function, text_of
from . import pipeline
from .beside import acco, delayed_update
from .data_parallel import Policy as OnAllRanks
from .data_parallel import barrier, buckets, dear, fifo, in_buckets, in_parts, no_overlap, priority, reverse_first_k
from .layup import layup
from .multi_region import planned as by_regions
from .ordered import Ordered, beyond
from .partime import partime, ticks
from .pd_asgd import asynchronous, pd_asgd
from .pipeline.bidirectional import chimera, dualpipe, dualpipe_v
from .pipeline.comparison import compared, needed
from .pipeline.fast_forward import (fast_forward, fast_forward_auto, fast_forward_greedy, fast_forward_push,
                                    fast_forward_push_released, fast_forward_strict)
from .pipeline.flush import gpipe, interleaved, one_f_one_b
from .pipeline.joint import arrangements, joint
from .pipeline.layerpipe import adl, layerpipe, layerpipe2, petra
from .pipeline.looped import groupings, hanayo, looped_bfs, modulo, modulo_greedy
from .pipeline.optimal import optimal
from .pipeline.policy import Policy, at_least, even, even_chunks, twice_and_even
from .pipeline.roundpipe import roundpipe
from .pipeline.slices import seq1f1b
from .pipeline.stale import paci, pipedream, pipedream_2bw
from .pipeline.v_shape import v_half, v_min, zb_v
from .pipeline.zb_auto import zb_auto
from .pipeline.zero_bubble import interleaved_zb, zb_h1, zb_h2
from .saved import PAIRS, POLICY, kind_of, options_in
from .single import in_order
from .single import planned as beside_the_chain

Function = Callable[..., Schedule | Ordered]
#: how training is spread over ranks -> how messages describe such schedulers
KINDS = {"none": "for one device", "data": "for data-parallel ranks", "pipeline": "for a pipeline"}
USUAL = {"none": "in_order", "data": "priority", "pipeline": "one_f_one_b"}  #: the scheduler if none is named
COMPARED = {"data": "barrier,priority", "pipeline": "gpipe,one_f_one_b"}  #: on ranks, those that are compared then


@dataclass(frozen=True)
class Scheduler:
    """A policy with its name. `parallel`: the one of KINDS that it is for. `function`: or the schedule of a file.
    `pairs`: whether it plans better if costs include how much tasks on two streams slow each other down. `rewrite`: the
    pass that makes the step that it orders, with its options. `each`: each micro-batch has an update of its own."""

    name: str
    parallel: str
    function: Function | OnAllRanks | Policy | Schedule
    pairs: bool = False
    rewrite: Callable[..., Draft] | None = None
    each: bool = False

    @cached_property
    def exact(self) -> bool:
        """Whether a step under it computes what the recorded one does."""
        return not (self.each or self.rewrite is not None
                    or (isinstance(self.function, Policy) and self.function.stale))

    @cached_property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """Its parameters besides graph, costs and machine."""
        if isinstance(self.function, Schedule):
            return pipeline.OF_ORDERS if self.parallel == "pipeline" else {}
        if isinstance(self.function, Policy):
            return pipeline.options_of(self.function)
        own = self.function.options if isinstance(self.function, OnAllRanks) else beyond(self.function, 3)
        return own if self.own else own | dict(options_of_passes(True))

    @cached_property
    def staged(self) -> Policy:
        """The policy of a scheduler for pipelines."""
        assert isinstance(self.function, Policy)
        return self.function

    @cached_property
    def own(self) -> bool:
        """Whether it is a function or a file of the user's."""
        return self.name not in SCHEDULERS

    @cached_property
    def about(self) -> str:
        """Its description, with source and closed form: its docstring without the errors."""
        of = self.function.order if isinstance(self.function, OnAllRanks | Policy) else self.function
        return " ".join((inspect.getdoc(of) or "").partition("Raises ")[0].split())

    def known(self, **given: Any) -> dict[str, Any]:
        """The given options that it accepts and that are not None."""
        return {option: value for option, value in given.items() if option in self.options and value is not None}

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for an unknown option, or one of a wrong type."""
        known = self.options
        for option, value in given.items():
            if option not in known:
                raise PlanError(f"scheduler {self.name} takes no argument {option!r}; it takes: "
                                 f"{', '.join(known) or 'none'}")
            kind = known[option].annotation
            if kind is not inspect.Parameter.empty and not isinstance(kind, str) and not _fits(value, kind):
                raise PlanError(f"scheduler {self.name}: {option} is {shorten(value)}; it must be {_in_words(kind)}")


def _in_words(kind: Any) -> str:
    """A type as people say it, without None."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(words.get(one, f"a {getattr(one, '__name__', one)}") for one in get_args(kind) or (kind,)
                       if one is not type(None))


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:  # which is no number, but Python's int
        return bool in get_args(kind)
    try:
        return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
    except TypeError:  # Python cannot check such types as list[int]
        return True


SCHEDULERS: dict[str, Scheduler] = {s.name: s for s in (
    Scheduler("in_order", "none", in_order),
    Scheduler("multi_stream", "none", beside_the_chain),
    Scheduler("multi_region", "none", by_regions, pairs=True),
    Scheduler("partime", "none", partime, rewrite=ticks),
    Scheduler("pd_asgd", "none", pd_asgd, rewrite=asynchronous, each=True),
    Scheduler("layup", "data", OnAllRanks(layup, None), each=True),
    *(Scheduler(policy.name, "data", policy) for policy in (
        OnAllRanks(no_overlap),
        OnAllRanks(barrier),
        OnAllRanks(buckets, in_buckets),
        OnAllRanks(fifo),
        OnAllRanks(priority, in_parts),
        OnAllRanks(dear, lambda graph: Sums(scatter=True)),
        OnAllRanks(reverse_first_k, in_parts))),
    Scheduler("delayed_update", "data", OnAllRanks(delayed_update), rewrite=delayed),
    Scheduler("acco", "data", OnAllRanks(acco), rewrite=in_halves),
    *(Scheduler(policy.name, "pipeline", policy) for policy in (
        Policy(gpipe, "contiguous"),
        Policy(one_f_one_b, "contiguous"),
        Policy(looped_bfs, "looped", chunks=2, chunks_fixed=False),
        Policy(fast_forward, "contiguous"),
        Policy(fast_forward_strict, "contiguous"),
        Policy(fast_forward_greedy, "contiguous"),
        Policy(fast_forward_push, "contiguous", needs=at_least("more than p micro-batches", lambda p: p + 1)),
        Policy(fast_forward_push_released, "contiguous", needs=at_least("more than p micro-batches", lambda p: p + 1)),
        Policy(fast_forward_auto, "looped", chunks_fixed=False, placements=groupings),
        Policy(modulo, "looped", chunks=2, chunks_fixed=False, placements=groupings),
        Policy(modulo_greedy, "looped", chunks=2, chunks_fixed=False, placements=groupings),
        Policy(zb_h1, "contiguous"),
        Policy(zb_h2, "contiguous", needs=at_least("at least 2p-1 micro-batches", lambda p: 2 * p - 1)),
        Policy(zb_auto, "contiguous"),
        Policy(optimal, "contiguous"),
        Policy(interleaved_zb, "looped", chunks=2, chunks_fixed=False),
        Policy(chimera, "bidirectional", chunks=2, needs=even),
        Policy(hanayo, "wave", chunks=2, chunks_fixed=False, needs=even_chunks),
        Policy(zb_v, "wave", chunks=2),
        Policy(v_half, "wave", chunks=2),
        Policy(v_min, "wave", chunks=2),
        Policy(pipedream, "contiguous", stale=True),
        Policy(pipedream_2bw, "contiguous", stale=True, needs=at_least("at least p micro-batches", lambda p: p)),
        Policy(paci, "contiguous", stale=True),
        Policy(layerpipe, "contiguous", chunks_fixed=False, stale=True, parted=True),
        Policy(layerpipe2, "contiguous", chunks_fixed=False, stale=True),
        Policy(adl, "contiguous", chunks_fixed=False, stale=True),
        Policy(petra, "contiguous", chunks_fixed=False, stale=True, reverses=True),
        Policy(dualpipe, "bidirectional", chunks=2, needs=twice_and_even),
        Policy(dualpipe_v, "wave", chunks=2,
               needs=at_least("at least as many micro-batches as stages", lambda p: 2 * p)),
        Policy(interleaved, "looped", chunks=2, chunks_fixed=False),
        Policy(roundpipe, "looped", chunks_fixed=False, parted=True, layered=True),
        Policy(joint, "contiguous", chunks=4, chunks_fixed=False, arranges=arrangements),
        Policy(seq1f1b, "contiguous", sliced=True))),
)}


def names(parallel: str, exact: bool = False) -> list[str]:
    """The names of this kind's schedulers, in the order of SCHEDULERS; `exact`: those with the recorded step's bits."""
    return [s.name for s in SCHEDULERS.values() if s.parallel == parallel and (s.exact or not exact)]


def find(name: str, parallel: str | None = None) -> Scheduler:
    """The scheduler of this name; `parallel`: of this kind. Raises ValueError, with similar names, if unknown."""
    if ":" in name:
        found = of_function(name, function_of(name), parallel)
    elif name.endswith(".csv"):
        schedule = pipeline.read_file(name)
        found = Scheduler(name, kind_of(schedule, parallel or "none"), schedule, pairs=PAIRS in schedule.notes)
    elif name in SCHEDULERS:
        found = SCHEDULERS[name]
    else:
        needs_function(name)
        known = names(parallel) if parallel else list(SCHEDULERS)
        near = ("the name of a plan's file ends in .csv" if os.path.isfile(name) else
                f"similar names: {', '.join(difflib.get_close_matches(name, known, 3, 0.3) or known)}")
        raise PlanError(f"unknown scheduler {name!r}{f' {KINDS[parallel]}' if parallel else ''}; {near}")
    if parallel not in (None, found.parallel):
        raise PlanError(f"scheduler {name} is {KINDS[found.parallel]}, not {KINDS[parallel]}; " + (
            f"give --parallel {found.parallel}" if found.own else f"use one of: {', '.join(names(parallel))}"))
    return found


def name_of(policy: Any) -> str:
    """The name of a scheduler, a policy or a function; a name as it is."""
    if isinstance(policy, str):
        return policy
    return str(getattr(policy, "name", None) or getattr(policy, "__name__", type(policy).__name__))


def scheduler_of(policy: Any, options: Mapping[str, Any], times: bool = False) -> Scheduler:
    """The scheduler that `minidl.plan` is given as a name, a function or a schedule, for a pipeline on given `times` or
    for a recorded step. Raises PlanError for anything else, and for options that it does not take."""
    kind = "pipeline" if times else None
    if isinstance(policy, Schedule):
        own = kind_of(policy)
        alone = own == "data" and made_by(policy)[0] is None  # of the graph's own tasks, sums included
        chosen = Scheduler("given", kind or ("none" if alone else own), policy)
    elif isinstance(policy, str | os.PathLike):
        chosen = find(os.fspath(policy), kind)
    elif isinstance(policy, Scheduler):
        chosen = policy
    elif callable(policy):
        chosen = of_function(name_of(policy), policy, kind)
    else:
        raise PlanError(f"policy is {shorten(policy)}; it must be a scheduler's name, a function or a plan's schedule")
    if times and not (isinstance(chosen.function, Schedule | Policy)):
        raise PlanError(f"scheduler {chosen.name} is {KINDS[chosen.parallel]}, not {KINDS['pipeline']}")
    known = options if not times else getattr(chosen.function, "options", {})
    chosen.check({option: value for option, value in options.items() if option in known})
    return chosen


def blamed(chosen: Scheduler, error: BaseException) -> BaseException:
    """An error in a user's policy as a PlanError that names it and the line; any other one as it is."""
    where = line_of(error)
    clear = isinstance(error, PipelineError) or (isinstance(error, PlanError) and not where)
    if clear or not chosen.own or isinstance(chosen.function, Schedule) or not foreseen(error):
        return error
    what = error.message if isinstance(error, ScheduleError) else f"{type(error).__name__}: {text_of(error)}"
    return PlanError(f"scheduler {chosen.name} failed: {what}{f' ({where})' if where else ''}")


def of_function(name: str, function: Function | OnAllRanks | Policy, parallel: str | None = None) -> Scheduler:
    """The scheduler of a function or a policy; `parallel`: the kind of schedule that a bare function makes, by default
    for one device. On a pipeline it gets the problem, with one stage on each rank; or it compares two tasks of a
    rank. Raises PlanError for a comparison that is not for a pipeline, or for more arguments there."""
    if isinstance(function, Policy):
        return Scheduler(name, "pipeline", function)
    if isinstance(function, OnAllRanks):
        return Scheduler(name, "data", function)
    if needed(function) == 2:
        if parallel not in (None, "pipeline"):
            raise PlanError(f"scheduler {name} has two arguments, so it compares tasks of a pipeline: give --parallel "
                            f"pipeline; any other scheduler is a function of (graph, cost, machine)")
        return Scheduler(name, "pipeline", compared(function))
    if parallel == "pipeline":
        if needed(function) > 2:
            raise PlanError(f"scheduler {name} has {needed(function)} arguments; for a pipeline give a function of the "
                            f"problem, or of two tasks")
        return Scheduler(name, parallel, Policy(function, "contiguous"))
    return Scheduler(name, parallel or "none", OnAllRanks(function) if parallel == "data" else function)


def made_by(schedule: Schedule) -> tuple[Scheduler | None, dict[str, Any]]:
    """The scheduler that an order was made by, if its notes say it, and its options. Raises ScheduleError."""
    return SCHEDULERS.get(schedule.notes.get(POLICY, "")), options_in(schedule.notes)
