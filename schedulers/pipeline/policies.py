"""All pipeline policies by name: placement, whether O and W are separate, preconditions, staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

from ...plans import Plan, Versions
from ...schedule import Schedule
from .bidirectional import chimera
from .choice import best_placement
from .dualpipe import dualpipe, dualpipe_v
from .fast_forward import fast_forward, fast_forward_auto, fast_forward_greedy, fast_forward_push, fast_forward_strict
from .flush import gpipe, interleaved, one_f_one_b
from .hanayo import hanayo
from .joint import Arrangement, arrangements, joint
from .layerpipe import layerpipe, layerpipe2, layerpipe2_steady, layerpipe2_versions, layerpipe_on_network
from .looped import groupings, looped_bfs, modulo, modulo_greedy
from .optimal import optimal
from .placement import PLACEMENTS, PipelineError, Placement
from .problem import Problem
from .slices import seq1f1b
from .stale import (
    paci,
    paci_versions,
    pipedream_2bw,
    pipedream_steady,
    pipedream_versions,
    two_buffered_steady,
    two_buffered_versions,
)
from .v_shape import v_half, v_min, zb_v
from .zb_auto import zb_auto
from .zero_bubble import interleaved_zb, zb_h1, zb_h2


@dataclass(frozen=True)
class Policy:
    """One scheduler: `order` maps a problem to a schedule, or to a schedule and notes for the plan. A policy whose
    tasks are not whole stages makes the whole plan, a stale one, which is proved like any other; for a recorded network
    `on_network` then returns schedule, placement of the parts and weight versions.

    `splits`: whether O and W are separate ("partly": for some micro-batches). `chunks`: the default number of stages
    per rank; `chunks_fixed`: no other number is possible. `needs(ranks, micro_batches, chunks)` returns what is wrong,
    or None. A stale policy has `versions(problem, schedule)`: the weight version that each entry reads, and the number
    of micro-batches per update; and `steady(problem)`: its time per mini-batch in steady state. A `sliced` policy makes
    a plan of `slices` of micro-batches. A policy that `arranges` layers chooses cut and policy too: it returns what it
    tried, the fastest first. `placements(problem)`: several placements by name, of which simulation chooses one.
    `validates`: in its source, updates do not wait for other stages, but are validated in the next step
    (`post_validation`). The other parameters of `order`, `versions` and `placements` are the policy's options.
    """

    order: Callable[..., Schedule | tuple[Schedule, dict[str, Any]] | Plan]
    placement: str
    splits: bool | str = False
    chunks: int = 1
    chunks_fixed: bool = True
    needs: Callable[[int, int, int], str | None] = lambda ranks, micro_batches, chunks: None
    versions: Callable[..., Versions] | None = None
    steady: Callable[[Problem], float] | None = None
    on_network: Callable[..., tuple[Schedule, Placement, Versions]] | None = None
    sliced: bool = False
    arranges: Callable[[Problem], list[Arrangement]] | None = None
    placements: Callable[..., Mapping[str, Placement]] | None = None
    validates: bool = False

    @property
    def stale(self) -> bool:
        return self.versions is not None or self.on_network is not None

    @property
    def options(self) -> dict[str, Parameter]:
        """The policy's options: its parameters beside the problem."""
        return (_beyond(self.order, 1) | (_beyond(self.versions, 2) if self.versions else {})
                | (_beyond(self.placements, 1) if self.placements else {}))

    def ordered(self, problem: Problem,
                options: Mapping[str, Any]) -> Schedule | tuple[Schedule, dict[str, Any]] | Plan:
        """The result of `order` for the problem, with those of the options that it accepts."""
        return self.order(problem, **_taken(self.order, options))

    def placed(self, problem: Problem, options: Mapping[str, Any]) -> tuple[Placement, dict[str, Any]]:
        """The best of the policy's placements, and what was tried; the problem's own placement if there is no
        choice."""
        if self.placements is None:
            return problem.placement, {}
        found = self.placements(problem, **_taken(self.placements, options))
        if len(found) == 1:
            return next(iter(found.values())), {}
        order: Any = partial(self.order, **_taken(self.order, options))  # no policy that builds plans has a choice
        return best_placement(problem, found, order, "group")

    def read(self, problem: Problem, schedule: Schedule, options: Mapping[str, Any]) -> Versions | None:
        """The weight versions that a stale policy's schedule reads."""
        return self.versions(problem, schedule, **_taken(self.versions, options)) if self.versions else None

    def parted(self, problem: Problem, options: Mapping[str, Any]) -> tuple[Schedule, Placement, Versions]:
        """The result of `on_network` for the problem."""
        assert self.on_network is not None
        return self.on_network(problem, **_taken(self.on_network, options))


