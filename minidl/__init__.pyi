"""Types of the names that `minidl/__init__.py` imports when they are first used: for editors and type checkers."""

from typing import Any

from . import data, models, nn, ops, optim, schedulers
from .autograd.op import autocast
from .autograd.random import seed
from .autograd.recording import record
from .autograd.tape import micro_batch, no_grad, set_default_device
from .autograd.tensor import Parameter, ShapeError, Tensor, array
from .core.graph import Buffer, GraphBuilder, Role, Task, TaskGraph
from .core.machine import Machine
from .core.schedule import Lane, Schedule, ScheduleError
from .core.tasks import GraphError, Kind
from .core.timeline import Timeline
from .devices import DeviceError, device
from .measuring.measure import measure
from .ops import (arange, cat, cdist, einsum, eye, full, full_like, linspace, maximum, minimum, ones, ones_like, rand,
                  rand_like, randint, randn, randn_like, randperm, stack, where, zeros, zeros_like)
from .ops.dither import dither
from .passes.boundary import cross_boundary
from .passes.rewrite import rename, unroll
from .plans.memory import MemoryLimitError, MemoryPlan, plan_memory
from .plans.plan import Plan
from .plans.program import Program, lower
from .pricing.cost import CostError, CostModel, Link
from .pricing.simulation import simulate
from .runtime.executors import CheckingExecutor, GraphExecutor, Runtime, SequentialExecutor, StreamExecutor, TaskError
from .schedulers.pipeline.synthetic import Pipeline
from .schedulers.planner import plan
from .testing.checks import CheckError, gradcheck, kernelcheck
from .training import checkpoint

__all__ = ["Buffer", "CheckError", "CheckingExecutor", "CostError", "CostModel", "DeviceError", "GraphBuilder",
           "GraphError", "GraphExecutor", "Kind", "Lane", "Link", "Machine", "MemoryLimitError", "MemoryPlan",
           "Parameter", "Pipeline", "Plan", "Program", "Role", "Runtime", "Schedule", "ScheduleError",
           "SequentialExecutor", "ShapeError", "StreamExecutor", "Task", "TaskError", "TaskGraph", "Tensor",
           "Timeline", "arange", "array", "autocast", "cat", "cdist", "checkpoint", "cross_boundary", "data", "device",
           "dither", "einsum", "eye", "full", "full_like", "gradcheck", "kernelcheck", "linspace", "lower", "maximum",
           "measure", "micro_batch", "minimum", "models", "nn", "no_grad", "ones", "ones_like", "ops", "optim", "plan",
           "plan_memory", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "record", "rename",
           "schedulers", "seed", "set_default_device", "simulate", "stack", "unroll", "where", "zeros", "zeros_like"]

__version__: str

def _of_method(x: Any, *args: Any, **kwargs: Any) -> Any: ...

abs = add = all = amax = amin = any = argmax = argmin = argsort = bincount = bmm = ceil = chunk = clamp = clip = \
    cos = cumsum = diagonal = div = eq = exp = flatten = flip = floor = gather = ge = gt = index_add = index_select = \
    isfinite = isinf = isnan = le = log = log_softmax = logsumexp = lt = masked_fill = masked_select = matmul = max = \
    mean = min = mm = movedim = mul = ne = neg = norm = numel = outer = permute = pow = prod = reciprocal = relu = \
    repeat_interleave = reshape = roll = round = rsqrt = scatter = scatter_add = sigmoid = sign = sin = softmax = sort \
    = split = sqrt = square = squeeze = std = sub = sum = swapaxes = t = tanh = tile = topk = transpose = tril = triu \
    = trunc = unbind = unsqueeze = var = _of_method
