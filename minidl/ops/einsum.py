"""Sums of products by the names of axes, as transpositions and matrix products."""

from __future__ import annotations

import math

from ..autograd.tensor import ShapeError, Tensor
from .linear import matmul
from .reduce import total
from .shape import reshape, transpose


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """The sum of products that the equation names: `einsum("nhqd,nhkd->nhqk", q, k)`. Operands are joined from left to
    right. Without `->`, the names that come once are the result's, sorted. Raises ValueError for an equation that it
    cannot read (no `...`, no name twice in an operand), ShapeError where lengths do not fit."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if not arrow:
        result = "".join(sorted(c for c in set(left) if c != "," and left.count(c) == 1))
    _check(equation, names, result, operands)
    parts = list(zip(operands, names, strict=True))
    x, own = parts.pop(0)
    while parts:
        y, other = parts.pop(0)
        needed = set(result).union(*(n for _, n in parts))
        x, own = _product(*_summed(x, own, needed | set(other)), *_summed(y, other, needed | set(own)), needed)
    x, own = _summed(x, own, set(result))
    return transpose(x, [own.index(c) for c in result]) if own != result else x


def _check(equation: str, names: list[str], result: str, operands: tuple[Tensor, ...]) -> None:
    if not all((n + result).isalpha() or not n + result for n in names):
        raise ValueError(f"einsum: {equation!r} may have letters, commas and one ->; write an axis for each of '...'")
    if len(names) != len(operands):
        raise ValueError(f"einsum: {equation!r} names {len(names)} operands, and {len(operands)} are given")
    if any(len(set(n)) < len(n) for n in (*names, result)):
        raise ValueError(f"einsum: {equation!r} has a name twice in an operand; diagonals are not supported")
    if missing := sorted(set(result) - set("".join(names))):
        raise ValueError(f"einsum: {missing[0]!r} of the result is in no operand of {equation!r}")
    lengths: dict[str, int] = {}
    for t, n in zip(operands, names, strict=True):
        if t.ndim != len(n):
            raise ShapeError(f"einsum: {n!r} names {len(n)} axes, and the operand is {t.shape}")
        for c, length in zip(n, t.shape, strict=True):
            if lengths.setdefault(c, length) != length:
                raise ShapeError(f"einsum: {c!r} is {lengths[c]} in one operand of {equation!r} and {length} in "
                                 f"another")


def _summed(x: Tensor, names: str, kept: set[str]) -> tuple[Tensor, str]:
    """x summed over the axes that nothing else needs."""
    gone = [a for a, c in enumerate(names) if c not in kept]
    return (total(x, gone), "".join(c for c in names if c in kept)) if gone else (x, names)


def _product(x: Tensor, own: str, y: Tensor, other: str, needed: set[str]) -> tuple[Tensor, str]:
    """The product of two: common axes that something else needs are its batch, the other common ones are summed."""
    batch = [c for c in own if c in other and c in needed]
    inner = [c for c in own if c in other and c not in needed]
    rows, columns = [c for c in own if c not in other], [c for c in other if c not in own]
    length = dict(zip(own, x.shape, strict=True)) | dict(zip(other, y.shape, strict=True))

    def size(names: list[str]) -> int:
        return math.prod(length[c] for c in names)

    def matrix(t: Tensor, names: str, *groups: list[str]) -> Tensor:
        order = [names.index(c) for g in groups for c in g]
        return reshape(transpose(t, order) if order else t, list(map(size, groups)))

    z = matmul(matrix(x, own, batch, rows, inner), matrix(y, other, batch, inner, columns))
    return reshape(z, [length[c] for c in (*batch, *rows, *columns)]), "".join((*batch, *rows, *columns))
