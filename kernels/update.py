"""Updates of parameters in place: an update rule, the two kernels that `define` makes of it, and launches over many
tensors. The rules have files of their own: sgd.py, adam.py, nadam.py, rmsprop.py. Values that vary from step to step
(learning rate, Adam's powers) are read from arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .cuda import FLAG, Call, Copy, Grid, LaunchError, Struct, c_type, pointer
from .registry import Thunk, flat, kernel, ufunc


@dataclass(frozen=True)
class Rule:
    """An update rule. One called sgd has two kernels: `sgd` for one parameter, and `sgd_many` for `count` parameters.

    Both read each parameter, its gradient, its states and `counts`; then, once for all, the learning rate, with
    `clipped` a factor (1,) for the gradients, and with `guarded` a flag (1,) int32: if it is not 0, nothing changes.
    They write each parameter, its states and, if `copy` is a type, a copy of the parameter in that type. Gradients may
    have a smaller type than their parameters. On CUDA they set the device's flag if a gradient times its factor is not
    finite, unless nothing changes.
    """

    name: str
    flops: float  #: per element
    states: Callable[..., int]  #: how many states a parameter has
    formula: Callable[..., Sequence[Any]]  #: (xp, p, g, *states, lr, *counts) -> p and states after
    loop: Callable[..., Thunk]  #: (p, g, *states, lr, *counts), in place and flat
    numbers: Callable[..., Sequence[Any]]  #: the last scalar arguments of the CUDA kernel
    #: the operands of the kernel for one parameter -> their order in the kernel for many
    order: Callable[..., list[Any]] = lambda arrays, **constants: list(arrays)
    counts: int = 0  #: how many arrays that tell a parameter's steps: Adam's powers

    def own(self, **constants: Any) -> int:
        """How many operands each parameter has of its own."""
        return 2 + self.states(**constants) + self.counts


class Update(NamedTuple):
    """The operands of one parameter. `wide`: scratch for a gradient that the CPU's loops cannot use directly."""

    p: Any
    g: Any
    states: list[Any]
    counts: list[Any]
    after: Any
    states_after: list[Any]
    copy: Any
    wide: Any

    @property
    def moves(self) -> list[tuple[Any, Any]]:
        """Pairs of arrays before and after the update: the parameter and its states."""
        return [(self.p, self.after), *zip(self.states, self.states_after, strict=True)]


RULES: dict[str, Rule] = {}


def define(rule: Rule) -> None:
    """Defines both kernels of a rule."""
    RULES[rule.name] = rule

    def many(xp: Any, *reads: Any, count: int, clipped: bool = False, guarded: bool = False, copy: str = "",
             **constants: Any) -> Any:
        own, states = rule.own(**constants), rule.states(**constants)
        common = reads[count * own :]
        after: list[Any] = []
        for i in range(count):
            p, g, *rest = reads[i * own : (i + 1) * own]
            g, before = g.astype(p.dtype) * (common[1] if clipped else p.dtype.type(1)), rest[:states]
            new = rule.formula(xp, p, g, *before, common[0], *rest[states:], **constants)
            if guarded:
                new = [xp.where(common[-1] != 0, old, n) for old, n in zip((p, *before), new, strict=True)]
            after += [*new, *([new[0].astype(copy)] if copy else [])]
        return tuple(after) if len(after) > 1 else after[0]

    def many_work(reads: Any, writes: Any, count: int, clipped: bool = False, guarded: bool = False, copy: str = "",
                  **constants: Any) -> list[Any]:
        own = rule.own(**constants)
        return [(p.shape, p.dtype) for p, g in (reads[i * own : i * own + 2] for i in range(count))
                if clipped or p.dtype != g.dtype]

    def bind(arrays: Sequence[Any], on_cuda: bool, count: int, clipped: bool = False, guarded: bool = False,
             copy: str = "", **constants: Any) -> list[Any]:
        left, states = list(arrays), rule.states(**constants)

        def take(n: int) -> list[Any]:
            head, left[:] = left[:n], left[n:]
            return head

        reads: list[Any] = [(*take(2), take(states), take(rule.counts)) for _ in range(count)]
        (lr,), (factor,), (skip,) = (take(1) if present else [None] for present in (True, clipped, guarded))
        writes = [take(1 + states + bool(copy)) for _ in range(count)]
        wide = [take(not on_cuda and (clipped or p.dtype != g.dtype)) for p, g, *_ in reads]
        assert not left, f"{rule.name} has {len(left)} arrays too many"
        updates = [Update(p, g, before, counts, after, rest[:states], *rest[states:] or [None], *w or [None])
                   for (p, g, before, counts), (after, *rest), w in zip(reads, writes, wide, strict=True)]
        if on_cuda:
            return _on_cuda(rule.name, updates, factor, skip, lr, *rule.numbers(**constants))
        return [thunk for u in updates for thunk in _on_cpu(rule, u, factor, skip, lr, constants)]

    def one(xp: Any, *reads: Any, **constants: Any) -> Any:
        return many(xp, *rule.order(reads, **constants), count=1, **constants)

    def one_work(reads: Any, writes: Any, **constants: Any) -> list[Any]:
        return many_work(rule.order(reads, **constants), writes, 1, **constants)

    def axes(reads: Any, **constants: Any) -> str:
        labels = ["C"] * len(reads)  # what all parameters share
        for i in rule.order(range(len(reads)), **constants)[: rule.own(**constants) - rule.counts]:
            labels[i] = "="
        return f"{','.join(labels)}->=,=,=,=,="

    for reference in (one, many):
        reference.__module__, reference.__doc__ = rule.formula.__module__, rule.formula.__doc__
    single = kernel(rule.name, flops=lambda reads, writes: rule.flops * writes[0].size, work=one_work, axes=axes)(one)
    single.cpu(lambda *arrays, **constants: bind(rule.order(arrays, **constants), False, 1, **constants))
    single.cuda()(lambda *arrays, **constants: bind(rule.order(arrays, **constants), True, 1, **constants))
    several = kernel(f"{rule.name}_many", flops=lambda reads, writes: sum(rule.flops * w.size for w in writes),
                     work=many_work)(many)
    several.cpu(lambda *arrays, **constants: bind(arrays, False, **constants))
    several.cuda()(lambda *arrays, **constants: bind(arrays, True, **constants))


