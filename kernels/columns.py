"""How CUDA kernels divide a matrix, for sums over rows and for values that belong to columns: a block has a tile of
columns and a share of the rows, a thread has four neighbouring columns. The sums themselves are in columns.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .cuda import pointer

WIDE = 4  #: columns of a thread
THREADS = 256  #: the most threads of a block
FEW = 2048  #: up to this many rows, one block sums all of them: a second launch would cost more
MULTIPROCESSORS = 132  #: as an H200 has


class Columns(NamedTuple):
    """Blocks (tiles, shares), threads (fours of columns of a tile, rows at a time), rows of a share."""

    blocks: tuple[int, int]
    threads: tuple[int, int]
    share: int


def _columns(rows: int, columns: int, width: int, blocks: int, each: int) -> Columns:
    """Tiles of equal width, at most `width` columns; as many shares as give about `blocks` blocks in all, or fewer, so
    that a thread has at least `each` rows."""
    fours = -(-columns // WIDE)
    tiles = -(-fours // (width // WIDE))
    across = -(-fours // tiles)
    shares = min(-(-blocks // tiles), -(-rows * across // (each * THREADS)))
    share = max(1, -(-rows // max(1, shares)))
    return Columns((tiles, max(1, -(-rows // share))), (across, min(THREADS // across, share)), share)


def spread(rows: int, columns: int, blocks: int = 8 * MULTIPROCESSORS) -> Columns:
    """For kernels without sums over rows: 4 rows per thread, or more if that would give more than about `blocks`
    blocks."""
    return _columns(rows, columns, 32, blocks, 4)


def sums(rows: int, columns: int, blocks: int = 2 * MULTIPROCESSORS) -> Columns:
    """For sums over rows. Few rows are summed by one block, in tiles as narrow as one access to memory allows.
    Otherwise a thread has at least 8 rows, and there are about `blocks` blocks in all, even with few tiles: every share
    is one more part to add up."""
    return _columns(rows, columns, 8, 1, max(rows, 1)) if rows <= FEW else _columns(rows, columns, 32, blocks, 8)


def sums_work(rows: int, columns: int, blocks: int = 2 * MULTIPROCESSORS) -> list[Any]:
    """The scratch array in which the shares of `sums` leave their results for a second launch; none for one share."""
    return [((sums(rows, columns, blocks).blocks[1] if columns else 1, columns, 2), "float64")]


def whole(columns: int, arrays: Sequence[Any], steps: Sequence[int] = ()) -> bool:
    """Whether four columns are one access to memory, in every row of every array. `steps`: elements from row to row,
    if not `columns`."""
    return (all(n % WIDE == 0 for n in (columns, *steps))
            and all(pointer(a) % min(WIDE * a.dtype.itemsize, 16) == 0 for a in arrays))
