"""Convolution on the CPU without matrix products: loops that keep a block of sums in vector registers.

A block is PIXELS pixels times LANES output channels. One step reads LANES weights and adds their products with one
value of each pixel; weights are copied first, so that a step's weights are neighbours. Each output adds its products in
the same order, with one rounding each, whatever the size of a vector register is: all machines get the same bits. For
the gradient of the weights, the sums are LANES output channels times PIXELS weights, and a step is one pixel.

These lines import numba, so `conv` imports them where a kernel is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, models, register_model

from .registry import Thunk, flat, loop, memory
from .taps import LANES, Part, blocks_of
from .taps import lines as lines_of

#: with AVX-512 LANES float32 are one register, else two or four of the 16 or 32 that there are
PIXELS = 8 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else 4


# ------------------------------------------------------------------------------------------------- vectors in a loop
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


def _suffix(kind: Any) -> str:
    return f"v{LANES}f{kind.dtype.bitwidth}"


@intrinsic
def _offsets(typing, numbers, at):  # type: ignore[no-untyped-def]
    """PIXELS of the numbers as a tuple."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        first = _address(context, builder, numbers, *arguments)
        return cgutils.pack_array(builder, [builder.load(builder.gep(first, [ir.Constant(ir.IntType(64), i)]))
                                            for i in range(PIXELS)])

    return UniTuple(types.int64, PIXELS)(numbers, at), build


@intrinsic
def _begin(typing, weights, at):  # type: ignore[no-untyped-def]
    """PIXELS times the vector weights[at : at + LANES]."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        vector = ir.VectorType(context.get_value_type(weights.dtype), LANES)
        place = builder.bitcast(_address(context, builder, weights, *arguments), vector.as_pointer())
        return cgutils.pack_array(builder, [builder.load(place, align=weights.dtype.bitwidth // 8)] * PIXELS)

    return _block_of(weights)(weights, at), build


@intrinsic
def _zeros(typing, array):  # type: ignore[no-untyped-def]
    """PIXELS vectors of zeros of the array's type."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return ir.Constant(context.get_value_type(_block_of(array)), None)

    return _block_of(array)(array), build


