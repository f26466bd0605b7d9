"""The problems of the arena, as JSON: ranks, micro-batches, times, link and cap, and the best that is proved of them.

    {"name": "slow_links", "about": "...", "ranks": 4, "micro_batches": 16, "forward": 1, "output_grad": 1,
     "weight_grad": 1, "latency": 0.5, "activation_cap": 8, "message_bytes": 1, "optimum": {"makespan": 27}}

A time is one number for a rank, which its stages share, or a list with one number for each stage; `latency` and
`activation_cap` are as on the command line. A file has one problem, or a list of them. `optimum` is a fact about orders
with one stage on each rank, which nobody has to respect.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.machine import Machine, is_number
from ..core.placement import PipelineError
from ..pricing.cost import MOST
from ..schedulers.pipeline import Pipeline
from ..system.files import read_json

BUNDLED = Path(__file__).with_name("problems.json")
MOST_TASKS = 100_000  #: of a problem: F, O and W of all ranks
NUMBERS = ("forward", "output_grad", "weight_grad")


class ArenaError(ValueError):
    """Problems or entries that cannot be used. The message is one line."""


@dataclass(frozen=True)
class Task:
    """One problem; see the module. `cap`: the most live activations of a rank, in units of its part of the model."""

    name: str
    ranks: int
    micro_batches: int
    forward: float | list[float] = 1.0
    output_grad: float | list[float] = 1.0
    weight_grad: float | list[float] = 1.0
    latency: float = 0.0
    activation_cap: float | None = None
    message_bytes: int = 1
    unit: str = ""
    about: str = ""
    optimum: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.machine, self.pipeline  # noqa: B018 (they check their numbers)
            for name in NUMBERS:
                times = np.asarray(getattr(self, name))  # not of float64, which makes numbers of text
                if times.dtype.kind not in "if" or times.ndim > 1 or not ((times > 0) & (times <= MOST)).all():
                    raise PipelineError(f"{name} must be a positive number, or a list of them, each at most {MOST:g}")
            if not (is_number(self.latency) and 0 <= self.latency <= MOST):
                raise PipelineError(f"latency must be a number of at least 0, and at most {MOST:g}")
            best = self.optimum.values() if isinstance(self.optimum, dict) else [None]
            if not all(is_number(x) and abs(x) <= MOST for x in best):
                raise PipelineError('optimum must be an object of numbers, as in {"makespan": 27}')
            if 3 * self.ranks * self.micro_batches > MOST_TASKS:
                raise PipelineError(f"{self.ranks} ranks and {self.micro_batches} micro-batches have more than "
                                    f"{MOST_TASKS:,} tasks")
        except (ValueError, TypeError) as error:
            raise ArenaError(f"problem {str(self.name)[:40]!r}: {error}") from None

    @property
    def pipeline(self) -> Pipeline:
        """Its times."""
        return Pipeline(self.micro_batches, self.forward, self.output_grad, self.weight_grad, self.latency,
                        message_bytes=self.message_bytes)

    @property
    def machine(self) -> Machine:
        """Its ranks and cap."""
        return Machine(self.ranks, activation_cap=self.activation_cap)

    @property
    def bound(self) -> float:
        """A lower bound on the period of every order on any placement: the work of a rank if all have the same."""
        times = (getattr(self, name) for name in NUMBERS)
        return self.micro_batches * sum(sum(t) if np.ndim(t) else t * self.ranks for t in times) / self.ranks


def read(where: str) -> list[Task]:
    """The problems of a JSON file; or the bundled ones, `all` of them or by names with commas. Raises ArenaError."""
    bundled = {problem.name: problem for problem in _of(BUNDLED)}
    if where.endswith(".json"):
        return _of(Path(where))
    chosen = [*bundled] if where == "all" else where.split(",")
    for name in chosen:
        if name not in bundled:
            raise ArenaError(f"{name[:60]!r} is neither a .json file nor a bundled problem; known: all, "
                             f"{', '.join(bundled)}")
    return [problem for name, problem in bundled.items() if name in chosen]


def _of(path: Path) -> list[Task]:
    try:
        content = read_json(path, "problems")
    except ValueError as error:
        raise ArenaError(str(error)) from None
    found = [_task(path, record) for record in (content if isinstance(content, list) else [content])]
    if len({task.name for task in found}) < max(1, len(found)):
        raise ArenaError(f"{path}: {'two problems have the same name' if found else 'it has no problems'}")
    return found


def _task(path: Path, record: Any) -> Task:
    known = {field.name for field in fields(Task)}
    if not isinstance(record, dict) or not {"name", "ranks", "micro_batches"} <= record.keys():
        raise ArenaError(f"{path}: a problem is an object with name, ranks and micro_batches")
    if unknown := sorted(record.keys() - known):
        raise ArenaError(f"{path}: unknown key {unknown[0][:40]!r}; known: {', '.join(sorted(known))}")
    for key in ("name", "about", "unit"):
        if not isinstance(text := record.get(key, ""), str) or not text.isprintable():
            raise ArenaError(f"{path}: the {key} of a problem is a line of text, not {str(text)[:40]!r}")
    try:
        return Task(**record)
    except ArenaError as error:
        raise ArenaError(f"{path}: {error}") from None
