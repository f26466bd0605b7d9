"""Products of elements, and distances between rows."""

from __future__ import annotations

from ..autograd.tensor import ShapeError, Tensor
from .along_axis import norm
from .create import full
from .elementwise import mul, sub
from .join import concat, cut
from .names import with_dim
from .reduce import finish
from .shape import axis_of, reshape, unsqueeze


@with_dim
def prod(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The product over one axis, or of all elements. Half of them is multiplied by the other half until one is left, so
    that the gradient divides by nothing and is right beside zeros."""
    if axis is None:
        y = prod(reshape(x, [-1]), 0)
        return reshape(y, [1] * x.ndim) if keepdims else y
    axis = axis_of(x, axis, "prod")
    if not x.shape[axis]:
        x = concat([x, full([1 if a == axis else n for a, n in enumerate(x.shape)], 1, x.dtype)], axis)
    odd: list[Tensor] = []
    while (n := x.shape[axis]) > 1:
        first, second, *last = [cut(x, (slice(None),) * axis + (slice(begin, begin + length),))
                                for begin, length in ((0, n // 2), (n // 2, n // 2), (n - 1, 1))][: 2 + n % 2]
        odd, x = [*odd, *last], mul(first, second)
    for y in odd:
        x = mul(x, y)
    return finish(x, (axis,), keepdims)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0) -> Tensor:
    """The distances between rows of x1 (..., n, d) and rows of x2 (..., m, d) -> (..., n, m): norms (p = 1, 2, inf) of
    their differences, which take n m d numbers of memory. The gradient of a distance that is 0 is 0. Raises ShapeError
    if they do not fit, and ValueError for another p."""
    if min(x1.ndim, x2.ndim) < 2 or x1.shape[-1] != x2.shape[-1]:
        raise ShapeError(f"cdist: rows of {x1.shape} and {x2.shape} have no distances; expected (..., n, d) and "
                         f"(..., m, d)")
    return norm(sub(unsqueeze(x1, -2), unsqueeze(x2, -3)), p, -1)
