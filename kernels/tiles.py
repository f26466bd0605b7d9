"""Products of matrices in float32 on processors with AVX-512: tiles of 14 x 32 sums stay in registers, while the rows
of a and the columns of b that they need lie packed beside each other, in the cache.

Each element is a sum over blocks of at most DEEP products, and each block a chain of products that are rounded once, in
order: its bits depend on its row, its column and their length alone, so parts are bit-identical to the whole.

Loops of numba; `linear` imports them where a product is bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .registry import Thunk, inlined, loop, memory
from .taps import LANES, LEAST_TILES
from .vectors import _address, _call, _repeated, _transposed

WIDE = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]  #: whether 32 registers hold LANES each
ROWS, LESS, VECTORS = 14, 8, 2  #: of a tile; of a tile for rows that are left
DEEP, HIGH = 384, 560  #: products that a tile adds up, and rows of a that are packed at once, at most
COLUMNS = VECTORS * LANES
FEW = 4  #: panels of the other matrix that are packed at once
TOGETHER = 8  #: steps that a panel packs at once
ROOM = DEEP * (HIGH + FEW * COLUMNS) + LANES  #: numbers of scratch
SLOTS = 64  #: products at once that have scratch
FAR, NONE = 1 << 40, np.zeros(1, np.int64)  #: more rows than there are; numbers of rows, if nobody reads them
LEAST = 1 << 21  #: products of numbers; for rows of a times rows of b they are `LEAST_TILES`
MOST = 2048  #: rows that columns of a and b have at most
FLOAT, NUMBER = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
BITS, MASK = ir.IntType(LANES), ir.VectorType(ir.IntType(1), LANES)


def _place(builder: Any, address: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(address, [index]), VECTOR.as_pointer())


def _first(builder: Any, count: Any) -> Any:
    """A bit for each of the first `count` of LANES elements."""
    some = builder.trunc(builder.sub(builder.shl(NUMBER(1), count), NUMBER(1)), BITS)
    return builder.select(builder.icmp_signed("<", count, NUMBER(LANES)), some, BITS(-1))


def _masked(builder: Any, place: Any, mask: Any) -> Any:
    """The vector at a place, with zeros for elements that are not in the mask."""
    return _call(builder, f"llvm.masked.load.v{LANES}f32.p0", VECTOR, place, ir.IntType(32)(4), mask,
                 ir.Constant(VECTOR, None))


def _tile(rows: int, vectors: int) -> Any:
    """y = more + a b for `rows` x `vectors` LANES elements, of which `high` x `columns` are stored, each at least
    `low`. In panels are a from a_at on, `rows` numbers for each of `deep` steps, and b from b_at on, for each vector
    LANES numbers for each step. Element (i, j) of y is at y_at + i y_row + j, and so in more if `adds`, else it is 0
    there."""

    @intrinsic
    def tile(  # type: ignore[no-untyped-def]
            typing, panels, a_at, b_at, deep, more, more_at, more_row, adds, y, y_at, y_row, high, columns, low):
        def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            (panels_, a, b, steps, more_, more_first, more_step, some, y_, y_first, y_step, high_, wide,
             least) = arguments

            def lines(kind: Any, array: Any, first: Any, step: Any) -> list[Any]:
                """Where each row begins, the last row's for rows that are not there."""
                last, start = builder.sub(high_, NUMBER(1)), _address(context, builder, kind, array, first)
                return [builder.gep(start, [builder.mul(step, builder.select(
                    builder.icmp_signed("<", NUMBER(i), high_), NUMBER(i), last))]) for i in range(rows)]

            outs = lines(y, y_, y_first, y_step)
            from_a, from_b = (_address(context, builder, panels, panels_, at) for at in (a, b))
            before, again, after = builder.block, *(builder.append_basic_block(n) for n in ("add", "added"))
            builder.branch(again)
            builder.position_at_end(again)
            k, sums = builder.phi(NUMBER), [[builder.phi(VECTOR) for _ in range(vectors)] for _ in range(rows)]
            weights = [builder.load(_place(builder, from_b, builder.mul(
                builder.add(builder.mul(steps, NUMBER(v)), k), NUMBER(LANES))), align=4) for v in range(vectors)]
            line, new = builder.gep(from_a, [builder.mul(k, NUMBER(rows))]), []
            for i, row in enumerate(sums):
                value = _repeated(builder, builder.load(builder.gep(line, [NUMBER(i)])))
                new.append([_call(builder, f"llvm.fma.v{LANES}f32", VECTOR, value, w, s)
                            for w, s in zip(weights, row, strict=True)])
            following = builder.add(k, NUMBER(1))
            for phi, zero, value in [(k, NUMBER(0), following), *(
                    (s, ir.Constant(VECTOR, None), n) for both in zip(sums, new, strict=True)
                    for s, n in zip(*both, strict=True))]:
                phi.add_incoming(zero, before)
                phi.add_incoming(value, again)
            builder.cbranch(builder.icmp_signed("<", following, steps), again, after)
            builder.position_at_end(after)
            masks = [_first(builder, builder.sub(wide, NUMBER(LANES * v))) for v in range(vectors)]
            some, least = builder.select(some, BITS(-1), BITS(0)), _repeated(builder, least)
            some = builder.bitcast(some, MASK)
            for i, (row, start, out) in enumerate(zip(new, lines(more, more_, more_first, more_step), outs,
                                                      strict=True)):
                own = builder.icmp_signed("<", NUMBER(i), high_)
                for v, value in enumerate(row):
                    shown = builder.bitcast(builder.select(own, masks[v], BITS(0)), MASK)
                    old = _masked(builder, _place(builder, start, NUMBER(LANES * v)), builder.and_(shown, some))
                    value = builder.fadd(value, old)
                    value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
                    _call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), value,
                          _place(builder, out, NUMBER(LANES * v)), ir.IntType(32)(4), shown)
            return context.get_dummy_value()

        return types.none(panels, a_at, b_at, deep, more, more_at, more_row, types.boolean, y, y_at, y_row, high,
                          columns, types.float32), build

    return tile


