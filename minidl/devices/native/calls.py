"""Bound calls of kernels as (address, block): loops of numba by their compiled code, NumPy's functions by the inner
loops that NumPy itself would run, so that all bits are the same. Other calls have no such form.

A kernel's call is a `partial`, see `minidl.kernels.registry`. NumPy's inner loops are read from the ufunc object, whose
layout is part of NumPy's stable ABI (numpy/ufuncobject.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from numba import typeof
from numba.core import types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

from ...kernels import Thunk
from ...kernels.experts import grouped_products
from ...kernels.group import in_turn
from ...kernels.registry import kind_of
from . import code


@dataclass
class Call:
    """The addresses of a function and of the block that it gets; `keep` holds the memory of both."""

    address: int
    block: int
    keep: tuple[Any, ...] = field(default=(), repr=False)


class Unknown(Exception):
    """A call has no native form."""


def convert(thunk: Thunk) -> list[Call]:
    """The native calls that do what a bound call does, to the same bits. Raises Unknown if there are none."""
    if type(thunk) is not partial:
        raise Unknown
    function, arguments, options = thunk.func, thunk.args, dict(thunk.keywords)
    if isinstance(function, Dispatcher):
        return _numba(function, arguments)
    if function is in_turn:
        return _several([call for thunk in arguments[0] for call in convert(thunk)])
    out = options.pop("out", None)
    operands = [*arguments, *([] if out is None else [out])]
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    known = len(operands) == 2 and options.keys() <= {"axis", "keepdims"}
    if isinstance(owner, np.ufunc) and name == "reduce" and known:
        return _reduce(owner, *operands, **options)
    if options:
        raise Unknown
    if function is grouped_products:
        return _grouped(*operands)
    if function in (np.matmul, np.dot):
        return _product(operands)
    if isinstance(function, np.ufunc):
        return _elementwise(function, operands)
    if function is np.copyto and len(operands) == 2:
        return _copy(*reversed(operands))
    if isinstance(owner, np.ndarray) and name == "fill" and len(operands) == 1:
        return _fill(owner, *operands)
    raise Unknown


def described(thunk: Thunk) -> str:
    """The name of what a bound call calls."""
    function = thunk.func if isinstance(thunk, partial) else thunk
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{owner.__name__}.{name}" if isinstance(owner, np.ufunc) else name


def _block(words: Sequence[int]) -> Any:
    return np.array([w & (1 << 64) - 1 for w in words], np.uint64)


def _several(found: Sequence[Call]) -> list[Call]:
    """One call that makes these calls in order."""
    block = _block([len(found), *(word for call in found for word in (call.address, call.block))])
    return [Call(code.several_call.address, block.ctypes.data, (block, found))]


# ------------------------------------------------------------------------------------------------------ loops of numba
def _slots(value: Any, words: list[int], floats: list[int]) -> str:
    """Appends the machine words of an argument to those in registers for floating-point numbers and to the others.
    Returns their kinds in order, one letter each."""
    if isinstance(value, np.ndarray):
        words += [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
        return "i" * (5 + 2 * value.ndim)
    if isinstance(value, tuple):
        return "".join(_slots(v, words, floats) for v in value)
    if isinstance(value, np.float32):
        floats.append(int(value.view(np.uint32)))
        return "f"
    if isinstance(value, float):  # float64 too
        floats.append(int(np.float64(value).view(np.uint64)))
        return "d"
    if isinstance(value, bool | np.bool_ | int | np.integer):
        words.append(int(value))
        return "i"
    raise Unknown


_known: dict[Any, tuple[int, str]] = {}


def _compiled(function: Dispatcher, arguments: tuple[Any, ...]) -> tuple[int, str]:
    """The address of a loop for arguments of these types, and the kinds of its machine arguments."""
    key = function, kind_of(arguments)
    if key not in _known:
        _known[key] = _compile(function, tuple(map(typeof, arguments)))
    return _known[key]


def _compile(function: Dispatcher, signature: tuple[Any, ...]) -> tuple[int, str]:
    function.compile(signature)
    found = function.overloads[signature]
    if found.signature.return_type != types.none or found.objectmode:
        raise Unknown
    kind = cpu_target.target_context.call_conv.get_function_type(found.fndesc.restype, found.fndesc.argtypes)
    letters = {"float": "f", "double": "d"}
    return (found.library.get_pointer_to_function(found.fndesc.llvm_func_name),
            "".join("i" if t.is_pointer or str(t).startswith("i") else letters.get(str(t), "?") for t in kind.args[2:]))


def _numba(function: Dispatcher, arguments: tuple[Any, ...]) -> list[Call]:
    words, floats = [0, 0], list[int]()
    address, kinds = _compiled(function, arguments)
    found = "".join(_slots(a, words, floats) for a in arguments)
    room = next((n for n in code.WORDS if n >= len(words)), 0)
    if found != kinds or not room or len(floats) > code.FLOATS:
        raise Unknown
    floats += [0] * (code.FLOATS - len(floats))
    block = _block([code.WORDS.index(room), address, *floats, *words, *[0] * (room - len(words) + 2)])
    first = 2 + code.FLOATS
    block[first : first + 2] = block.ctypes.data + 8 * np.arange(first + room, first + room + 2, dtype=np.uint64)
    return [Call(code.numba_call.address, block.ctypes.data, (block, arguments, function))]


# ----------------------------------------------------------------------------------------------- inner loops of NumPy
class _Ufunc(ctypes.Structure):
    """The head of PyUFuncObject."""

    _fields_ = [("head", ctypes.c_char * object.__basicsize__), ("nin", ctypes.c_int), ("nout", ctypes.c_int),
                ("nargs", ctypes.c_int), ("identity", ctypes.c_int), ("functions", ctypes.POINTER(ctypes.c_void_p)),
                ("data", ctypes.POINTER(ctypes.c_void_p)), ("ntypes", ctypes.c_int), ("reserved1", ctypes.c_int),
                ("name", ctypes.c_char_p), ("types", ctypes.POINTER(ctypes.c_byte))]


@cache
def _inner_loop(ufunc: np.ufunc, *dtypes: Any) -> tuple[int, int]:
    """(address, data) of the loop for exactly these types of the operands."""
    head = _Ufunc.from_address(id(ufunc))
    if ((head.nin, head.nout, head.nargs, head.ntypes) != (ufunc.nin, ufunc.nout, ufunc.nargs, ufunc.ntypes)
            or head.name.decode() != ufunc.__name__):
        raise Unknown  # another layout than the one that is known
    wanted = [t.num for t in dtypes]
    for i in range(head.ntypes):
        if list(head.types[i * head.nargs : (i + 1) * head.nargs]) == wanted:
            return head.functions[i], (head.data[i] or 0) if head.data else 0
    raise Unknown


Axis = tuple[int, tuple[int, ...]]  #: how many steps, and the bytes of a step for each operand


def _plain(*arrays: Any) -> list[Any]:
    """The operands as arrays. Raises Unknown for what NumPy would convert first."""
    for a in arrays:
        if (not isinstance(a, np.ndarray | np.generic) or not a.flags.aligned or not a.dtype.isnative
                or a.dtype.kind not in "fiub" or any(s < 0 for s in a.strides)):
            raise Unknown
    return [np.asarray(a) for a in arrays]


def _apart(inputs: Sequence[Any], out: Any) -> None:
    """Raises Unknown if an input overlaps the output without being the same array: NumPy copies it first."""
    for a in inputs:
        if np.may_share_memory(a, out) and (a.ctypes.data, a.shape, a.strides) != (out.ctypes.data, out.shape,
                                                                                  out.strides):
            raise Unknown


def _axes(shape: Sequence[int], arrays: Sequence[Any]) -> list[Axis]:
    """The axes over which NumPy iterates, the fastest last: sorted by their steps, in C order if operands disagree
    (`npyiter_find_best_axis_ordering`). Axes of length 1 are left out, axes that follow each other in memory joined."""
    found: list[Axis] = []  # the fastest first
    for n, *steps in reversed([*zip(shape, *(a.strides for a in arrays), strict=True)]):
        if n == 1:
            continue
        place = len(found)
        for at in reversed(range(len(found))):
            if larger := [mine > other for mine, other in zip(steps, found[at][1], strict=True) if mine and other]:
                if all(larger) or any(larger):
                    break
                place = at
        found.insert(place, (n, tuple(steps)))
    joined: list[Axis] = []
    for n, apart in reversed(found):
        if joined and all(before == n * step for before, step in zip(joined[-1][1], apart, strict=True)):
            n *= joined.pop()[0]
        joined.append((n, apart))
    return joined


def _loop(loop: tuple[int, int], operands: Sequence[Any], sizes: Sequence[int], steps: Sequence[int],
          outer: Sequence[Axis], begin: Sequence[int] = ()) -> Call:
    """A loop over `sizes` with `steps`, for each index of the outer axes. `begin`: the bytes at which it begins in each
    operand, if not at the first."""
    count = len(operands)
    first = [a.ctypes.data + at for a, at in zip(operands, begin or [0] * count, strict=True)]
    lists = ([*sizes], [*steps], [0] * count, first, [n for n, _ in outer],
             [step for _, apart in outer for step in apart], [0] * len(outer))
    arrays = [np.array([*values, 0], np.int64) for values in lists]  # never empty, so that each has an address
    block = _block([*loop, count, len(outer), *(a.ctypes.data for a in arrays)])
    return Call(code.numpy_call.address, block.ctypes.data, (block, arrays, operands))


def _elementwise(ufunc: np.ufunc, operands: Sequence[Any]) -> list[Call]:
    if ufunc.signature is not None or ufunc.nout != 1 or ufunc.nin != len(operands) - 1:
        raise Unknown
    *inputs, out = _plain(*operands)
    loop = _inner_loop(ufunc, *(a.dtype for a in inputs), out.dtype)
    inputs = [a if a.shape == out.shape else np.broadcast_to(a, out.shape) for a in inputs]
    _apart(inputs, out)
    if not out.size:
        return []
    *outer, (n, steps) = _axes(out.shape, [*inputs, out]) or [(1, (0,) * len(operands))]
    return [_loop(loop, [*inputs, out], [n], steps, outer)]


def _as_bytes(array: Any) -> Any:
    """The array with an unsigned integer for each element, so that a copy keeps all bits."""
    if array.dtype.kind not in "fiub" or array.itemsize not in (1, 2, 4, 8):
        raise Unknown
    return array.view(f"u{array.itemsize}")


def _copy(source: Any, out: Any) -> list[Call]:
    if not isinstance(source, np.ndarray | np.generic) or source.dtype != out.dtype:
        raise Unknown
    return _elementwise(np.positive, [_as_bytes(source), _as_bytes(out)])


def _fill(out: Any, value: Any) -> list[Call]:
    (out,) = _plain(out)
    one = np.empty(1, out.dtype)
    one.fill(value)
    if out.flags.c_contiguous and not one.view(np.uint8).any():
        block = _block([out.ctypes.data, out.nbytes])
        return [Call(code.zeros_call.address, block.ctypes.data, (block, out))] if out.size else []
    return _copy(one[0], out)


def _product(operands: Sequence[Any]) -> list[Call]:
    if len(operands) != 3 or min(np.ndim(x) for x in operands) < 2:
        raise Unknown
    a, b, out = _plain(*operands)
    if out.dtype.kind != "f":
        raise Unknown
    loop = _inner_loop(np.matmul, a.dtype, b.dtype, out.dtype)
    if np.may_share_memory(a, out) or np.may_share_memory(b, out):
        raise Unknown
    if not out.size:
        return []
    if not a.shape[-1]:
        raise Unknown
    lead = out.shape[:-2]
    a, b = (np.broadcast_to(x, lead + x.shape[-2:]) for x in (a, b))
    *outer, (n, steps) = _axes(lead, [x[..., 0, 0] for x in (a, b, out)]) or [(1, (0, 0, 0))]
    (m, k), p = a.shape[-2:], b.shape[-1]
    return [_loop(loop, [a, b, out], [n, m, k, p], [*steps, *(s for x in (a, b, out) for s in x.strides[-2:])], outer)]


def _grouped(counts: Any, group: int, a: Any, b: Any, out: Any, summed: bool, others: range) -> list[Call]:
    counts, a, b, out = _plain(counts, a, b, out)
    if counts.dtype != np.int64 or not counts.flags.c_contiguous or not a.size or not b.size or not out.size:
        raise Unknown
    loop = _inner_loop(np.matmul, a.dtype, b.dtype, out.dtype)
    steps = [a.strides[1], b.strides[0], 0] if summed else [a.strides[0], 0, out.strides[0]]
    sizes = np.array([1, a.shape[0], a.shape[1], b.shape[-1]], np.int64)
    strides = np.array([0, 0, 0, *(s for x in (a, b, out) for s in x.strides)], np.int64)
    moving, places = np.zeros(3, np.int64), [(x.ctypes.data, step) for x, step in zip((a, b, out), steps, strict=True)]
    block = _block([*loop, *(x.ctypes.data for x in (sizes, strides, moving)), 2 if summed else 1, counts.ctypes.data,
                    group, out.nbytes * summed, others.start, others.stop, *(word for own in places for word in own)])
    return [Call(code.grouped_call.address, block.ctypes.data, (block, sizes, strides, moving, counts, a, b, out))]


def _reduce(ufunc: np.ufunc, x: Any, out: Any, axis: Any = 0, keepdims: bool = False) -> list[Call]:
    """As NumPy does: a sum begins as 0, a maximum as the first values; then the loop has the output as its first input
    too, and goes over the values that are left."""
    x, out = _plain(x, out)
    if not keepdims or x.dtype != out.dtype or not x.size or np.may_share_memory(x, out) or ufunc not in (
            np.add, np.maximum):
        raise Unknown
    reduced = {a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)}
    over = np.lib.stride_tricks.as_strided(out, x.shape, [0 if a in reduced else s for a, s in enumerate(out.strides)])
    axes = _axes(x.shape, [over, x]) or [(1, (0, 0))]
    along = [i for i, (_, (step, _)) in enumerate(axes) if step == 0 and axes[i][0] > 1]
    if len(along) > 1:
        raise Unknown  # NumPy copies such an array piece by piece, and sums the pieces
    skipped, begin = 0, _fill(out, 0)
    if ufunc is np.maximum:
        begin = _copy(x[*(slice(0, 1) if a in reduced else slice(None) for a in range(x.ndim)), ...], out)
        if not along:
            return begin
        n, (_, skipped) = axes[along[0]]
        axes[along[0]] = n - 1, axes[along[0]][1]
    *outer, (n, (step, apart)) = axes
    return [*begin, _loop(_inner_loop(ufunc, x.dtype, x.dtype, out.dtype), [over, x, over], [n], [step, apart, step],
                          [(n, (step, apart, step)) for n, (step, apart) in outer], [0, skipped, 0])]
