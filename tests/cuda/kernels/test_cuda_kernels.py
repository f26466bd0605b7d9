"""Each kernel's CUDA form, run on the CPU, against its reference over NumPy in float64: the same calls as
of the CPU forms."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import run_kernel
from helpers import bits
from kernel_examples import IN_PLACE, STRIDED, arrays, examples

from minidl.kernels import KERNELS

TOLERANCE = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-13}  #: of an array's norm


def of_sizes(*sizes):
    """The examples of all sizes."""
    return [pytest.param(e, id=f"{e} {size}") for size in sizes for e in examples(*size)]


def expected(example, reads):
    """What the reference makes of the same numbers in float64."""
    wide = [r.astype("float64") if r.dtype.kind == "f" else r.copy() for r in reads]
    out = KERNELS[example.kernel].reference(np, *wide, **example.constants)
    return [np.asarray(e) for e in (out if isinstance(out, tuple) else (out,))]


def assert_close(example, found, reads):
    """Errors are measured against the output's norm; where it is a sum, against that of its terms'
    magnitudes, which cancel."""
    sizes = expected(example, [np.abs(r) for r in reads] if example.kernel == "sum" else reads)
    for y, e, size in zip(found, expected(example, reads), sizes, strict=True):
        assert np.linalg.norm(y.astype("float64") - e) <= TOLERANCE.get(y.dtype.name, 0) * np.linalg.norm(
            np.broadcast_to(size, y.shape))


@pytest.mark.few(51)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", of_sizes((3, 4), (37, 300)))
def test_the_cuda_form_is_the_reference(example, dtype):
    """Whatever the order of threads, the bits are the same."""
    reads, writes = arrays(example, dtype)
    before = bits(*reads)
    run_kernel(example.kernel, reads, writes, seed=1, constants=example.constants)
    assert bits(*reads) == before
    assert_close(example, writes, reads)
    again = arrays(example, dtype)[1]
    run_kernel(example.kernel, reads, again, seed=2, constants=example.constants)
    assert bits(*again) == bits(*writes)


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", [p for p in of_sizes((3, 4), (37, 300)) if p.values[0].kernel in IN_PLACE])
def test_updates_may_be_in_place(example, dtype):
    for start in range(2 if example.kernel == "add" else 1):
        reads, writes = arrays(example, dtype)
        bound_to = [p for p in IN_PLACE[example.kernel] if p < len(reads)][start:][: len(writes)]
        if any(reads[p].shape != w.shape for p, w in zip(bound_to, writes, strict=True)):
            continue
        before = [r.copy() for r in reads]
        run_kernel(example.kernel, reads, [reads[p] for p in bound_to], constants=example.constants)
        assert_close(example, [reads[p] for p in bound_to], before)


@pytest.mark.few(34)
@pytest.mark.parametrize("example", [p for p in of_sizes((3, 4), (37, 300)) if p.values[0].kernel in STRIDED])
def test_strided_operands(example):
    reads, writes = arrays(example, "float64")
    strided = [np.asfortranarray(r) if r.ndim > 1 else np.repeat(r, 2)[::2] if r.ndim == 1 else r for r in reads]
    run_kernel(example.kernel, strided, writes, constants=example.constants)
    assert_close(example, writes, reads)


def test_every_kernel_has_a_cuda_form():
    ours = {name: k for name, k in KERNELS.items() if k.reference.__module__.startswith("minidl.")}
    assert [name for name, k in ours.items() if k._cuda is None] == []