# ------------------------------------------------------------------------------------------------------------------ CPU
def _on_cpu(rule: Rule, u: Update, factor: Any, skip: Any, lr: Any, constants: dict[str, Any]) -> list[Thunk]:
    """The update in place, with the calls before and after it."""
    copied = [thunk for before, after in u.moves for thunk in moved(before, after)]
    thunks: list[Thunk] = []
    if u.wide is not None:
        thunks += [partial(np.copyto, u.wide, u.g) if factor is None else partial(np.multiply, u.g, factor, out=u.wide)]
    g = u.g if u.wide is None else u.wide
    thunks += [rule.loop(flat(u.after), flat(g), *map(flat, u.states_after), lr, *u.counts, **constants)]
    if skip is not None:
        thunks = [unless(skip, thunks)]
    return [*copied, *thunks, *([] if u.copy is None else [partial(np.copyto, u.copy, u.after, casting="unsafe")])]


def moved(before: Any, after: Any) -> list[Thunk]:
    """A copy where the two arrays differ. Loops work in place, since only loops without aliases are vectorised."""
    return [] if before.ctypes.data == after.ctypes.data else [ufunc(np.positive, before, after)]


def unless(skip: Any, thunks: Sequence[Thunk]) -> Thunk:
    """A call of all these, which does nothing if the flag `skip` (1,) is set."""
    return partial(_run_unless, skip, thunks)


def _run_unless(skip: Any, thunks: Sequence[Thunk]) -> None:
    if not skip[0]:
        for thunk in thunks:
            thunk()


# ----------------------------------------------------------------------------------------------------------------- CUDA
AT_ONCE = 62  #: tensors per launch: as many as fit in the 4 KiB of a launch's arguments
SHARE = 2048  #: elements per block


class _Tensors(ctypes.Structure):
    """`Tensors` of update.cuh."""

    _fields_ = [("start", ctypes.c_int * (AT_ONCE + 1)), ("size", ctypes.c_longlong * AT_ONCE),
                ("of", ctypes.c_void_p * AT_ONCE * 6), ("factor", ctypes.c_void_p), ("skip", ctypes.c_void_p)]


def over_tensors(source: str, kernel: str, groups: Sequence[Sequence[Any]], *arguments: Any, factor: Any = None,
                 skip: Any = None) -> list[Call]:
    """Launches of `kernel` (Tensors, arguments), as few as its table allows. A group has the arrays of one tensor: up
    to six arrays, the first of its size, or None."""
    groups = [g for g in groups if g[0].size]
    calls: list[Call] = []
    for begin in range(0, len(groups), AT_ONCE):
        some, table, blocks = groups[begin : begin + AT_ONCE], _Tensors(), 0
        for i, group in enumerate(some):
            table.size[i] = group[0].size
            blocks += -(-group[0].size // SHARE)
            for k, array in enumerate(group):
                table.of[k][i] = None if array is None else pointer(flat(array))
            table.start[i + 1 :] = [blocks] * (AT_ONCE - i)
        table.factor, table.skip = (None if a is None else pointer(a) for a in (factor, skip))
        calls.append(Grid(source, kernel, (blocks,), (256,), (Struct("Tensors", bytes(table)), *arguments)))
    return calls


def _on_cuda(name: str, updates: Sequence[Update], factor: Any, skip: Any, *arguments: Any) -> list[Call]:
    """All updates in place, after copies where arrays differ. The kernel's last argument is the device's flag."""
    calls: list[Call] = [Copy(before, after) for u in updates for before, after in u.moves
                         if after.size and pointer(before) != pointer(after)]
    alike: dict[str, list[Any]] = {}
    for u in updates:
        for array, wanted in ((factor, str(u.p.dtype)), (skip, "int32")):
            if array is not None and str(array.dtype) != wanted:
                raise LaunchError(f"{name}: the factor or flag must be {wanted}, not {array.dtype}")
        typed = (u.after, u.g, u.after if u.copy is None else u.copy)
        states = [*u.states_after, *u.counts, None, None, None][:3]
        alike.setdefault(", ".join(map(c_type, typed)), []).append((u.after, u.g, *states, u.copy))
    for types, groups in alike.items():
        calls += over_tensors(f"{name}.cu", f"{name}<{types}>", groups, *arguments, FLAG, factor=factor, skip=skip)
    return calls
