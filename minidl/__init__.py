"""minidl: a mini deep-learning engine in which the order of the backward pass is a value.

`import minidl` needs NumPy alone; everything else is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # without `typing` the program comes to its handler of interrupts three milliseconds earlier
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "CostError": "cost", "CostModel": "cost", "Link": "cost",
    "CheckingExecutor": "executors", "SequentialExecutor": "executors", "GraphExecutor": "executors", "Runtime": "executors", "StreamExecutor": "executors", "TaskError": "executors",
    "cross_boundary": "boundary", "lower": "program", "Program": "program",
    "Buffer": "graph", "GraphBuilder": "graph", "GraphError": "graph", "Kind": "graph", "Role": "graph", "Task": "graph",
    "TaskGraph": "graph",
    "MemoryLimitError": "memory", "MemoryPlan": "memory", "plan_memory": "memory",
    "rename": "passes", "unroll": "passes",
    "autocast": "precision", "seed": "random", "record": "recording",
    "Lane": "schedule", "Schedule": "schedule", "ScheduleError": "schedule",
    "simulate": "simulation", "micro_batch": "tape", "no_grad": "tape", "set_default_device": "tape", "DeviceError": "device",
    "Parameter": "tensor", "ShapeError": "tensor", "Tensor": "tensor", "array": "tensor", "Timeline": "timeline",
}
_MODULES = {"checkpoint", "data", "device", "models", "nn", "ops", "optim", "schedulers"}

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        if name in ("Tensor", "Parameter", "array", "record"):
            import_module(f"{__name__}.ops")  # puts the operators on Tensor
        value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
