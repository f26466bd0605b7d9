"""Ranks that train weights of their own, and mix layers that others send: the runtime of `layup`.

All ranks know the same moments of a step and the same drawn peers, so each knows which layers it receives. By the
moments, a rank waits only for a layer that has left its sender at an earlier one; another clock (`clocks.py`) may order
a step instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core.standstill import Doing
from ..plans.program import Program
from . import doing
from .clocks import Clock, Event
from .comm import Communicator, Patience, Transfer
from .replica import Replica
from .version_log import VersionRead


class Gossip:
    """Call it with a step's inputs on this rank; it returns the step's outputs, or None on a rank that runs only some
    of the batches. `moments`: of all ranks, in order, see `minidl.schedulers.layup`. `peer(step, task, rank)`: the rank
    to which an update sends its layer, or -1. `clock`: orders the events of a step in place of the moments. `log` keeps
    the version that each task has read or made; `replica` has the weights."""

    timeline = None

    def __init__(self, program: Program, moments: Sequence[tuple[int, int, bool]], peer: Callable[[int, int, int], int],
                 communicator: Communicator, device: Any = None, clock: Clock | None = None) -> None:
        part, me = program.body[0], communicator.rank
        self.replica, self.graph = Replica(part.graph, part.memory, device, me), part.graph
        self.log: list[VersionRead] = []
        self._moments, self._peer, self._communicator, self._clock = moments, peer, communicator, clock
        self._whole = sum(rank == me and not arrives for rank, _, arrives in moments) == len(part.graph)
        self._versions, self._step = Counter[int](), 0
        self._now: Event = -1, -1  #: at which this rank is
        self._bound: dict[tuple[int, int, bool], tuple[Any, Transfer]] = {}  # (update, peer, sends)
        self._coming: dict[Event, Iterator[None]] = {}  # layers of this step that have not been seen to arrive
        self._sending: list[Iterator[None]] = []
        self._kept: dict[int, list[Any]] | None = None  # this rank's own weights while the mean is in their place

    def __call__(self, *inputs: Any) -> Any:
        replica, me = self.replica, self._communicator.rank
        self._own()
        replica.bound.load(inputs)
        events = [(task, rank if arrives else -1) for rank, task, arrives in self._moments
                  if (self._peer(self._step, task, rank) if arrives else rank) == me]
        self._coming = {event: self._transfer(*event, False)[1]() for event in events if event[1] >= 0}
        for task, source in self._clock(self._step, events, self._arrived) if self._clock else events:
            self._now = task, source
            if source >= 0:
                replica.mix(replica.layer[task], self._received(task, source))
            else:
                replica.run(task)
            self._note(task, source)
        self._now = -1, -1
        while self._polled():
            self._communicator.check()
        self._step += 1
        return replica.bound.results() if self._whole else None

    def doing(self) -> Doing:
        """The state of this rank now; another thread may ask."""
        layers = {layer: 8 + sum(a.nbytes for a in arrays) for layer, arrays in self.replica.weights.items()}
        return doing.of_gossip(self.graph, self._step, *self._now, self.log[:], layers)

    def progress(self) -> tuple[Any, ...]:
        """A value that changes with any progress."""
        return self._step, self._now, len(self.log)

    def _note(self, task: int, source: int = -1) -> None:
        """Logs a task that has run, or a layer that has arrived, and sends what is to be sent."""
        replica, me = self.replica, self._communicator.rank
        for layer in replica.reads[task] if source < 0 else ():
            self._log(task, layer)
        if (layer := replica.layer.get(task, -1)) >= 0:
            self._versions[layer] += 1
            to = self._peer(self._step, task, me) if source < 0 else -1
            self._log(task, layer, to=to, source=source)
            if to >= 0:
                payload, transfer = self._transfer(task, to, True)
                replica.give(layer, payload)
                self._sending.append(transfer())
                self._polled()

    def _log(self, task: int, layer: int, **said: int) -> None:
        self.log.append(VersionRead(self._step, int(self.graph.keys[task]), self._versions[layer], layer,
                                    rank=self._communicator.rank, **said))

    def _transfer(self, task: int, peer: int, sends: bool) -> tuple[Any, Transfer]:
        """The message of an update and the transfer to or from the peer, made once."""
        if (task, peer, sends) not in self._bound:
            payload = self.replica.payload(self.replica.layer[task])
            move = self._communicator._send if sends else self._communicator._receive
            self._bound[task, peer, sends] = payload, move(payload, peer, task)
        return self._bound[task, peer, sends]

    def _received(self, task: int, rank: int) -> Any:
        """The layer that an update of another rank has sent."""
        patience = Patience(self._communicator, lane=True)
        for _ in self._coming.pop((task, rank), ()):
            self._polled()
            patience.wait((rank,), f"the layer of {self.graph.name(task)}")
        patience.reset()
        return self._transfer(task, rank, False)[0]

    def _arrived(self) -> list[Event]:
        """The layers that have arrived since the last call."""
        self._polled()
        found = [event for event, move in self._coming.items() if next(move, self) is self]
        for event in found:
            del self._coming[event]
        return found

    def _polled(self) -> bool:
        """Polls the messages that are being sent; whether some are left."""
        self._sending = [move for move in self._sending if next(move, self) is not self]
        return bool(self._sending)

    # ----------------------------------------------------------------------------------------------- between two steps
    def settle(self) -> None:
        """Nothing is left to run between steps."""

    def whole(self, everywhere: bool = False) -> None:
        """The ranks' mean, weighted by their shares, takes the place of each rank's weights until the next step."""
        self._own()
        replica = self.replica
        self._kept = {layer: [np.array(a) for a in arrays] for layer, arrays in replica.weights.items()}
        every = self._communicator.gather((replica.share, self._kept))
        for layer, arrays in replica.weights.items():
            total = sum(share[layer] for share, _ in every)
            for i, array in enumerate(arrays):
                np.copyto(array, sum(share[layer] / total * weights[layer][i].astype(np.float64)
                                     for share, weights in every), casting="same_kind")

    def _own(self) -> None:
        for layer, arrays in (self._kept or {}).items():
            for array, kept in zip(self.replica.weights[layer], arrays, strict=True):
                np.copyto(array, kept)
        self._kept = None

    def close(self) -> None:
        """Ends the run."""
