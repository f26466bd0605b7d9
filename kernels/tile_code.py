"""The parts of `tiles` in the compiler's own language: a tile of sums in registers, panels, flags between threads.
Functions of numba's loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .taps import LANES
from .vectors import WIDE, _address, _call, _repeated, _transposed, store_masked

ROWS, LESS, VECTORS = (14, 8, 2) if WIDE else (6, 4, 1)  #: of a tile; of one for rows that are left; of both
FLOAT, NUMBER = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
BITS, MASK = ir.IntType(LANES), ir.VectorType(ir.IntType(1), LANES)


def _place(builder: Any, address: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(address, [index]), VECTOR.as_pointer())


def _first(builder: Any, count: Any) -> Any:
    """A bit for each of the first `count` of LANES elements."""
    some = builder.trunc(builder.sub(builder.shl(NUMBER(1), count), NUMBER(1)), BITS)
    return builder.select(builder.icmp_signed("<", count, NUMBER(LANES)), some, BITS(-1))


def _masked(builder: Any, place: Any, bits: Any) -> Any:
    """The vector at a place, with zeros for elements that have no bit."""
    return _call(builder, f"llvm.masked.load.v{LANES}f32.p0", VECTOR, place, ir.IntType(32)(4),
                 builder.bitcast(bits, MASK), ir.Constant(VECTOR, None))


def _stored(builder: Any, value: Any, place: Any, bits: Any) -> None:
    """Stores those elements of a vector that have a bit; they are the first ones."""
    store_masked(builder, value, place, 4, builder.bitcast(bits, MASK), builder.zext(builder.ctpop(bits), NUMBER))


def _called(builder: Any, name: str, body: Callable[[Any], None], arguments: Sequence[Any]) -> None:
    """Calls a function of this module of the compiler, which is made by `body` where it is called first."""
    function = builder.module.globals.get(f"minidl.{name}")
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in arguments])
        function = ir.Function(builder.module, kind, f"minidl.{name}")
        function.linkage = "internal"
        function.attributes.add("noinline")
        body(function)
    builder.call(function, arguments)


def _at(builder: Any, start: Any, step: Any, i: Any, v: int) -> Any:
    """A pointer to vector v of row i."""
    return _place(builder, builder.gep(start, [builder.mul(step, i)]), NUMBER(LANES * v))


def _summed(builder: Any, rows: int, vectors: int, from_a: Any, across: Any, along: Any, from_b: Any, steps: Any
            ) -> dict[tuple[int, int], Any]:
    """The sums of a tile over at least one step, by row and vector: see `_tile`."""
    places = [(i, v) for i in range(rows) for v in range(vectors)]
    # where the rows of a are is hidden from the compiler, which makes a chain of sums of it
    hidden = ir.InlineAsm(ir.FunctionType(NUMBER, [NUMBER]), "", "=r,0")
    odd = [builder.call(hidden, [builder.mul(across, NUMBER(i))]) for i in range(1, rows, 2)]
    before, again, after = builder.block, *(builder.append_basic_block(n) for n in ("add", "added"))
    builder.branch(again)
    builder.position_at_end(again)
    k, sums, new = builder.phi(NUMBER), {place: builder.phi(VECTOR) for place in places}, {}
    weights = [builder.load(_place(builder, from_b, builder.mul(
        builder.add(builder.mul(steps, NUMBER(v)), k), NUMBER(LANES))), align=4) for v in range(vectors)]
    spot = builder.gep(from_a, [builder.mul(k, along)])
    for i in range(rows):
        two = max(i & -i, 1)  # i is so many times an odd number
        value = _repeated(builder, builder.load(
            builder.gep(spot, [builder.mul(odd[i // two // 2], NUMBER(two))]) if i else spot))
        for v, weight in enumerate(weights):
            new[i, v] = _call(builder, f"llvm.fma.v{LANES}f32", VECTOR, value, weight, sums[i, v])
    following = builder.add(k, NUMBER(1))
    for phi, zero, value in [(k, NUMBER(0), following), *(
            (sums[place], ir.Constant(VECTOR, None), new[place]) for place in places)]:
        phi.add_incoming(zero, before)
        phi.add_incoming(value, again)
    builder.cbranch(builder.icmp_signed("<", following, steps), again, after)
    builder.position_at_end(after)
    return new


def _tile_into(function: Any, rows: int, vectors: int) -> None:
    """The body of a tile's function: see `_tile`. Its arguments begin at the tile's first elements."""
    from_a, across, along, from_b, steps, from_more, more_step, some, to, y_step, high, wide, least = function.args
    places = [(i, v) for i in range(rows) for v in range(vectors)]
    builder = ir.IRBuilder(function.append_basic_block("start"))
    at = partial(_at, builder)
    for i, v in places:  # what is written comes into the cache meanwhile
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), at(to, y_step, NUMBER(i), v), *map(ir.IntType(32), (1, 3, 1)))
    new = _summed(builder, rows, vectors, from_a, across, along, from_b, steps)
    least = _repeated(builder, least)

    def stored(load: Callable[[int, int], Any] | None, store: Callable[[Any, int, int], Any]) -> None:
        for i, v in places:
            value = builder.fadd(new[i, v], load(i, v)) if load else new[i, v]
            store(builder.select(builder.fcmp_ordered("<", value, least), least, value), i, v)

    def finished(load: Callable[[int, int], Any], store: Callable[[Any, int, int], Any]) -> None:
        with builder.if_else(some) as (adding, bare):
            with adding:
                stored(load, store)
            with bare:
                stored(None, store)

    with builder.if_else(builder.and_(builder.icmp_signed(">=", high, NUMBER(rows)),
                                      builder.icmp_signed(">=", wide, NUMBER(LANES * vectors)))) as (whole, part):
        with whole:
            finished(lambda i, v: builder.load(at(from_more, more_step, NUMBER(i), v), align=4),
                     lambda value, i, v: builder.store(value, at(to, y_step, NUMBER(i), v), align=4))
        with part:
            last = builder.sub(high, NUMBER(1))
            masks = [_first(builder, builder.sub(wide, NUMBER(LANES * v))) for v in range(vectors)]
            inside = [builder.icmp_signed("<", NUMBER(i), high) for i in range(rows)]
            lines = [builder.select(one, NUMBER(i), last) for i, one in enumerate(inside)]
            shown = {(i, v): builder.select(inside[i], masks[v], BITS(0)) for i, v in places}
            finished(lambda i, v: _masked(builder, at(from_more, more_step, lines[i], v), shown[i, v]),
                     lambda value, i, v: _stored(builder, value, at(to, y_step, lines[i], v), shown[i, v]))
    builder.ret_void()


def _tile(rows: int, vectors: int) -> Any:
    """y = more + a b for `rows` x `vectors` LANES elements, of which `high` x `columns` are stored, each at least
    `low`. Element (i, k) of a is at a_at + i a_row + k a_step. b lies in panels from b_at on, for each vector LANES
    numbers for each of `deep` steps. Element (i, j) of y is at y_at + i y_row + j, and so in more if `adds`, else it is
    0 there. A function of its own, which is compiled once."""
    @intrinsic
    def tile(  # type: ignore[no-untyped-def]
            typing, a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, adds, y, y_at, y_row, high,
            columns, low):
        def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            (a_, a_first, across, along, panels_, b_first, steps, more_, more_first, more_step, some, y_, y_first,
             *rest) = arguments
            from_a, from_b, from_more, to = (
                _address(context, builder, kind, array, at) for kind, array, at in (
                    (a, a_, a_first), (panels, panels_, b_first), (more, more_, more_first), (y, y_, y_first)))
            passed = from_a, across, along, from_b, steps, from_more, more_step, some, to, *rest
            _called(builder, f"tile.{rows}.{vectors}", partial(_tile_into, rows=rows, vectors=vectors), passed)
            return context.get_dummy_value()

        return types.none(a, a_at, a_row, a_step, panels, b_at, deep, more, more_at, more_row, types.boolean, y, y_at,
                          y_row, high, columns, types.float32), build

    return tile


def _bare_into(function: Any, rows: int, vectors: int) -> None:
    """The body of the function of `_bare`."""
    from_a, across, from_b, steps, to, y_step = function.args
    builder = ir.IRBuilder(function.append_basic_block("start"))
    for (i, v), value in _summed(builder, rows, vectors, from_a, across, NUMBER(1), from_b, steps).items():
        builder.store(value, _at(builder, to, y_step, NUMBER(i), v), align=4)
    builder.ret_void()


def _bare(rows: int, vectors: int) -> Any:
    """y = a b for a whole tile, as in `_tile` with a_step 1."""
    @intrinsic
    def tile(typing, a, a_at, a_row, panels, b_at, deep, y, y_at, y_row):  # type: ignore[no-untyped-def]
        def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            a_, a_first, across, panels_, b_first, steps, y_, y_first, step = arguments
            from_a, from_b, to = (_address(context, builder, kind, array, at) for kind, array, at in (
                (a, a_, a_first), (panels, panels_, b_first), (y, y_, y_first)))
            _called(builder, f"bare.{rows}.{vectors}", partial(_bare_into, rows=rows, vectors=vectors),
                    (from_a, across, from_b, steps, to, step))
            return context.get_dummy_value()

        return types.none(a, a_at, a_row, panels, b_at, deep, y, y_at, y_row), build

    return tile


bare_one, bare = (_bare(ROWS, v) for v in (1, VECTORS))
large_one, large, small_one, small = (_tile(rows, v) for rows in (ROWS, LESS) for v in (1, VECTORS))


@intrinsic
def row_to_panel(typing, x, at, count, to, first, width):  # type: ignore[no-untyped-def]
    """to[first + j] = x[at + j] for j below `count`, else 0, for j below `width`, at most LANES."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x_, at_, count_, to_, first_, width_ = arguments
        source, out = (_place(builder, _address(context, builder, kind, array, index), NUMBER(0))
                       for kind, array, index in ((x, x_, at_), (to, to_, first_)))
        full = (builder.icmp_signed(">=", n, NUMBER(LANES)) for n in (count_, width_))
        with builder.if_else(builder.and_(*full)) as (whole, part):
            with whole:
                builder.store(builder.load(source, align=4), out, align=4)
            with part:
                _stored(builder, _masked(builder, source, _first(builder, count_)), out, _first(builder, width_))
        return context.get_dummy_value()

    return types.none(x, at, count, to, first, width), build


