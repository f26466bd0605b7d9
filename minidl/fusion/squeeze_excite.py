"""The fusion rule for squeeze-and-excite blocks: the mean over pixels, the two 1x1 convolutions, the relu and the
hard-sigmoid after them, and the product with the image become one launch; so do their output gradients. The weight
gradients stay separate tasks. A block that is built otherwise, or whose inner values other tasks read, stays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..core.graph import View
from ..core.tasks import Kind
from ..kernels.conv_cuda import way
from ..kernels.squeeze_excite import fits
from .draft import Draft


class Half(NamedTuple):
    """One direction of a block: its tasks in order, what its launch reads and writes."""

    tasks: list[int]
    reads: list[View]
    writes: list[View]


class NoMatch(Exception):
    """The tasks are not a squeeze-and-excite block."""


def squeeze_excite(draft: Draft) -> None:
    """Makes each squeeze-and-excite block one launch, and all its output gradients another one."""
    for i, launch in draft.alone("hardsigmoid"):
        with suppress(NoMatch):
            _put_together(draft, i, *launch.reads, *launch.writes)


def _put_together(draft: Draft, i: int, pre: View, gate: View) -> None:
    forward = _forward(draft, i, pre, gate)
    scale = forward.tasks[-1]
    after = [t for t in draft.readers(*draft.buffers(gate)) if t != scale]
    halves = [("squeeze_excite", forward, scale)]
    if after:
        backward = _backward(draft, forward, gate, _one(after))
        halves.append(("squeeze_excite_input_grad", backward, backward.tasks[0]))
    for _, half, into in halves:
        _require(all(draft.moves(t, into, half.tasks) for t in half.tasks))
    for kernel, half, into in halves:
        casts = [launch for t in half.tasks for launch in draft[t].launches if launch.kernel == "cast"]
        draft.merge(into, [*casts, draft.launch(kernel, half.reads, half.writes)], [t for t in half.tasks if t != into])
    unit = draft[scale].unit
    draft.units[unit] = "/".join([*draft.units[unit].split("/")[:-1], "squeeze_excite"])


def _forward(draft: Draft, i: int, pre: View, gate: View) -> Half:
    """The block whose hard-sigmoid is task i, from `pre` to `gate`."""
    second, (hidden, w2, *b2) = _maker(draft, pre, "conv2d")
    act, (r,) = _maker(draft, hidden, "relu")
    first, (mean, w1, *b1) = _maker(draft, r, "conv2d")
    pool, (x,) = _maker(draft, mean, "sum")
    _require(len(x.shape) == 4 and x.dense and fits(x, w1) and len(b1) == len(b2) == 1)
    _require(_is(draft, pool, ("sum", (x,), (mean,), {"axes": (1, 2), "factor": 1.0 / (x.shape[1] * x.shape[2])})))
    for t, v, w in ((first, mean, w1), (second, hidden, w2)):
        constants = dict(draft[t].launches[-1].constants)
        _require(way(v, w, constants.pop("geometry")) == "pointwise" and not constants)
    _require(_readers(draft, r) == [act])
    scale = _one([t for t in _readers(draft, gate) if draft.kind(t) == Kind.F])
    last = draft[scale].launches[0]
    _require(_is(draft, scale, ("mul", (x, gate), last.writes, {})))
    return Half([pool, first, act, second, i, scale], [x, w1, *b1, w2, *b2], [last.writes[0], mean, hidden, pre])


def _backward(draft: Draft, forward: Half, gate: View, start: int) -> Half:
    """The output gradients of a block. `gate`: what scales the image; `start`: the gradient of the product."""
    (x, w1, _, w2, _), (_, _, hidden, pre), launches = forward.reads, forward.writes, draft[start].launches
    _require(len(launches) > 1)
    dy, direct, product, dgate = (launches[0].reads[0], launches[0].writes[0], launches[1].writes[0],
                                  launches[-1].writes[0])
    total = [("sum", (product,), (dgate,), {"axes": (1, 2)})] if x.shape != gate.shape else []
    _require(dy.dense
             and _is(draft, start, ("mul", (dy, gate), (direct,), {}), ("mul", (dy, x), (product,), {}), *total))
    slope = _one(_readers(draft, dgate))
    dpre = draft[slope].launches[0].writes[0]
    _require(_readers(draft, product) == ([] if total else [slope])
             and _is(draft, slope, ("hardsigmoid_grad", (pre, dgate), (dpre,), {})))
    second, dh = _input_grad(draft, dpre, w2)
    act = _one(_readers(draft, dh))
    dhidden = draft[act].launches[0].writes[0]
    _require(_is(draft, act, ("relu_grad", (hidden, dh), (dhidden,), {})))
    first, dmean = _input_grad(draft, dhidden, w1)
    last = _one(_readers(draft, dmean))
    dx = draft[last].launches[0].writes[0]
    _require(_readers(draft, direct) == [last] and dx.dense and _is(
        draft, last, ("spread", (dmean, x), (dx,), {"factor": 1.0 / (x.shape[1] * x.shape[2])}),
        ("add", (direct, dx), (dx,), {})))
    return Half([start, slope, second, act, first, last], [dy, x, w1, w2, hidden, pre], [dx, dpre, dhidden])


def _require(condition: bool) -> None:
    if not condition:
        raise NoMatch


def _one(tasks: Sequence[int]) -> int:
    _require(len(tasks) == 1)
    return tasks[0]


def _readers(draft: Draft, view: View) -> list[int]:
    """The readers of a view that may disappear. Raises NoMatch for any other view."""
    buffer = draft.passed_on(view)
    if buffer is None:
        raise NoMatch
    return draft.readers(buffer)


def _maker(draft: Draft, view: View, kernel: str) -> tuple[int, tuple[View, ...]]:
    """The task whose only launch besides casts of its operands is this kernel and makes the view; and what the kernel
    reads."""
    task = _one([t for b in draft.buffers(view) for t in draft.writers(b)])
    *before, launch = draft[task].launches
    _require(launch.kernel == kernel and launch.writes == (view,) and all(c.kernel == "cast" for c in before))
    return task, launch.reads


def _input_grad(draft: Draft, dy: View, w: View) -> tuple[int, View]:
    """The task that makes only the output gradient of a 1x1 convolution from dy, and that gradient."""
    task = _one([t for b in draft.buffers(dy)
                 for t in draft.readers(b) if draft[t].launches[0].kernel == "conv2d_input_grad"])
    (dx,) = draft[task].launches[0].writes
    _require(len(draft[task].launches) == 1 and draft[task].launches[0].reads == (dy, w))
    return task, dx


def _is(draft: Draft, task: int, *launches: tuple[str, tuple[View, ...], tuple[View, ...], dict[str, Any]]) -> bool:
    """Whether a task's launches are exactly these: kernel, reads, writes, constants."""
    return [(launch.kernel, launch.reads, launch.writes, dict(launch.constants))
            for launch in draft[task].launches] == ([*launches])
