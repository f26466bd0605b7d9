"""Memory of the host in pages of 2 MB, if the system has them.

A processor keeps the addresses of a few thousand pages. A large matrix in pages of 4 KB has one for each row, with
which a product takes 1.1 to 2 times as long on a virtual machine. Linux gives large pages to those who ask; NumPy asks
for arrays from 4 MB on, and most parameters have less.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

LARGE = 1 << 21  #: bytes of a large page
CHUNK = 8 * LARGE  #: bytes that pieces share
KNOWN = hasattr(mmap, "MADV_HUGEPAGE")  #: whether the system knows large pages


def _mapped(nbytes: int) -> mmap.mmap:
    """Room for so many bytes from a multiple of LARGE on. A page of it exists once it is written."""
    memory = mmap.mmap(-1, nbytes + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _bytes(memory: mmap.mmap, begin: int, nbytes: int) -> Any:
    raw = np.frombuffer(memory, np.uint8)
    begin += -raw.ctypes.data % LARGE
    return raw[begin : begin + nbytes]


def own(nbytes: int) -> Any:
    """Uninitialised bytes in large pages of their own; None if they do not fill half of one, or there are none."""
    return _bytes(_mapped(-(-nbytes // LARGE) * LARGE), 0, nbytes) if KNOWN and 2 * nbytes >= LARGE else None


class Shared:
    """Makes pieces of large pages, aligned, which lie in chunks. A chunk is given back when none of its pieces is used
    any more, so they should last about equally long."""

    def __init__(self, alignment: int) -> None:
        self._alignment, self._lock, self._used = alignment, threading.Lock(), 0
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None

    def piece(self, nbytes: int) -> Any:
        """Uninitialised bytes, in pages of their own if they fill half of a chunk; None if there are no large pages."""
        if not KNOWN or 2 * nbytes > CHUNK:
            return own(nbytes)
        with self._lock:
            memory = self._chunk()
            if memory is None or self._used + nbytes > CHUNK:
                memory, self._used = _mapped(CHUNK), 0
                self._chunk = ref(memory)
            begin, self._used = self._used, self._used + -(-nbytes // self._alignment) * self._alignment
            return _bytes(memory, begin, nbytes)
