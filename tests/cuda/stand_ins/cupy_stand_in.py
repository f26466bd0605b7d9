"""CuPy without a GPU: NumPy's results behind CuPy's names, signatures and refusals, as far as references of
kernels use them.

What the installed CuPy does not have is not there, neither functions and their arguments nor methods of arrays. Results
are always arrays, also of a single number, and none becomes NumPy's by itself. Says nothing about what CuPy computes.
"""

from __future__ import annotations

import inspect
from typing import Any

import cupy
import numpy as np

SCALARS = (bool, int, float, complex, np.generic)


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on the device that is not there."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __repr__(self) -> str:
        return f"on the device: {self.values!r}"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
                        "a NumPy array explicitly.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **given: Any) -> Any:
        if not hasattr(cupy, ufunc.__name__) or method != "__call__":
            return NotImplemented
        result = ufunc(*there(inputs), **({"out": there(out)} if out else {}), **given)
        return out[0] if out else here(result)

    def __array_function__(self, function: Any, types: Any, given: Any, named: Any) -> Any:
        return getattr(xp, function.__name__)(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(cupy.ndarray, name):
            raise AttributeError(f"cupy.ndarray has no {name}")
        found = getattr(self.values, name)
        if not callable(found) or isinstance(found, type):
            return here(found)
        return lambda *given, **named: here(found(*there(given), **there(named)))

    def __getitem__(self, key: Any) -> Any:
        return here(self.values[there(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[there(key)] = there(value)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Any:
        return (here(row) for row in self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def __int__(self) -> int:
        return int(self.values)

    def __index__(self) -> int:
        return self.values.__index__()

    def __float__(self) -> float:
        return float(self.values)


def there(value: Any) -> Any:
    """Arguments as NumPy takes them. Raises TypeError for arrays of the host."""
    if isinstance(value, Array):
        return value.values
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, tuple | list):
        return type(value)(map(there, value)) if not hasattr(value, "_fields") else value
    if isinstance(value, dict):
        return {key: there(v) for key, v in value.items()}
    return value


def here(value: Any) -> Any:
    """Results as CuPy gives them."""
    if isinstance(value, tuple):
        return value if all(isinstance(v, int) for v in value) else tuple(map(here, value))
    return Array(value) if isinstance(value, np.ndarray | np.generic) else value


class Module:
    """CuPy's functions that references call."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(cupy, name)  # raises AttributeError for what CuPy has not
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            assert found is real or found == real, f"cupy.{name} is not NumPy's"
            return found

        def call(*given: Any, **named: Any) -> Any:
            if isinstance(real, cupy.ufunc):
                assert named.keys() <= {"out", "dtype"}
                assert all(isinstance(v, (Array, *SCALARS)) for v in given), f"cupy.{name} takes arrays and numbers"
            else:
                inspect.signature(real).bind(*given, **named)
            return here(found(*there(given), **there(named)))

        return call


xp = Module()
