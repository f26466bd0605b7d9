"""A pipeline policy: an order, and the facts that planning needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from ...core.machine import is_whole, shorten
from ...core.placement import PLACEMENTS, PipelineError, Placement, check_numbers
from ...core.schedule import Schedule
from ..ordered import Ordered, as_ordered, beyond, taken
from .choice import best_order, with_choices
from .joint import Arrangement
from .problem import Problem


@dataclass(frozen=True)
class Policy:
    """One scheduler: `order` maps a problem to a schedule, or to one with notes, versions or a placement (`Ordered`).
    Its other parameters, and the parameters of `placements`, are the policy's options.

    `chunks`: the default number of stages per rank; `chunks_fixed`: no other number is possible. `needs(ranks,
    micro_batches, chunks)` returns what is wrong, or None. `stale`: its pipeline never drains, and it gives the version
    that each entry reads; `parted`: F, O and W of a stage may be on several ranks. `layered`: its stages are layers,
    any number of them, which it cuts itself. `sliced`: it orders `slices` of micro-batches. A policy that `arranges`
    layers also chooses cut and policy: it returns what it tried, the fastest first. `placements(problem)`: several
    placements by name, of which simulation chooses one. `reverses`: it is for reversible networks, whose backward pass
    keeps no activations (`minidl.passes.reverse`).
    """

    order: Callable[..., Schedule | Ordered]
    placement: str
    chunks: int = 1
    chunks_fixed: bool = True
    needs: Callable[[int, int, int], str | None] = lambda ranks, micro_batches, chunks: None
    stale: bool = False
    parted: bool = False
    layered: bool = False
    sliced: bool = False
    arranges: Callable[[Problem], list[Arrangement]] | None = None
    placements: Callable[..., Mapping[str, Placement]] | None = None
    reverses: bool = False

    @cached_property
    def options(self) -> dict[str, Parameter]:
        """The policy's options: its parameters beside the problem."""
        return beyond(self.order) | (beyond(self.placements) if self.placements else {})

    @cached_property
    def taken(self) -> frozenset[str]:
        """The names of the options that `order` accepts."""
        return frozenset(signature(self.order).parameters)

    @cached_property
    def name(self) -> str:
        return getattr(self.order, "__name__", type(self.order).__name__)

    def __call__(self, problem: Problem, **options: Any) -> Ordered:
        """The result of `order` for the problem, with the options that it accepts."""
        made = self.order(problem, **{name: options[name] for name in options.keys() & self.taken})
        return Ordered(made) if isinstance(made, Schedule) else as_ordered(made, self.name, self.order)

    def best(self, problem: Problem, options: Mapping[str, Any], given: Placement | None = None,
             order: Callable[[Problem], Ordered] | None = None) -> Ordered:
        """The order for the best of its placements, or for the one that is given, with notes on what was tried.
        `order`: from a problem to the policy's order, if that is not all."""
        place, tried = self.placed(problem, options, given)
        problem = problem if place is problem.placement else replace(problem, placement=place)
        made = self(problem, **options) if order is None else order(problem)
        return replace(made, placement=made.placement or place,
                       notes=with_choices(tried, made.notes) if tried else made.notes)

    def place(self, ranks: int, chunks: int | None = None, layers: int | None = None) -> Placement:
        """The placement of its stages; `layers`: of a step, if it is known. Raises PipelineError for numbers that it
        does not accept."""
        if self.layered and chunks is None and layers is not None and is_whole(ranks):
            check_numbers(layers, 1, None)
            return Placement("looped", ranks, np.arange(layers)[None] % ranks)
        chunks = self.chunks if chunks is None else chunks
        for what, value in (("ranks", ranks), ("chunks per rank", chunks)):
            if not is_whole(value):
                raise PipelineError(f"{shorten(value)} {what}; at least 1 is needed")
        check_numbers(ranks * chunks, 1, None)
        if self.chunks_fixed and chunks != self.chunks:
            raise PipelineError(f"{self.name} holds exactly {self.chunks} chunk{'s' * (self.chunks > 1)} per rank, "
                                f"not {chunks}")
        if self.placement not in PLACEMENTS:
            raise PipelineError(f"{self.name}: no placement {self.placement!r}; take {' or '.join(PLACEMENTS)}")
        return PLACEMENTS[self.placement](ranks, chunks)

    def placed(self, problem: Problem, options: Mapping[str, Any],
               given: Placement | None = None) -> tuple[Placement, dict[str, Any]]:
        """The best of its placements, and what was tried; the one that is given, or the problem's own, if there is no
        choice. Raises PipelineError for options and numbers that the policy does not accept."""
        if wrong := self.needs(problem.ranks, problem.micro_batches, problem.chunks):
            raise PipelineError(f"{self.name}: {wrong}")
        if unknown := sorted(options.keys() - set(self.options)):
            raise PipelineError(f"{self.name} takes no argument {unknown[0]!r}; it takes "
                                f"{', '.join((*self.options, 'lag', 'cap'))}")
        if given is not None or self.placements is None:
            return given or problem.placement, {}
        found = self.placements(problem, **taken(self.placements, options))
        if len(found) == 1:
            return next(iter(found.values())), {}
        order = partial(self.order, **taken(self.order, options))
        best = best_order(problem, dict.fromkeys(found, order), "group", found)
        return best.placement or problem.placement, dict(best.notes)

    def update_every(self, micro_batches: int, mini_batches: Any = 1) -> int:
        """The number of micro-batches between two updates of a run, whose step has `mini_batches` mini-batches. Raises
        PipelineError for numbers that do not fit."""
        if "mini_batches" in self.options:
            if not isinstance(mini_batches, int) or mini_batches < 1 or micro_batches % mini_batches:
                raise PipelineError(f"{self.name} updates after each mini-batch, so the number of mini-batches "
                                    f"(--scheduler-arg mini_batches={mini_batches}) must divide the number of "
                                    f"micro-batches (--micro-batches {micro_batches})")
            return micro_batches // mini_batches
        return 1 if self.stale else micro_batches

    @property
    def slices(self) -> int:
        """Into how many slices it cuts each micro-batch by default."""
        return int(self.options["slices"].default) if self.sliced else 1

    @property
    def groups(self) -> int:
        """The number of groups of micro-batches whose gradients are summed separately: one for each direction."""
        return 2 if self.placement == "bidirectional" else 1


def at_least(what: str, bound: Callable[[int], int]) -> Callable[[int, int, int], str | None]:
    def needs(ranks: int, micro_batches: int, chunks: int) -> str | None:
        least = bound(ranks)
        return None if micro_batches >= least else f"needs {what}, so {least} for {ranks} ranks, not {micro_batches}"
    return needs


def even(ranks: int, micro_batches: int, chunks: int) -> str | None:
    odd = ranks % 2 or micro_batches % 2
    return f"needs even numbers of ranks and micro-batches, not {ranks} and {micro_batches}" if odd else None


def even_chunks(ranks: int, micro_batches: int, chunks: int) -> str | None:
    return f"needs an even number of chunks per rank (waves), not {chunks}" if chunks % 2 else None


def twice_and_even(ranks: int, micro_batches: int, chunks: int) -> str | None:
    return (even(ranks, micro_batches, chunks)
            or at_least("at least 2p micro-batches", lambda p: 2 * p)(ranks, micro_batches, chunks))
