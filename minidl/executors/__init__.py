"""Everything that runs a graph under a schedule: the oracle, the runtime by its short names, and the executor that looks
for races."""

from .checking import CheckingExecutor, VersionError, random_order
from .names import DistributedExecutor, GraphExecutor, StreamExecutor, executor
from .runtime import Runtime, TaskError
from .sequential import SequentialExecutor

__all__ = ["CheckingExecutor", "DistributedExecutor", "GraphExecutor", "Runtime", "SequentialExecutor", "StreamExecutor", "TaskError",
           "VersionError", "executor", "random_order"]
