"""The oracle: runs tasks in the order of emission, each storage in its own memory. No schedule, no plan, no streams."""

from __future__ import annotations

from typing import Any

from ..core.graph import TaskGraph
from ..devices.lanes import run_program
from .bound import Bound
from .runtime import Guard


class SequentialExecutor:
    """Call it with a step's inputs; it returns the step's outputs. Every schedule must be bit-identical to it."""

    def __init__(self, graph: TaskGraph, device: Any = None) -> None:
        self.graph = graph
        self._bound = Bound(graph, None, device)
        self._guard = Guard(forks=not self._bound.device.captures)
        self._program = [thunk for task in range(len(graph)) for thunk in self._bound.thunks(task)]

    def __call__(self, *inputs: Any) -> Any:
        with self._guard:
            self._bound.load(inputs)
            stop = run_program(self._program)
            if stop.error is not None:
                raise stop.error
            return self._bound.results()