@intrinsic
def _add_products(typing, sums, x, at, offsets, weights, to):  # type: ignore[no-untyped-def]
    """sums[i] + x[at + offsets[i]] * weights[to : to + LANES] for each i, rounded once; without offsets x[at + i]."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        before, x_, at_, apart, weights_, to_ = arguments
        vector = ir.VectorType(context.get_value_type(x.dtype), LANES)
        place = builder.bitcast(_address(context, builder, weights, weights_, to_), vector.as_pointer())
        factor = builder.load(place, align=x.dtype.bitwidth // 8)
        first = _address(context, builder, x, x_, at_)
        after = []
        for i in range(PIXELS):
            offset = ir.Constant(ir.IntType(64), i) if offsets is types.none else builder.extract_value(apart, i)
            value = builder.load(builder.gep(first, [offset]))
            after.append(_call(builder, f"llvm.fma.{_suffix(x)}", vector, _repeated(builder, value), factor,
                               builder.extract_value(before, i)))
        return cgutils.pack_array(builder, after)

    return sums(sums, x, at, offsets, weights, to), build


@intrinsic
def _store(typing, sums, y, at, offsets, count):  # type: ignore[no-untyped-def]
    """y[at + offsets[i] :] = the first `count` of sums[i], for each i."""
    def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values, y_, at_, apart, count_ = arguments
        lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        mask = builder.icmp_signed("<", lanes, _repeated(builder, count_))
        align = ir.Constant(ir.IntType(32), y.dtype.bitwidth // 8)
        for i, place in enumerate(_places(context, builder, y, y_, at_, apart)):
            _call(builder, f"llvm.masked.store.{_suffix(y)}.p0", ir.VoidType(), builder.extract_value(values, i), place,
                  align, mask)
        return context.get_dummy_value()

    return types.none(sums, y, at, offsets, types.int64), build


@intrinsic
def _add(typing, sums, totals, at, offsets):  # type: ignore[no-untyped-def]
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


# ------------------------------------------------------------------------------------------------------- the loops
# Indices are cast to unsigned because a signed one might mean "from the end", and that check keeps loops from being
# vectorised.
@njit(nogil=True, error_model="numpy")
def _frame(padded, x, start, h, w, c, top, left, height, width):  # type: ignore[no-untyped-def]
    """Copies the image (h, w, c) that begins at `start` into one of (height, width, c), with zeros around it."""
    for i in range(height):
        to, line = i * width * c, i - top
        low = min(left, width) * c if 0 <= line < h else width * c
        high = low + max(0, min(w, width - left)) * c if 0 <= line < h else width * c
        begin = start + line * w * c - low
        for k in range(low):
            padded[np.uintp(to + k)] = 0
        for k in range(low, high):
            padded[np.uintp(to + k)] = x[np.uintp(begin + k)]
        for k in range(high, width * c):
            padded[np.uintp(to + k)] = 0


def _pack(w, steps, shape, bias, numbers, packed):  # type: ignore[no-untyped-def]
    groups, outputs, rows = shape
    at = 0
    for g in range(groups):
        for first in range(0, outputs, LANES):
            count = min(LANES, outputs - first)
            for j in range(LANES):
                packed[at + j] = bias[g * outputs + first + j] if j < count and len(bias) else 0
            for t in numbers:
                start = g * steps[0] + first * steps[1] + t * steps[2]
                for r in range(rows):
                    at += LANES
                    for j in range(count):
                        packed[np.uintp(at + j)] = w[np.uintp(start + r * steps[3] + j * steps[1])]
                    for j in range(count, LANES):
                        packed[np.uintp(at + j)] = 0
            at += LANES


def _convolve(x, packed, y, padded, shape, taps):  # type: ignore[no-untyped-def]
    n, h, w, c, top, left, height, width, copied, groups, rows, run, oh, ow, sy, sx = shape[:16]
    outputs, yh, yw, y0, x0, ys, xs, lines, columns = shape[16:25]
    reads, writes = _offsets(shape, 25), _offsets(shape, 25 + PIXELS)
    depth = (1 + len(taps) * run) * LANES
    source, across = x, w * c
    if copied:
        source, across = padded, width * c
    for i in range(n):
        start = i * h * w * c
        if copied:
            _frame(padded, x, start, h, w, c, top, left, height, width)
            start = 0
        begin = 0
        for g in range(groups):
            for first in range(0, outputs, LANES):
                count = min(LANES, outputs - first)
                for oy in range(0, oh, lines):
                    for ox in range(0, ow, columns):
                        line, column = min(oy, oh - lines), min(ox, ow - columns)  # the last may overlap another
                        pixel = start + line * sy * across + column * sx * c + g * rows
                        sums, to = _begin(packed, begin), begin + LANES
                        for t in range(len(taps)):
                            at = pixel + taps[t]
                            for k in range(run):
                                sums = _add_products(sums, source, at + k, reads, packed, to)
                                to += LANES
                        at = ((i * yh + y0 + line * ys) * yw + x0 + column * xs) * outputs * groups
                        _store(sums, y, at + g * outputs + first, writes, count)
                begin += depth


@njit(nogil=True, error_model="numpy")
def _over_pixels(source, begin, offsets, across, apart, lanes, lines, columns):  # type: ignore[no-untyped-def]
    """The sums over lines of pixels, from the first value on."""
    sums, to = _zeros(lanes), 0
    for line in range(lines):
        at = begin + line * across
        for _ in range(columns):
            sums = _add_products(sums, source, at, offsets, lanes, to)
            at += apart
            to += LANES
    return sums


def _weight_sums(x, dy, totals, padded, lanes, shape, taps, blocks):  # type: ignore[no-untyped-def]
    n, h, w, c, top, left, height, width, copied, _, rows, run, oh, ow, sy, sx = shape[:16]
    step, chunk = shape[16:18]
    rest, whole, into = _offsets(shape, 18), _offsets(shape, 18 + PIXELS), _offsets(shape, 18 + 2 * PIXELS)
    source, across = x, w * c
    if copied:
        source, across = padded, width * c
    totals[:] = 0
    for i in range(n):
        start = i * h * w * c
        if copied:
            _frame(padded, x, start, h, w, c, top, left, height, width)
            start = 0
        for begin in range(0, oh, chunk):
            end = min(begin + chunk, oh)
            total = 0
            for b in range(len(blocks)):
                group, first, count = blocks[b, 0], blocks[b, 1], blocks[b, 2]
                at = (i * oh + begin) * ow * step + first
                for pixel in range((end - begin) * ow):
                    for j in range(count):
                        lanes[np.uintp(pixel * LANES + j)] = dy[np.uintp(at + j)]
                    for j in range(count, LANES):
                        lanes[np.uintp(pixel * LANES + j)] = 0
                    at += step
                for t in range(len(taps)):
                    at = start + begin * sy * across + group * rows + taps[t]
                    for k in range(0, run - run % PIXELS, PIXELS):
                        sums = _over_pixels(source, at + k, None, sy * across, sx * c, lanes, end - begin, ow)
                        _add(sums, totals, total + k * LANES, whole)
                    if run % PIXELS:
                        k = run - run % PIXELS
                        sums = _over_pixels(source, at + k, rest, sy * across, sx * c, lanes, end - begin, ow)
                        _add(sums, totals, total + k * LANES, into)
                    total += run * LANES


def _unpack(totals, numbers, blocks, dw):  # type: ignore[no-untyped-def]
    _, taps, rows = dw.shape
    flat_dw, at = dw.reshape(dw.size), 0
    for b in range(len(blocks)):
        for t in numbers:
            for j in range(blocks[b, 2]):
                to = ((blocks[b, 1] + j) * taps + t) * rows
                for r in range(rows):
                    flat_dw[np.uintp(to + r)] = totals[np.uintp(at + r * LANES + j)]
            at += rows * LANES


# ------------------------------------------------------------------------------------------------------------ calls
def _numbers(values: Sequence[int]) -> Any:
    return np.array(values, np.int64)


def _source(x: Any, part: Part, groups: int) -> tuple[list[int], Any]:
    """Arguments of both loops for the image and its taps: numbers, and the places of runs of neighbouring values."""
    (v, h), each = part[:2], x.shape[3] // groups
    across = (h.length if part.copied else x.shape[2]) * x.shape[3]
    joined = groups == 1 and bool(h.offsets) and h.offsets == tuple(range(h.offsets[0], h.offsets[0] + len(h.offsets)))
    offsets, run = (h.offsets[:1], len(h.offsets) * each) if joined else (h.offsets, each)
    return ([*x.shape, v.before, h.before, v.length, h.length, part.copied, groups, each, run, v.outputs, h.outputs,
             v.step, h.step], _numbers([oy * across + ox * x.shape[3] for oy in v.offsets for ox in offsets]))


def _which(part: Part, taps: Sequence[int]) -> Any:
    return _numbers([ky * taps[1] + kx for ky, kx in part.numbers])


def convolve(x: Any, w: Any, bias: Any, y: Any, part: Part, taps: Sequence[int], packed: Any, padded: Any
             ) -> list[Thunk]:
    """y (n, h, w, groups * o) at the part's places = the products of x (n, h, w, groups * c) with w (groups, o, taps,
    c), + bias unless it is None. `packed`, `padded`: scratch."""
    groups, outputs = w.shape[:2]
    v, h = part[:2]
    shape, places = _source(x, part, groups)
    columns = min(PIXELS, h.outputs)
    lines = min(PIXELS // max(columns, 1), v.outputs)
    block = [divmod(min(i, lines * columns - 1), max(columns, 1)) for i in range(PIXELS)]
    across = (h.length if part.copied else x.shape[2]) * x.shape[3]
    step = outputs * groups
    shape += [outputs, *y.shape[1:3], v.first, h.first, v.apart, h.apart, lines, columns,
              *(line * v.step * across + column * h.step * x.shape[3] for line, column in block),
              *((line * v.apart * y.shape[2] + column * h.apart) * step for line, column in block)]
    if not y.size:
        return []
    steps, sizes = tuple(s // w.itemsize for s in w.strides), (groups, outputs, w.shape[3])
    bias = np.empty(0, w.dtype) if bias is None else bias
    return [loop(_pack, memory(w), steps, sizes, bias, _which(part, taps), packed),
            loop(_convolve, flat(x), packed, flat(y), padded, _numbers(shape), places)]


def weight_sums(x: Any, dy: Any, dw: Any, pixels: Sequence[int], part: Part, taps: Sequence[int], groups: int,
                rows: tuple[int, int], totals: Any, padded: Any, lanes: Any) -> list[Thunk]:
    """dw (o, taps, c / groups) = for each tap the products of x and dy, summed over pixels. `dy`: the memory of pixels
    (n, h, w), each with rows[1] outputs, of which dw has those from rows[0] on, where dy begins. The last arrays:
    scratch."""
    shape, places = _source(x, part, groups)
    run, each = shape[11], range(PIXELS)
    rest = [min(i, max(run % PIXELS - 1, 0)) for i in each]
    shape += [rows[1], lines_of(pixels), *rest, *(LANES * i for i in each), *(LANES * i for i in rest)]
    blocks = np.array(blocks_of(rows, len(dw), groups), np.int64)
    return [loop(_weight_sums, flat(x), dy, totals, padded, lanes, _numbers(shape), places, blocks),
            loop(_unpack, totals, _which(part, taps), blocks, dw)]
