"""Random numbers that are pure functions of their purpose.

All numbers are keyed by (seed, purpose, index): weights, which are drawn on the host, by the order in which parameters
are made, random tensors by theirs; dropout by (number of the dropout since the seed, global sample). So every device
and every layout of ranks sees the same numbers.

Ranks may be threads of one process, so what counts is the tape's own `State` if it has one, else the thread's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.graph import Role, View
from .initial import Initial, generator_of, shape_of
from .tape import Storage, current


@dataclass(eq=False)
class State:
    """The seed, and how many parameters, random tensors and dropouts have followed from it."""

    seed: int = 0
    made: int = 0
    drawn: int = 0
    counter: Storage | None = None
    device: Any = None  #: where the counter lies


class _Thread(threading.local):
    seed = 0  #: with which new threads begin: the last one of any thread

    def __init__(self) -> None:
        self.state = State(self.seed)


_thread = _Thread()


def _state() -> State:
    return current().random or _thread.state


def seed(value: int) -> None:
    """Starts over in this thread: weights made from now on, and dropout, follow from `value` alone. A step that was
    recorded before keeps its own seed and count, so seed first and record then. Raises ValueError below 0."""
    if not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"the seed is {value!r}; it must be a whole number of at least 0")
    tape, state = current(), State(int(value))
    if tape.random is None:
        _Thread.seed, _thread.state = state.seed, state
    else:
        tape.random = state
    tape.end_step()


def current_seed() -> int:
    return _state().seed


def dropout_counter() -> Storage:
    """The number of dropouts since the seed, (1,) uint64. An eager dropout increases it at once; a recorded step
    increases it at its end, by all its dropouts."""
    device, state = current().device, _state()
    if state.counter is None or state.device is not device:
        counter = Storage("dropout counter", (1,), "uint64", Role.SCALAR, device.allocate(8))
        device.write(device.array(counter.data, View(0, (1,), (1,), 0, "uint64")), 0)
        state.counter, state.device = counter, device
    return state.counter


def generator(purpose: str, *index: int, seed: int | None = None) -> np.random.Generator:
    """`generator_of` with this thread's seed, if none is given."""
    return generator_of(current_seed() if seed is None else seed, purpose, *index)


def uniform(bound: float, shape: Any, dtype: str, middle: float = 0.0) -> Initial:
    """The values of the next parameter, uniform in middle +-bound."""
    return _next("uniform", bound, shape, dtype, middle)


def normal(deviation: float, shape: Any, dtype: str, mean: float = 0.0) -> Initial:
    """The values of the next parameter, normal."""
    return _next("normal", deviation, shape, dtype, mean)


def _next(law: str, scale: float, shape: Any, dtype: str, middle: float) -> Initial:
    state = _state()
    state.made += 1
    return Initial(law, shape_of(shape), (str(np.dtype(dtype)),), float(scale), float(middle), state.seed,
                   state.made - 1)


def next_tensors() -> Any:
    """The generator for the values of the next random tensor."""
    state = _state()
    state.drawn += 1
    return generator("tensors", state.drawn - 1)
