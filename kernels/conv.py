"""Convolution over images with channels last: forward and its two separate gradients.

x (n, h, w, c), weight (o, kh, kw, c / groups), y (n, oh, ow, o); all contiguous. The CPU's loops are in `direct`,
those for images of few pixels in `small`, those for windows of 3 x 3 over many channels in `winograd`, and those for
one filter per channel in `depthwise`; the CUDA forms are in `conv_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .beside import Like, folded, joined, spread, together, widened
from .depthwise import (
    depthwise,
    depthwise_input_grad,
    depthwise_weight_grad,
    depthwise_weight_grad_work,
    depthwise_work,
)
from .linear import alike, cpu_act, gemm, small
from .registry import Thunk, flat, kernel, loop, memory
from .sums import row_sums, row_sums_work
from .taps import (
    CONVOLVED,
    LANES,
    PLACES,
    SUMMED,
    WIDEST,
    Part,
    Place,
    backward,
    blocks_of,
    forward,
    line,
    lines,
    packed,
    padded,
    readers,
    within,
)

Pair = tuple[int, int]
SAMPLES = 4  #: with fewer, the loops of `small` have too few outputs of a kind for a block
TAPS = 64  #: with more, the tables of `small` take long to make
PIXELS, SIDE = 192, 4  #: of all images, of an image's side, from which `winograd` is faster


class Geometry(NamedTuple):
    """How a window moves over an image: (vertical, horizontal) each; and the number of groups of channels."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def output(self, image: Sequence[int], taps: Sequence[int]) -> list[int]:
        """Lines and columns of the output; not positive where the window does not fit."""
        return [(image[a] + 2 * self.padding[a] - self.dilation[a] * (taps[a] - 1) - 1) // self.stride[a] + 1
                for a in (0, 1)]


