"""Where the taps of a window lie in an image, for the loops of `direct`. Knows no weights and no pixels' values.

A convolution's output is one part: each of its pixels adds up the products of all taps. The gradient toward its input
is a convolution too, whose parts are the pixels that the same taps reach: with stride 2 every second line and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]
LANES = 16  #: output channels that are computed together
LEAST_TILES = 1 << 18  #: products of numbers in a product of matrices from which `tiles` may be faster
PLACES = 16  #: positions of a tile of pixels that `winograd` has transformed
CONVOLVED, SUMMED = 28, 56  #: tiles of pixels that it transforms at once, at most; and for weights
WIDEST = 8  #: pixels that are computed together at most
CHUNK = 256  #: about how many pixels the gradient of the weights adds up before it adds them to the others'
LINE = 128  #: pixels of a line at most, where lines may have any length


class Axis(NamedTuple):
    """One axis of a part. Output `first + i * apart` reads a tap at `i * step + offset` of the image with `before`
    zeros in front, cut or filled up with zeros to `length`."""

    taps: tuple[int, ...]
    offsets: tuple[int, ...]
    first: int
    apart: int
    outputs: int
    step: int
    before: int
    length: int


class Part(NamedTuple):
    """Outputs of one kind of place, (vertical, horizontal), and the size of the image that they read."""

    vertical: Axis
    horizontal: Axis
    size: Pair

    @property
    def copied(self) -> bool:
        """Whether the image must be copied to get its zeros."""
        return any(axis.before or axis.length > size for axis, size in zip(self[:2], self.size, strict=True))

    @property
    def numbers(self) -> list[Pair]:
        """The taps in order: (vertical, horizontal) number of each."""
        return [(ky, kx) for ky in self.vertical.taps for kx in self.horizontal.taps]


def forward(size: Sequence[int], taps: Sequence[int], outputs: Sequence[int], stride: Pair, padding: Pair,
            dilation: Pair) -> list[Part]:
    """The only part of a convolution over an image of this size."""
    axes = [Axis(tuple(range(k)), tuple(t * d for t in range(k)), 0, 1, o, s, p, (o - 1) * s + (k - 1) * d + 1)
            for k, o, s, p, d in zip(taps, outputs, stride, padding, dilation, strict=True)]
    return [Part(axes[0], axes[1], (size[0], size[1]))]


def backward(size: Sequence[int], taps: Sequence[int], outputs: Sequence[int], stride: Pair, padding: Pair,
             dilation: Pair) -> list[Part]:
    """The parts of the gradient toward an image of this size, made from the outputs' gradient."""
    def axes(a: int) -> list[Axis]:
        found = []
        for first in range(min(stride[a], size[a])):
            count = -(-(size[a] - first) // stride[a])
            # output i of the convolution reads pixel `first + stride * m` with tap t where i = m + place
            places = sorted(((first + padding[a] - t * dilation[a]) // stride[a], t) for t in range(taps[a])
                            if (first + padding[a] - t * dilation[a]) % stride[a] == 0)
            before = max([0, *(-place for place, _ in places)])
            length = before + count + max(place for place, _ in places) if places else 0
            found.append(Axis(tuple(t for _, t in places), tuple(place + before for place, _ in places), first,
                              stride[a], count, 1, before, length))
        return found

    return [Part(v, h, (outputs[0], outputs[1])) for v in axes(0) for h in axes(1)]


def padded(parts: Sequence[Part], channels: int) -> int:
    """How many numbers one image with its zeros has."""
    return max([0, *(p.vertical.length * p.horizontal.length * channels for p in parts if p.copied)])


def packed(weights: Sequence[int]) -> int:
    """How many numbers weights (groups, o, taps, c) and a bias are with LANES outputs side by side."""
    groups, outputs, taps, each = weights
    return groups * -(-outputs // LANES) * LANES * (1 + taps * each)


def blocks_of(rows: Pair, count: int, groups: int) -> list[tuple[int, int, int]]:
    """The `count` outputs from rows[0] on, of rows[1] in all, in blocks of at most LANES, each within one group: its
    group, its first output, counted from rows[0], and its number of outputs."""
    found, at, size = list[tuple[int, int, int]](), 0, rows[1] // groups
    while at < count:
        group, before = divmod(rows[0] + at, size)
        found.append((group, at, min(LANES, size - before, count - at)))
        at += found[-1][2]
    return found


def lines(y: Sequence[int]) -> int:
    """How many lines of y (n, oh, ow, o) are a chunk."""
    return max(1, min(CHUNK // max(y[2], 1), y[1]))


def line(pixels: int) -> int:
    """The length of the lines into which pixels without neighbours are divided: all equal, and at most LINE."""
    return max(n for n in range(1, min(pixels, LINE) + 1) if pixels % n == 0) if pixels else 1


Place = tuple[Pair, ...]  #: what an output reads along one axis: (tap, place) of each product


class Kind(NamedTuple):
    """Outputs along one axis that read the same taps at the same distances: (tap, distance from the first one's place)
    of each, and of all outputs (output, that first place)."""

    taps: tuple[Pair, ...]
    outputs: list[Pair]


def within(size: int, taps: int, outputs: int, stride: int, padding: int, dilation: int) -> list[Place]:
    """For each output along an axis the taps that lie in an image of this size."""
    return [tuple((t, i * stride - padding + t * dilation) for t in range(taps)
                  if 0 <= i * stride - padding + t * dilation < size) for i in range(outputs)]


def readers(size: int, taps: int, outputs: int, stride: int, padding: int, dilation: int) -> list[Place]:
    """For each pixel along an axis of this size the taps that read it, and for which output; outputs in order."""
    found = [list[Pair]() for _ in range(size)]
    for output, places in enumerate(within(size, taps, outputs, stride, padding, dilation)):
        for tap, place in places:
            found[place].append((tap, output))
    return list(map(tuple, found))


def kinds(places: Sequence[Place]) -> list[Kind]:
    """All outputs, grouped by kind."""
    found = dict[tuple[Pair, ...], Kind]()
    for i, taps in enumerate(places):
        first = taps[0][1] if taps else 0
        apart = tuple((t, place - first) for t, place in taps)
        found.setdefault(apart, Kind(apart, [])).outputs.append((i, first))
    return list(found.values())
