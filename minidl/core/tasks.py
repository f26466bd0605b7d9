"""The identity of a task: its kind, and its key (one integer) or name, such as `4W0`; and its launches, kernel calls on
views of storages.

Data and pure functions over integers and arrays of integers. `minidl.core.graph` has what a task reads and writes, and
for what it must wait.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np


class GraphError(ValueError):
    """A graph, a task name or a buffer is not valid. The message names it."""


class Kind(IntEnum):
    """The kind of a task. The names here are printed and parsed."""

    F = 0  #: forward
    O = 1  #: output gradient (dgrad, dX)
    W = 2  #: weight gradient (wgrad, dW)
    B = 3  #: fused backward, O and W in one task
    U = 4  #: update
    R = 5  #: recompute, a forward again
    Q = 6  #: quantise, a gradient rounded for its readers
    D = 7  #: copy out, to the host or a file
    H = 8  #: copy back
    A = 9  #: all-reduce
    AS = 10  #: reduce-scatter
    AG = 11  #: all-gather
    X = 12  #: exchange, an all-to-all of tokens
    SF = 13  #: send activation
    RF = 14  #: receive activation
    SO = 15  #: send gradient
    RO = 16  #: receive gradient


class What(IntEnum):
    """The kinds of a timeline's records."""

    TASK = 0
    WAIT = 1  #: the lane waited until a task of another lane or rank ended
    TRANSFER = 2  #: the lane waited for data that were on their way from another rank


SUMS = (Kind.A, Kind.AS, Kind.AG)  #: of gradients over ranks, whole or in halves; they have no micro-batch
COLLECTIVE = (*SUMS, Kind.X)  #: collectives: all ranks of a group take part
SENDS, RECEIVES = (Kind.SF, Kind.SO), (Kind.RF, Kind.RO)  #: the two ends of messages
MESSAGES = (*SENDS, *RECEIVES)
COMMUNICATION = (*COLLECTIVE, *MESSAGES)
COPIES = (Kind.D, Kind.H)  #: out of the memory that counts, and back (`minidl.passes.offload`)
WORDS = dict(zip(Kind, (
    "forward", "output gradient", "weight gradient", "backward", "update", "recompute", "quantise", "copy out",
    "copy back", "all-reduce", "reduce-scatter", "all-gather", "exchange", "send of the activation",
    "receive of the activation", "send of the gradient", "receive of the gradient"),
    strict=True))  #: what each kind does, for messages
#: the names of axes along which kernels are cut, by their labels; others are called by their number
AXES = {"n": "samples", "s": "samples", "m": "rows", "r": "rows", "h": "heads", "o": "outputs", "c": "channels"}
COMPUTE = (Kind.F, Kind.O, Kind.W, Kind.B, Kind.U, Kind.R)  #: tasks that compute, which can be cut into parts


# One 64-bit key is one task's identity. From the lowest bit: kind (5 bits), unit (20), micro-batch (19), index (10),
# late (1), iteration (8). The index is a message's destination, or any other task's part.
_KIND_BITS, _UNIT_BITS, _MICRO_BITS, _INDEX_BITS, _LATE_BITS, _ITERATION_BITS = 5, 20, 19, 10, 1, 8
_UNIT = _KIND_BITS
_MICRO = _UNIT + _UNIT_BITS
_INDEX = _MICRO + _MICRO_BITS
_LATE = _INDEX + _INDEX_BITS
_ITERATION = _LATE + _LATE_BITS
_BITS = {"unit": _UNIT_BITS, "micro-batch": _MICRO_BITS, "part": _INDEX_BITS, "destination": _INDEX_BITS,
         "late": _LATE_BITS, "iteration": _ITERATION_BITS}
NAME = re.compile(r"(\d+)(AS|AG|SF|RF|SO|RO|[FOWBURQDHAX])(\d+)(?:/(\d+)|>(\d+))?(?:@(\d+))?(?:#(\d+))?")
_KIND_NAMES = [kind.name for kind in Kind]
_LIMITS = [1 << bits for bits in _BITS.values()]
_A, _X, _SF = int(Kind.A), int(Kind.X), int(Kind.SF)  # a member of an Enum is slow to look up


