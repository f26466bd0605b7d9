"""Everything that runs a graph under a schedule: the oracle, streams, and the executor that looks for races."""

from .checking import CheckingExecutor, VersionError, random_order
from .sequential import SequentialExecutor
from .steady import SteadyExecutor, executor
from .stream import GraphExecutor, StreamExecutor, TaskError

__all__ = ["CheckingExecutor", "GraphExecutor", "SequentialExecutor", "SteadyExecutor", "StreamExecutor", "TaskError", "VersionError", "executor",
           "random_order"]
