"""References of kernels are written over an array module: over CuPy's interface they do what they do over NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import need
from reference_calls import calls

from minidl.kernels import KERNELS

OURS = [name for name, k in KERNELS.items() if k.reference.__module__.startswith("minidl.")]


@pytest.fixture
def stand_in(monkeypatch):
    """CuPy over NumPy's arrays."""
    need("cupy")
    import cupy_stand_in
    import cupyx.scipy.special

    monkeypatch.setattr(cupyx.scipy.special, "erf",
                        lambda x: cupy_stand_in.Array(np.vectorize(math.erf, otypes=[x.dtype])(x.values)))
    return cupy_stand_in


def outputs(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", OURS)
def test_references_need_nothing_that_cupy_has_not(name, stand_in):
    for reads, constants in calls()[name]:
        with np.errstate(all="ignore"):
            wanted = outputs(KERNELS[name].reference(np, *reads, **constants))
            found = outputs(KERNELS[name].reference(stand_in.xp, *map(stand_in.Array, reads), **constants))
        assert len(found) == len(wanted)
        for f, w in zip(found, wanted, strict=True):
            assert isinstance(f, stand_in.Array), "not an array of the device"
            assert f.dtype == np.asarray(w).dtype
            np.testing.assert_array_equal(f.values, w)


@pytest.mark.slow
def test_there_is_a_call_of_every_kernel():
    assert [name for name, found in calls().items() if not found] == []


def test_the_stand_in_refuses_what_cupy_refuses(stand_in):
    xp, x = stand_in.xp, stand_in.Array(np.ones(3, "float32"))
    for refused in (lambda: xp.no_such_function(x), lambda: x.no_such_method(),
                    lambda: xp.argsort(x, no_such_argument=1), lambda: x + np.ones(3), lambda: np.float32(x.sum()),
                    lambda: xp.where(x > 0, x, np.ones(3)), lambda: xp.matmul(x, np.ones(3)), lambda: np.asarray(x),
                    lambda: np.add.reduce(x)):
        with pytest.raises((AttributeError, TypeError)):
            refused()
    assert isinstance(x.sum(), stand_in.Array)
    assert isinstance(np.sqrt(x), stand_in.Array)
    assert float(x.sum()) == 3
