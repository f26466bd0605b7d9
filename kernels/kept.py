"""When machine code that numba kept is out of date. Numba looks at the file of a loop only, but the code also
holds functions and numbers of other files: after an update of those a loop would run with both old and new ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
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


def follow(compiled: Any, function: Callable[..., Any]) -> Any:
    """The compiled function, which from now on compiles again if any of its sources has changed."""
    file, index = Path(function.__code__.co_filename), getattr(compiled._cache, "_cache_file", None)
    if index is not None and file.exists():
        index._source_stamp = tuple(sorted(map(_state, sources(file))))
    return compiled
