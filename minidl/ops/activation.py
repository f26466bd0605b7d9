"""Activations beside the usual ones."""

from __future__ import annotations

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import ShapeError, Tensor, new
from ..core.graph import Role
from .elementwise import Alike, exp, sigmoid
from .join import chunk
from .masks import clamp, where
from .pair_loss import softplus
from .reduce import sum_to
from .shape import axis_of


def spike(x: Tensor, surrogate: str = "triangle") -> Tensor:
    """1 where x is at least 1, else 0. In the place of the derivative, which is 0, the gradient has a surrogate:
    max(0, 1 - abs(x - 1)), or with "rectangle" 1 where abs(x - 1) <= 1/2."""
    return Alike("spike", "spike_grad a dy", rectangle=surrogate == "rectangle")(x)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is above 0, alpha (exp(x) - 1) elsewhere."""
    return where(x > 0, x, (exp(clamp(x, max=0.0)) - 1.0) * alpha)


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), for any x."""
    return -softplus(-x)


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is above 0, alpha (exp(x / alpha) - 1) elsewhere."""
    return where(x > 0, x, (exp(clamp(x, max=0.0) * (1 / alpha)) - 1.0) * alpha)


def selu(x: Tensor) -> Tensor:
    """`elu` with the slope and scale that keep mean and variance."""
    return elu(x, 1.6732632423543772848170429916717) * 1.0507009873554804934193349852946


class PReLU(Op):
    """The mask of what is above 0, x, weight."""

    name = "prelu"
    precision = "widest"

    def forward(self, above: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        dtype = same_dtype(self, x, weight)
        self.above, self.operands = above, (x, weight)
        y = self.out_by("mul", [x, weight], x.shape, dtype)
        return self.call("where", [above, x, y], [y])

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        full = new("grad prelu", dy.shape, dy.dtype, Role.GRADIENT)
        self.call("mul", [dy, self.operands[2 - i]], [full])
        if i == 1:
            self.call("where", [self.above, dy, full], [full])
        else:  # after the product: infinity times zero is NaN
            self.call("where_grad", [self.above, full], [full], chosen=False)
        return sum_to(full, self.operands[i - 1])


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x where it is above 0, `weight` (1,) or (channels,), which are last, times x elsewhere."""
    if weight.shape not in ((1,), x.shape[-1:]):
        raise ShapeError(f"prelu: weight {weight.shape} does not fit {x.shape}; expected (1,) or {x.shape[-1:]}")
    return PReLU()(x > 0, x, weight)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half along an axis times the sigmoid of the second. Raises ShapeError for an odd length."""
    axis = axis_of(x, dim, "glu")
    if x.shape[axis] % 2:
        raise ShapeError(f"glu: axis {axis} of shape {x.shape} has no two halves")
    a, b = chunk(x, 2, axis)
    return a * sigmoid(b)
