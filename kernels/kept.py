"""Machine code that numba keeps in files: where it cannot be kept, and when it is out of date. Numba looks at the file
of a loop only, but the code also holds functions and numbers of other files: after an update of those a loop would run
with both old and new ones."""

from __future__ import annotations

import marshal
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from types import FunctionType, ModuleType
from typing import Any

_IMPORTS = re.compile(r"^ *from \.(\w*) import (\([^)]*|[\w, ]+)", re.MULTILINE)


@cache
def sources(file: Path) -> frozenset[Path]:
    """A file, those beside it that it imports, those that they import, and so on."""
    found, left = set[Path](), [file]
    while left:
        if (one := left.pop()) not in found:
            found.add(one)
            for module, names in _IMPORTS.findall(one.read_text(encoding="utf-8")):
                beside = [one.with_name(f"{name}.py") for name in ([module] if module else re.findall(r"\w+", names))]
                left += [path for path in beside if path.exists()]
    return frozenset(found)


@cache
def _state(file: Path) -> tuple[str, int, int]:
    seen = file.stat()
    return file.name, seen.st_mtime_ns, seen.st_size


def _held(function: Any) -> tuple[set[Path], list[tuple[str, bytes]]]:
    """The files of a function and of all that it calls, and the numbers outside of functions that these name."""
    called, numbers = {function}, list[tuple[str, bytes]]()
    left = [function]
    while left:
        one = left.pop()
        named = [one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__]
        for space in (one.__globals__, *(vars(value) for value in named if isinstance(value, ModuleType))):
            for name in one.__code__.co_names:
                value = getattr(space.get(name), "py_func", space.get(name))  # what numba compiles
                if isinstance(value, FunctionType) and value not in called:
                    called.add(value)
                    left.append(value)
                with suppress(ValueError):  # neither numbers nor texts
                    numbers.append((name, marshal.dumps(value, 2)))  # of 2: equal values have equal bytes
    return {Path(one.__code__.co_filename) for one in called}, numbers


def follow(compiled: Any, function: Callable[..., Any]) -> Any:
    """The compiled function, which from now on compiles again if any of its sources has changed."""
    if (index := getattr(compiled._cache, "_cache_file", None)) is not None:
        files, numbers = _held(function)
        found = {source for file in files if file.exists() for source in sources(file)}
        index._source_stamp = (index._source_stamp, sorted(map(_state, found)), numbers)
    return compiled


def kept(compiler: Callable[..., Any], *types: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`compiler`, numba's njit or cfunc, as a decorator whose machine code is kept in files. If there is no folder for
    them, the disk is full, or a file is damaged, each process compiles for itself."""
    from numba import config

    def make(function: Callable[..., Any]) -> Any:
        if config.DISABLE_JIT:
            raise RuntimeError("NUMBA_DISABLE_JIT is set, and the loops of minidl are machine code; unset it")
        try:
            made = compiler(*types, cache=True, **options)(function)
        except (RuntimeError, OSError, EOFError, UnpicklingError):
            return compiler(*types, **options)(function)
        made._cache._guard_against_spurious_io_errors = lambda: suppress(Exception)
        return made

    return make
