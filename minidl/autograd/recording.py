"""record: turns the Python function that trains eagerly into a task graph. It executes nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.graph import Role, TaskGraph
from ..core.tasks import Kind
from ..system.garbage import paused
from . import random
from . import tape as tapes
from .op import HALVES
from .tape import Recorder, Storage
from .tensor import FLOATS, Tensor


def record(step: Callable[..., Any], *example: Any, name: str = "") -> TaskGraph:
    """The graph of `step(*example)`. Only shapes and types of the example arrays matter.

    `step` returns a tensor, a tuple of tensors, or nothing. No kernel runs; parameters, states, counters and gradients
    stay as they were. `step` cannot read the values of tensors. A recorded step begins without gradients, and it drops
    those that no update has used. Raises RuntimeError if a gradient is computed after its update, since the next
    eager call would add to it.
    """
    tape = Recorder(tapes.current().device)
    before = tapes.current()
    tape.autocast, tape.random, tape.dither = before.autocast, before.random, before.dither
    inputs = [_input(i, value) for i, value in enumerate(example)]
    for t in inputs:
        tape.number(t.storage)
    with paused:
        try:
            with tapes.use(tape):
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
        return tape.build(inputs, outputs, name or getattr(step, "__name__", "step"))


def _input(i: int, value: Any) -> Tensor:
    array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    dtype = str(array.dtype)
    if dtype not in (*FLOATS, *HALVES, "int64"):
        raise TypeError(f"example {i} is {dtype}; inputs must be {', '.join((*FLOATS, *HALVES))} or int64")
    return Tensor(Storage(f"input{i}", array.shape, dtype, Role.INPUT))


