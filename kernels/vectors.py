"""Vectors of LANES numbers in the loops of numba, and blocks of PIXELS such sums, which stay in registers.

A step adds the products of one vector with one value of each pixel, each rounded once: all machines get the same bits,
whatever the size of a vector register is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, models, register_model

from .taps import LANES, WIDEST

_, NAME, FEATURES = cpu_target.target_context.codegen().magic_tuple()
#: whether LANES float32 are one of 32 registers; else they are two of 16 or four of 32
WIDE, AVX2 = "+avx512f" in FEATURES, {"+avx2", "+fma"} <= {*FEATURES.split(",")}
PIXELS = WIDEST if WIDE else WIDEST // 2
TWICE = WIDE  #: whether the registers hold two blocks of sums


class _Vector(types.Type):
    """LANES numbers of one type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), LANES))


def _block_of(array: Any) -> Any:
    return UniTuple(_Vector(array.dtype), PIXELS)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _repeated(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _places(context: Any, builder: Any, kind: Any, array: Any, at: Any, offsets: Any) -> list[Any]:
    """Pointers to vectors at array[at + offset] for each offset."""
    vector = ir.VectorType(context.get_value_type(kind.dtype), LANES).as_pointer()
    first = _address(context, builder, kind, array, at)
    return [builder.bitcast(builder.gep(first, [builder.extract_value(offsets, i)]), vector) for i in range(PIXELS)]


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _suffix(vector: Any) -> str:
    return f"v{vector.count}f{32 if vector.element == ir.FloatType() else 64}"


def store_masked(builder: Any, value: Any, place: Any, align: int, mask: Any, count: Any) -> None:
    """Stores the first `count` elements of a vector, which are in the mask, at a pointer to vectors. With AVX2 alone in
    pieces of 16, 8, 4, 2 and 1: on AMD's processors a store with a mask takes ten times as long as one without."""
    lanes, number, word = value.type.count, count.type, ir.IntType(32)
    if WIDE:
        _call(builder, f"llvm.masked.store.{_suffix(value.type)}.p0", ir.VoidType(), value, place, word(align), mask)
        return
    to, size = builder.bitcast(place, value.type.element.as_pointer()), lanes
    with builder.if_else(builder.icmp_signed(">=", count, number(lanes))) as (whole, part):
        with whole:
            builder.store(value, place, align=align)
        with part:
            while size := size // 2:
                there = builder.icmp_signed("!=", builder.and_(count, number(size)), number(0))
                with builder.if_then(there):
                    piece = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(word, size), [*range(size)]))
                    builder.store(piece, builder.bitcast(to, piece.type.as_pointer()), align=align)
                later = [min(i + size, lanes - 1) for i in range(lanes)]
                value = builder.select(there, builder.shuffle_vector(
                    value, value, ir.Constant(ir.VectorType(word, lanes), later)), value)
                to = builder.select(there, builder.gep(to, [number(size)]), to)


