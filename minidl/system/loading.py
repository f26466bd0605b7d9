"""Functions that users name: `file.py:function` or `package.module:function`. Their code runs when it is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import opcode
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOADING = threading.RLock()  #: a thread that asks for a file while another runs it waits for all of it

_HERE = Path(__file__).parents[1].absolute()
#: folders of code that no user writes; in a clone, three rooms of the package are beside it
_OTHERS = (_HERE, *(_HERE.parent / room for room in ("kernels", "models", "schedulers")), Path(os.__file__).parent)


def function_of(name: str) -> Callable[..., Any]:
    """The function with this name. Raises ValueError, with one line, if it cannot be loaded."""
    where, _, function = name.rpartition(":")
    if not where or not function.isidentifier():
        raise ValueError(f"{name!r} is not the name of a function; write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise ValueError(f"{where}: no such file")
    try:
        with _LOADING:
            if not is_file and (here := os.getcwd()) not in sys.path:  # where `python -m minidl` looks as well
                sys.path.append(here)
            module = _of_file(where) if is_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where}: {type(error).__name__}: {text_of(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
               and (not hasattr(value, "__qualname__") or getattr(value, "__module__", "") == module.__name__)]
        raise ValueError(f"{where} has no function {function}; it has {', '.join(own) or 'none'}")
    return found


def line_of(error: BaseException) -> str:
    """Where in a user's code an error arose, as `own.py, line 12`: the innermost call that is neither in this package,
    nor in an installed one, nor in Python's library. Empty if there is none."""
    from traceback import walk_tb

    found = ""
    for frame, line in walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename).absolute()
        if not any(map(path.is_relative_to, _OTHERS)) and "site-packages" not in path.parts and (
                path.is_file() or frame.f_code.co_filename in linecache.cache):  # a cell of a notebook
            found = f"{path.name}, line {line}"
    return found


def text_of(error: BaseException) -> str:
    """The text of an error, which a user's code may make, and fail."""
    try:
        return str(error)
    except BaseException:
        return "its text cannot be printed"


def foreseen(error: BaseException) -> bool:
    """Whether a `raise` of this package or a user's code made the error, so that its words are for a user. Otherwise an
    operation of Python or of a library failed, which is a fault of this package."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or line_of(error):
        return True
    code = last.tb_frame.f_code
    return (not isinstance(error, AssertionError)
            and any(map(Path(code.co_filename).absolute().is_relative_to, _OTHERS[:-1]))
            and code.co_code[last.tb_lasti] == opcode.opmap["RAISE_VARARGS"])


def by_name(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a user's function that may be given by name: not `*more` and `**more`, which take nothing.
    Raises ValueError for one without a default that may not, and for compiled code that does not say them."""
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        raise ValueError("does not say its arguments; call it in a function of your own") from None
    for key, p in found.items():
        if p.default is p.empty and p.kind == p.POSITIONAL_ONLY:
            raise ValueError(f"its argument {key} has no name for others; leave out the / after it")
    return {key: p for key, p in found.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def place_of(function: Callable[..., Any]) -> str:
    """The file and line of a function that a user has written, as `own.py, line 12`."""
    code = inspect.unwrap(function).__code__
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


@contextmanager
def users_code() -> Iterator[None]:
    """Turns an error that arises in a user's code, or in what it calls, into a ValueError of one line with its place.
    Other errors pass."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or not (place := line_of(error)):
            raise
        words = " ".join(text_of(error).split())[:300]
        kind = "" if words and isinstance(error, ValueError | TypeError) else type(error).__name__
        raise ValueError(f"{place}: {': '.join(filter(None, (kind, words)))}") from error


def needs_function(name: str) -> None:
    """Raises ValueError for a file of Python without the name of a function in it."""
    if name.endswith(".py"):
        raise ValueError(f"{name}: name its function as well: {name}:FUNCTION")


def _of_file(path: str) -> Any:
    """The file as a module. It runs once, and can import files from its own folder."""
    known = str(Path(path).resolve())
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(known).parent))
    sys.modules[known] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module
