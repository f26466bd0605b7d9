"""How CUDA goes over a matrix by columns, for sums over its rows and for what differs from column to column: a block has
a tile of columns and a share of the rows. The sums themselves are in columns.cuh."""

from __future__ import annotations

from typing import Any, NamedTuple

THREADS = 512  #: of a block at most
FEW = 2048  #: rows, up to which one block sums all of them: a second launch would cost more


class Columns(NamedTuple):
    """Blocks (tiles, shares), threads (columns of a tile, rows at a time), rows of a share."""

    blocks: tuple[int, int]
    threads: tuple[int, int]
    share: int


def _columns(rows: int, columns: int, width: int, shares: int) -> Columns:
    """Tiles of equal width, `width` at most; as many shares as there are rows at most."""
    tiles = -(-columns // width)
    across = -(-columns // tiles)
    share = max(1, -(-rows // max(1, shares)))
    return Columns((tiles, max(1, -(-rows // share))), (across, min(THREADS // across, share)), share)


def spread(rows: int, columns: int, blocks: int = 1056) -> Columns:
    """Where rows do not meet: 4 rows a thread, or more where that would be more than about `blocks`."""
    return _columns(rows, columns, 32, min(-(-blocks * 32 // columns), -(-rows * min(columns, 32) // (4 * THREADS))))


def sums(rows: int, columns: int) -> Columns:
    """For sums over rows. Few rows: all of them in one block, in tiles as narrow as one access to memory allows. Else 16
    rows a thread or more, and few enough shares for a second launch to add them up quickly."""
    if rows <= FEW:
        return _columns(rows, columns, 8, 1)
    return _columns(rows, columns, 32, min(128, -(-528 * 32 // columns), -(-rows * min(columns, 32) // (16 * THREADS))))


def sums_work(rows: int, columns: int) -> list[Any]:
    """The array in which the shares of `sums` leave theirs for a second launch; of one share, where there is none."""
    return [((sums(rows, columns).blocks[1] if columns else 1, 2, columns), "float64")]