def _beyond(function: Callable[..., Any], given: int) -> dict[str, Parameter]:
    """A function's parameters after the first `given`."""
    return dict(list(signature(function, eval_str=True).parameters.items())[given:])


def _taken(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a function accepts."""
    return {name: value for name, value in options.items() if name in signature(function).parameters}


def _at_least(what: str, bound: Callable[[int], int]) -> Callable[[int, int, int], str | None]:
    def needs(ranks: int, micro_batches: int, chunks: int) -> str | None:
        least = bound(ranks)
        return None if micro_batches >= least else f"needs {what} micro-batches, so {least} for {ranks} ranks, " \
                                                   f"not {micro_batches}"
    return needs


def _even(ranks: int, micro_batches: int, chunks: int) -> str | None:
    if ranks % 2 or micro_batches % 2:
        return f"needs even numbers of ranks and micro-batches, not {ranks} and {micro_batches}"
    return None


def _even_chunks(ranks: int, micro_batches: int, chunks: int) -> str | None:
    return f"needs an even number of chunks per rank (waves), not {chunks}" if chunks % 2 else None


def _dualpipe(ranks: int, micro_batches: int, chunks: int) -> str | None:
    return (_even(ranks, micro_batches, chunks)
            or _at_least("at least 2p", lambda p: 2 * p)(ranks, micro_batches, chunks))


POLICIES: dict[str, Policy] = {
    "gpipe": Policy(gpipe, "contiguous"),
    "one_f_one_b": Policy(one_f_one_b, "contiguous"),
    "looped_bfs": Policy(looped_bfs, "looped", chunks=2, chunks_fixed=False),
    "fast_forward": Policy(fast_forward, "contiguous", splits=True),
    "fast_forward_strict": Policy(fast_forward_strict, "contiguous", splits=True),
    "fast_forward_greedy": Policy(fast_forward_greedy, "contiguous", splits=True),
    "fast_forward_push": Policy(fast_forward_push, "contiguous", splits=True,
                                needs=_at_least("more than p", lambda p: p + 1)),
    "fast_forward_auto": Policy(fast_forward_auto, "looped", splits=True, chunks_fixed=False, placements=groupings),
    "modulo": Policy(modulo, "looped", splits=True, chunks=2, chunks_fixed=False, placements=groupings),
    "modulo_greedy": Policy(modulo_greedy, "looped", splits=True, chunks=2, chunks_fixed=False, placements=groupings),
    "zb_h1": Policy(zb_h1, "contiguous", splits=True, validates=True),
    "zb_h2": Policy(zb_h2, "contiguous", splits=True, validates=True,
                    needs=_at_least("at least 2p-1", lambda p: 2 * p - 1)),
    "zb_auto": Policy(zb_auto, "contiguous", splits=True, validates=True),
    "optimal": Policy(optimal, "contiguous", splits=True),
    "interleaved_zb": Policy(interleaved_zb, "looped", splits=True, chunks=2, chunks_fixed=False),
    "chimera": Policy(chimera, "bidirectional", chunks=2, needs=_even),
    "hanayo": Policy(hanayo, "wave", chunks=2, chunks_fixed=False, needs=_even_chunks),
    "zb_v": Policy(zb_v, "wave", splits=True, validates=True, chunks=2),
    "v_half": Policy(v_half, "wave", splits=True, chunks=2),
    "v_min": Policy(v_min, "wave", splits=True, chunks=2),
    "pipedream": Policy(one_f_one_b, "contiguous", versions=pipedream_versions, steady=pipedream_steady),
    "pipedream_2bw": Policy(pipedream_2bw, "contiguous", versions=two_buffered_versions, steady=two_buffered_steady,
                            needs=_at_least("at least p", lambda p: p)),
    "paci": Policy(paci, "contiguous", versions=paci_versions, steady=two_buffered_steady),
    "layerpipe": Policy(layerpipe, "contiguous", splits=True, chunks_fixed=False, on_network=layerpipe_on_network),
    "layerpipe2": Policy(layerpipe2, "contiguous", splits=True, chunks_fixed=False, versions=layerpipe2_versions,
                         steady=layerpipe2_steady),
    "dualpipe": Policy(dualpipe, "bidirectional", splits="partly", chunks=2, needs=_dualpipe),
    "dualpipe_v": Policy(dualpipe_v, "wave", splits="partly", chunks=2,
                         needs=_at_least("at least 2p", lambda p: 2 * p)),
    "interleaved": Policy(interleaved, "looped", chunks=2, chunks_fixed=False),
    "joint": Policy(joint, "contiguous", splits="partly", chunks=4, chunks_fixed=False, arranges=arrangements),
    "seq1f1b": Policy(seq1f1b, "contiguous", sliced=True),
}


def names() -> list[str]:
    """All policies' names, in alphabetical order."""
    return sorted(POLICIES)


def update_every(name: str, micro_batches: int, mini_batches: Any = 1) -> int:
    """The number of micro-batches between two updates of a run under this policy, whose step has `mini_batches`
    mini-batches. Raises PipelineError for numbers that do not fit."""
    if "mini_batches" in policy(name).options:
        if not isinstance(mini_batches, int) or mini_batches < 1 or micro_batches % mini_batches:
            raise PipelineError(f"{name} updates after each mini-batch, so the number of mini-batches "
                                f"(--scheduler-arg mini_batches={mini_batches}) must divide the number of "
                                f"micro-batches (--micro-batches {micro_batches})")
        return micro_batches // mini_batches
    return 1 if policy(name).stale else micro_batches


def slices_of(name: str, given: int | None = None) -> int:
    """Into how many slices a run under this policy cuts each micro-batch. `given`: what its options say."""
    if name not in POLICIES or not POLICIES[name].sliced:
        return 1
    return POLICIES[name].options["slices"].default if given is None else given


def groups(name: str) -> int:
    """The number of groups of micro-batches whose gradients a run under this policy sums separately: one for each
    direction of its pipeline."""
    return 2 if name in POLICIES and POLICIES[name].placement == "bidirectional" else 1


def policy(name: str | Policy) -> Policy:
    """The policy with this name; a Policy is returned unchanged. Raises PipelineError with the known names."""
    if isinstance(name, Policy):
        return name
    if name not in POLICIES:
        raise PipelineError(f"unknown pipeline scheduler {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def title(name: str | Policy) -> str:
    """A policy's name."""
    return name if isinstance(name, str) else name.order.__name__


def place(name: str | Policy, ranks: int, chunks: int | None = None, **options: Any) -> Placement:
    """The placement of the policy's stages. Raises PipelineError for numbers that it does not accept."""
    chosen = policy(name)
    if ranks < 1:
        raise PipelineError(f"{ranks} ranks; at least 1 is needed")
    chunks = chosen.chunks if chunks is None else chunks
    if chunks < 1:
        raise PipelineError(f"{chunks} chunks per rank; at least 1 is needed")
    if chosen.chunks_fixed and chunks != chosen.chunks:
        raise PipelineError(f"{title(name)} holds exactly {chosen.chunks} chunk{'s' * (chosen.chunks > 1)} per rank, "
                            f"not {chunks}")
    return PLACEMENTS[chosen.placement](ranks, chunks, **options)
