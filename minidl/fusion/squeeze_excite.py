"""The fusion rule for squeeze-and-excite blocks: the mean over pixels, the two 1x1 convolutions, the relu and the
hard-sigmoid after them, and the product with the image become one launch; so do their output gradients. The weight
gradients stay separate tasks. A block that is built in another way, or whose inner values other tasks read, stays as it
is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..core.graph import View
from ..core.tasks import Kind, strides_of
from ..kernels.conv_cuda import way
from ..kernels.squeeze_excite import fits
from .draft import Draft


class Half(NamedTuple):
    """One direction of a block: its tasks in order, what its launch reads and writes, and the views that disappear."""

    tasks: list[int]
    reads: list[View]
    writes: list[View]
    gone: list[View]


class NoMatch(Exception):
    """The tasks are not a squeeze-and-excite block."""


def squeeze_excite(draft: Draft) -> None:
    """Makes each squeeze-and-excite block one launch, and all its output gradients another one."""
    for i, entry in list(draft.numbered()):
        if entry.only is not None and entry.only.kernel == "hardsigmoid":
            with suppress(NoMatch):
                _put_together(draft, i)


def _put_together(draft: Draft, i: int) -> None:
    forward = _forward(draft, i)
    scale, gate = forward.tasks[-1], forward.gone[-1]
    after = [t for t in draft.readers(*draft.buffers(gate)) if t != scale]
    backward = _backward(draft, forward, _one(after)) if after else None
    halves = [("squeeze_excite", forward, scale),
              *([("squeeze_excite_input_grad", backward, backward.tasks[0])] if backward else [])]
    for _, half, into in halves:
        _require(all(draft.moves(t, into, half.tasks) for t in half.tasks))
    for kernel, half, into in halves:
        launches = [launch for t in half.tasks for launch in draft[t].launches]
        launch, work = draft.launch(kernel, half.reads, half.writes)
        made = {b for t in half.tasks for b in draft[t].writes}
        gone = draft.buffers(gate, *half.gone, *(v for old in launches for v in old.work))
        draft.merge(into, [t for t in half.tasks if t != into], [*(c for c in launches if c.kernel == "cast"), launch],
                    gone, work, reads_not=made)
    unit = draft[scale].unit
    draft.units[unit] = "/".join([*draft.units[unit].split("/")[:-1], "squeeze_excite"])


def _forward(draft: Draft, i: int) -> Half:
    """The block whose hard-sigmoid is task i."""
    (pre,), (gate,) = draft[i].launches[0].reads, draft[i].launches[0].writes
    second, (hidden, w2, *b2) = _maker(draft, pre, "conv2d")
    act, (r,) = _maker(draft, hidden, "relu")
    first, (mean, w1, *b1) = _maker(draft, r, "conv2d")
    pool, (x,) = _maker(draft, mean, "sum")
    _require(len(x.shape) == 4 and _dense(x) and fits(x, w1) and len(b1) == len(b2) == 1)
    _require(_is(draft, pool, ("sum", (x,), (mean,), {"axes": (1, 2), "factor": 1.0 / (x.shape[1] * x.shape[2])})))
    for t, v, w in ((first, mean, w1), (second, hidden, w2)):
        constants = dict(draft[t].launches[-1].constants)
        _require(way(v, w, constants.pop("geometry")) == "pointwise" and not constants)
    _require(_readers(draft, r) == [act])
    scale = _one([t for t in _readers(draft, gate) if draft.kind(t) == Kind.F])
    last = draft[scale].launches[0]
    _require(_is(draft, scale, ("mul", (x, gate), last.writes, {})))
    return Half([pool, first, act, second, i, scale], [x, w1, *b1, w2, *b2],
                [last.writes[0], mean, hidden, pre], [r, gate])


def _backward(draft: Draft, forward: Half, start: int) -> Half:
    """The output gradients of a block. `start`: the one of the product."""
    (x, w1, _, w2, _), (_, _, hidden, pre), gate = forward.reads, forward.writes, forward.gone[-1]
    _require(len(draft[start].launches) > 1)
    dy, product, dgate = (draft[start].launches[0].reads[0], draft[start].launches[1].writes[0],
                          draft[start].launches[-1].writes[0])
    direct = draft[start].launches[0].writes[0]
    total = [("sum", (product,), (dgate,), {"axes": (1, 2)})] if x.shape != gate.shape else []
    _require(_dense(dy)
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
    _require(_readers(draft, direct) == [last] and _dense(dx) and _is(
        draft, last, ("spread", (dmean, x), (dx,), {"factor": 1.0 / (x.shape[1] * x.shape[2])}),
        ("add", (direct, dx), (dx,), {})))
    return Half([start, slope, second, act, first, last], [dy, x, w1, w2, hidden, pre], [dx, dpre, dhidden],
                [direct, product, dgate, dh, dmean])


def _require(condition: bool) -> None:
    if not condition:
        raise NoMatch


def _one(tasks: Sequence[int]) -> int:
    _require(len(tasks) == 1)
    return tasks[0]


def _dense(view: View) -> bool:
    return view.strides == strides_of(view.shape)


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
