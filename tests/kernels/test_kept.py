"""Machine code that was kept is compiled again if a file changes from which a loop has functions or numbers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from minidl.kernels import kept, registry, tiles


def test_the_sources_of_a_loop_are_all_files_that_it_comes_from():
    names = {file.name for file in kept.sources(Path(tiles.__file__))}
    assert {"tiles.py", "vectors.py", "taps.py", "registry.py", "tile_code.py"} <= names
    assert "conv.py" not in names


def add(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loop of the folder, imported again."""
    for name in ("both", "both.numbers", "both.loops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for cached in (kept.sources, kept._state):
        cached.cache_clear()
    monkeypatch.syspath_prepend(folder.parent)
    return registry.jitted(importlib.import_module("both.loops").add)


def test_a_changed_number_in_another_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "numbers.py").write_text("MORE = 1\n")
    (folder / "loops.py").write_text("from .numbers import MORE\n\n\ndef add(x):\n    return x + MORE\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert add(folder, monkeypatch)(1) == 2
    again = add(folder, monkeypatch)
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1
    (folder / "numbers.py").write_text("MORE = 20\n")
    assert add(folder, monkeypatch)(1) == 21