def _turn_into(function: Any) -> None:
    """The body of `turned`."""
    begin, across, count, high, end, step, width = function.args
    builder = ir.IRBuilder(function.append_basic_block("start"))
    last, there, shown = builder.sub(count, NUMBER(1)), _first(builder, high), _first(builder, width)
    lines = [builder.select(builder.icmp_signed("<", NUMBER(j), last), NUMBER(j), last) for j in range(LANES)]

    def copied(load: Callable[[Any], Any], store: Callable[[Any, Any, int], Any]) -> None:
        rows = [load(_place(builder, begin, builder.mul(across, line))) for line in lines]
        for i, row in enumerate(_transposed(builder, rows)):
            store(row, _place(builder, end, builder.mul(step, NUMBER(i))), i)

    full = (builder.icmp_signed(">=", n, NUMBER(LANES)) for n in (high, width))
    with builder.if_else(builder.and_(*full)) as (whole, part):
        with whole:
            copied(lambda at: builder.load(at, align=4), lambda row, at, i: builder.store(row, at, align=4))
        with part:
            copied(lambda at: _masked(builder, at, there), lambda row, at, i: _stored(builder, row, at, builder.select(
                builder.icmp_signed("<", NUMBER(i), high), shown, BITS(0))))
    builder.ret_void()


