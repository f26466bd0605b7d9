"""How CUDA goes over a matrix by columns, for sums over its rows and for what differs from column to column: a block
has a tile of columns and a share of the rows, a thread four neighbouring columns. The sums themselves are in
columns.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .cuda import pointer

WIDE = 4  #: columns of a thread
THREADS = 256  #: of a block at most
FEW = 2048  #: rows, up to which one block sums all of them: a second launch would cost more
MULTIPROCESSORS = 132  #: of an H200


class Columns(NamedTuple):
    """Blocks (tiles, shares), threads (fours of columns of a tile, rows at a time), rows of a share."""

    blocks: tuple[int, int]
    threads: tuple[int, int]
    share: int


def _columns(rows: int, columns: int, width: int, blocks: int, each: int) -> Columns:
    """Tiles of equal width, `width` columns at most; shares for about so many blocks in all, or fewer, so that a thread
    has `each` rows."""
    fours = -(-columns // WIDE)
    tiles = -(-fours // (width // WIDE))
    across = -(-fours // tiles)
    shares = min(-(-blocks // tiles), -(-rows * across // (each * THREADS)))
    share = max(1, -(-rows // max(1, shares)))
    return Columns((tiles, max(1, -(-rows // share))), (across, min(THREADS // across, share)), share)


def spread(rows: int, columns: int, blocks: int = 8 * MULTIPROCESSORS) -> Columns:
    """Where rows do not meet: 4 rows a thread, or more where that would be more than about `blocks`."""
    return _columns(rows, columns, 32, blocks, 4)


def sums(rows: int, columns: int, blocks: int = 2 * MULTIPROCESSORS) -> Columns:
    """For sums over rows. Few rows: all of them in one block, in tiles as narrow as one access to memory allows. Else 8
    rows a thread or more, and about `blocks` in all, also where there are few tiles: every share is one more part for
    whoever adds them up."""
    return _columns(rows, columns, 8, 1, max(rows, 1)) if rows <= FEW else _columns(rows, columns, 32, blocks, 8)


def sums_work(rows: int, columns: int, blocks: int = 2 * MULTIPROCESSORS) -> list[Any]:
    """The array in which the shares of `sums` leave theirs for a second launch; of one share, where there is none."""
    return [((sums(rows, columns, blocks).blocks[1] if columns else 1, columns, 2), "float64")]


def whole(columns: int, arrays: Sequence[Any], steps: Sequence[int] = ()) -> bool:
    """Whether four columns are one access to memory, in every row of every array; `steps`: elements from row to row,
    where that is not `columns`."""
    return (all(n % WIDE == 0 for n in (columns, *steps))
            and all(pointer(a) % min(WIDE * a.dtype.itemsize, 16) == 0 for a in arrays))
