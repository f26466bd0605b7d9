"""Random steps in torch, float64: the functions that their text calls, and what a step leaves.

Gradients are spent as by minidl's optimizers: an update uses those made since the last one, and the next backward
starts anew. Which elements a dropout drops is asked of minidl.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from random_steps import StepSource
from torch.nn import functional as F

import minidl as ml
from minidl import ops


def exact(program: StepSource) -> StepSource:
    """The same step in float64, without what makes noise large: Adam divides a gradient that is zero but for
    rounding by its size."""
    optimizers = {name: ("SGD", arguments, members) for name, (_, arguments, members) in program.optimizers.items()}
    return replace(program, dtype="float64", scaled=False, optimizers=optimizers)


def torch_steps(program: StepSource, seed: int) -> list[Any]:
    """All outputs of all calls, then parameters and running statistics, as arrays."""
    p = {name: torch.tensor(value, requires_grad=True) for name, value in program.parameters.items()}
    k = {name: torch.tensor(value) for name, value in program.constants.items()}
    n = {name: [torch.zeros(c).double(), torch.ones(c).double(), torch.tensor(0)] for name, c in program.norms.items()}
    optimizers = {name: (torch.optim.SGD([p[m] for m in members], **{key: v for key, v in arguments.items()
                                                                     if key != "max_norm"}), arguments.get("max_norm"),
                         [p[m] for m in members]) for name, (_, arguments, members) in program.optimizers.items()}
    spent: set[Any] = set()

    def backward(loss: Any) -> None:
        before = {q: q.grad for q in spent}
        for q in before:
            q.grad = None
        loss.backward(retain_graph=True)
        for q, g in before.items():
            if q.grad is None:
                q.grad = g
            else:
                spent.discard(q)

    def update(optimizer: Any) -> None:
        opt, max_norm, members = optimizer
        fresh = [q for q in members if q.grad is not None and q not in spent]
        if not fresh:
            return
        before = {q: q.grad for q in members if q in spent}
        for q in before:
            q.grad = None
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(fresh, max_norm)
        opt.step()
        for q, g in before.items():
            q.grad = g
        spent.update(fresh)

    def drop(*dropped: Any) -> None:
        for q in dropped:
            q.grad = None
            spent.discard(q)

    names = {**FUNCTIONS, **p, **k, **n, **optimizers, "backward": backward, "update": update, "drop": drop,
             "grad": lambda q: q if q.grad is None else q.grad}
    step, found = program.step(names), []
    for call, inputs in enumerate(program.inputs(seed)):
        drop(*p.values())
        for opt, *_ in optimizers.values() if program.rates else ():
            opt.param_groups[0]["lr"] = 0.1 / (call + 1)
        outputs = step(*map(torch.tensor, inputs))
        found += [t.detach().numpy().copy() for t in outputs or ()]
    return found + [t.detach().numpy() for t in (*p.values(), *(t for three in n.values() for t in three))]


def our_steps(program: StepSource, seed: int) -> list[Any]:
    """The same by minidl, run eagerly."""
    training, found = program.training(seed), []
    leaves = [t for t in training.owners if isinstance(t, ml.Tensor)]
    for call, inputs in enumerate(training.inputs):
        for t in leaves:
            t.grad = None
        training.before(call)
        outputs = training.step(*map(ml.array, inputs))
        found += [np.array(t.numpy()) for t in outputs or ()]
    return found + [t.numpy() for t in leaves]


def _dropout(x: Any, rate: float) -> Any:
    return x * torch.tensor(ops.dropout(ml.array(np.ones(x.shape)), rate).numpy())


def _batch_norm(x: Any, w: Any, b: Any, running: Any, training: bool) -> Any:
    running[2] += training
    # torch's gradient reads those of later
    mean, variance = running[:2] if training else (t.clone() for t in running[:2])
    return F.batch_norm(x.reshape(-1, x.shape[-1]), mean, variance, w, b, training).reshape(x.shape)


def _conv2d(x: Any, w: Any, b: Any, groups: int) -> Any:
    return F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), b, groups=groups).permute(0, 2, 3, 1)


def _rnn(gx: Any, h: Any, w: Any) -> Any:
    rows = []
    for row in gx:
        h = torch.tanh(row + h @ w.T)
        rows.append(h)
    return torch.stack(rows), h


FUNCTIONS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("matmul", "relu", "tanh", "sigmoid", "exp", "sqrt", "log", "maximum",
                                               "minimum", "broadcast_to", "reshape", "absolute", "neg")},
    **{name: getattr(F, name) for name in ("gelu", "relu6", "hardswish", "cross_entropy", "linear")},
    "mse": F.mse_loss, "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
    "power": torch.pow, "transpose": lambda x: x.permute(*range(x.ndim)[::-1]),
    "concat": lambda parts, axis, room=0: torch.cat(parts, axis),
    "total": lambda x, axis=None, keep=False: x.sum() if axis is None else x.sum(axis, keepdim=keep),
    "mean": lambda x, axis=None, keep=False: x.mean() if axis is None else x.mean(axis, keepdim=keep),
    "amax": lambda x, axis, keep: x.amax(axis, keepdim=keep),
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), "batch_norm": _batch_norm, "dropout": _dropout,
    "conv2d": _conv2d, "rnn": _rnn, "cast": lambda x: x, "array": torch.tensor,
    "max_pool2d": lambda x, size: F.max_pool2d(x.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1),
    "avg_pool2d": lambda x, size: F.avg_pool2d(x.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1),
    "attention": lambda q, key, v, causal: F.scaled_dot_product_attention(q, key, v, is_causal=causal),
    "embedding": lambda table, y: F.embedding(y, table), "detach": lambda x: x.detach(), "no_grad": torch.no_grad,
    "micro_batch": ml.micro_batch}
