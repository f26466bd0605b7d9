"""Memory of the host in pages of 2 MB, if the system has them.

A processor keeps the addresses of a few thousand pages. A large matrix in pages of 4 KB has one for each row, with
which a product takes 1.1 to 2.5 times as long on a virtual machine. Linux gives large pages to those who ask; NumPy
asks for arrays from 4 MB on, and most parameters have less.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np

LARGE = 1 << 21  #: bytes of a large page
CHUNK = 2 * LARGE  #: bytes that pieces share
KNOWN = hasattr(mmap, "MADV_HUGEPAGE")  #: whether the system knows large pages


def _mapped(nbytes: int) -> mmap.mmap:
    """Room for so many bytes from the first multiple of LARGE on. A page of it exists once it is written."""
    try:
        memory = mmap.mmap(-1, nbytes + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.resize(_begin(memory) + nbytes)  # or the rest would become a part of the last large page
    except OSError:
        raise MemoryError(f"the system has no {nbytes} bytes") from None
    with suppress(OSError):  # the kernel may be built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _begin(memory: mmap.mmap) -> int:
    return -np.frombuffer(memory, np.uint8).ctypes.data % LARGE


def _bytes(memory: mmap.mmap, begin: int, nbytes: int) -> Any:
    return np.frombuffer(memory, np.uint8, nbytes, _begin(memory) + begin)


def own(nbytes: int, otherwise: Callable[[int], Any]) -> Any:
    """Uninitialised bytes from the begin of a large page on; `otherwise`: gives them if they fill less than half."""
    return _bytes(_mapped(nbytes), 0, nbytes) if KNOWN and 2 * nbytes >= LARGE else otherwise(nbytes)


class Shared:
    """Makes pieces of large pages, aligned, which lie in chunks. A chunk is given back when none of its pieces is used
    any more, so they should last about equally long."""

    def __init__(self, alignment: int) -> None:
        self._alignment, self._lock, self._used = alignment, threading.Lock(), 0
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None

    def piece(self, nbytes: int, otherwise: Callable[[int], Any]) -> Any:
        """Uninitialised bytes, in pages of their own if they fill half of a chunk; `otherwise`: without large pages."""
        if not KNOWN or 2 * nbytes > CHUNK:
            return own(nbytes, otherwise)
        with self._lock:
            memory = self._chunk()
            if memory is None or self._used + nbytes > CHUNK:
                memory, self._used = _mapped(CHUNK), 0
                self._chunk = ref(memory)
            begin, self._used = self._used, self._used + -(-nbytes // self._alignment) * self._alignment
            return _bytes(memory, begin, nbytes)
