"""References of kernels: CPU forms do what they say; over CuPy's interface they do what they do over NumPy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from forms import blank, bound, outputs, reference
from helpers import bits, need
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


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.wide)])
def test_the_cpu_form_of_every_kernel_is_its_reference(dtype: str) -> None:
    """Every element is written, reads stay as they are, and what is bound can be called again."""
    tolerance = 5e-6 if dtype == "float32" else 1e-10
    for name in OURS:
        assert calls()[name], f"reference_calls has no call of {name}"
        for reads, constants in calls()[name]:
            given = [r.astype(dtype) if r.dtype == np.float32 else r for r in reads]
            before = [r.copy() for r in given]
            with np.errstate(all="ignore"):
                wanted = reference(name, given, **constants)
                found = blank(wanted)
                for thunk in bound(name, given, found, **constants) * 2:
                    thunk()
            for y, e in zip(found, wanted, strict=True):
                scale = np.abs(e, where=np.isfinite(e), out=np.ones(e.shape)).max(initial=1)
                np.testing.assert_allclose(y, e, rtol=tolerance, atol=tolerance * scale, err_msg=name)
            for r, b in zip(given, before, strict=True):
                np.testing.assert_array_equal(r, b, err_msg=name)


@pytest.mark.parametrize("name", [name for name in OURS if KERNELS[name].over])
def test_a_result_over_what_it_is_made_of_has_the_same_bits(name: str) -> None:
    written = set()
    for (result, read), (reads, constants), dtype in product(KERNELS[name].over, calls()[name], ("float32", "float64")):
        given = [r.astype(dtype) if r.dtype == np.float32 else r.copy() for r in reads]
        with np.errstate(all="ignore"):
            apart = blank(reference(name, given, **constants))
            if read >= len(given) or given[read].shape != apart[result].shape or given[read].dtype != dtype:
                continue
            over = [given[read] if i == result else y.copy() for i, y in enumerate(apart)]
            for found in (apart, over):
                for thunk in bound(name, given, found, **constants):
                    thunk()
        assert bits(*over) == bits(*apart)
        written.add((result, read))
    assert written == {(result, read) for result, read in KERNELS[name].over if read < len(calls()[name][0][0])}


@pytest.mark.parametrize("name", OURS)
def test_references_need_nothing_that_cupy_has_not(name, stand_in):
    for reads, constants in calls()[name]:
        with np.errstate(all="ignore"):
            wanted = reference(name, reads, **constants)
            found = outputs(KERNELS[name].reference(stand_in.xp, *map(stand_in.Array, reads), **constants))
        assert len(found) == len(wanted)
        for f, w in zip(found, wanted, strict=True):
            assert isinstance(f, stand_in.Array), "not an array of the device"
            assert f.dtype == w.dtype
            np.testing.assert_array_equal(f.values, w)


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
