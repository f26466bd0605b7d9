"""Batches of a step in real time: threads run them forward and backward, and race for the weights of each layer.

Nothing says beforehand which version of the weights a task reads. It holds the locks of the layers that it reads or
changes, so it reads one version of each. The log of these versions alone says the bits, so a log repeats its run
(`replica.Replayed`). Each value has memory of its own, since any two batches may be under way at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Lock, Semaphore, current_thread
from typing import Any

from ..core.graph import TaskGraph
from ..core.standstill import LAST, Doing, LaneState, Ran
from ..core.tasks import task_name
from ..devices import DeviceError
from .replica import Replica
from .version_log import VersionLog


class Race:
    """Call it with a step's inputs; it returns the step's outputs when the last batch has ended. `ahead`, `back`: the
    tasks of each batch for forward and for backward threads; `rest`: those after all batches. `threads`: forward and
    backward ones; `most`: how many batches may be under way. `log` keeps which version each task has read."""

    timeline = None

    def __init__(self, graph: TaskGraph, ahead: Sequence[Sequence[int]], back: Sequence[Sequence[int]],
                 rest: Sequence[int], threads: tuple[int, int], most: int, device: Any = None) -> None:
        replica = Replica(graph, device=device)
        if replica.bound.device.captures:
            raise DeviceError(f"on {replica.bound.device.name} threads do not race for weights: take clock=simulated, "
                              f"or --device cpu")
        self.graph, self.bound, self.log = graph, replica.bound, VersionLog(graph)
        self._ahead, self._back, self._rest = ahead, back, rest
        self._layers = [sorted({*reads, replica.layer.get(t, -1)} - {-1}) for t, reads in enumerate(replica.reads)]
        self._locks = {layer: Lock() for layer in replica.weights}
        logged = self.log.around(lambda task, stream: replica.calls[task], graph)
        self._calls = [logged(t, None) for t in range(len(graph))]
        self._forward, self._backward = (ThreadPoolExecutor(n, name) for n, name in zip(
            threads, ("minidl forward", "minidl backward"), strict=True))
        self._room = Semaphore(most)
        self._at: dict[str, tuple[int, int]] = {}  # thread -> its task, and how many of the task's layers it holds

    def __call__(self, *inputs: Any) -> Any:
        self.bound.load(inputs)
        self.log.begin(fills=False)
        ahead, back = list[Future[None]](), list[Future[None]]()

        def forward(batch: int) -> None:
            try:
                self._run(self._ahead[batch])
            except BaseException:
                self._room.release()
                raise
            back.append(self._backward.submit(backward, batch))

        def backward(batch: int) -> None:
            try:
                self._run(self._back[batch])
            finally:
                self._room.release()

        try:
            for batch in range(len(self._ahead)):
                self._room.acquire()
                ahead.append(self._forward.submit(forward, batch))
        finally:  # also after an interrupt: nobody shall read weights that threads still change
            wait(ahead)
            wait(back)
        for job in (*ahead, *back):
            job.result()
        self._run(self._rest)
        return self.bound.results()

    def _run(self, tasks: Iterable[int]) -> None:
        me = current_thread().name
        for t in tasks:
            with ExitStack() as held:
                for holds, layer in enumerate(self._layers[t]):
                    self._at[me] = t, holds
                    held.enter_context(self._locks[layer])
                self._at[me] = t, len(self._layers[t])
                for call in self._calls[t]:
                    call()
        self._at.pop(me, None)

    def doing(self) -> Doing:
        """The state of the threads now; another thread may ask."""
        graph, at, entries = self.graph, {**self._at}, self.log.entries
        holds = {layer: t for t, held in at.values() for layer in self._layers[t][:held]}
        lanes = []
        for name, (task, held) in at.items():
            wanted = self._layers[task][held : held + 1]
            lanes.append(LaneState(name, "waits" if wanted else "runs", graph.name(task), graph[task].in_words, None,
                                   tuple(graph.name(holds[layer]) for layer in wanted if layer in holds), 0, 0))
        step = entries[-1].step if entries else 0
        names = [task_name(e.key) for e in entries[-len(graph):] if e.step == step]
        return Doing(step + 1, tuple(lanes), last=tuple(Ran(n, "", None, None) for n in names[-LAST:]),
                     order={"all threads": tuple(names)})

    def progress(self) -> tuple[Any, ...]:
        """A value that changes with any progress."""
        return {**self._at}, len(self.log.entries)

    def close(self) -> None:
        """Ends the threads."""
        self._forward.shutdown()
        self._backward.shutdown()
