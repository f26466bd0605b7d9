"""Memory that is not the device's own: of the CPU a file, mapped into the address space of the process; of a GPU the
host's.

The room of the whole file is taken before the first write, so a full disk is an error then and not in the middle of a
step. The file has no name while it is used: nothing else writes to it, and it goes with the process. The copies of a
step are reads and writes of the file, which fail with an error; an access to a mapped page would end the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import EEXIST
from functools import partial
from mmap import PAGESIZE, mmap
from tempfile import TemporaryFile, gettempdir
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np


class File(NamedTuple):
    """An open file of so many bytes, the address of its first byte in the process, and its name for people."""

    number: int
    size: int
    begin: int
    name: str


class _Owned(np.ndarray[Any, Any]):
    """Bytes that keep their owner alive."""

    owner: Any

    def __array_finalize__(self, of: Any) -> None:
        if isinstance(of, _Owned):
            self.owner = of.owner


class Mapped(_Owned):
    """Bytes of a mapped file, which is open as long as they are used. `owner`: the `File`."""


class OnHost(_Owned):
    """Pinned bytes of the host beside a CUDA device. `owner`: its driver."""


FAR = Mapped, OnHost  #: the types of far memory


def mapped(nbytes: int, path: str | None, rank: int = 0) -> Mapped:
    """So many zeros in a new file; the first is at the begin of a page. `path`: None for a file in the folder for
    temporary files; with rank r above 0, `path`.r. Raises OSError with one line if the file exists, or cannot be made
    or filled."""
    where = os.fspath(path) + f".{rank}" * (rank > 0) if path else "a temporary file"
    size = max(nbytes, PAGESIZE)
    try:
        number = _opened(where if path else None)
        try:
            os.posix_fallocate(number, 0, size)
            memory = mmap(number, size)
        except OSError:
            os.close(number)
            raise
    except OSError as error:
        raise _failed(error, nbytes, "out to", where) from error
    finalize(memory, os.close, number)
    found = np.frombuffer(memory, np.uint8)[:nbytes].view(Mapped)
    found.owner = File(number, size, found.ctypes.data, where if path else f"{where} in {gettempdir()}")
    return found


def transfer(source: Any, out: Any) -> Callable[[], None] | None:
    """A call that copies a dense array to another one, if one of them is in a mapped file; else None. The call raises
    OSError with one line."""
    for move, way, near, far in ((os.pwritev, "out to", source, out), (os.preadv, "back from", out, source)):
        if isinstance(far.base, Mapped):
            return partial(_move, move, way, near.reshape(-1).view(np.uint8), far, far.base.owner)
    return None


def _move(move: Callable[[int, list[Any], int], int], way: str, near: Any, far: Any, file: File) -> None:
    begin, done = far.ctypes.data - file.begin, 0
    try:
        while done < len(near):
            if os.fstat(file.number).st_size < file.size:
                raise OSError("the file has become shorter")
            done += move(file.number, [near[done:]], begin + done)
    except OSError as error:
        raise _failed(error, len(near), way, file.name) from error


def _failed(error: OSError, nbytes: int, way: str, where: str) -> OSError:
    return OSError(f"cannot copy {f'{nbytes:,} bytes ' * (nbytes > 0)}{way} {where}: {error.strerror or error}")


def _opened(path: str | None) -> int:
    """A new file without a name, so processes may ask for one path at the same time."""
    if path and os.path.lexists(path):
        raise FileExistsError(EEXIST, os.strerror(EEXIST))
    folder, name = os.path.split(path) if path else (None, "")
    with TemporaryFile(buffering=0, prefix=f"{name}.", dir=os.curdir if folder == "" else folder) as file:
        return os.dup(file.fileno())
