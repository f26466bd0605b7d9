"""Checks of what people write themselves: gradients against finite differences, kernels against their references.

Both raise CheckError, an AssertionError, which names the operand or output and where it is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..autograd.tape import no_grad
from ..autograd.tensor import Parameter, Tensor, array
from ..kernels import KERNELS


class CheckError(AssertionError):
    """A gradient or a kernel's result is wrong."""


# ------------------------------------------------------------------------------------------------------------ gradients
def gradcheck(f: Callable[..., Tensor], *arrays: Any, seed: int = 1, eps: float = 1e-6, rtol: float = 1e-6,
              atol: float = 2e-8) -> None:
    """Compares the gradients of `f` toward each float64 array with central differences of step `eps`.

    `f` takes one tensor per array and returns one of any shape; it must be smooth there. The gradients belong to a
    random weighting of its result (`seed`), taken once toward parameters, so that weight gradients make them, and once
    toward inner tensors, so that output gradients do; contiguous and strided. Raises CheckError for a gradient that is
    wrong by more than `atol + rtol * |difference|`, missing or of another shape, TypeError for arrays that are not
    float64.
    """
    values = tuple(np.asarray(a) for a in arrays)
    if wrong := next((a.dtype for a in values if a.dtype != np.float64), None):
        raise TypeError(f"finite differences need float64, not {wrong}")
    with no_grad():
        shape = f(*(array(a) for a in values)).shape
    weights = np.random.default_rng(seed).uniform(0.5, 2.0, shape) * np.random.default_rng(seed).choice([-1, 1], shape)
    differences = [_differences(f, values, which, weights, eps) for which in range(len(values))]
    for leaf, strided in itertools.product((True, False), repeat=2):
        how = f"{'parameters' if leaf else 'inner tensors'}, {'strided' if strided else 'contiguous'}"
        found = gradients(f, values, weights, leaf=leaf, strided=strided)
        for i, (one, wanted) in enumerate(zip(found, differences, strict=True)):
            _compare(one, wanted, rtol, atol, f"the gradient toward operand {i} ({how})", "finite differences")


def _differences(f: Callable[..., Tensor], values: Sequence[Any], which: int, weights: Any, eps: float) -> Any:
    def moved(at: tuple[int, ...], step: float) -> float:
        inputs = [np.array(x) for x in values]
        inputs[which][at] += step
        with no_grad():
            return float((f(*map(array, inputs)).numpy() * weights).sum())

    found = np.zeros_like(values[which])
    for at in np.ndindex(*found.shape):
        found[at] = (moved(at, eps) - moved(at, -eps)) / (2 * eps)
    return found


def gradients(f: Callable[..., Tensor], values: Sequence[Any], weights: Any, *, leaf: bool, strided: bool) -> list[Any]:
    """The gradients of sum(weights * f(values)) by the tape. `leaf`: toward parameters, so that weight gradient tasks
    make them; else the operands depend on data too, so that output gradient tasks do. `strided`: operands and the
    incoming gradient are transposed views. Raises CheckError for one that is missing or has another shape."""
    parameters = [Parameter(a.T if strided else a) for a in values]
    operands: list[Any] = list(parameters)
    if not leaf:
        operands = [p + array(np.zeros(p.shape, p.dtype)) for p in parameters]
    if strided:
        operands = [ops.transpose(t) if t.ndim > 1 else t for t in operands]
    out = f(*operands)
    turned = strided and out.ndim > 1
    ((ops.transpose(out) if turned else out) * array(weights.T if turned else weights)).sum().backward()
    found = []
    for i, p in enumerate(parameters):
        if p.grad is None or p.grad.shape != p.shape:
            what = "is missing" if p.grad is None else f"has the shape {p.grad.shape}, not {p.shape}"
            raise CheckError(f"the gradient toward operand {i} {what}")
        if not p.grad.contiguous:
            raise CheckError(f"the gradient toward operand {i} is not contiguous")
        found.append(p.grad.numpy().T if strided else p.grad.numpy())
    return found


# -------------------------------------------------------------------------------------------------------------- kernels
#: relative to the largest value, by type
TOLERANCE = {"float64": 1e-12, "float32": 3e-6}


def kernelcheck(name: str, *reads: Any, rtol: float | None = None, **constants: Any) -> None:
    """Compares the CPU form of a kernel with its reference, in float32 and in float64.

    `reads`: its operands, arrays; floats are converted. Outputs are full of NaN before the call, so that it must write
    all of them; the calls run twice, and must leave what they read as it was. `rtol`: how far an element may be from
    the reference, relative to it or to 1, by default 3e-6 and 1e-12. Raises CheckError, and KernelError for an unknown
    kernel or one without a CPU form.
    """
    kernel = KERNELS[name]
    for dtype, tolerance in TOLERANCE.items():
        own = [np.asarray(r).astype(dtype) if np.asarray(r).dtype.kind == "f" else np.array(r) for r in reads]
        before = [r.copy() for r in own]
        wanted = kernel.reference(np, *[r.copy() for r in own], **constants)
        expected = [np.asarray(e) for e in (wanted if isinstance(wanted, tuple) else (wanted,))]
        writes = [np.full(e.shape, np.nan if e.dtype.kind == "f" else -1, e.dtype) for e in expected]
        specs = kernel.work(own, writes, **constants) if kernel.work else ()
        work = [np.full(shape, np.nan if np.dtype(t).kind == "f" else 1, t) for shape, t in specs]
        calls = kernel.bind(own, writes, work, constants)
        for time in ("", " in a second call"):
            for call in calls:
                call()
            for i, (found, e) in enumerate(zip(writes, expected, strict=True)):
                allowed = rtol if rtol is not None else tolerance
                _compare(found, e, allowed, allowed, f"kernel {name}, output {i} in {dtype}{time}", "the reference")
        for i, (now, then) in enumerate(zip(own, before, strict=True)):
            if now.tobytes() != then.tobytes():
                raise CheckError(f"kernel {name} changes what it reads, input {i} in {dtype}")


def _compare(found: Any, wanted: Any, rtol: float, atol: float, what: str, judge: str) -> None:
    """Raises CheckError that names the element that is most wrong."""
    if np.shape(found) != np.shape(wanted):
        raise CheckError(f"{what} has the shape {np.shape(found)}, {judge} {np.shape(wanted)}")
    error = np.abs(np.asarray(found, np.float64) - wanted)
    beyond = np.where(np.isnan(error), np.inf, error - (atol + rtol * np.abs(wanted)))
    beyond = np.where(np.isnan(found) & np.isnan(wanted), -np.inf, beyond)
    if (wrong := beyond > 0).any():
        at = np.unravel_index(int(np.argmax(beyond)), beyond.shape)
        place = f"[{', '.join(map(str, at))}]" if at else ""
        raise CheckError(f"{what}: element {place or 'alone'} is {np.asarray(found)[at]:.9g}, {judge} has "
                         f"{np.asarray(wanted)[at]:.9g}; {int(wrong.sum())} of {wrong.size} are wrong")
