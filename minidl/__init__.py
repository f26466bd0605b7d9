"""minidl: a mini deep-learning engine in which the order of the backward pass is a value.

`import minidl` needs NumPy alone; everything else is imported when it is first used.
"""

from importlib import import_module

# not from `typing`, which takes three milliseconds, and no `__future__`: each import delays the handler of interrupts
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "CostError": "pricing.cost", "CostModel": "pricing.cost", "Link": "pricing.cost",
    "CheckingExecutor": "runtime.executors", "SequentialExecutor": "runtime.executors",
    "GraphExecutor": "runtime.executors", "Runtime": "runtime.executors", "StreamExecutor": "runtime.executors",
    "TaskError": "runtime.executors", "cross_boundary": "passes.boundary", "lower": "plans.program",
    "Program": "plans.program", "Machine": "core.machine", "Plan": "plans.plan", "plan": "schedulers.planner",
    "Pipeline": "schedulers.pipeline.synthetic", "Buffer": "core.graph", "GraphBuilder": "core.graph",
    "GraphError": "core.tasks", "Kind": "core.tasks", "Role": "core.graph", "Task": "core.graph",
    "TaskGraph": "core.graph", "MemoryLimitError": "plans.memory", "MemoryPlan": "plans.memory",
    "plan_memory": "plans.memory", "rename": "passes.rewrite", "unroll": "passes.rewrite", "autocast": "autograd.op",
    "dither": "ops.dither", "seed": "autograd.random", "record": "autograd.recording", "Lane": "core.schedule",
    "Schedule": "core.schedule", "ScheduleError": "core.schedule", "simulate": "pricing.simulation",
    "measure": "measuring.measure", "micro_batch": "autograd.tape", "no_grad": "autograd.tape",
    "set_default_device": "autograd.tape", "DeviceError": "devices", "Parameter": "autograd.tensor",
    "ShapeError": "autograd.tensor", "Tensor": "autograd.tensor", "array": "autograd.tensor",
    "Timeline": "core.timeline", "CheckError": "testing.checks", "gradcheck": "testing.checks",
    "kernelcheck": "testing.checks", "arange": "ops", "full": "ops", "ones": "ops", "ones_like": "ops", "rand": "ops",
    "randn": "ops", "zeros": "ops", "zeros_like": "ops", "stack": "ops", "where": "ops", "cat": "ops", "maximum": "ops",
    "minimum": "ops", "eye": "ops", "linspace": "ops", "einsum": "ops", "full_like": "ops", "rand_like": "ops",
    "randn_like": "ops", "randint": "ops", "randperm": "ops", "cdist": "ops",
}
#: methods that are functions, too, as in torch: `minidl.exp(x)` is `x.exp()`. They are listed here because each import
#: of a module of this package asks for its name here first, and must not import the ops
_METHODS = ("abs", "add", "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "bincount", "bmm", "ceil",
            "chunk", "clamp", "clip", "cos", "cumsum", "diagonal", "div", "eq", "exp", "flatten", "flip", "floor",
            "gather", "ge", "gt", "index_add", "index_select", "isfinite", "isinf", "isnan", "le", "log",
            "log_softmax", "logsumexp", "lt", "masked_fill", "masked_select", "matmul", "max", "mean", "min", "mm",
            "movedim", "mul", "ne", "neg", "norm", "numel", "outer", "permute", "pow", "prod", "reciprocal", "relu",
            "repeat_interleave", "reshape", "roll", "round", "rsqrt", "scatter", "scatter_add", "sigmoid", "sign",
            "sin", "softmax", "sort", "split", "sqrt", "square", "squeeze", "std", "sub", "sum", "swapaxes", "t",
            "tanh", "tile", "topk", "transpose", "tril", "triu", "trunc", "unbind", "unsqueeze", "var")
_MODULES = {"checkpoint": "training.checkpoint", "data": "data", "device": "devices.device", "models": "models",
            "nn": "nn", "ops": "ops", "optim": "optim", "schedulers": "schedulers"}

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> "Any":
    if name in _WHERE:
        if name in ("Tensor", "Parameter", "array", "record"):
            import_module(f"{__name__}.ops")  # puts the operators on Tensor
        value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _METHODS:
        value = import_module(f"{__name__}.ops.methods").function(name)
    else:
        hint = import_module(f"{__name__}.autograd.hints").hint("torch", name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name[:2] == "__"), *__all__, *_METHODS])
