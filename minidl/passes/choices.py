"""Choices of a plan besides the order of its tasks, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.columns import Content, Ints
from ..core.placement import Placement
from ..core.tasks import task_name
from .offload import Moves
from .shard import Shards

Parts = int | Mapping[int, int]  #: of every task that can be cut, or of some by their keys


@dataclass(frozen=True)
class Choices(Content):
    """Passes take those that have the names of their options.

    `dropped`: the units whose activations are computed again. `parts`: the number of parts of tasks. `shard`: what
    ranks share out. `moves`: the memory that leaves. `chunks`: stages per rank; `stage_of_unit`: the stage of each
    unit, by default balanced; `placement`: the rank of each stage, by default the policy's. `order`: fixed, or a hint;
    `cap`: the most micro-batches that a rank keeps of a stage, by default the policy's. `experts_over`: none, or data,
    the ranks among which experts are shared out. `options`: of the policy and of passes, such as `streams`."""

    dropped: tuple[int, ...] = ()
    parts: Parts = 1
    shard: Shards = field(default_factory=Shards)
    moves: Moves | None = None
    chunks: int | None = None
    stage_of_unit: Ints | None = None
    placement: Placement | None = None
    order: str = "fixed"
    cap: int | str | tuple[int, ...] | None = None
    experts_over: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The choices, for people; empty if nothing is chosen."""
        parts = self.parts if isinstance(self.parts, int) else {task_name(key): n for key, n in self.parts.items()}
        words = {"recompute": "+".join(map(str, self.dropped)), "split": parts if parts != 1 else "",
                 "shard": self.shard if self.shard.level else "", "offload": self.moves or "",
                 "chunks": self.chunks or "", "order": self.order if self.order != "fixed" else "", "cap": self.cap,
                 "experts over": self.experts_over if self.experts_over != "none" else "",
                 "placement": self.placement.name if self.placement else "",
                 "stages": "" if self.stage_of_unit is None else " ".join(map(str, self.stage_of_unit)), **self.options}
        return ", ".join(f"{name} {value}" for name, value in words.items() if value not in ("", None, {}))


NOTHING = Choices()  #: is chosen
