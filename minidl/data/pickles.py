"""A safe reader for the pickles of CIFAR: plain values and numeric arrays.

Python's unpickler builds the values, but finds no class: the five names that such a file may mention become functions
of this module, and the reader rejects every other name. Before it runs, a pass over the opcodes refuses those that no
CIFAR file has, so that the file's size bounds time and memory, whatever lengths the file declares. This module does not
know what the values mean.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .dataset import Array

OPCODES = 1_000_000  #: the most opcodes of a file; CIFAR-100, the largest, has about 300,000
RARE = 1000  #: the most tuples and numbers above 2**60: as keys of dicts, more could take long or exhaust the stack

_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"}  # fmt: skip


def read(content: bytes) -> object:
    """The value of a pickle: None, bool, int, float, str, bytes, list, dict or tuple of them, or a numeric array.

    An array is the value of a dict's key, or alone. Strings of Python 2 become bytes. Raises ValueError that says what
    it rejects, or any Exception for a damaged file.
    """
    _check(content)
    value = _Unpickler(content).load()
    if isinstance(value, dict):
        return {key: item.value if isinstance(item, _Holder) else item for key, item in value.items()}
    return value.value if isinstance(value, _Holder) else value


def _check(content: bytes) -> None:
    """Raises ValueError for opcodes, or so many, that no CIFAR file has, and for a length above the file's own."""
    rare = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name, number = opcode.name, argument if isinstance(argument, int) else 0
        if count == OPCODES:
            raise ValueError(f"the pickle has more than {OPCODES} opcodes, far more than any CIFAR file")
        if name not in _OPCODES:
            raise ValueError(f"the pickle holds {name}; only plain values and arrays are read")
        if name.endswith("PUT") and number > count:  # the unpickler makes room for as many values
            raise ValueError(f"the pickle keeps value {number}, and has fewer")
        rare += name.startswith("TUPLE") or abs(number) >= 2**60
        if rare > RARE:
            raise ValueError(f"the pickle has more than {RARE} tuples and large numbers, more than any CIFAR file")


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._budget = len(content)  # bytes that may still be made from text

    def find_class(self, module: str, name: str) -> Any:
        """A function of this module in place of the one that is named. Raises ValueError for any other name."""
        full = f"{module}.{name}"
        known: dict[str, Callable[..., Any]] = {
            "numpy.dtype": _Type, "_codecs.encode": self._encode, "numpy.ndarray": _refuse,
            **{f"{room}.multiarray._reconstruct": lambda *_: _Holder() for room in ("numpy.core", "numpy._core")},
            **{f"{room}.numeric._frombuffer": lambda data, kind, shape, order: _Holder(
                _array(data, kind, shape, order == "F")) for room in ("numpy.core", "numpy._core")}}
        if full not in known:
            raise ValueError(f"the pickle names {full[:80]!r}; only plain values and arrays are "
                             f"read, nothing is executed")
        return partial(known[full])  # an object of its own: a pickle may change attributes of what it finds

    def _encode(self, text: str, encoding: bytes | str) -> bytes:
        """Bytes, as Python 3 writes them for Python 2."""
        self._budget -= len(text)
        if _text(encoding) != "latin1" or self._budget < 0:
            raise ValueError("the pickle makes bytes in a way that is not for arrays")
        return text.encode("latin-1")


class _Type:
    """A numeric dtype: kind and size, then the byte order."""

    def __init__(self, spec: Any, *_: Any) -> None:
        self.spec, self.order = _text(spec), "|"
        if not re.fullmatch(r"[iu][1248]|f[248]", self.spec):
            raise ValueError(f"the pickle holds an array of type {self.spec[:20]!r}; only numbers are read")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """State: version, byte order, ..."""
        self.order = _text(state[1])
        if self.order not in ("<", ">", "|", "="):
            raise ValueError(f"the pickle holds an unknown byte order {self.order[:20]!r}")


@dataclass
class _Holder:
    """An array that the file declares first and fills later."""

    found: Array | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """State: version, shape, type, column-major, bytes."""
        _, shape, kind, column_major, data = state
        self.found = _array(data, kind, shape, column_major)

    @property
    def value(self) -> Array:
        if self.found is None:
            raise ValueError("the pickle holds an array without content")
        return self.found


def _refuse(*_: Any) -> Any:
    raise ValueError("the pickle calls numpy.ndarray; only plain values and arrays are read")


def _array(data: Any, kind: Any, shape: Any, column_major: Any) -> Array:
    """An array on the bytes `data`. Raises ValueError unless shape and type need exactly these."""
    dtype = np.dtype(kind.order + kind.spec)
    if len(shape) > 8 or not all(isinstance(size, int) and 0 <= size < 2**63 for size in shape):
        raise ValueError("the pickle holds an array with an impossible shape")
    size, need = len(memoryview(data)), math.prod(shape) * dtype.itemsize
    if size != need:
        raise ValueError(f"the pickle holds an array of shape {shape} that needs {need} bytes but has {size}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if column_major else "C")


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