@intrinsic
def offsets_at(typing, numbers, at):  # type: ignore[no-untyped-def]
    """PIXELS of the numbers as a tuple."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        first = _address(context, builder, numbers, *arguments)
        return cgutils.pack_array(builder, [builder.load(builder.gep(first, [ir.Constant(ir.IntType(64), i)]))
                                            for i in range(PIXELS)])

    return UniTuple(types.int64, PIXELS)(numbers, at), build


@intrinsic
def alike(typing, weights, at):  # type: ignore[no-untyped-def]
    """PIXELS times the vector weights[at : at + LANES]."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        vector = ir.VectorType(context.get_value_type(weights.dtype), LANES)
        place = builder.bitcast(_address(context, builder, weights, *arguments), vector.as_pointer())
        return cgutils.pack_array(builder, [builder.load(place, align=weights.dtype.bitwidth // 8)] * PIXELS)

    return _block_of(weights)(weights, at), build


@intrinsic
def zeros(typing, array):  # type: ignore[no-untyped-def]
    """PIXELS vectors of zeros of the array's type."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return ir.Constant(context.get_value_type(_block_of(array)), None)

    return _block_of(array)(array), build


def _products_added(builder: Any, context: Any, x: Any, value: Any, offsets: Any, apart: Any,
                    weights: tuple[Any, Any], befores: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Blocks of sums after a step, one for each place of weights: `value` is the address of the first pixel's."""
    vector = ir.VectorType(context.get_value_type(x.dtype), LANES)
    factors = [builder.load(builder.bitcast(_address(context, builder, *weights, place), vector.as_pointer()),
                            align=x.dtype.bitwidth // 8) for place in places]
    after: list[list[Any]] = [[] for _ in places]
    for i in range(PIXELS):
        offset = ir.Constant(ir.IntType(64), i) if offsets is types.none else builder.extract_value(apart, i)
        pixel = _repeated(builder, builder.load(builder.gep(value, [offset])))
        for sums, before, factor in zip(after, befores, factors, strict=True):
            sums.append(_call(builder, f"llvm.fma.{_suffix(vector)}", vector, pixel, factor,
                              builder.extract_value(before, i)))
    return [cgutils.pack_array(builder, sums) for sums in after]


@intrinsic
def add_products(typing, sums, x, at, offsets, weights, to):  # type: ignore[no-untyped-def]
    """sums[i] + x[at + offsets[i]] * weights[to : to + LANES] for each i, rounded once; without offsets x[at + i]."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        before, x_, at_, apart, weights_, to_ = arguments
        return _products_added(builder, context, x, _address(context, builder, x, x_, at_), offsets, apart,
                               (weights, weights_), [before], [to_])[0]

    return sums(sums, x, at, offsets, weights, to), build


@intrinsic
def add_products_twice(typing, sums, others, x, at, offsets, weights, to, other):  # type: ignore[no-untyped-def]
    """`add_products` for two blocks whose weights begin at `to` and at `other`: each value of x is read once."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        before, second, x_, at_, apart, weights_, to_, other_ = arguments
        return cgutils.pack_array(builder, _products_added(
            builder, context, x, _address(context, builder, x, x_, at_), offsets, apart, (weights, weights_),
            [before, second], [to_, other_]))

    return UniTuple(sums, 2)(sums, others, x, at, offsets, weights, to, other), build


@intrinsic
def store(typing, sums, y, at, offsets, count):  # type: ignore[no-untyped-def]
    """y[at + offsets[i] :] = the first `count` of sums[i], for each i."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values, y_, at_, apart, count_ = arguments
        lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        mask = builder.icmp_signed("<", lanes, _repeated(builder, count_))
        for i, place in enumerate(_places(context, builder, y, y_, at_, apart)):
            store_masked(builder, builder.extract_value(values, i), place, y.dtype.bitwidth // 8, mask, count_)
        return context.get_dummy_value()

    return types.none(sums, y, at, offsets, types.int64), build


@intrinsic
def add(typing, sums, totals, at, offsets):  # type: ignore[no-untyped-def]
    """totals[at + offsets[i] :] += sums[i]; equal offsets have equal sums, which are added once."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values, totals_, at_, apart = arguments
        align = totals.dtype.bitwidth // 8
        places = _places(context, builder, totals, totals_, at_, apart)
        before = [builder.load(place, align=align) for place in places]
        for i, place in enumerate(places):
            builder.store(builder.fadd(before[i], builder.extract_value(values, i)), place, align=align)
        return context.get_dummy_value()

    return types.none(sums, totals, at, offsets), build


@intrinsic
def plus(typing, sums, others):  # type: ignore[no-untyped-def]
    """sums[i] + others[i] for each i."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return cgutils.pack_array(builder, [builder.fadd(*(builder.extract_value(a, i) for a in arguments))
                                            for i in range(PIXELS)])

    return sums(sums, others), build


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of LANES vectors."""
    step, mask = 1, ir.VectorType(ir.IntType(32), LANES)
    while step < LANES:  # two squares of `step` swap places, those beside the diagonal of one twice as large
        upper = ir.Constant(mask, [i - step + LANES if i & step else i for i in range(LANES)])
        lower = ir.Constant(mask, [i + LANES if i & step else i + step for i in range(LANES)])
        rows = [builder.shuffle_vector(rows[j - step], row, lower) if j & step else
                builder.shuffle_vector(row, rows[j + step], upper) for j, row in enumerate(rows)]
        step *= 2
    return rows


@intrinsic
def transpose(typing, x, at, apart, to, first):  # type: ignore[no-untyped-def]
    """to[first + LANES * i + j] = x[at + i + apart * j] for i and j below LANES."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        x_, at_, apart_, to_, first_ = arguments
        align, number = x.dtype.bitwidth // 8, ir.IntType(64)
        vector = ir.VectorType(context.get_value_type(x.dtype), LANES).as_pointer()
        begin, end = _address(context, builder, x, x_, at_), _address(context, builder, to, to_, first_)
        rows = [builder.load(builder.bitcast(builder.gep(begin, [builder.mul(apart_, ir.Constant(number, j))]), vector),
                             align=align) for j in range(LANES)]
        for i, row in enumerate(_transposed(builder, rows)):
            place = builder.gep(end, [ir.Constant(number, LANES * i)])
            builder.store(row, builder.bitcast(place, vector), align=align)
        return context.get_dummy_value()

    return types.none(x, at, apart, to, first), build
