"""Which rank holds which stage, and which weights its tasks read. Any order of the tasks can go with a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .columns import Columns, Content, Ints
from .machine import is_number, is_whole, shorten
from .schedule import Schedule
from .tasks import COLLECTIVE, COPIES, Kind, unpack

LARGEST = 10**8  #: the most tasks of a plan
HISTORIES = ("exact", "average", "predicted", "none")  #: the weights on which a stale step runs
#: decays of an average of updates, by the age of the weights that it rebuilds: none; of LayerPipe2; with the mean lag
#: of the last `age` updates, (age - 1) / 2; of PipeMare (1910.05124)
DECAYS: dict[str, Callable[[int], float]] = {
    "last": lambda age: 0.0,
    "age": lambda age: (age - 1) / age, "window": lambda age: (age - 1) / (age + 1),
    "pipemare": lambda age: 0.135 ** (1 / age)}


class PipelineError(ValueError):
    """A pipeline cannot be planned as asked; the message says why and what to do."""


class Refused(PipelineError):
    """A pass cannot do what a step asks for. One line says what is not possible, why, and what to do instead."""

    def __init__(self, what: str, why: str, cure: str) -> None:
        super().__init__(what, why, cure)
        self.what, self.why, self.cure = what, why, cure

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.cure}"


def check_numbers(stages: int, micro_batches: int, cap: float | None) -> None:
    """Raises PipelineError for numbers that no plan can have."""
    if not is_whole(micro_batches):
        raise PipelineError(f"the number of micro-batches is {shorten(micro_batches)}; it must be at least 1")
    if 3 * stages * micro_batches > LARGEST or micro_batches >= 1 << 19:
        raise PipelineError(f"{stages:,} stages and {micro_batches:,} micro-batches are too many: a plan has at most "
                            f"{LARGEST:,} tasks and {(1 << 19) - 1:,} micro-batches")
    if cap is not None and not (is_number(cap) and cap > 0):
        raise PipelineError(f"the activation cap is {shorten(cap)}; it must be positive")


@dataclass(frozen=True)
class Placement(Content):
    """`table[d, s]` is the rank that holds stage s for micro-batches of direction d.

    With one direction every micro-batch has direction 0. With two, the first half of the micro-batches goes down
    (direction 0) and the second half up; each rank then holds two copies of weights. If a stage's tasks are on
    different ranks, `parts[kind, part, stage]` is the rank of each instead. `halves`: stage whose output gradients are
    two tasks, the upper layers' and then the lower layers' -> the share of the time that the first should take.
    `apart`: forwards have their own ranks and copies of weights, which part 1 of an update follows.
    """

    name: str
    ranks: int
    table: Ints
    parts: Ints | None = None
    halves: Mapping[int, float] | None = None
    apart: bool = False

    @property
    def stages(self) -> int:
        return int(self.table.shape[1])

    @property
    def directions(self) -> int:
        return 1 if self.apart else int(self.table.shape[0])

    @property
    def chunks(self) -> int:
        """Stages per rank, counted over both directions."""
        return self.stages * self.directions // self.ranks

    @property
    def share(self) -> float:
        """The size of one stage's activation in units of a rank's whole part of the model."""
        return self.ranks / self.stages

    def direction(self, micro_batch: Any, micro_batches: int) -> Any:
        """0 or 1 for micro-batch number(s)."""
        return (np.asarray(micro_batch) * self.directions >= micro_batches) * (self.directions - 1)

    def rank(self, stage: Any, micro_batch: Any, micro_batches: int) -> Any:
        """The rank(s) on which tasks of the stage(s) for the micro-batch(es) run."""
        return self.table[self.direction(micro_batch, micro_batches), stage]

    def home(self, keys: Any, micro_batches: int) -> Any:
        """The rank(s) of task(s), which must be in range. For an update in both directions, the part is the
        direction; gathers of the two take turns. A sum over replicas is where its stage is updated; a copy out or back
        is beside the forward or the update."""
        own = unpack(keys)
        if self.parts is not None:
            copies = np.isin(own.kind, COPIES)  # of activations, or of states, which are part 1
            made = own.kind == Kind.SF  # by a forward, or new weights by an update
            moves = copies | made | np.isin(own.kind, COLLECTIVE)
            beside = np.where((copies & (own.part == 0)) | (made & (own.micro_batch < micro_batches)), Kind.F, Kind.U)
            kind = np.where(moves, beside, np.where(own.kind < len(self.parts), own.kind, Kind.O))
            return self.parts[kind, np.where(moves, 0, np.minimum(own.part, self.parts.shape[1] - 1)), own.unit]
        gather, most = own.kind == Kind.AG, self.directions - 1
        direction = np.where(gather, own.part % self.directions, np.minimum(own.part, most))
        return np.where((gather | (own.kind == Kind.U)) & (most > 0), self.table[direction, own.unit],
                        self.rank(own.unit, own.micro_batch, micro_batches))

    def held(self, rank: int) -> Ints:
        """The stages on a rank (of the first direction), ascending."""
        return np.flatnonzero(self.table[0] == rank)


def contiguous(ranks: int, chunks: int = 1) -> Placement:
    """Consecutive stages on one rank: rank r holds r*chunks .. r*chunks + chunks - 1."""
    return Placement("contiguous", ranks, np.arange(ranks * chunks)[None] // chunks)


def modulo(ranks: int, chunks: int = 1, group: int = 1) -> Placement:
    """Stage i on rank (i // group) mod ranks, in rounds. Raises PipelineError if the last round would be incomplete."""
    if group < 1 or chunks % group:
        raise PipelineError(f"modulo placement: {chunks} chunks per rank is not a multiple of the group size {group}")
    return Placement("modulo", ranks, (np.arange(ranks * chunks)[None] // group) % ranks)


def looped(ranks: int, chunks: int = 1) -> Placement:
    """Stage i on rank i mod ranks: the modulo placement with group size 1."""
    return Placement("looped", ranks, np.arange(ranks * chunks)[None] % ranks)


def wave(ranks: int, chunks: int = 2) -> Placement:
    """Down and up again, in rounds: 0 1 .. p-1 p-1 .. 1 0; with two chunks it is the V placement."""
    stage = np.arange(ranks * chunks)
    place = stage % ranks
    return Placement("v" if chunks == 2 else "wave", ranks,
                     np.where(stage // ranks % 2, ranks - 1 - place, place)[None])


def bidirectional(ranks: int, chunks: int = 2) -> Placement:
    """Stage s on rank s for one half of the micro-batches and on rank p-1-s for the other: two copies of weights."""
    if chunks != 2:
        raise PipelineError(f"a bidirectional pipeline holds exactly 2 stages per rank, not {chunks}")
    stage = np.arange(ranks)
    return Placement("bidirectional", ranks, np.stack([stage, ranks - 1 - stage]))


def apart(name: str, ranks: int, forward: Ints, backward: Ints) -> Placement:
    """The forwards of each stage on one rank, its backwards and its update on another."""
    homes = np.tile(backward, (Kind.U + 1, 2, 1))
    homes[Kind.F] = homes[Kind.U, 1] = forward
    return Placement(name, ranks, np.asarray(backward)[None], homes, apart=True)


PLACEMENTS: dict[str, Callable[..., Placement]] = {
    "contiguous": contiguous, "modulo": modulo, "looped": looped, "wave": wave, "bidirectional": bidirectional}


@dataclass(frozen=True)
class Versions(Columns):
    """The weight versions of a stale schedule: entry i reads version `read[i]`; an update reads the version that it
    changes.

    Version 0 is the newest one when a step begins and all updates of the steps before are done; stage s has version k +
    1 as soon as its weight gradient of micro-batch `(k + 1) * every - 1` is done. In a run that never drains, version
    -1 is of one update before; when the run begins, it equals version 0. `history`: the weights on which a backward
    runs. "exact": the version that its forward read, which is kept. "average": that version, rebuilt from a moving
    average of the updates with a decay of DECAYS. "predicted": the newest version, of which its forward predicts the
    share `p` of the way: from the last update, or with a `decay` from their moving average. "none": the newest version,
    so that none is kept.
    """

    read: Ints
    every: int = 1
    history: str = "exact"
    decay: str = "age"
    p: float = 1.0

    def __post_init__(self) -> None:
        for name, known in (("history", HISTORIES), ("decay", DECAYS)):
            if (value := getattr(self, name)) not in known:
                raise PipelineError(f"unknown {name} {value!r}; known: {', '.join(known)}")
        super().__post_init__()

    def moved(self, schedule: Schedule, to: Schedule) -> Versions:
        """These versions of a schedule, for another one that has more tasks: these have the version of their time."""
        read = dict(zip(schedule.keys.tolist(), self.read.tolist(), strict=True))
        of_its_time = unpack(to.keys).micro_batch // self.every
        return replace(self, read=np.array([read.get(key, other) for key, other in
                                            zip(to.keys.tolist(), of_its_time.tolist(), strict=True)], np.int64))
