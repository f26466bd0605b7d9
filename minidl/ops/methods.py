"""The operators and methods that the ops give a Tensor: NumPy's names, and torch's where they mean the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ..autograd.hints import hint
from ..autograd.tensor import Parameter, ShapeError, Tensor, array
from .along_axis import root
from .cast import astype
from .elementwise import absolute, add, div, exp, mul, neg, power, sub
from .extremes import amax, amin, max_with_indices, min_with_indices
from .index import index
from .linear import matmul
from .masks import all_of, any_of, clamp, compare, logic, where
from .rearrange import take
from .reduce import broadcast_to, total, variance
from .shape import axis_of, reshape, swap_axes, transpose, unsqueeze

#: ops that are methods under their own names
OPS = ("amax", "amin", "argmax", "argmin", "argsort", "astype", "bincount", "ceil", "chunk", "clamp", "cos", "cumsum",
       "diagonal", "exp", "flatten", "flip", "floor", "gather", "gelu", "index_add", "log", "log_softmax", "logsumexp",
       "masked_fill", "masked_select", "matmul", "mean", "movedim", "neg", "norm", "prod", "relu", "repeat_interleave",
       "roll", "round", "scatter", "scatter_add", "sigmoid", "sign", "sin", "softmax", "sort", "split", "sqrt",
       "squeeze", "tanh", "tile", "topk", "tril", "triu", "trunc", "unbind", "unsqueeze")

def _other(t: Tensor, value: Any) -> Any:
    """A Tensor or a number stays; an array becomes a tensor of t's type."""
    return value if isinstance(value, Tensor | int | float) else array(value, t.dtype)


def _operator(op: Any) -> Any:
    """An operator of two tensors; a mask counts as 0 and 1 of the other's type."""
    def method(a: Tensor, b: Any) -> Any:
        b = _other(a, b)
        if isinstance(b, Tensor) and (a.dtype == "bool") != (b.dtype == "bool"):
            a, b = (astype(a, b.dtype), b) if a.dtype == "bool" else (a, astype(b, a.dtype))
        return op(a, b)

    return method


def _comparison(name: str) -> Any:
    def method(a: Tensor, b: Any) -> Any:
        known = isinstance(b, Tensor | int | float | np.generic | np.ndarray)
        return compare(name, a, b) if known else NotImplemented

    return method


def _logic(name: str) -> Any:
    return lambda a, b: logic(name, a, b if isinstance(b, Tensor) else array(b))


def _shape(given: tuple[Any, ...]) -> Sequence[int]:
    """`f(2, 3)` as `f((2, 3))`."""
    return tuple(map(int, given[0] if len(given) == 1 and not isinstance(given[0], int | np.integer) else given))


def _transpose(t: Tensor, *axes: Any) -> Tensor:
    """Two numbers exchange these axes, as in torch; all axes, or a tuple of them, are their new order, as in NumPy."""
    return swap_axes(t, *axes) if len(axes) == 2 else transpose(t, _shape(axes))


def _expand(t: Tensor, *shape: Any) -> Tensor:
    """`broadcast_to` where -1 keeps a length. Raises ShapeError if there is none to keep."""
    lengths = list(_shape(shape))
    new = len(lengths) - t.ndim
    if new < 0 or -1 in lengths[:new]:
        raise ShapeError(f"expand: shape {t.shape} does not expand to {tuple(lengths)}; -1 keeps the length of an axis "
                         f"that is there")
    return broadcast_to(t, [t.shape[a - new] if n == -1 else n for a, n in enumerate(lengths)])


def _exponential(t: Tensor, base: Any) -> Tensor:
    """base ** t."""
    if not base > 0:
        raise ValueError(f"{base} ** x: the base must be above 0")
    return exp(mul(t, math.log(base))) if base != 1 else power(t, 0.0)  # infinity times 0 is NaN


def _extreme(name: str, plain: Any, indexed: Any) -> Any:
    """NumPy's max(axis=) and torch's max(dim=), which return other things."""
    def method(t: Tensor, *position: Any, **named: Any) -> Any:
        if position and isinstance(position[0], Tensor):
            raise TypeError(f"x.{name}(y) is minidl.{name}imum(x, y)")
        if position:
            raise TypeError(f"x.{name}({', '.join(map(str, position))}) means one thing in NumPy and another in torch: "
                            f"write x.{name}(axis=...) for the values alone, x.{name}(dim=...) for (values, indices)")
        if "dim" in named:
            return indexed(t, named.pop("dim"), keepdims=named.pop("keepdim", False), **named)
        return plain(t, **named)

    return method


def _var(t: Tensor, *args: Any, **named: Any) -> Tensor:
    if "correction" not in named:
        raise TypeError("var and std mean one thing in NumPy and another in torch: give correction=0 to divide by the "
                        "number of elements, as in NumPy, correction=1 for one less, as in torch")
    return variance(t, *args, **named)