def pack(unit: Any, kind: Any, micro_batch: Any = 0, *, part: Any = 0, destination: Any = 0, late: Any = 0,
         iteration: Any = 0) -> Any:
    """The key(s) of tasks: integers or integer arrays in, int64 out. Raises GraphError for numbers that are too large,
    and for fields that a kind does not have, see `Identity`."""
    given = (unit, micro_batch, part, destination, late, iteration)
    if isinstance(kind, int) and all(type(value) is int for value in given):  # of one task, which need no arrays
        fits = all(0 <= value < limit for value, limit in zip(given, _LIMITS, strict=True))
        if fits and not (part if kind >= _SF else destination) and not (micro_batch and _A <= kind < _X):
            return np.int64(_packed(unit, kind, micro_batch, part | destination, late, iteration))
    fields = [np.asarray(value, np.int64) for value in given]
    for (what, bits), own, value in zip(_BITS.items(), given, fields, strict=True):
        if (type(own) is not int or own) and value.size and not 0 <= value.min() <= value.max() < 1 << bits:
            wrong = "is too large" if value.min() >= 0 else "is negative"
            raise GraphError(f"{what} {value.max() if value.min() >= 0 else value.min()} {wrong} (at most "
                             f"{(1 << bits) - 1})")
    unit, micro_batch, part, destination, late, iteration = fields
    kind = np.asarray(kind, np.int64)
    if part.any() or destination.any() or (kind >= _A).any():
        message, sums = kind >= _SF, (kind >= _A) & (kind < _X)
        for what, wrong in (("parts", part * message), ("destination", destination * ~message),
                            ("micro-batch", micro_batch * sums)):
            if np.any(wrong):
                first = np.broadcast_to(kind, np.shape(wrong)).flat[np.flatnonzero(wrong)[0]]
                raise GraphError(f"{Kind(first).name} has no {what}")
    return _packed(unit, kind, micro_batch, part | destination, late, iteration)


def _packed(unit: Any, kind: Any, micro_batch: Any, index: Any, late: Any, iteration: Any) -> Any:
    key = (iteration << _LATE_BITS | late) << _INDEX_BITS | index
    return ((key << _MICRO_BITS | micro_batch) << _UNIT_BITS | unit) << _KIND_BITS | kind


def _bits(begin: int, count: int) -> Any:
    """A property: so many bits of the key, from bit `begin` on."""
    mask = (1 << count) - 1
    return property(lambda self: self.key >> begin & mask)


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of a task's key, or of several keys (then each field is an array): the inverse of `pack`.

    Every field has one meaning, and one syntax in the name (`task_name`):

    - `unit`, `kind`, `micro_batch`: `4W0`;
    - `part`: which piece of a task that is cut into several: `4A0/2` is part 2 of an all-reduce. Part 0 is not written.
      A split task has the parts `4O0/1`, `4O0/2`, ..., so that `4O0` is always the whole one;
    - `destination`: the rank to which a message goes. `2SF0>1` sends the result of 2F0 to rank 1, `2RF0>1` receives it
      there;
    - `late`: 1 if the task runs one step late: `4W0@1` is the 4W0 of the step before;
    - `iteration`: in an unrolled graph, the step of the task: `4W0#2`.
    """

    key: Any

    kind = _bits(0, _KIND_BITS)
    unit = _bits(_UNIT, _UNIT_BITS)
    micro_batch = _bits(_MICRO, _MICRO_BITS)
    part = property(lambda self: self._index * (self.kind < _SF))
    destination = property(lambda self: self._index * (self.kind >= _SF))
    late = _bits(_LATE, _LATE_BITS)
    iteration = _bits(_ITERATION, _ITERATION_BITS)
    _index = _bits(_INDEX, _INDEX_BITS)


def unpack(key: Any) -> Identity:
    """The fields of a task's key, or of an array of keys."""
    return Identity(key)


def repack(keys: Any, **fields: Any) -> Any:
    """The same keys with other fields, such as `late=1`."""
    own = unpack(int(keys) if isinstance(keys, np.integer) else keys)
    names = ("unit", "kind", "micro_batch", "part", "destination", "late", "iteration")
    return pack(**{name: getattr(own, name) for name in names} | fields)


def widths(keys: Any) -> dict[int, int]:
    """The number of parts of each task of which these keys name parts, by the key of the whole task."""
    own = unpack(keys)
    parted = np.flatnonzero(np.isin(own.kind, COMPUTE) & (own.part > 0))
    found: dict[int, int] = {}
    for key, part in zip(repack(own.key[parted], part=0, late=0).tolist(), own.part[parted].tolist(), strict=True):
        found[key] = max(found.get(key, 1), part)
    return found


def as_recorded(keys: Any) -> Any:
    """The keys of the same tasks as they were recorded: in iteration 0, and not late."""
    return keys & ((1 << _LATE) - 1)


def task_name(key: int) -> str:
    """`4W0`: unit, kind, micro-batch, and the other fields as in `Identity`."""
    own = unpack(int(key))
    name = f"{own.unit}{_KIND_NAMES[own.kind]}{own.micro_batch}"
    if own.kind >= Kind.SF:
        name += f">{own.destination}"
    elif own.part:
        name += f"/{own.part}"
    return name + (f"@{own.late}" if own.late else "") + (f"#{own.iteration}" if own.iteration else "")


