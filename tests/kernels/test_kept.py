"""Machine code that was kept is compiled again if a file changes from which a loop has functions or numbers."""

from __future__ import annotations

import importlib
import pickle
import sys
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile

from minidl.core import columns
from minidl.kernels import kept, registry, tiles


def test_the_sources_of_a_loop_are_all_files_that_it_comes_from():
    names = {file.name for file in kept.sources(Path(tiles.__file__))}
    assert {"tiles.py", "vectors.py", "taps.py", "registry.py", "tile_code.py"} <= names
    assert "conv.py" not in names


def add(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loop of the folder, imported again."""
    for name in ("both", "both.numbers", "both.loops", "beside_both"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for cached in (kept.sources, kept._state):
        cached.cache_clear()
    monkeypatch.syspath_prepend(folder.parent)
    return registry.jitted(importlib.import_module("both.loops").add)


@pytest.mark.parametrize(("place", "number", "loop"), [
    ("both/numbers", "MORE = {}", "from .numbers import MORE\n\ndef add(x):\n    return x + MORE"),
    ("beside_both", "MORE = {}", "from beside_both import MORE\n\ndef add(x):\n    return x + MORE"),
    ("beside_both", "MORE = {}", "import beside_both as numbers\n\ndef add(x):\n    return x + numbers.MORE"),
    ("beside_both", "MORE = ({}, 0)", "from beside_both import MORE\n\ndef add(x):\n    return x + MORE[0]"),
    ("beside_both", "from numba import njit\n@njit\ndef more(x):\n    return x + {}",
     "import beside_both\n\nmore = beside_both.more\n\ndef add(x):\n    return more(x)"),
])
def test_a_changed_number_in_another_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str,
                                                  number: str, loop: str):
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "__init__.py").touch()
    other = tmp_path / f"{place}.py"
    other.write_text(number.format(1))
    (folder / "loops.py").write_text(loop)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert add(folder, monkeypatch)(1) == 2
    again = add(folder, monkeypatch)
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1
    other.write_text(number.format(20))
    assert add(folder, monkeypatch)(1) == 21


def next_to(x):
    return x + 1


def full(*_: Any) -> Any:
    raise OSError(ENOSPC, "No space left on device")


@pytest.mark.parametrize(("compiler", "types"), [(numba.njit, ()), (numba.njit, ("int64(int64)",)),
                                                 (numba.cfunc, ("int64(int64)",))])
@pytest.mark.parametrize(("where", "name", "instead"), [
    (CompileResultCacheImpl, "_locator_classes", []), (IndexDataCacheFile, "save", full),
    (IndexDataCacheFile, "load", lambda *_: pickle.loads(b""))], ids=["no folder", "full disk", "damaged"])
def test_a_process_compiles_for_itself_if_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                              compiler: Any, types: Any, where: Any, name: str,
                                                              instead: Any):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(where, name, instead)
    made = kept.follow(kept.kept(compiler, *types)(next_to), next_to)
    assert getattr(made, "ctypes", made)(1) == 2
    assert columns._compiled.__wrapped__(next_to)(1) == 2


def test_loops_refuse_to_run_as_python(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(RuntimeError, match="NUMBA_DISABLE_JIT is set, and .* machine code; unset it"):
        kept.kept(numba.njit)(next_to)