def _truth(t: Tensor) -> bool:
    if t.size != 1:
        raise ValueError(f"the truth of a tensor of shape {t.shape} is not one value; use (x == y).all() or .any()")
    return bool(t.item())


def _set_item(t: Tensor, item: Any, value: Any) -> NoReturn:
    raise TypeError("a tensor is not changed in place: x = where(mask, value, x) makes a new one; "
                    "x.assign(values) outside a step replaces all values")


def _in_place(p: Parameter, other: Any) -> NoReturn:
    raise TypeError("+=, -=, *= and /= would make a new tensor of this name and leave the parameter as it is: an "
                    "optimizer updates parameters, parameter.assign(values) replaces their values")


def _missing(t: Tensor, name: str) -> NoReturn:
    """Called for attributes that a Tensor has not."""
    raise AttributeError(f"a Tensor has no {name!r}{hint('x', name)}")


METHODS: dict[str, Any] = {
    "__add__": _operator(add), "__radd__": _operator(add), "__sub__": _operator(sub),
    "__rsub__": lambda a, b: add(neg(a), _other(a, b)), "__mul__": _operator(mul), "__rmul__": _operator(mul),
    "__truediv__": _operator(div), "__rtruediv__": lambda a, b: mul(power(a, -1.0), _other(a, b)),
    "__neg__": neg, "__pow__": power, "__rpow__": _exponential, "__abs__": absolute,
    "__matmul__": lambda a, b: matmul(a, _other(a, b)), "__rmatmul__": lambda a, b: matmul(array(b, a.dtype), a),
    **{name: _comparison(kernel) for short, kernel in (
        ("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"),
        ("ge", "greater_equal")) for name in (short, f"__{short}__")},
    "__hash__": object.__hash__, "__bool__": _truth, "__int__": lambda t: int(t.item()),
    "__index__": lambda t: t.numpy().__index__(),  # range(t), x[:t]
    "__format__": lambda t, how: format(t.item(), how) if how else str(t),  # f"{loss:.3f}"
    "__and__": _logic("logical_and"), "__or__": _logic("logical_or"), "__xor__": _logic("logical_xor"),
    "__invert__": lambda t: logic("logical_not", t),
    "__getitem__": index, "__setitem__": _set_item, "__getattr__": _missing,
    "abs": absolute, "pow": power, "clip": clamp, "square": lambda t: mul(t, t), "sum": total,
    "var": _var, "std": lambda t, *args, **named: root(_var(t, *args, **named)),
    "max": _extreme("max", amax, max_with_indices), "min": _extreme("min", amin, min_with_indices),
    "any": any_of, "all": all_of, "where": lambda t, mask, other: where(mask, t, other),
    "reshape": lambda t, *shape: reshape(t, _shape(shape)), "view": lambda t, *shape: reshape(t, _shape(shape)),
    "view_as": lambda t, other: reshape(t, other.shape), "expand": _expand,
    "expand_as": lambda t, other: broadcast_to(t, other.shape), "swapaxes": swap_axes, "transpose": _transpose,
    "permute": lambda t, *axes: transpose(t, _shape(axes)), "t": lambda t: swap_axes(t, 0, 1) if t.ndim > 1 else t,
    "T": property(transpose), "float": lambda t: astype(t, "float32"), "double": lambda t: astype(t, "float64"),
    "long": lambda t: astype(t, "int64"), "bool": lambda t: astype(t, "bool"), "mm": matmul, "bmm": matmul,
    "rsqrt": lambda t: power(t, -0.5), "reciprocal": lambda t: power(t, -1.0),
    "index_select": lambda t, dim, index: take(t, index, axis_of(t, dim, "index_select")),
    "outer": lambda a, b: mul(unsqueeze(a, 1), _other(a, b)),
    "add": _operator(add), "sub": _operator(sub), "mul": _operator(mul), "div": _operator(div),
    "isnan": lambda t: compare("not_equal", t, t), "isinf": lambda t: compare("equal", absolute(t), math.inf),
    "isfinite": lambda t: compare("less", absolute(t), math.inf),
    "dim": lambda t: t.ndim, "numel": lambda t: t.size, "tolist": lambda t: t.numpy().tolist(),
}


def function(name: str) -> Any:
    """The function of a tensor or an array that calls this method."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x if isinstance(x, Tensor) else array(x), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"`x.{name}(...)`."
    return call


def install(ops: Mapping[str, Any]) -> None:
    """Puts them on Tensor. `ops`: by name."""
    for name, method in {**{name: ops[name] for name in OPS}, **METHODS}.items():
        setattr(Tensor, name, method)
    for name in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
        setattr(Parameter, name, _in_place)