_large_one, _large, _small_one, _small = (_tile(rows, v) for rows in (ROWS, LESS) for v in range(1, VECTORS + 1))


@intrinsic
def _row(typing, x, at, count, to, first, width):  # type: ignore[no-untyped-def]
    """to[first + j] = x[at + j] for j below `count`, else 0, for j below `width`, at most LANES."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x_, at_, count_, to_, first_, width_ = arguments
        source, out = (_place(builder, _address(context, builder, kind, array, index), NUMBER(0))
                       for kind, array, index in ((x, x_, at_), (to, to_, first_)))
        values = _masked(builder, source, builder.bitcast(_first(builder, count_), MASK))
        _call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), values, out, ir.IntType(32)(4),
              builder.bitcast(_first(builder, width_), MASK))
        return context.get_dummy_value()

    return types.none(x, at, count, to, first, width), build


@intrinsic
def _turned(typing, x, at, across, count, to, first, step):  # type: ignore[no-untyped-def]
    """to[first + step i + j] = x[at + i + across min(j, count - 1)] for i and j below LANES, for one i after the
    other."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x_, at_, across_, count_, to_, first_, step_ = arguments
        begin, end = _address(context, builder, x, x_, at_), _address(context, builder, to, to_, first_)
        last = builder.sub(count_, NUMBER(1))
        rows = [builder.load(_place(builder, begin, builder.mul(across_, builder.select(
            builder.icmp_signed("<", NUMBER(j), last), NUMBER(j), last))), align=4) for j in range(LANES)]
        for i, row in enumerate(_transposed(builder, rows)):
            builder.store(row, _place(builder, end, builder.mul(step_, NUMBER(i))), align=4)
        return context.get_dummy_value()

    return types.none(x, at, across, count, to, first, step), build


@intrinsic
def _taken(typing, flags, at):  # type: ignore[no-untyped-def]
    """Whether a flag was set; it is set then."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        flag = _address(context, builder, flags, *arguments)
        return builder.icmp_signed("!=", builder.atomic_rmw("xchg", flag, NUMBER(1), "acquire"), NUMBER(0))

    return types.boolean(flags, at), build


@intrinsic
def _given(typing, flags, at):  # type: ignore[no-untyped-def]
    """Clears a flag."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store_atomic(NUMBER(0), _address(context, builder, flags, *arguments), "release", 8)
        return context.get_dummy_value()

    return types.none(flags, at), build


