"""A safe reader for the pickles of CIFAR: plain values and numeric arrays.

Python's unpickler never runs. This module interprets the few opcodes below, maps the five names that such a file may
mention to functions of its own, and refuses everything else. The file's size and OPCODES bound time and memory,
whatever lengths the file declares. This module does not know what the values mean.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dataset import Array

OPCODES = 1_000_000  #: the most opcodes of a file; CIFAR-100, the largest, has about 300,000

_VALUES = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT",
           "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
           "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}  # fmt: skip
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # from Python 2: bytes, which pickletools returns as latin-1
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARRAY = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_BUFFER = {"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"}
_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode"} | _ARRAY | _BUFFER


@dataclass(frozen=True)
class _Name:
    """A name in the file; nothing is imported."""

    name: str


@dataclass
class _Type:
    """A numeric dtype: kind and size, then the byte order."""

    spec: str
    order: str = "|"


@dataclass
class _Holder:
    """An array that the file declares first and fills later."""

    value: Array | None = None


def read(content: bytes) -> object:
    """The value of a pickle: None, bool, int, float, str, bytes, list, dict or tuple of them, or a numeric array.

    Dicts have str or bytes keys; an array is the value of a dict's key, or alone. Strings of Python 2 become bytes.
    Raises ValueError that says what is refused, or any Exception for a damaged file.
    """
    return _Reader(content).run()


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.budget = len(content)  # bytes that may still be made from text

    def run(self) -> object:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self.content)):
            if count == OPCODES:
                raise ValueError(f"the pickle has more than {OPCODES} opcodes, far more than any CIFAR file")
            if opcode.name == "STOP":
                return _finished(self.stack.pop())
            self.step(opcode.name, argument)
        raise ValueError("the pickle has no end")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self.last(0 if name == "EMPTY_TUPLE" else int(name[-1]))))
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name in ("EMPTY_LIST", "LIST"):
            stack.append([] if name == "EMPTY_LIST" else self.since_mark())
        elif name in ("EMPTY_DICT", "DICT"):
            items = [] if name == "EMPTY_DICT" else self.since_mark()
            stack.append({})
            self.set_items(items)
        elif name in ("APPEND", "APPENDS"):
            items = self.last(1) if name == "APPEND" else self.since_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.last(2) if name == "SETITEM" else self.since_mark())
        elif name == "GLOBAL":
            stack.append(_named(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            stack.append(_named(".".join(_expect(part, str) for part in self.last(2))))
        elif name == "REDUCE":
            function, arguments = self.last(2)
            stack.append(self.call(_expect(function, _Name).name, _expect(arguments, tuple)))
        elif name == "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the pickle holds {name}, which is refused: only plain values and arrays are read")

    def last(self, count: int) -> list[Any]:
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise ValueError("the pickle uses more values than it has")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def since_mark(self) -> list[Any]:
        return self.last(len(self.stack) - self.marks.pop())

    def set_items(self, items: list[Any]) -> None:
        target = _expect(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_expect(key, (str, bytes))] = value

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "numpy.dtype":
            spec = _text(arguments[0])
            if not re.fullmatch(r"[iu][1248]|f[248]", spec):
                raise ValueError(f"the pickle holds an array of type {spec[:20]!r}, which is "
                                 f"refused: only numbers are read")
            return _Type(spec)
        if name == "_codecs.encode":
            text, encoding = arguments
            self.budget -= len(_expect(text, str))
            if _text(encoding) != "latin1" or self.budget < 0:
                raise ValueError("the pickle makes bytes in a way that is not for arrays")
            return text.encode("latin-1")
        if name in _ARRAY:
            return _Holder()
        if name in _BUFFER:
            data, dtype, shape, order = arguments
            return _Holder(_array(data, dtype, shape, order == "F"))
        raise ValueError(f"the pickle calls {name}, which is refused")


def _named(name: str) -> _Name:
    if name not in _NAMES:
        raise ValueError(f"the pickle names {name[:80]!r}, which is refused: only plain values and arrays are read, "
                         "nothing is executed")
    return _Name(name)


def _fill(target: object, state: Any) -> None:
    """Does BUILD on an array (version, shape, type, column-major, bytes) or a type (version, byte order, ...)."""
    if isinstance(target, _Holder):
        _, shape, dtype, column_major, data = state
        target.value = _array(data, dtype, shape, column_major)
    else:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise ValueError(f"the pickle holds an unknown byte order {order[:20]!r}")
        _expect(target, _Type).order = order


def _array(data: Any, dtype: Any, shape: Any, column_major: Any) -> Array:
    """An array on the bytes `data`. Raises ValueError unless shape and type need exactly these."""
    kind = np.dtype(_expect(dtype, _Type).order + dtype.spec)
    if len(_expect(shape, tuple)) > 8 or not all(isinstance(size, int) and 0 <= size < 2**63 for size in shape):
        raise ValueError("the pickle holds an array with an impossible shape")
    size, need = len(_expect(data, (bytes, bytearray))), math.prod(shape) * kind.itemsize
    if size != need:
        raise ValueError(f"the pickle holds an array of shape {shape} that needs {need} bytes but has {size}")
    return np.frombuffer(data, kind).reshape(shape, order="F" if column_major else "C")


def _finished(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finished(item) if isinstance(item, _Holder) else item for key, item in value.items()}
    if isinstance(value, _Holder) and value.value is None:
        raise ValueError("the pickle holds an array without content")
    return value.value if isinstance(value, _Holder) else value


def _expect(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the pickle holds a {type(value).__name__} in a wrong place")
    return value


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(_expect(value, str))
