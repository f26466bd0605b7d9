"""The host's side of a captured step with small inputs: pinned memory for all inputs, which the graph uploads by its
first node, and for small outputs, which it writes by its last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType

from ...kernels import cuda
from ...kernels.ring import MOST, leave
from ..returned import Returned
from .driver import on_host

OUTPUTS = 4096  #: the most bytes that a slot takes
START = 256  #: bytes; every output begins at a multiple


class Slot:
    """One of two, that calls of a step take in turns: each has a graph of its own. Before a slot is taken again, its
    last step has run, and outputs of it that somebody still holds got copies of their own.

    `outputs`: where the step writes; all are contiguous, small and few, see `fit`.
    """

    def __init__(self, device: Any, block: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        driver = device.driver
        event = driver.event()
        self.wait, self.done = driver.waiting(event), driver.record(event, device.main)
        device.once([self.done])
        pinned = driver.pinned(block.size)
        pinned[...] = 0  # valid labels, for the run before the capture
        begins = [cuda.pointer(place) - cuda.pointer(block) for place in inputs]
        self.inputs = [at(pinned, begin, place) for begin, place in zip(begins, inputs, strict=True)]
        self.upload = [driver.copy(pinned, block, device.main)]
        self.outputs: list[Any] = []
        self.given: list[ReferenceType[Returned]] = []  #: what its last step returns
        self.not_finite: Any = None  #: with outputs, int32 (1,): whether its last step used a gradient that was not so
        self.unasked = False  #: whether nobody knows `not_finite` yet
        self.leave: list[Any] = []
        if outputs:
            room = driver.pinned(START * (1 + len(outputs)) + OUTPUTS)
            room[...] = 0
            begin, flag = START, device.flag
            self.not_finite = at(room, 0, flag)
            for place in outputs:
                self.outputs.append(at(room, begin, place))
                begin += -(-place.nbytes // START) * START
            self.leave = device.thunks(leave([*zip(outputs, self.outputs, strict=True), (flag, self.not_finite)]))

    def ask(self) -> Returned:
        """Whether the last step used a gradient that is not finite, as int32 (1,). Whoever asks is to tell."""
        self.unasked = False
        found = Returned(self.not_finite, self.wait)
        self.given.append(ReferenceType(found))
        return found


def fit(outputs: Sequence[Any]) -> bool:
    """Whether a slot can take these outputs of a step."""
    return (0 < len(outputs) < MOST and sum(place.nbytes for place in outputs) <= OUTPUTS
            and all(not on_host(place) and place.size and cuda.contiguous(place) for place in outputs))


def at(memory: Any, begin: int, like: Any) -> Any:
    """An array in pinned memory with the shape and type of another one."""
    return memory[begin : begin + like.nbytes].view(like.dtype).reshape(like.shape)