@intrinsic
def _thread(typing, slots):  # type: ignore[no-untyped-def]
    """A slot that differs from thread to thread, as their stacks do."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        spot = builder.ptrtoint(cgutils.alloca_once(builder, ir.IntType(8)), NUMBER)
        return builder.urem(builder.lshr(spot, NUMBER(20)), arguments[0])

    return types.int64(slots), build


@inlined
def _begin(panel, less, size, width):  # type: ignore[no-untyped-def]
    """Where a panel begins: the first `less` are LESS wide, the others `width`; the last one ends at `size`."""
    return min(min(panel, less) * LESS + max(panel - less, 0) * width, size)


@inlined
def _pack(x, along, across, at, end, count, width, deep, panels, to):  # type: ignore[no-untyped-def]
    """Packs `count` panels of x, whose element (k, j) is x[along k + across j], from j = at on, `width` numbers wide
    but for the last one, which ends at `end`; one of the steps is 1. A panel has its numbers of each k beside each
    other."""
    if across == 1:  # a few k at once: panels may begin where the cache has few places
        for block in range(0, deep, TOGETHER):
            for p in range(count):
                for k in range(block, min(block + TOGETHER, deep)):
                    _row(x, k * along + at + p * width, min(width, end - at - p * width), panels,
                         to + (p * deep + k) * width, width)
    else:
        for p in range(count):
            for block in range(0, deep, LANES):
                k = min(block, deep - LANES)
                _turned(x, k + (at + p * width) * across, across, min(width, end - at - p * width), panels,
                        to + (p * deep + k) * width, width)


@inlined
def _tiled(a, a_row, a_step, b, b_step, b_column, more, more_row, adds, y, y_row, low, size,  # type: ignore[no-untyped-def]
           panels, slot):
    """A product of two matrices, with the scratch of a slot. With b_step 0 b lies at its begin, packed."""
    m, depth, n = size
    packed, vectors = b_step == 0, -(-n // LANES)
    less = 0  # so many that the last panel of ROWS is whole
    while less < 6 and less * LESS < m and (m - less * LESS) % ROWS > 1:
        less += 1
    talls, wides = less + max(-(-(m - less * LESS) // ROWS), 0), -(-n // COLUMNS)
    # some panels of one side stay packed, while panels of the other side come, a few at a time
    a_stays = packed or (m < n and (a_step > 1 or 8 * m <= n))
    kept = slot * ROOM + (depth * vectors * LANES if packed else 0)
    passing = kept + DEEP * HIGH
    from_a, from_b = (kept, passing) if a_stays else (passing, kept)
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
                if other == 0 or not a_stays:
                    first, small = _begin(i0, less, m, ROWS), max(min(less, i1) - i0, 0)
                    _pack(a[begin * a_step :], a_step, a_row, first, m, small, LESS, deep, panels, from_a)
                    _pack(a[begin * a_step :], a_step, a_row, first + small * LESS, m, i1 - i0 - small, ROWS, deep,
                          panels, from_a + small * LESS * deep)
                if packed:
                    from_b = slot * ROOM + (begin * vectors + j0 * VECTORS * deep) * LANES
                elif other == 0 or a_stays:
                    _pack(b[begin * b_step :], b_step, b_column, j0 * COLUMNS, n,
                          min(j1 * VECTORS, vectors) - j0 * VECTORS, LANES, deep, panels, from_b)
                start = _begin(i0, less, m, ROWS)
                for c in range(j1 - j0 if a_stays else i1 - i0):
                    for p in range(i1 - i0 if a_stays else j1 - j0):
                        row, column = (i0 + p, j0 + c) if a_stays else (i0 + c, j0 + p)
                        top, left = _begin(row, less, m, ROWS), column * COLUMNS
                        rows, columns = min(LESS if row < less else ROWS, m - top), min(COLUMNS, n - left)
                        here, there = from_a + (top - start) * deep, from_b + (column - j0) * COLUMNS * deep
                        to = top * y_row + left
                        if block == 0:
                            old, at, apart, some = more, top * more_row + left, more_row, adds
                        else:
                            old, at, apart, some = y, to, y_row, True
                        if row >= less and columns > LANES:
                            _large(panels, here, there, deep, old, at, apart, some, y, to, y_row, rows, columns, least)
                        elif row >= less:
                            _large_one(panels, here, there, deep, old, at, apart, some, y, to, y_row, rows, columns,
                                       least)
                        elif columns > LANES:
                            _small(panels, here, there, deep, old, at, apart, some, y, to, y_row, rows, columns, least)
                        else:
                            _small_one(panels, here, there, deep, old, at, apart, some, y, to, y_row, rows, columns,
                                       least)


def _product(counts, a, b, more, y, low, numbers, panels, flags):  # type: ignore[no-untyped-def]
    """Products of matrices of one size, for two axes as many as `numbers` says, each so far from the one before: (how
    many, for a, for b, for more, for y). Or, of group >= 0, the product of its rows, if there are so many, as
    `experts.grouped_products`. All whole numbers are in one array, since each argument takes time to bind."""
    group, least_rows, most_rows, summed, adds = numbers[0], numbers[1], numbers[2], numbers[3] != 0, numbers[4] != 0
    a_row, a_step, b_step, b_column, more_row, y_row = (
        numbers[5], numbers[6], numbers[7], numbers[8], numbers[9], numbers[10])
    m, depth, n = numbers[11], numbers[12], numbers[13]
    if group >= 0:
        rows, begin = counts[group], counts[:group].sum()
        if not least_rows <= rows < most_rows:
            return
        if summed:
            depth, a, b = rows, a[begin * a_step :], b[begin * b_step :]
        else:
            m, a, y, more = rows, a[begin * a_row :], y[begin * y_row :], more[begin * more_row :]
    slots = len(flags) // 8
    slot = _thread(slots)
    while _taken(flags, 8 * slot):
        slot = (slot + 1) % slots
    far, near = numbers[14:19], numbers[19:24]
    for i in range(far[0]):
        for j in range(near[0]):
            _tiled(a[i * far[1] + j * near[1] :], a_row, a_step, b[i * far[2] + j * near[2] :], b_step, b_column,
                   more[i * far[3] + j * near[3] :], more_row, adds, y[i * far[4] + j * near[4] :], y_row, low,
                   (m, depth, n), panels, slot)
    _given(flags, 8 * slot)


@cache
def _scratch() -> tuple[Any, Any]:
    """The panels of all slots, of which only those pages exist that a product has used, and the flags of the slots, a
    cache line for each."""
    raw = np.empty(SLOTS * ROOM + LANES, np.float32)
    skip = -raw.ctypes.data % 64 // 4
    return raw[skip : skip + SLOTS * ROOM], np.zeros(8 * SLOTS, np.int64)


def _steps(a: Any, b: Any, y: Any, more: Any) -> tuple[int, ...] | None:
    """The steps by rows and columns of a and b, if tiles can multiply arrays like these."""
    if not WIDE or any(x.dtype != np.float32 or min(x.strides) < 4 for x in (a, b, y)) or (
            y.strides[-1] != 4 or any(4 not in x.strides[-2:] for x in (a, b))) or (
            more is not None and (more.strides[-1] != 4 or min(more.strides) < 0)):
        return None
    return tuple(s // 4 for x in (a, b) for s in x.strides[-2:])


def _sizes(one: int, other: int, a_step: int, b_step: int) -> range:
    """The third of the sizes m, k and n for which tiles are faster here than the library, by the other two. (With rows
    of a that are not beside each other it is k.)"""
    least = LEAST_TILES if a_step == b_step == 1 else LEAST
    return range(max(LANES, -(-least // (one * other))) if min(one, other) >= LANES else FAR,
                 MOST + 1 if a_step > 1 else FAR)


def _packed(b, b_step, b_column, depth, n, to):  # type: ignore[no-untyped-def]
    """Packs b (depth, n) block by block."""
    blocks, vectors = -(-depth // DEEP), -(-n // LANES)
    for block in range(blocks):
        begin, end = block * depth // blocks, (block + 1) * depth // blocks
        _pack(b[begin * b_step :], b_step, b_column, 0, n, vectors, LANES, end - begin, to, begin * vectors * LANES)


def _bound(steps: tuple[int, ...], a: Any, b: Any, y: Any, more: Any, low: float, counts: Any, *group: Any) -> Thunk:
    old = y if more is None else np.broadcast_to(more, y.shape)
    every = a, b, old, y
    numbers = [*group, more is not None, *steps, old.strides[-2] // 4, y.strides[-2] // 4, *y.shape[-2:-1], a.shape[-1],
               y.shape[-1]]
    for axis in range(y.ndim - 2):
        numbers += [y.shape[axis], *(x.strides[axis] // 4 for x in every)]
    numbers += [1, 0, 0, 0, 0] * (4 - y.ndim)
    return loop(_product, counts, *map(memory, every), np.float32(low), np.array(numbers), *(
        _scratch() if steps[2] else (b, np.zeros(8, np.int64))))


def product(a: Any, b: Any, y: Any, more: Any = None, low: float = -np.inf) -> Thunk | None:
    """y (m, n) = a (m, k) @ b (k, n) + more, each element at least `low`, if that is faster here than the library's
    product; else None. `more` (n,) or (m, n) may be y itself. Or as many products as two leading axes of all have. The
    choice depends on the processor, shapes and steps alone."""
    steps = _steps(a, b, y, more)
    if steps is None or a.shape[-1] not in _sizes(a.shape[-2], b.shape[-1], *steps[1:3]):
        return None
    return _bound(steps, a, b, y, more, low, NONE, -1, 0, 0, False)


def packed_product(m: int, b: Any, work: Any) -> tuple[list[Thunk], Callable[[Any, Any], Thunk]] | None:
    """For some products of a (m, k) with one b (k, n): the call that packs b in `work`, whose other memory is for
    panels of a, and a function that binds y = a @ b, bit-identical to `product`. None if the library's products are
    faster here."""
    steps = _steps(b, b, work, None)
    full = m % LESS == 0  # other rows leave places of tiles empty; the library packs nothing below a million
    if steps is None or min(m + full * LESS, *b.shape) < LANES or m * b.size < (LEAST // 2 if full else LEAST):
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
