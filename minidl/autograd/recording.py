"""`record` turns the Python function that trains eagerly into a task graph: it executes nothing and changes nothing.

The graph cannot follow later changes of what the function has read: attributes of modules and optimizers, and whether
parameters get gradients. So executors notice them: a change raises `tape.changes`, which each call compares with the
number that it has seen.
"""
from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.graph import Role, TaskGraph
from ..core.machine import shorten
from ..core.tasks import Kind
from ..system.process import paused
from . import random
from . import tape as tapes
from .tape import Recorder
from .tensor import FLOATS, HALVES, Tensor

ABSENT = object()  #: in place of an attribute that there is not
#: types whose values are compared; other objects are the same, or others
PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))


class Watched:
    """An object whose attributes become part of a recorded step that reads them."""

    def __setattr__(self, name: str, value: Any) -> None:
        held = object.__getattribute__(self, "__dict__")
        before = held.get(name, ABSENT)
        _check_carried(self, name, value)
        object.__setattr__(self, name, value)
        if held.get(name, ABSENT) is not before:  # a property has told its buffer instead
            tapes.changed(self, name)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        tapes.changed(self, name)


def _check_carried(thing: Any, name: str, value: Any) -> None:
    """Raises RuntimeError if the step that is recorded has read this attribute and now sets it to tensors of its own,
    which its next run would not read."""
    tape, key = tapes.current(), (id(thing), name)
    if (isinstance(tape, Recorder) and key in tape.read and tape.set_by_step.get(key, (thing, True))[1]
        and all(isinstance(t, Tensor) and t.storage.recorded
                for t in (value if isinstance(value, tuple | list) and value else [value]))):
        raise _carried(f"{tape.read[key][1]}.{name}")


def _carried(name: str) -> RuntimeError:
    return RuntimeError(f"the step reads {name} and then sets it to a tensor of its own, but each run of a recorded "
                        f"step begins with the present value: let the step take it as an input and return it, or set "
                        f"it before the step is recorded")


def _outside(step: Any) -> dict[str, Tensor]:
    """The tensors in variables outside of a step, in its object, and in lists and tables that these are."""
    with suppress(TypeError, ValueError):  # it is no function of Python
        seen = inspect.getclosurevars(inspect.unwrap(step))
        found = {**seen.globals, **seen.nonlocals, **getattr(getattr(step, "__self__", None), "__dict__", {})}
        for name, value in [*found.items()]:
            parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
            if isinstance(parts, dict):
                found |= {f"{name}[{key!r}]": t for key, t in parts.items() if isinstance(t, Tensor)}
        return {name: t for name, t in found.items() if isinstance(t, Tensor)}
    return {}


def _noted(thing: Any, name: str) -> Any:
    """Reads an attribute; a recording notes that."""
    tape = tapes.current()
    if isinstance(tape, Recorder) and (name[:2] != "__" or name == "__dict__") and name != "_name":
        tape.read.setdefault((id(thing), name), (thing, _place(thing, tape.place.labels)))
    return object.__getattribute__(thing, name)


def _place(thing: Any, labels: list[str]) -> str:
    """The name in messages of a module, which may be the one that is running, or of an optimizer."""
    own = object.__getattribute__(thing, "__dict__").get("_name") or type(thing).__name__
    return "/".join(labels if labels and own.lower() == labels[-1].lower() else [*labels, own])


_recording, _recordings = threading.Lock(), 0


@contextmanager
def reads_noted() -> Iterator[None]:
    """While any thread is inside, `_noted` reads attributes of watched objects: at other times that costs nothing."""
    global _recordings
    with _recording:
        _recordings += 1
        setattr(Watched, "__getattribute__", _noted)  # noqa: B010  (a checker knows no other way)
    try:
        yield
    finally:
        with _recording:
            _recordings -= 1
            if not _recordings:
                del Watched.__getattribute__


