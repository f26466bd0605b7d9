"""Functions that users name: `file.py:function` or `package.module:function`. Their code runs when it is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOADING = threading.RLock()  #: a thread that asks for a file while another runs it waits for all of it


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
            module = _of_file(where) if is_file else importlib.import_module(where)
    except Exception as error:
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [key for key, value in vars(module).items()
               if callable(value) and getattr(value, "__module__", "") == module.__name__ and not key.startswith("_")]
        raise ValueError(f"{where} has no function {function}; it has {', '.join(own) or 'none'}")
    return found


def needs_function(name: str) -> None:
    """Raises ValueError for a file of Python without the name of a function in it."""
    if name.endswith(".py"):
        raise ValueError(f"{name}: name its function too: {name}:FUNCTION")


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
