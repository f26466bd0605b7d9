"""Memory that is not in RAM for good: a file, mapped into the address space of the process.

The room of the whole file is taken before the first write, so a full disk is an error then and not in the middle of a
step. The file has no name while it is used: nothing else writes to it, and it goes with the process.
"""

from __future__ import annotations

import os
from mmap import PAGESIZE, mmap
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np


class Mapped(np.ndarray[Any, Any]):
    """Bytes of a mapped file."""


def mapped(nbytes: int, path: str | None, rank: int = 0) -> Mapped:
    """So many zeros in a new file; the first is at the begin of a page. `path`: None for a file in the folder for
    temporary files; with rank r above 0, `path`.r. Raises OSError with one line if the file exists, or cannot be made
    or filled."""
    where = os.fspath(path) + f".{rank}" * (rank > 0) if path else "a temporary file"
    try:
        with _opened(where if path else None) as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, PAGESIZE))
            return np.frombuffer(mmap(file.fileno(), max(nbytes, PAGESIZE)), np.uint8)[:nbytes].view(Mapped)
    except OSError as error:
        size = f"{nbytes:,} bytes " * (nbytes > 0)
        raise OSError(f"cannot copy {size}out to {where}: {error.strerror or error}") from error


def _opened(path: str | None) -> IO[bytes]:
    if path is None:
        return TemporaryFile()
    file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b")
    os.unlink(path)
    return file