def _flops(y: Any, w: Any) -> float:
    """A product and a sum for each tap of each element of y (or dy)."""
    return float(2 * y.size * (w.size // w.shape[0]))


# ----------------------------------------------------------------------------------------------- references
def _slices(tap: int, axis: int, count: int, geometry: Geometry) -> slice:
    """The places of a padded axis that a tap sees, one for each of `count` outputs."""
    start = tap * geometry.dilation[axis]
    return slice(start, start + (count - 1) * geometry.stride[axis] + 1, geometry.stride[axis])


def _taps(taps: Sequence[int], y: Sequence[int], geometry: Geometry) -> Iterator[tuple[int, int, Any]]:
    """(ky, kx, slice of the padded image that this tap reads) for every tap; y (n, oh, ow, ...)."""
    for ky in range(taps[0]):
        for kx in range(taps[1]):
            yield ky, kx, (slice(None), _slices(ky, 0, y[1], geometry), _slices(kx, 1, y[2], geometry))


def _padded(xp: Any, x: Any, geometry: Geometry) -> Any:
    (vertical, horizontal), none = geometry.padding, (0, 0)
    return xp.pad(x, (none, (vertical, vertical), (horizontal, horizontal), none))


def _grouped(x: Any, groups: int) -> Any:
    """(..., c) as (groups, pixels, c / groups)."""
    return x.reshape(prod(x.shape[:-1]), groups, x.shape[-1] // groups).transpose(1, 0, 2)


def _axes(reads: Any, *, geometry: Geometry, **constants: Any) -> str:
    """Samples are cut, or rows if there is one sample: then they are neighbours in memory. Not if the padding is so
    wide that rows read nothing."""
    by_rows = reads[0].shape[0] == 1 and geometry.padding[0] <= (reads[1].shape[1] - 1) * geometry.dilation[0]
    return "nrWC,OTUC,O->nrWO" if by_rows else "nHWC,OTUC,O->nHWO"


def _padded_by(geometry: Geometry, rows: int) -> Geometry:
    return geometry._replace(padding=(rows, geometry.padding[1]))


def _rows_read(begin: int, end: int, reads: Any, *, geometry: Geometry, **constants: Any) -> Any:
    """The rows of x for these rows of y, which have zeros above only if they are the first."""
    (stride, _), (padding, _), (apart, _), _ = geometry
    top = begin * stride - padding
    last = (end - 1) * stride - padding + (reads[1].shape[1] - 1) * apart + 1
    first = max(0, top)
    return first, min(last, reads[0].shape[1]), {**constants, "geometry": _padded_by(geometry, first - top)}


def _rows_of_grad(begin: int, end: int, reads: Any, *, size: Pair, geometry: Geometry) -> Any:
    """The rows of dy whose windows have these rows of dx; if there are none, one that is too far away."""
    (stride, _), (padding, _), (apart, _), _ = geometry
    rows = reads[0].shape[1]
    first = min(max(0, (begin + padding - (reads[1].shape[1] - 1) * apart) // stride), rows - 1)
    last = max(min((end - 1 + padding) // stride + 1, rows), first + 1)
    return first, last, {"size": (end - begin, size[1]),
                         "geometry": _padded_by(geometry, padding + begin - first * stride)}


def _rows_of_dw(begin: int, end: int, reads: Any, **constants: Any) -> Any:
    """The outputs whose gradients make these rows of dw, and which they are."""
    return begin, end, {**constants, "rows": (begin, reads[1].shape[3])}


@kernel("conv2d", axes=_axes, window=_rows_read, flops=lambda reads, writes: _flops(writes[0], reads[1]),
        work=lambda reads, writes, geometry, act="": forward_work(reads[0], reads[1], writes[0], geometry))
def conv2d(xp: Any, x: Any, w: Any, b: Any = None, *, geometry: Geometry, act: str = "") -> Any:
    """y[n, oy, ox] = sum over taps of x[n, oy s - p + ky d, ox s - p + kx d] w[:, ky, kx] (+ b), or relu of it."""
    groups, shape = geometry.groups, (x.shape[0], *geometry.output(x.shape[1:3], w.shape[1:3]), len(w))
    padded, y = _padded(xp, x, geometry), xp.zeros((groups, shape[0] * shape[1] * shape[2], len(w) // groups), x.dtype)
    for ky, kx, seen in _taps(w.shape[1:3], shape, geometry):
        tap = w[:, ky, kx].reshape(groups, len(w) // groups, -1)
        y += xp.matmul(_grouped(padded[seen], groups), tap.transpose(0, 2, 1))
    y = y.transpose(1, 0, 2).reshape(shape)
    y = y if b is None else y + b
    return xp.maximum(y, 0) if act else y


@kernel("conv2d_input_grad", axes=_axes, window=_rows_of_grad, flops=lambda reads, writes: _flops(reads[0], reads[1]),
        work=lambda reads, writes, size, geometry: input_grad_work(reads[0], reads[1], writes[0], geometry))
def conv2d_input_grad(xp: Any, dy: Any, w: Any, *, size: Pair, geometry: Geometry) -> Any:
    """dx (n, *size, c): every tap's product is added to the pixel from which it came."""
    groups, each = geometry.groups, w.shape[3]
    padded = _padded(xp, xp.zeros((len(dy), *size, each * groups), dy.dtype), geometry)
    for ky, kx, seen in _taps(w.shape[1:3], dy.shape, geometry):
        g = xp.matmul(_grouped(dy, groups), w[:, ky, kx].reshape(groups, len(w) // groups, each))
        padded[seen] += g.transpose(1, 0, 2).reshape(*dy.shape[:3], each * groups)
    top, left = geometry.padding
    return padded[:, top : top + size[0], left : left + size[1]]


@kernel("conv2d_weight_grad", axes="NHWC,NHWr->rTUC,r", window=_rows_of_dw,
        flops=lambda reads, writes: _flops(reads[1], writes[0]),
        work=lambda reads, writes, **constants: _weight_grad_work(reads[0], reads[1], writes[0], **constants),
        alike=lambda reads, writes, geometry, **constants: _alike(reads[0], writes[0], geometry))
def conv2d_weight_grad(xp: Any, x: Any, dy: Any, *, taps: Pair, bias: bool, geometry: Geometry,
                       rows: Pair | None = None) -> Any:
    """dw (o, *taps, c / groups); with `bias` also db (o,), the sum of dy over samples and pixels. `rows`: dy has the
    outputs from rows[0] on, of rows[1] in all."""
    if rows is not None:
        before, after = rows[0], rows[1] - rows[0] - dy.shape[3]
        whole = xp.pad(dy, ((0, 0), (0, 0), (0, 0), (before, after)))
        found = conv2d_weight_grad.reference(xp, x, whole, taps=taps, bias=bias, geometry=geometry)
        mine = slice(before, before + dy.shape[3])
        return tuple(a[mine] for a in found) if bias else found[mine]
    groups, o = geometry.groups, dy.shape[3]
    padded, dw = _padded(xp, x, geometry), xp.empty((o, *taps, x.shape[3] // groups), x.dtype)
    for ky, kx, seen in _taps(taps, dy.shape, geometry):
        tap = xp.matmul(_grouped(dy, groups).transpose(0, 2, 1), _grouped(padded[seen], groups))
        dw[:, ky, kx] = tap.reshape(o, -1)
    return (dw, dy.sum(axis=(0, 1, 2))) if bias else dw


# ----------------------------------------------------------------------------------------------- CPU forms
class _Plan(NamedTuple):
    """The operands of a kernel: shapes of x and y, of the weights (groups, o / groups, taps, c / groups), and the parts
    of its outputs."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    w: tuple[int, ...]
    parts: list[Part]


def _plan(x: Any, w: Any, y: Any, geometry: Geometry, parts: Callable[..., list[Part]] = forward) -> _Plan:
    xs, ys, groups = tuple(x.shape), tuple(y.shape), geometry.groups
    if w.shape[1:3] == (1, 1) and geometry[:2] == ((1, 1), (0, 0)):  # no neighbours: any pixels can be a line
        length = line(prod(ys[:3]))
        xs, ys = ((prod(ys[:3]) // length, 1, length, s[3]) for s in (xs, ys))
    return _Plan(xs, ys, (groups, w.shape[0] // groups, w.shape[1] * w.shape[2], w.shape[3]),
                 parts(xs[1:3], w.shape[1:3], ys[1:3], *geometry[:3]))


def _shaped(plan: _Plan, x: Any, w: Any, y: Any) -> tuple[Any, Any, Any]:
    return flat(x).reshape(plan.x), flat(w).reshape(plan.w), flat(y).reshape(plan.y)


def _is_depthwise(outputs: int, w: Any, geometry: Geometry) -> bool:
    return bool(1 < outputs == geometry.groups and w.shape[3] == 1)


def _is_small(y: Any, taps: Sequence[int], geometry: Geometry, pixels: int = 32, samples: int = SAMPLES) -> bool:
    """Whether y has at most so many pixels for each tap, and enough samples, that the loops of `small` are faster:
    measured with 1 to 1,024 pixels, windows of 1 to 7, 3 to 512 channels, 1 to 64 samples."""
    few = prod(y.shape[1:3]) <= pixels * prod(taps) <= pixels * TAPS
    return few and geometry.groups == 1 and y.shape[0] >= samples


def _together(y: Any, w: Any, geometry: Geometry, outputs: int = 0) -> int:
    """How many pixels of y (n, h, w, o) the loops take as one. `outputs`: of y, if w is a part of it."""
    return together(outputs or w.shape[0], y.shape[2], w.shape[2], geometry.stride[1], geometry.dilation[1],
                    geometry.groups)


def _all_of(dy: Any, dw: Any, outputs: int) -> tuple[Like, Like]:
    """dy and dw with all outputs, if they are a part. Few outputs share a vector, so it takes no longer than a part."""
    return Like((*dy.shape[:3], outputs), dy.dtype), Like((outputs, *dw.shape[1:]), dw.dtype)


def _by(pixels: int, geometry: Geometry) -> Geometry:
    """How a window moves by so many pixels at once."""
    return geometry._replace(stride=(geometry.stride[0], pixels * geometry.stride[1]))


def _forth(w: Any, dx: Any, geometry: Geometry) -> Geometry | None:
    """How a turned window moves over dy, if the gradient toward dx is a convolution that takes pixels as one."""
    before = tuple(taps - 1 - padding for taps, padding in zip(w.shape[1:3], geometry.padding, strict=True))
    if geometry.stride != (1, 1) or geometry.dilation != (1, 1) or min(before) < 0:
        return None
    found = geometry._replace(padding=before)
    return found if together(w.shape[3], dx.shape[2], w.shape[2], 1, 1, geometry.groups) > 1 else None


def _is_winograd(pixels: Sequence[int], w: Any, geometry: Geometry, outputs: int = 0) -> bool:
    """Whether the loops of `winograd` are faster, on processors with AVX2, for such pixels (n, h, w) of the result,
    or of the gradient that is summed. Not for a single image, which may be cut between any rows. `outputs`: of dy, if w
    is a part of it."""
    outputs = outputs or w.shape[0]
    return (tuple(w.shape[1:3]) == (3, 3) and geometry.stride == geometry.dilation == (1, 1) and geometry.groups == 1
            and w.dtype == "float32" and outputs % LANES == w.shape[3] % LANES == 0
            and min(outputs, w.shape[3]) >= LANES and pixels[0] > 1 and min(pixels[1:]) >= SIDE
            and prod(pixels) >= PIXELS)


def _winograd(pixels: Any, w: Any, geometry: Geometry, outputs: int = 0) -> Any:
    """The module `winograd`, if its loops are faster here."""
    if not _is_winograd(pixels.shape[:3], w, geometry, outputs):
        return None
    from . import vectors, winograd  # they import numba

    return winograd if vectors.AVX2 else None


def _winograd_work(w: Any, tiles: int) -> tuple[int, int]:
    """How many numbers the transformed windows have, and so many tiles on both sides of the products."""
    outputs, channels = -(-w.shape[0] // LANES) * LANES, w.shape[3]
    return PLACES * outputs * channels, PLACES * tiles * (outputs + channels) + LANES


def is_product(x: Any, w: Any, geometry: Geometry, outputs: int = 0) -> bool:
    """Whether the gradient of w (o, 1, 1, c) is a small product of the pixels of dy and x. `outputs`: of dy, if w is a
    part of it."""
    return (tuple(w.shape[1:3]) == (1, 1) and geometry == Geometry((1, 1), (0, 0), geometry.dilation, 1)
            and small(prod(x.shape[:3]), outputs or w.shape[0], w.shape[3]))


def _alike(x: Any, w: Any, geometry: Geometry) -> str:
    if is_product(x, w, geometry):
        return alike(x, w.shape[0], w.shape[3])
    return f"windows of {x.dtype} for each channel" if _is_depthwise(w.shape[0], w, geometry) else ""


def _places(size: Sequence[int], taps: Sequence[int], outputs: Sequence[int], geometry: Geometry,
          by: Callable[..., list[Place]] = within) -> tuple[list[Place], list[Place]]:
    """Vertically and horizontally: what each output reads."""
    vertical, horizontal = (by(*numbers) for numbers in zip(size, taps, outputs, *geometry[:3], strict=True))
    return vertical, horizontal


def forward_work(x: Any, w: Any, y: Any, geometry: Geometry) -> list[Any]:
    """Scratch arrays of the forward kernel: packed weights, an image with zeros around it."""
    if _is_depthwise(w.shape[0], w, geometry):
        return depthwise_work(x.shape, w.shape, y.shape, geometry[:3], x.dtype)
    if (pixels := _together(y, w, geometry)) > 1:
        wide = widened(w, pixels, geometry.stride[1])
        return [wide, ((wide.shape[0],), w.dtype), *forward_work(x, wide, joined(y, pixels), _by(pixels, geometry))]
    if _is_small(y, w.shape[1:3], geometry):
        return _scratch(((1 + prod(w.shape[1:])) * LANES,), y, w, geometry)
    plan = _plan(x, w, y, geometry)
    return _scratch((packed(plan.w), padded(plan.parts, plan.x[3])), y, w, geometry)


def _scratch(sizes: Sequence[int], pixels: Any, w: Any, geometry: Geometry, tiles: int = CONVOLVED,
             outputs: int = 0) -> list[Any]:
    """Scratch arrays of these sizes, the first two large enough for `winograd`: a plan does not depend on the
    processor."""
    if _is_winograd(pixels.shape[:3], w, geometry, outputs):
        sizes = [max(each) for each in zip_longest(sizes, _winograd_work(w, tiles), fillvalue=0)]
    return [((size,), w.dtype) for size in sizes]


def input_grad_work(dy: Any, w: Any, dx: Any, geometry: Geometry) -> list[Any]:
    if _is_depthwise(w.shape[0], w, geometry):
        return forward_work(dx, w, dy, geometry)
    if forth := _forth(w, dx, geometry):
        return forward_work(dy, Like((w.shape[3], *w.shape[1:3], w.shape[0]), w.dtype), dx, forth)
    if _is_small(dy, w.shape[1:3], geometry):
        return _scratch(((1 + prod(w.shape[:3])) * LANES,), dx, w, geometry)
    plan = _plan(dx, w, dy, geometry, backward)
    groups, outputs, count, each = plan.w
    return _scratch((packed((groups, each, count, outputs)), padded(plan.parts, plan.y[3])), dx, w, geometry)


def _weight_grad_work(x: Any, dy: Any, dw: Any, taps: Pair, bias: bool, geometry: Geometry,
                      rows: Pair | None = None) -> list[Any]:
    """Sums of each block of outputs, an image with zeros around it, the outputs of a chunk of pixels side by side."""
    rows, sums = rows or (0, dy.shape[3]), row_sums_work(dy.shape[3]) if bias else []
    if is_product(x, dw, geometry, rows[1]):
        return sums
    if _is_depthwise(rows[1], dw, geometry):
        return [*depthwise_weight_grad_work(x.shape, dw.shape, dy.shape, geometry[:3], x.dtype, rows), *sums]
    if (pixels := _together(dy, dw, geometry, rows[1])) > 1:
        if dw.shape[0] < rows[1]:
            every = _all_of(dy, dw, rows[1])
            return [*every, *_weight_grad_work(x, *every, taps, False, geometry), *sums]
        wide = widened(dw, pixels, geometry.stride[1])
        return [wide, *_weight_grad_work(x, joined(dy, pixels), wide, (wide.shape[1], wide.shape[2]), False,
                                        _by(pixels, geometry)),
                *sums]
    if x.shape[3] >= LANES and _is_small(dy, taps, geometry, pixels=8, samples=1):
        return [*_scratch((prod(dy.shape[:3]) * WIDEST,), dy, dw, geometry, SUMMED, rows[1]), *sums]
    plan = _plan(x, dw, dy, geometry)
    totals = len(blocks_of(rows, dw.shape[0], geometry.groups)) * LANES * plan.w[2] * plan.w[3]
    sizes = totals, padded(plan.parts, plan.x[3]), 2 * lines(plan.y) * plan.y[2] * LANES
    return [*_scratch(sizes, dy, dw, geometry, SUMMED, rows[1]), *sums]


@conv2d.cpu
def _(x: Any, w: Any, *rest: Any, geometry: Geometry, act: str = "") -> list[Thunk]:
    from . import direct, small

    bias, (y, *work) = (rest[0], rest[1:]) if rest[0].ndim == 1 else (None, rest)
    end = cpu_act(act, y.reshape(-1, len(w)))
    if _is_depthwise(len(w), w, geometry):
        add = [] if bias is None else [loop(_add_bias, y.reshape(-1, len(w)), bias)]
        return [*depthwise(x, w, y, *work, geometry=geometry[:3]), *add, *end]
    if (pixels := _together(y, w, geometry)) > 1:
        wide, biases, *work = work
        given = [x, wide] if bias is None else [x, wide, biases]
        return [spread(w, bias, geometry.stride[1], wide, biases), *conv2d.bind(
            given, [y.reshape(joined(y, pixels).shape)], work, {"geometry": _by(pixels, geometry)}), *end]
    if winograd := _winograd(y, w, geometry):
        return [*winograd.convolve(x, w, bias, y, geometry.padding, False, *work), *end]
    if _is_small(y, w.shape[1:3], geometry):
        taps, steps = w.shape[1:3], (prod(w.shape[1:]), w.shape[3], 1)
        axes = _places(x.shape[1:3], taps, y.shape[1:3], geometry)
        return [*small.convolve(x, w, steps, bias, y, taps, *axes, work[0]), *end]
    plan = _plan(x, w, y, geometry)
    x, w, y, taps = *_shaped(plan, x, w, y), w.shape[1:3]
    return [*direct.convolve(x, w, bias, y, plan.parts[0], taps, *work), *end]


@conv2d_input_grad.cpu
def _(dy: Any, w: Any, dx: Any, *work: Any, size: Pair, geometry: Geometry) -> list[Thunk]:
    from . import direct, small

    if _is_depthwise(len(w), w, geometry):
        return depthwise_input_grad(dy, w, dx, *work, geometry=geometry[:3])
    if forth := _forth(w, dx, geometry):
        return conv2d.bind([dy, w[:, ::-1, ::-1].transpose(3, 1, 2, 0)], [dx], work, {"geometry": forth})
    if winograd := _winograd(dx, w, geometry):
        before = [2 - padding for padding in geometry.padding]
        return winograd.convolve(dy, w, None, dx, before, True, *work)
    if _is_small(dy, w.shape[1:3], geometry):
        taps, steps = w.shape[1:3], (1, w.shape[3], prod(w.shape[1:]))
        axes = _places(dx.shape[1:3], taps, dy.shape[1:3], geometry, readers)
        return small.convolve(dy, w, steps, None, dx, taps, *axes, work[0])
    plan = _plan(dx, w, dy, geometry, backward)
    dx, w, dy, taps = *_shaped(plan, dx, w, dy), w.shape[1:3]
    back = w.transpose(0, 3, 2, 1)
    return [thunk for part in plan.parts for thunk in direct.convolve(dy, back, None, dx, part, taps, *work)]


@conv2d_weight_grad.cpu
def _(x: Any, dy: Any, dw: Any, *rest: Any, taps: Pair, bias: bool, geometry: Geometry, rows: Pair | None = None
      ) -> list[Thunk]:
    from . import direct, small

    db, work, total = (rest[0], rest[1:-1], rest[-1]) if bias else (None, rest, None)
    sums = row_sums(dy.reshape(-1, len(dw)), db, total) if bias else []
    rows = rows or (0, len(dw))
    if is_product(x, dw, geometry, rows[1]):
        return [gemm(dy.reshape(-1, len(dw)).T, x.reshape(-1, x.shape[3]), dw.reshape(len(dw), -1)), *sums]
    if _is_depthwise(rows[1], dw, geometry):
        return [*depthwise_weight_grad(x, dy, dw, *work, geometry=geometry[:3], rows=rows), *sums]
    if (pixels := _together(dy, dw, geometry, rows[1])) > 1:
        if len(dw) < rows[1]:  # in the order of the whole, with zeros for the others
            whole, every, *more = work
            mine = slice(rows[0], rows[0] + len(dw))
            return [partial(whole.fill, 0), partial(np.copyto, whole[..., mine], dy), *conv2d_weight_grad.bind(
                [x, whole], [every], more, {"taps": taps, "bias": False, "geometry": geometry}),
                partial(np.copyto, dw, every[mine]), *sums]
        wide, *more = work
        return [*conv2d_weight_grad.bind([x, dy.reshape(joined(dy, pixels).shape)], [wide], more, {
            "taps": wide.shape[1:3], "bias": False, "geometry": _by(pixels, geometry)}),
            folded(wide, geometry.stride[1], dw), *sums]
    if winograd := _winograd(dy, dw, geometry, rows[1]):
        return [*winograd.weight_sums(x, dy, dw, geometry.padding, rows[1], *work[:2]), *sums]
    if x.shape[3] >= LANES and _is_small(dy, taps, geometry, pixels=8, samples=1):
        axes = _places(x.shape[1:3], taps, dy.shape[1:3], geometry)
        return [*small.weight_sums(x, memory(dy), dw, dy.shape[:3], *axes, rows[1], work[0]), *sums]
    plan = _plan(x, dw, dy, geometry)
    x, dw = flat(x).reshape(plan.x), flat(dw).reshape(len(dw), *plan.w[2:])
    sums_of = direct.weight_sums(x, memory(dy), dw, plan.y[:3], plan.parts[0], taps, geometry.groups, rows, *work)
    return [*sums_of, *sums]


def _add_bias(y, b):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]
