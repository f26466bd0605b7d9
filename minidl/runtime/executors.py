"""The executors: short names for configurations of the runtime; also the oracle, and one that looks for races."""

from __future__ import annotations

from typing import Any

from ..autograd import tape as tapes
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..plans.program import Program, lower
from .bound import Bound
from .checking import CheckingExecutor, VersionError
from .comm import Communicator
from .comm.flight import CREDIT
from .runtime import Guard, Runtime, Stays, StreamExecutor, TaskError
from .version_log import VersionLog

__all__ = ["CheckingExecutor", "DistributedExecutor", "GraphExecutor", "Runtime", "SequentialExecutor",
           "StreamExecutor", "TaskError", "VersionError", "executor", "runtime"]


class SequentialExecutor(Stays):
    """The oracle: runs tasks in the order of emission, each storage in its own memory, without schedule, plan and
    streams. Call it with a step's inputs; it returns the step's outputs. Every schedule must be bit-identical to it."""

    def __init__(self, graph: TaskGraph, device: Any = None) -> None:
        self.graph = graph
        self._bound = Bound(graph, None, device)
        self._guard = Guard(forks=not self._bound.device.captures)
        self._program = [thunk for task in range(len(graph)) for thunk in self._bound.thunks(task)]

    def __call__(self, *inputs: Any) -> Any:
        with self._guard:
            self._bound.load(inputs)
            self._bound.device.once(self._program)
            return self._bound.results()


class GraphExecutor(StreamExecutor):
    """One device: a step is captured once as a CUDA graph and replayed by one launch. Raises DeviceError on a device
    that cannot capture graphs."""

    captures = True


class DistributedExecutor(Runtime):
    """One rank among several, which all have the same schedule; captured where the device can. `logged`: `log` keeps
    the version of its weights that each task read, and nothing is captured."""

    def __init__(self, graph: TaskGraph, schedule: Schedule, communicator: Communicator, *, device: Any = None,
                 trace: bool = False, credit: int = CREDIT, logged: bool = False) -> None:
        program = lower(graph, schedule, ranks=communicator.size, rank=communicator.rank)
        super().__init__(program, **_settings(program, device, logged), transport=communicator, trace=trace,
                         credit=credit)


def executor(graph: TaskGraph, schedule: Schedule, *, device: Any = None, trace: bool = False) -> StreamExecutor:
    """The executor for a recorded graph and a schedule; on a device that captures graphs, a step is one launch."""
    device = tapes.device_of(device)
    return (GraphExecutor if device.captures else StreamExecutor)(graph, schedule, device=device, trace=trace)


def runtime(program: Program, *, device: Any = None, transport: Communicator | None = None, trace: bool = False,
            logged: bool = False, watched: bool = False, at_once: int = 1) -> Runtime:
    """The runtime of a plan's program; captured where the device can, unless it is `logged` (`DistributedExecutor`)."""
    return Runtime(program, **_settings(program, device, logged), transport=transport, trace=trace, watched=watched,
                   at_once=at_once)


def _settings(program: Program, device: Any, logged: bool) -> dict[str, Any]:
    device = tapes.device_of(device)
    return {"device": device, "captured": device.captures and not logged,
            "log": VersionLog(program.graph) if logged else None}