class Readings:
    """The values that a recorded step has read, as they are when it ends; not those that it sets itself. A copy, or
    what a pickle holds, is of other objects and has none."""

    def __init__(self, tape: Recorder | None = None) -> None:
        self._seen = -1
        self._values: list[tuple[Any, str, str, Any]] = []
        if tape is not None:
            read = [(thing, name, place) for (_, name), (thing, place) in tape.read.items()]
            read += [(t, name, t.storage.name) for t in tape.leaves() for name in ("requires_grad", "storage")]
            self._own = {*tape.set_by_step}
            self._values = [(thing, name, place, self._value(thing, name)) for thing, name, place in read
                            if (id(thing), name) not in self._own]

    def __reduce__(self) -> Any:
        return Readings, ()

    def check(self) -> None:
        """Raises RuntimeError if values that the step has read are others now."""
        now = tapes.changes
        if self._seen == now:
            return
        found = [said for thing, name, place, before in self._values
                 for said in _changes(f"{place}.{name}".removesuffix(".__dict__"), before, self._value(thing, name))]
        if found:
            more = f" (and {len(found) - 1} more)" if found[1:] else ""
            raise RuntimeError(f"{found[0]}{more} since this step was recorded; record it again and make another "
                               f"executor, or undo the change")
        self._seen = now

    def _value(self, thing: Any, name: str) -> Any:
        """An attribute as it is kept, without its class's `__get__`; of all, modules and tensors that last."""
        if isinstance(thing, Tensor):
            return getattr(thing, name)
        held = object.__getattribute__(thing, "__dict__")
        if name == "__dict__":
            return {key: value for key, value in held.items() if (id(thing), key) not in self._own
                    and (isinstance(value, Watched) or (isinstance(value, Tensor) and value.storage.role.persistent))}
        return held.get(name, getattr(type(thing), name, ABSENT))


def _changes(what: str, before: Any, now: Any) -> Iterator[str]:
    """Says how a value has changed, if it has."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _changes(f"{what}.{key}", before.get(key, ABSENT), now.get(key, ABSENT))
    elif not (before is now or (type(before) is type(now) and isinstance(before, PLAIN) and before == now)):
        said = (f"changed from {before!r} to {now!r}" if isinstance(before, PLAIN) and isinstance(now, PLAIN) else
                "was added" if before is ABSENT else "was removed" if now is ABSENT else "was replaced")
        yield f"{what} {said}"


# --------------------------------------------------------------------------------------------------------------- record
def record(step: Callable[..., Any], *example: Any, name: str = "") -> TaskGraph:
    """The graph of `step(*example)`. Only shapes and types of the example arrays matter.

    `step` returns a tensor, a tuple of tensors, or nothing; runs return a tuple of one as the tensor. No kernel runs;
    parameters, states, counters and gradients stay as they were. `step` cannot read or set the values of tensors. A
    recorded step begins without gradients, and it drops those that no update has used. Raises RuntimeError if a
    gradient is computed after its update, since the next eager call would add to it.
    """
    if not callable(step):
        raise TypeError(f"the step is {shorten(step)}; it must be a function, as in record(step, x, y)")
    tape = Recorder(tapes.current().device)
    before = tapes.current()
    tape.autocast, tape.random, tape.dither = before.autocast, before.random, before.dither
    held = _outside(step)
    inputs = [_input(tape, i, value) for i, value in enumerate(example)]
    for t in inputs:
        tape.number[t.storage]  # inputs come first
    with paused:
        try:
            with tapes.use(tape), reads_noted():
                result = step(*inputs)
                tape.check_spent()
                if tape.draws:
                    counter = Tensor(random.dropout_counter())
                    with tape.task(tape.new_unit("dropout counter"), Kind.U):
                        tape.call("tick", [counter], [counter], draws=tape.draws)
        finally:
            tape.restore()
        outputs = [] if result is None else list(result) if isinstance(result, tuple | list) else [result]
        for i, value in enumerate(outputs):
            if not isinstance(value, Tensor):
                raise TypeError(f"the step returned a {type(value).__name__} as output {i}; it may return only tensors")
        for place, t in _outside(step).items():
            if t.storage.recorded and place in held and held[place].storage in tape.number:
                raise _carried(place)
        made_of = Readings(tape)
        return replace(tape.build(inputs, outputs, name or getattr(step, "__name__", "step")), made_of=made_of)


def _input(tape: Recorder, i: int, value: Any) -> Tensor:
    array = np.empty((), object)
    with suppress(ValueError):  # a batch of arrays of unequal shapes is none
        array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    dtype = str(array.dtype) if array.dtype != object else f"a {type(value).__name__}"
    if dtype not in (*FLOATS, *HALVES, "int64"):
        raise TypeError(f"example {i} is {dtype}; inputs must be {', '.join((*FLOATS, *HALVES))} or int64, each "
                        f"an argument, as in record(step, *batch)")
    return Tensor(tape.storage(f"input{i}", array.shape, dtype, Role.INPUT))