@intrinsic
def turned(typing, x, at, across, count, high, to, first, step, width):  # type: ignore[no-untyped-def]
    """to[first + step i + j] = x[at + i + across min(j, count - 1)] for i below `high` and j below `width`, of LANES
    each, for one i after the other."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x_, at, across, count, high, to_, first, step, width = arguments
        _called(builder, "turn", _turn_into, (_address(context, builder, x, x_, at), across, count, high,
                                              _address(context, builder, to, to_, first), step, width))
        return context.get_dummy_value()

    return types.none(x, at, across, count, high, to, first, step, width), build


@intrinsic
def taken(typing, flags, at):  # type: ignore[no-untyped-def]
    """Whether a flag was set; it is set then."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        flag = _address(context, builder, flags, *arguments)
        return builder.icmp_signed("!=", builder.atomic_rmw("xchg", flag, NUMBER(1), "acquire"), NUMBER(0))

    return types.boolean(flags, at), build


@intrinsic
def given(typing, flags, at):  # type: ignore[no-untyped-def]
    """Clears a flag."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.store_atomic(NUMBER(0), _address(context, builder, flags, *arguments), "release", 8)
        return context.get_dummy_value()

    return types.none(flags, at), build


@intrinsic
def slot_of_thread(typing, slots):  # type: ignore[no-untyped-def]
    """A slot that differs from thread to thread, as their stacks do."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        spot = builder.ptrtoint(cgutils.alloca_once(builder, ir.IntType(8)), NUMBER)
        return builder.urem(builder.lshr(spot, NUMBER(20)), arguments[0])

    return types.int64(slots), build