def parse_task(name: str) -> int:
    """The key of a task's name. Raises GraphError when it is not a task's name or out of range."""
    match = NAME.fullmatch(name.strip())
    if match is None:
        raise GraphError(f"{name[:40]!r} is not a task name; expected unit, kind, micro-batch, as in 4W0")
    unit, kind, micro_batch, part, destination, late, iteration = match.groups(default="0")
    for (what, bits), value in zip(_BITS.items(), (unit, micro_batch, part, destination, "0", iteration), strict=True):
        if len(value) > 20 or int(value) >= 1 << bits:
            raise GraphError(f"task {name[:40]!r}: {what} {value[:20]} is too large (at most {(1 << bits) - 1})")
    own = Kind[kind]
    if (own >= Kind.SF) != (match[5] is not None):
        raise GraphError(f"task {name[:40]!r}: " + (
            f"the name of a message needs its destination, as in {unit}{kind}{micro_batch}>1" if own >= Kind.SF else
            f"only a message has a destination; part 1 is {unit}{kind}{micro_batch}/1"))
    if own in SUMS and int(micro_batch):
        raise GraphError(f"task {name[:40]!r}: a sum over ranks has no micro-batch; its part {micro_batch} is "
                         f"{unit}{kind}0/{micro_batch}")
    if int(late) > 1:
        raise GraphError(f"task {name[:40]!r}: a task runs at most one step late, @1; iteration {late} is "
                         f"{unit}{kind}{micro_batch}#{late}")
    return int(_packed(int(unit), own, int(micro_batch), int(part) | int(destination), int(late), int(iteration)))


# ------------------------------------------------------------------------------------------------------------ launches
@dataclass(frozen=True, slots=True)
class View:
    """A strided window on a storage: offset and strides in elements."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str

    @classmethod
    def of(cls, storage: Any, number: int = 0) -> View:
        """All elements of a storage, which has this number in its graph."""
        return cls(number, storage.shape, strides_of(storage.shape), 0, storage.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether the elements lie in order without gaps."""
        return self.strides == strides_of(self.shape)

    def part(self, axis: int, begin: int, end: int) -> View:
        """The elements from `begin` to `end` along an axis."""
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + begin * self.strides[axis])


@lru_cache(4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def strided(memory: Any, view: View, base: int = 0) -> Any:
    """The array that `view` means in host memory, whose storage begins at byte `base`."""
    size = np.dtype(view.dtype).itemsize
    if 0 in view.shape:
        return np.empty(view.shape, view.dtype)
    return np.ndarray(view.shape, view.dtype, memory, base + view.offset * size, tuple(s * size for s in view.strides))


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a launch may be cut: a label for each axis of each view, see `minidl.kernels.registry.kernel`;
    `work(reads, writes, **constants)`: the shapes and types of a part's scratch arrays; and the kernel's `window`.
    `along`: of a part, the axis along which it has been cut, in words."""

    axes: str
    work: Callable[..., Sequence[tuple[tuple[int, ...], Any]]]
    window: Callable[..., tuple[int, int, dict[str, Any]]] | None = None
    along: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call of a task: the kernel's name, the views that it reads, writes and uses as scratch, and its
    constants. `cuts`: None if it must stay whole. `alike`: the text that it shares with those that may be one launch
    with it (`minidl.passes.group`); empty if it stays alone."""

    kernel: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    work: tuple[View, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    cuts: Cuts | None = field(default=None, compare=False, repr=False)
    alike: str = field(default="", compare=False, repr=False)

    @property
    def views(self) -> tuple[View, ...]:
        return self.reads + self.writes + self.work

    def shifted(self, samples: int) -> Launch:
        """The same launch for a part of the batch that begins this many samples later."""
        return replace(self, constants=tuple((name, value + samples if name == "sample" else value)
                                             for name, value in self.constants))

    def moved(self, storage: Mapping[int, int], known: dict[int, View] | None = None) -> Launch:
        """The same launch on other storages. `known`: see `moved_views`."""
        known = {} if known is None else known
        return Launch(self.kernel, moved_views(self.reads, storage, known), moved_views(self.writes, storage, known),
                      moved_views(self.work, storage, known), self.constants, self.cuts, self.alike)


def moved_views(views: Iterable[View], storages: Mapping[int, int], known: dict[int, View] | None = None
                ) -> tuple[View, ...]:
    """The same views on the storages that replace theirs. `known`: of each view, by its id, what replaces it, if
    launches share views; it grows."""
    known, found = {} if known is None else known, []
    for v in views:
        view = known.get(id(v))
        if view is None:
            to = storages.get(v.storage, v.storage)
            view = known[id(v)] = v if to == v.storage else View(to, v.shape, v.strides, v.offset, v.dtype)
        found.append(view)
    return tuple(found)
