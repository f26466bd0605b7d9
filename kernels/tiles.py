"""Products of matrices in float32 on processors with AVX2: tiles of 6 x 16 sums, with AVX-512 of 14 x 32, stay in
registers, while the columns of b that they need lie packed beside each other, in the cache. Rows of a are read where
they lie, or are packed like them; or the transpose of b.T a.T is computed, if it takes long to pack b. Each processor
has its rule which of these ways a product takes, or that the library's is faster.

Each element is a sum over blocks of at most DEEP products, and each block a chain of products that are rounded once, in
order: its bits depend on its row, its column and their length alone, so parts are bit-identical to the whole.

Loops of numba; `linear` imports them where a product is bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from .registry import Thunk, inlined, loop, memory
from .taps import LANES, LEAST_TILES
from .tile_code import (
    LESS,
    ROWS,
    VECTORS,
    given,
    large,
    large_one,
    row_to_panel,
    slot_of_thread,
    small,
    small_one,
    taken,
    turned,
)
from .vectors import AVX2, NAME, WIDE

ZEN = NAME.startswith("znver")
DEEP, HIGH = 384, 560  #: products that a tile adds up, and rows of a that are packed at once, at most
COLUMNS = VECTORS * LANES
FEW = 4  #: panels of the other matrix that are packed at once
TOGETHER = 8  #: steps that a panel packs at once
ROOM = DEEP * (HIGH + FEW * COLUMNS) + LANES  #: numbers of scratch
SLOTS = 64  #: products at once that have scratch
FAR, NONE = 1 << 40, np.zeros(1, np.int64)  #: more rows than there are; numbers of rows, if nobody reads them
LEAST = 1 << 21 if WIDE else LEAST_TILES  #: products of numbers; for rows of a times rows of b they are `LEAST_TILES`
SHALLOW = 0 if WIDE else 64  #: products that a sum has, for which it gains nothing that b is packed once
MOST = 2048 if ZEN else FAR  #: rows that columns of a and b have at most
TILED, STREAMED, TURNED, PACKED = range(4)  #: ways of a product: see `_tiled` and `_streamed`
LONGEST = DEEP * HIGH // COLUMNS  #: rows of b that fit in scratch
PAGE = 1024  #: numbers; rows that are a multiple apart have the same places in the cache
SPREAD, AGAIN = 256, 4  #: numbers that columns which are read again are no multiple apart; how often they are, at most
OWN = 1 << 19  #: numbers that the own cache of a core of this Intel holds
KEPT, WIDER = 1 << 17, 256  #: numbers of b that stay in a core's own cache on a Zen 3; columns that are TILED there
STORED = 1.4  #: packed numbers that take as long as a sum that is stored transposed


@inlined
def _begin(panel, less, size, width):  # type: ignore[no-untyped-def]
    """Where a panel begins: the first `less` are LESS wide, the others `width`; the last one ends at `size`."""
    return min(min(panel, less) * LESS + max(panel - less, 0) * width, size)


@inlined
def _pack(x, start, along, across, at, end, count, width, deep, panels, to):  # type: ignore[no-untyped-def]
    """Packs `count` panels of x, whose element (k, j) is x[start + along k + across j], from j = at on, `width` numbers
    wide but for the last one, which ends at `end`; one of the steps is 1. A panel has its numbers of each k beside each
    other."""
    if across == 1:  # a few k at once: panels may begin where the cache has few places
        for block in range(0, deep, TOGETHER):
            for p in range(count):
                for k in range(block, min(block + TOGETHER, deep)):
                    row_to_panel(x, start + k * along + at + p * width, min(width, end - at - p * width), panels,
                         to + (p * deep + k) * width, width)
    else:
        for p in range(count):
            for block in range(0, deep, LANES):
                k = min(block, deep - LANES)
                turned(x, start + k + (at + p * width) * across, across, min(width, end - at - p * width), LANES,
                        panels, to + (p * deep + k) * width, width, LANES)


@partial(inlined, forceinline=True)
def _multiplied(a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, adds, y, y_at,  # type: ignore[no-untyped-def]
                y_row, high, columns, low, less):
    """A tile of LESS rows if `less`, else of ROWS, as wide as its columns need."""
    if columns > LANES:
        if less:
            small(a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, adds, y, y_at, y_row, high,
                  columns, low)
        else:
            large(a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, adds, y, y_at, y_row, high,
                  columns, low)
    elif less:
        small_one(a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, adds, y, y_at, y_row, high,
                  columns, low)
    else:
        large_one(a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, adds, y, y_at, y_row, high,
                  columns, low)


@inlined
def _lower(m):  # type: ignore[no-untyped-def]
    """How many panels have LESS of m rows, so that tiles have the fewest rows that are not there."""
    less, fewest = 0, m + ROWS
    for few in range(7):
        rows = few * LESS - (few * LESS - m) // ROWS * ROWS if few * LESS < m else few * LESS
        if rows < fewest and (few - 1) * LESS < m:
            less, fewest = few, rows
    return less


@inlined
def _tiled(a, a_row, a_step, b, b_step, b_column, more, more_row, adds, y, y_row, low, firsts, size,  # type: ignore[no-untyped-def]
           panels, start):
    """A product of two matrices, whose panels are packed in scratch from `start` on."""
    (a_at, b_at, more_at, y_at), (m, depth, n) = firsts, size
    vectors, less = -(-n // LANES), _lower(m)
    talls, wides = less + max(-(-(m - less * LESS) // ROWS), 0), -(-n // COLUMNS)
    # some panels of one side stay packed, while panels of the other side come, a few at a time
    a_stays = (n <= COLUMNS and a_step > 1) or (m < n and (a_step > 1 or 8 * m <= n))
    from_a, from_b = (start, start + DEEP * HIGH) if a_stays else (start + DEEP * HIGH, start)
    tall, wide = (HIGH // ROWS, FEW) if a_stays else (FEW * COLUMNS // ROWS, HIGH // COLUMNS)
    blocks, above, beside = -(-depth // DEEP), -(-talls // tall), -(-wides // wide)
    outer, inner = (above, beside) if a_stays else (beside, above)
    for one in range(outer):
        for block in range(blocks):
            begin = block * depth // blocks
            deep = (block + 1) * depth // blocks - begin
            least = low if block == blocks - 1 else -np.float32(np.inf)
            for other in range(inner):
                i, j = (one, other) if a_stays else (other, one)
                i0, i1 = i * talls // above, (i + 1) * talls // above
                j0, j1 = j * wides // beside, (j + 1) * wides // beside
                first = _begin(i0, less, m, ROWS)
                if other == 0 or not a_stays:
                    few = max(min(less, i1) - i0, 0)
                    _pack(a, a_at + begin * a_step, a_step, a_row, first, m, few, LESS, deep, panels, from_a)
                    _pack(a, a_at + begin * a_step, a_step, a_row, first + few * LESS, m, i1 - i0 - few, ROWS, deep,
                          panels, from_a + few * LESS * deep)
                if other == 0 or a_stays:
                    _pack(b, b_at + begin * b_step, b_step, b_column, j0 * COLUMNS, n,
                          min(j1 * VECTORS, vectors) - j0 * VECTORS, LANES, deep, panels, from_b)
                for c in range(j1 - j0 if a_stays else i1 - i0):
                    for p in range(i1 - i0 if a_stays else j1 - j0):
                        row, column = (i0 + p, j0 + c) if a_stays else (i0 + c, j0 + p)
                        top, left, width = _begin(row, less, m, ROWS), column * COLUMNS, LESS if row < less else ROWS
                        to = y_at + top * y_row + left
                        if block == 0:
                            old, at, apart, some = more, more_at + top * more_row + left, more_row, adds
                        else:
                            old, at, apart, some = y, to, y_row, True
                        _multiplied(panels, from_a + (top - first) * deep, 1, width, panels,
                                    from_b + (column - j0) * COLUMNS * deep, deep, old, at, apart, some, y, to, y_row,
                                    min(width, m - top), min(COLUMNS, n - left), least, row < less)


@inlined
def _streamed(a, a_row, a_step, b, b_step, b_column, more, more_row, adds, y, y_row, way, low,  # type: ignore[no-untyped-def]
              firsts, size, panels, start):
    """A product of two matrices, which reads a where it lies, and packs b in scratch from `start` on, as many columns
    as there is room for; with b_step 0 b lies there, packed. If it is TURNED, more and y are transposed: tiles are
    added up in scratch, and stored from there. If it is PACKED, each tile's rows of a are packed; else only for tiles
    that have more places than rows, since a tile reads as many rows as it has places."""
    (a_at, b_at, more_at, y_at), (m, depth, n) = firsts, size
    vectors, less = -(-n // LANES), _lower(m)
    tile = start + (DEEP * HIGH if b_step else depth * vectors * LANES)
    talls, wides = less + max(-(-(m - less * LESS) // ROWS), 0), -(-n // COLUMNS)
    blocks, parts = -(-depth // DEEP), 1 if b_step == 0 else -(-wides // (DEEP * HIGH // (depth * COLUMNS)))
    for part in range(parts):
        j0, j1 = part * wides // parts, (part + 1) * wides // parts
        beside = min(j1 * VECTORS, vectors) - j0 * VECTORS
        panel = tile + (j1 - j0) * ROWS * COLUMNS if way == TURNED else tile
        for block in range(blocks if b_step else 0):
            begin, end = block * depth // blocks, (block + 1) * depth // blocks
            _pack(b, b_at + begin * b_step, b_step, b_column, j0 * COLUMNS, n, beside, LANES, end - begin, panels,
                  start + begin * beside * LANES)
        for row in range(talls):
            top, width = _begin(row, less, m, ROWS), LESS if row < less else ROWS
            high = min(width, m - top)
            if way == TURNED and adds:
                for left in range(j0 * COLUMNS, min(j1 * COLUMNS, n), LANES):
                    turned(more, more_at + top + left * more_row, more_row, min(n - left, LANES), high, panels,
                           tile + (left // COLUMNS - j0) * ROWS * COLUMNS + left % COLUMNS, COLUMNS, LANES)
            for block in range(blocks):
                begin = block * depth // blocks
                deep = (block + 1) * depth // blocks - begin
                least = low if block == blocks - 1 else -np.float32(np.inf)
                if way == PACKED or high < width:
                    _pack(a, a_at + begin * a_step, a_step, a_row, top, m, 1, width, deep, panels, panel)
                    source, here, across, along = panels, panel, 1, width
                else:
                    source, here, across, along = a, a_at + top * a_row + begin * a_step, a_row, a_step
                for column in range(j0, j1):
                    left = column * COLUMNS
                    if way == TURNED:
                        new, to, step = panels, tile + (column - j0) * ROWS * COLUMNS, COLUMNS
                    else:
                        new, to, step = y, y_at + top * y_row + left, y_row
                    if block or way == TURNED:
                        old, at, apart = new, to, step
                    else:
                        old, at, apart = more, more_at + top * more_row + left, more_row
                    _multiplied(source, here, across, along, panels,
                                start + (begin * beside + (column - j0) * VECTORS * deep) * LANES, deep, old, at, apart,
                                adds or block > 0, new, to, step, high, min(COLUMNS, n - left), least, row < less)
            if way == TURNED:
                for left in range(j0 * COLUMNS, min(j1 * COLUMNS, n), LANES):
                    turned(panels, tile + (left // COLUMNS - j0) * ROWS * COLUMNS + left % COLUMNS, COLUMNS, high,
                           min(n - left, LANES), y, y_at + top + left * y_row, y_row, high)


def _product(counts, a, b, more, y, low, numbers, panels, flags):  # type: ignore[no-untyped-def]
    """Products of matrices of one size, for two axes as many as `numbers` says, each so far from the one before: (how
    many, for a, for b, for more, for y). Or, of group >= 0, the product of its rows, if there are so many, as
    `experts.grouped_products`. All whole numbers are in one array, since each argument takes time to bind."""
    group, least_rows, most_rows, summed, adds = numbers[0], numbers[1], numbers[2], numbers[3] != 0, numbers[4] != 0
    a_row, a_step, b_step, b_column, more_row, y_row = (
        numbers[5], numbers[6], numbers[7], numbers[8], numbers[9], numbers[10])
    m, depth, n = numbers[11], numbers[12], numbers[13]
    a_at, b_at, more_at, y_at = 0, 0, 0, 0
    if group >= 0:
        rows, begin = counts[group], 0
        for before in counts[:group]:
            begin += before
        if not least_rows <= rows < most_rows:
            return
        if summed:
            depth, a_at, b_at = rows, begin * a_step, begin * b_step
        else:
            m, a_at, y_at, more_at = rows, begin * a_row, begin * y_row, begin * more_row
    slots = len(flags) // 8
    slot = slot_of_thread(slots)
    while taken(flags, 8 * slot):
        slot = (slot + 1) % slots
    far, near, way = numbers[14:19], numbers[19:24], numbers[24]
    for i in range(far[0]):
        for j in range(near[0]):
            firsts = (a_at + i * far[1] + j * near[1], b_at + i * far[2] + j * near[2],
                      more_at + i * far[3] + j * near[3], y_at + i * far[4] + j * near[4])
            if way == TILED or (b_step and depth > LONGEST):
                _tiled(a, a_row, a_step, b, b_step, b_column, more, more_row, adds, y, y_row, low, firsts,
                       (m, depth, n), panels, slot * ROOM)
            else:
                _streamed(a, a_row, a_step, b, b_step, b_column, more, more_row, adds, y, y_row, way, low, firsts,
                          (m, depth, n), panels, slot * ROOM)
    given(flags, 8 * slot)


@cache
def _scratch() -> tuple[Any, Any]:
    """The panels of all slots, of which only those pages exist that a product has used, and the flags of the slots, a
    cache line for each."""
    raw = np.empty(SLOTS * ROOM + LANES, np.float32)
    skip = -raw.ctypes.data % 64 // 4
    return raw[skip : skip + SLOTS * ROOM], np.zeros(8 * SLOTS, np.int64)


def _steps(a: Any, b: Any, y: Any, more: Any) -> tuple[int, ...] | None:
    """The steps by rows and columns of a and b, if tiles can multiply arrays like these."""
    if not AVX2 or any(x.dtype != np.float32 or min(x.strides) < 4 for x in (a, b, y)) or (
            y.strides[-1] != 4 or any(4 not in x.strides[-2:] for x in (a, b))) or (
            more is not None and (more.strides[-1] != 4 or min(more.strides) < 0)):
        return None
    return tuple(s // 4 for x in (a, b) for s in x.strides[-2:])


def _sizes(one: int, n: int, a_step: int, b_step: int) -> range:
    """The numbers m of rows of a for which tiles are faster here than the library, by the other two sizes, k and n. If
    rows of a are not beside each other, the numbers k, by m and n."""
    least = LEAST_TILES if a_step == b_step == 1 else LEAST
    return range(max(LANES, -(-least // (one * n))) if min(one, n) >= LANES else FAR, _stop(one, n, a_step, b_step))


def _stop(one: int, n: int, a_step: int, b_step: int) -> int:
    """Where the range of `_sizes` ends. With AVX2 alone 1,011 products were timed on a Zen 3: by this choice they take
    0.95 of the library's time (geometric mean), at most 1.07."""
    if WIDE:
        return MOST + 1 if a_step > 1 else FAR
    if a_step > 1:
        return 129 if n >= WIDER else 513 if n <= 48 else 0
    if one * n <= KEPT and -n % LANES <= n // LANES:
        return FAR
    return -(-one * n // (3 * n + one)) if b_step == 1 and one <= LONGEST else 0  # those that are TURNED


def _packed(b, b_step, b_column, depth, n, to):  # type: ignore[no-untyped-def]
    """Packs b (depth, n) block by block."""
    blocks, vectors = -(-depth // DEEP), -(-n // LANES)
    for block in range(blocks):
        begin, end = block * depth // blocks, (block + 1) * depth // blocks
        _pack(b, begin * b_step, b_step, b_column, 0, n, vectors, LANES, end - begin, to, begin * vectors * LANES)


def _way_zen(steps: tuple[int, ...], m: int, depth: int, n: int, turns: bool) -> int:
    """The way that was fastest for matrices like these on a Zen 4, whose vectors are stored in two halves and whose
    first cache has 8 places for numbers a page apart. `turns`: whether the transpose may be computed."""
    a_row, a_step, b_step, b_column = steps
    a_apart, b_apart = max(a_row, a_step), max(b_step, b_column)
    if b_step == 0:
        return STREAMED if a_apart % PAGE else PACKED
    if turns and depth * (n - m) > STORED * m * n and depth <= LONGEST and b_apart % PAGE and (
            b_step == 1 or depth * m <= DEEP * HIGH):
        return TURNED
    parts = -(-depth * n // (DEEP * HIGH))  # of b, for each of which a is read again
    return STREAMED if a_apart % PAGE and (
        a_step == 1 or parts == 1 or (parts <= AGAIN and a_apart % SPREAD)) else TILED


def _way_intel(steps: tuple[int, ...], m: int, depth: int, n: int, turns: bool) -> int:
    """The way that was fastest on an Intel with AMX (1,194 products: 0.8 % slower than the best way of each, before
    `few` looked at sizes): rows that are packed cost little, columns that are read where they lie much, most of all if
    the core's cache lacks them."""
    _, a_step, b_step, _ = steps
    if b_step == 1 and turns and depth * (n - m) > 2 * m * n and depth <= LONGEST:
        return TURNED
    few = n <= COLUMNS and (a_step == 1 or m * depth < OWN)
    return STREAMED if b_step == 0 or few or (a_step == 1 and n <= min(2 * m, 16 * depth)) else TILED


def _way_avx2(steps: tuple[int, ...], m: int, depth: int, n: int, turns: bool) -> int:
    """The way that was fastest on a Zen 3, which has no AVX-512, of the products that `_sizes` has."""
    _, a_step, b_step, _ = steps
    if b_step and a_step > 1:
        return TILED if n >= WIDER else STREAMED
    return TURNED if b_step == 1 and turns and depth * (n - m) > 3 * m * n and depth <= LONGEST else STREAMED


_way = _way_avx2 if not WIDE else _way_zen if ZEN else _way_intel  # all ways are bit-identical


def _bound(steps: tuple[int, ...], a: Any, b: Any, y: Any, more: Any, low: float, counts: Any, *group: Any) -> Thunk:
    (a_row, a_step, b_step, b_column), (m, depth, n) = steps, (y.shape[-2], a.shape[-1], y.shape[-1])
    old, way = y if more is None else np.broadcast_to(more, y.shape), _way(steps, m, depth, n, group[0] < 0)
    if way == TURNED:
        a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
        m, n, a_row, a_step, b_step, b_column = n, m, b_column, b_step, a_step, a_row
    every = a, b, old, y
    numbers = [*group, more is not None, a_row, a_step, b_step, b_column, old.strides[-2] // 4, y.strides[-2] // 4, m,
               depth, n]
    for axis in range(y.ndim - 2):
        numbers += [y.shape[axis], *(x.strides[axis] // 4 for x in every)]
    numbers += [*[1, 0, 0, 0, 0] * (4 - y.ndim), way]
    return loop(_product, counts, *map(memory, every), np.float32(low), np.array(numbers), *(
        _scratch() if b_step else (b, np.zeros(8, np.int64))))


def product(a: Any, b: Any, y: Any, more: Any = None, low: float = -np.inf) -> Thunk | None:
    """y (m, n) = a (m, k) @ b (k, n) + more, each element at least `low`, if that is faster here than the library's
    product; else None. `more` (n,) or (m, n) may be y itself. Or as many products as two leading axes of all have. The
    choice depends on the processor, shapes and steps alone."""
    steps = _steps(a, b, y, more)
    if steps is None:
        return None
    one, other = a.shape[-2:] if steps[1] > 1 else a.shape[:-3:-1]
    if other not in _sizes(one, b.shape[-1], *steps[1:3]):
        return None
    return _bound(steps, a, b, y, more, low, NONE, -1, 0, 0, False)


def packed_product(m: int, b: Any, work: Any) -> tuple[list[Thunk], Callable[[Any, Any], Thunk]] | None:
    """For some products of a (m, k) with one b (k, n): the call that packs b in `work`, which also has room for some
    rows of a, and a function that binds y = a @ b, bit-identical to `product`. None if the library's products are
    faster here."""
    steps = _steps(b, b, work, None)
    full = m % LESS == 0  # other rows leave places of tiles empty; the library packs nothing below a million
    if steps is None or min(m + full * LESS, *b.shape) < LANES or len(b) <= SHALLOW or (
            m * b.size < (LEAST // 2 if full else LEAST)):
        return None

    def bound(a: Any, y: Any) -> Thunk:
        return _bound((*(s // 4 for s in a.strides), 0, 0), a, work, y, None, -np.inf, NONE, -1, 0, 0, False)

    return [loop(_packed, memory(b), *steps[2:], *b.shape, work)], bound


def group_product(counts: Any, group: int, a: Any, b: Any, y: Any, summed: bool, bias: Any = None
                  ) -> tuple[list[Thunk], range]:
    """The product of a group of rows as in `experts.grouped_products`, bit-identical to `product`, if the group has one
    of these numbers of rows; for others the call does nothing."""
    steps = _steps(a, b, y, bias)
    sizes = range(0) if steps is None else _sizes(a.shape[1 - summed], b.shape[1], *steps[1:3])
    return ([_bound(steps, a, b, y, bias, -np.inf, counts, group, sizes.start, sizes.stop, summed)]
            if steps and sizes else []), sizes
