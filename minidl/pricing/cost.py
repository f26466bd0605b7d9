"""How long tasks take: measured, analytic, or given. A cost model knows a graph's tasks by name, kind and size.

It is never fitted to the schedule that it then predicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.columns import Floats, Ints, spread
from ..core.graph import TaskGraph, check_kinds
from ..core.machine import is_number, is_whole, shorten
from ..core.tasks import COLLECTIVE, COMMUNICATION, RECEIVES, SENDS, Kind, as_recorded, parse_task, repack, unpack
from ..system.files import read_json, write_atomic
from .corun import BYTES_PER_US, FLOPS_PER_US, CoRun
from .memory import Memory
from .sms import Sms

_RATES = {"flops_per_us", "bytes_per_us"}
SECOND = "O/1"  #: the kind that prices the second part of an O that is cut in two
_KINDS = {*Kind.__members__, SECOND, *_RATES}
_PAIR = re.compile(r"(0|[1-9][0-9]*)->(0|[1-9][0-9]*)")
_PART = re.compile(r"(.*/[0-9]+)/([0-9]{1,4})")
LEAST, TINY, MOST = 1e-9, 1e-100, 1e18  #: the least rate, the numbers beside 0: sums and quotients stay finite


@lru_cache(1 << 16)
def _named(name: str) -> tuple[int, int]:
    """The key of the task that a cost names, and the number of parts of which it is one; 0 for any number."""
    part = _PART.fullmatch(name)
    return (parse_task(part[1]), int(part[2])) if part else (parse_task(name), 0)


class CostError(ValueError):
    """A cost is missing, negative or not a number. The message names it."""


def _check(what: str, value: Any, least: float) -> None:
    least = max(least, TINY) if is_number(value) and 0 < value < TINY else least
    if not is_number(value) or not least <= value <= MOST:
        most = f", at most {MOST:g}" if is_number(value) and value > MOST else ""
        raise CostError(f"{what} is {shorten(value)}; it must be a finite number >= {least:g}{most}")


@dataclass(frozen=True)
class Link:
    """A link between two ranks: latency in time units, bandwidth in bytes per time unit (None: unlimited).

    `core`: whether the cores that compute also move the messages. Then half of a message's time is work of the
    sender's lane, right after the task that makes it, half of the reader's, right before it, and nothing is hidden.
    """

    latency: float = 0.0
    bandwidth: float | None = None
    core: bool = False

    @property
    def per_byte(self) -> float:
        """The time of a byte."""
        return 1 / self.bandwidth if self.bandwidth else 0.0

    def time(self, nbytes: Any) -> Any:
        """How long a message of `nbytes` takes."""
        return self.latency + (np.asarray(nbytes) / self.bandwidth if self.bandwidth else 0.0)


@dataclass(frozen=True)
class Cross:
    """The cost per byte of crossing from one lane of a device to another, since each core has a cache of its own:
    `read`, of bytes that another lane has written; `write`, over bytes that another lane has read or written. See
    `minidl.pricing.crossing`. `source`: given, measured, or assumed if it could not be measured."""

    read: float = 0.0
    write: float = 0.0
    source: str = "given"


@dataclass(frozen=True)
class CostModel:
    """Durations of tasks.

    `tasks`: task name -> duration; `4O0/1/2` is part 1 of 4O0 where it is cut in two, `4O0/1` in any number. `kinds`:
    name of a kind -> duration of the tasks not named, one number or one per unit; "O/1" is the second part of an O that
    is cut. Where neither gives a duration, a send takes its bytes over the link's bandwidth, a receive 0, a collective
    the link's time. `link`: between any two ranks; `links`: exceptions, by pairs such as "0->1"; `far`: to the host's
    memory or a file, and back, None if it is not known. `launch`: added to every task; `node`: of a task's own time,
    what a launch takes that does hardly anything. `step`: once per step, for inputs and outputs. `source`: given,
    measured or analytic. `sizes`: of a network in stages, numbers per stage: "layers", "saved_bytes" by a forward for
    its backward, "message_bytes" to the next stage.

    The lanes of a device: `sync`: added where a task waits for another lane. `spin`: a lane that has waited for so long
    sleeps; `doze`: added if it must be woken; `wake`: the time that the lane that wakes it spends. `cross`: the time
    added for bytes that another lane has touched. `memory`: the bandwidth that they share. `corun`: how much tasks on
    two streams slow each other down, measured or estimated with all that they share, so `memory` does not count then.
    `sms`: the times with a part of a GPU's SMs, and how lanes divide them. `cores`: how many lanes run at the same
    time, one that sums gradients among them; None: all.
    """

    tasks: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    link: Link = Link()
    launch: float = 0.0
    node: float = 0.0
    sync: float = 0.0
    spin: float = 0.0
    doze: float = 0.0
    wake: float = 0.0
    step: float = 0.0
    cross: Cross = Cross()
    cores: int | None = None
    source: str = "given"
    unit: str = "us"
    device: str = ""
    corun: CoRun | None = None
    sms: Sms | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    far: Link | None = None
    memory: Memory | None = None

    def __repr__(self) -> str:
        return f"<CostModel {self.source}: {len(self.tasks):,} tasks, kinds {shorten(dict(self.kinds))}>"

    def __post_init__(self) -> None:
        for name in ("source", "unit", "device"):
            if not isinstance(text := getattr(self, name), str):
                raise CostError(f"{name} is {shorten(text)}; it must be a text")
        own = {name: getattr(self, name) for name in ("launch", "node", "sync", "spin", "doze", "wake", "step")}
        own |= {"reading from another lane": self.cross.read, "writing after another lane": self.cross.write}
        for name, value in (*self.tasks.items(), *own.items()):
            _check(f"the cost of {name}", value, 0)
        if self.cores is not None and not is_whole(self.cores):
            raise CostError(f"cores is {shorten(self.cores)}; it must be a whole number >= 1")
        for name, given in self.kinds.items():
            if name not in _KINDS:
                raise CostError(f"unknown kind of task {name[:40]!r}; known: {', '.join(k.name for k in Kind)}")
            if name in _RATES:
                _check(name, given, LEAST)
            else:
                for each in np.atleast_1d(np.asarray(given, object)).tolist():
                    _check(f"the cost of {name}", each, 0)
        for name, numbers in self.sizes.items():
            for each in numbers:
                _check(f"a size of {name[:40]!r}", each, 0)
        if self.source == "analytic" and (missing := _RATES - self.kinds.keys()):
            raise CostError(f"analytic costs need {min(missing)} in `kinds`")
        for pair in self.links:
            if not _PAIR.fullmatch(str(pair)):
                raise CostError(f"{shorten(pair)} does not name a link; expected two ranks, as in 0->1")
        for pair, link in {"": self.link, "the copies": self.far or Link(), **self.links}.items():
            where = f" of {pair}" if pair else ""
            if not isinstance(link.core, bool):
                raise CostError(f"core{where} is {shorten(link.core)}; it must be true or false")
            _check(f"the latency{where}", link.latency, 0)
            if link.bandwidth is not None:
                _check(f"the bandwidth{where}", link.bandwidth, LEAST)

    @classmethod
    def given(cls, forward: float | Sequence[float], output_grad: float | Sequence[float],
              weight_grad: float | Sequence[float], latency: float = 0.0, bandwidth: float | None = None,
              update: float | Sequence[float] = 0.0) -> CostModel:
        """Times per kind, one for all units or one per unit; a fused backward takes O + W."""
        with np.errstate(over="ignore", invalid="ignore"):  # the check below reports overflow
            backward = np.add(output_grad, weight_grad)
        return cls(kinds={"F": forward, "O": output_grad, "W": weight_grad, "B": backward.tolist(), "U": update},
                   link=Link(latency, bandwidth), unit="")

    @classmethod
    def analytic(cls, flops_per_us: float = FLOPS_PER_US, bytes_per_us: float = BYTES_PER_US,
                 launch: float = 1.0) -> CostModel:
        """A roofline: the larger of arithmetic and memory time, plus a launch. Defaults: one modest CPU core."""
        return cls(kinds={"flops_per_us": flops_per_us, "bytes_per_us": bytes_per_us}, launch=launch, source="analytic")

    def durations(self, graph: TaskGraph) -> Floats:
        """One duration per task, without launch and sync. Raises CostError if a task's cost is not known."""
        check_kinds(graph=(graph, TaskGraph))
        time = np.full(len(graph), np.nan)
        if self.source == "analytic":
            time[:] = np.maximum(graph.flops / float(self.kinds["flops_per_us"]),  # type: ignore[arg-type]
                                 graph.bytes / float(self.kinds["bytes_per_us"]))  # type: ignore[arg-type]
        for kind in map(Kind, np.flatnonzero(np.bincount(graph.kind)).tolist()):
            mine = graph.kind == kind
            if kind.name in self.kinds:
                time[mine] = self._of_kind(kind.name, graph.unit[mine])
            elif kind in COMMUNICATION and self.source != "analytic":
                # the latency of a message lies between send and receive; a collective is one task, latency included
                link = self.link if kind in COLLECTIVE else replace(self.link, latency=0.0)
                time[mine] = 0.0 if kind in RECEIVES else link.time(graph.bytes[mine])
            elif kind in (Kind.D, Kind.H) and self.far is not None:
                time[mine] = self.far.time(graph.bytes[mine])
        if SECOND in self.kinds and (mine := (graph.kind == Kind.O) & (unpack(graph.keys).part == 1)).any():
            time[mine] = self._of_kind(SECOND, graph.unit[mine])
        if self.tasks:
            keys, counts = np.array([*map(_named, self.tasks)], np.int64).T
            values = np.fromiter(self.tasks.values(), np.float64)
            bare = as_recorded(graph.keys)  # every iteration of an unrolled graph costs the same
            width = np.zeros(len(bare))  # in how many parts each task is cut
            if counts.any():
                _, of = np.unique(repack(bare, part=0), return_inverse=True)
                width = spread(of, unpack(bare).part, len(bare), by=np.maximum)[of]
            for count in np.unique(counts).tolist():  # names without a number of parts first
                mine = np.flatnonzero(counts == count)
                mine = mine[np.argsort(keys[mine])]
                at = mine[np.minimum(np.searchsorted(keys[mine], bare), len(mine) - 1)]
                hit = (keys[at] == bare) & (width == (count or width))
                time[hit] = values[at[hit]]
        if (again := np.flatnonzero(np.isnan(time) & (graph.kind == Kind.R))).size:
            time[again] = time[graph.find(repack(graph.keys[again], kind=Kind.F))]
        if (unknown := np.flatnonzero(np.isnan(time))).size:
            raise CostError(f"the {self.source} costs lack task {graph.name(int(unknown[0]))} "
                            f"({unknown.size} of {len(graph)} tasks are missing); measure costs for this graph")
        return time

    def divided(self, side: int) -> CostModel:
        """The costs if all lanes but the first have so many SMs, if they say how long tasks take then. Raises PlanError
        for a share that the device cannot give."""
        if self.sms is None or self.sms.side == side:
            return self
        if side:
            self.sms.check(side)
        return replace(self, sms=replace(self.sms, side=side))

    def _of_kind(self, name: str, unit: Ints) -> Any:
        """The duration of each unit in `kinds` under this name."""
        value = np.asarray(self.kinds[name], np.float64)
        if value.ndim and unit.max() >= len(value):
            raise CostError(f"{len(value)} costs are given for {name}, but the graph has units up to {unit.max()}")
        return value[unit] if value.ndim else value

    def by_link(self, graph: TaskGraph) -> Any:
        """Mask of the sends whose duration only the link gives."""
        sends = [int(k) for k in SENDS if k.name not in self.kinds and self.source != "analytic"]
        return np.isin(graph.kind, sends) & ~np.isin(as_recorded(graph.keys), [_named(name)[0] for name in self.tasks])

    def beyond(self, graph: TaskGraph) -> list[str]:
        """The names in `tasks` whose unit or micro-batch the graph does not reach."""
        units, batches = int(graph.unit.max(initial=-1)), int(graph.micro_batch.max(initial=-1))
        return [name for name in self.tasks if (of := unpack(_named(name)[0])).unit > units or of.micro_batch > batches]

    def save(self, path: str | Path) -> None:
        """Writes JSON, whole or not at all."""
        record = asdict(self) | {"kinds": {k: np.asarray(v).tolist() for k, v in self.kinds.items()}}
        write_atomic(path, json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Reads JSON. Raises CostError for a file that is not a cost model, OSError for one that cannot be read."""
        try:
            record = read_json(path, "costs")
            for name in {**record}.get("tasks", {}):
                _named(name)
            optional = {"corun": CoRun, "sms": Sms, "far": Link, "memory": Memory}
            given = {name: kind(**record[name]) for name, kind in optional.items() if record.get(name) is not None}
            return cls(**{**record, **given, "link": Link(**record["link"]), "cross": Cross(**record["cross"]),
                          "links": {pair: Link(**link) for pair, link in record.get("links", {}).items()}})
        except KeyError as error:
            raise CostError(f"{path} is not a cost model: it lacks {error}; start from one of --save-costs") from None
        except (ValueError, TypeError, AttributeError) as error:
            why = " ".join(str(error).removeprefix(f"{path}: ").split())[:200]
            raise CostError(f"{path} is not a cost model: {why}") from None


def most_streams(cost: CostModel) -> int:
    """As many as there are cores, if the costs say how many; at least 2."""
    return max(2, cost.cores or 2)


def counts_up_to(most: int) -> list[int]:
    """Numbers of lanes, or of parts: all from 2 to 16, then 24, 32, 48 and so on, and `most`. So whatever is a
    candidate for fewer lanes is one for more, at least up to 16."""
    return sorted({most, *range(2, min(most, 16) + 1), *(n for i in range(3, most.bit_length())
                                                         for n in (2 << i, 3 << i) if n <= most)})
