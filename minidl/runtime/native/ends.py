"""A whole step as one call of compiled code: it checks the inputs and copies them to their places, runs the lanes, and
copies the outputs to new memory.

The code reads arrays from their objects, whose layout is part of NumPy's stable ABI (numpy/ndarraytypes.h), and the
tuple that holds them, whose layout is part of CPython's. It takes row-major arrays of exactly the types and shapes of
the step. Everything else it refuses, before it changes anything: Python then converts the inputs, or says what is wrong
with them.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from ..lanes import Ends
from .code import DONE, peek, peek_int32, step

REFUSED = -1  #: what `whole` returns for inputs that it does not take

HEAD = object.__basicsize__  #: bytes of what all objects begin with; the address of the type is its last word
ITEMS = tuple.__basicsize__  #: the byte of a tuple at which its items begin; their number follows the head
TYPE, DATA, AXES, SHAPE, DTYPE, FLAGS = HEAD - 8, HEAD, HEAD + 8, HEAD + 16, HEAD + 40, HEAD + 48
ROW_MAJOR = 0x0001 | 0x0100  #: of the flags: contiguous and aligned

# words of a whole step: its lane, workers and their number, the address of what it takes, of what it gives
LANE, WORKERS, COUNT, TAKES, GIVES = range(5)
# what it takes: the type of arrays, how many inputs, how many limits of indices; then for each input its dtype, the
# number of axes, the address of its shape, its place and its bytes; and for each limit the input, how many indices (of
# 64 bits), the length that they are below, a value that is also allowed
INPUT, LIMIT = 5, 4

memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))


@njit(nogil=True, cache=True)
def _fits(array, kind, wanted):
    """Whether an object is a row-major array as an input must be."""
    axes = peek(wanted + 8)
    if (peek(array + TYPE) != kind or peek(array + DTYPE) != peek(wanted) or peek_int32(array + AXES) != axes
            or peek_int32(array + FLAGS) & ROW_MAJOR != ROW_MAJOR):
        return False
    shape, other = peek(array + SHAPE), peek(wanted + 16)
    for axis in range(axes):  # noqa: SIM110
        if peek(shape + 8 * axis) != peek(other + 8 * axis):
            return False
    return True


@njit(nogil=True, cache=True)
def _in_range(indices, limit):
    """Whether all indices are below the length, or have the value that is also allowed."""
    length, allowed = peek(limit + 16), peek(limit + 24)
    for i in range(peek(limit + 8)):
        index = peek(indices + 8 * i)
        if (index < 0 or index >= length) and index != allowed:
            return False
    return True


@njit(nogil=True, cache=True)
def _take(takes, inputs):
    """Copies the arrays of a tuple to their places. Returns whether it did."""
    count = peek(takes + 8)
    if peek(inputs + HEAD) != count:
        return False
    first = takes + 24
    limits = first + 8 * INPUT * count
    for i in range(count):
        if not _fits(peek(inputs + ITEMS + 8 * i), peek(takes), first + 8 * INPUT * i):
            return False
    for i in range(peek(takes + 16)):
        limit = limits + 8 * LIMIT * i
        if not _in_range(peek(peek(inputs + ITEMS + 8 * peek(limit)) + DATA), limit):
            return False
    for i in range(count):
        wanted = first + 8 * INPUT * i
        memcpy(peek(wanted + 24), peek(peek(inputs + ITEMS + 8 * i) + DATA), peek(wanted + 32))
    return True


@njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)
def whole(words, at, inputs, outputs):
    """As `code.step`, with the addresses of a tuple of inputs (0: they are in their places) and of a tuple of new
    arrays of bytes for the outputs. Returns REFUSED if it does not take the inputs."""
    if at < 0 and inputs and not _take(peek(words + 8 * TAKES), inputs):
        return REFUSED
    result = step(peek(words + 8 * LANE), peek(words + 8 * WORKERS), peek(words + 8 * COUNT), at)
    if outputs and result & 3 == DONE:
        gives = peek(words + 8 * GIVES)
        for i in range(peek(gives)):
            memcpy(peek(peek(outputs + ITEMS + 8 * i) + DATA), peek(gives + 8 + 16 * i), peek(gives + 16 + 16 * i))
    return result


def takes(ends: Ends) -> tuple[Any, Any] | None:
    """The words of what a step takes, and what they refer to; None where compiled code cannot take it."""
    words = [id(np.ndarray), len(ends.inputs), len(ends.limits)]
    shapes = [np.array([*a.shape, 0], np.int64) for a in ends.inputs]
    for place, shape in zip(ends.inputs, shapes, strict=True):
        words += [id(place.dtype), place.ndim, shape.ctypes.data, place.ctypes.data, place.nbytes]
    for i, length, allowed in ends.limits:
        words += [i, ends.inputs[i].size, length, allowed]
    known = _plain(ends.inputs) and all(ends.inputs[i].dtype == np.int64 for i, *_ in ends.limits)
    return _kept(words, shapes) if known else None


def gives(ends: Ends) -> tuple[Any, Any] | None:
    """The words of what a step gives; None where compiled code cannot give it."""
    words = [len(ends.outputs), *(word for a in ends.outputs for word in (a.ctypes.data, a.nbytes))]
    return _kept(words, ends.outputs) if _plain(ends.outputs) else None


def _kept(words: list[int], others: Any) -> tuple[Any, Any]:
    return np.array(words, np.int64), others


def _plain(arrays: Sequence[Any]) -> bool:
    return _layout_is_known() and all(a.flags.c_contiguous and a.flags.aligned and a.dtype is np.dtype(a.dtype.str)
                                      for a in arrays)


@cache
def _layout_is_known() -> bool:
    """Whether array objects and tuples are laid out as this module says."""
    def word(at: int, kind: Any = ctypes.c_int64) -> int:
        return int(kind.from_address(at).value)

    array = np.zeros((3, 5), np.float32)
    pair, at = (array, None), id(array)
    return ((word(id(pair) + HEAD), word(id(pair) + ITEMS)) == (2, at)
            and (word(at + TYPE), word(at + DATA)) == (id(np.ndarray), array.ctypes.data)
            and word(at + AXES, ctypes.c_int32) == 2 and word(at + DTYPE) == id(array.dtype)
            and word(at + FLAGS, ctypes.c_int32) & ROW_MAJOR == ROW_MAJOR
            and (word(word(at + SHAPE)), word(word(at + SHAPE) + 8)) == (3, 5))
