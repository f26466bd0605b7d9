"""Each kernel's CUDA form, run on the CPU, against its reference over NumPy in float64: the same calls as
of the CPU forms."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_agree import written
from cuda_on_cpu import run_kernel
from forms import exact
from kernel_examples import IN_PLACE, STRIDED, arrays, examples, in_place, strided

from minidl.kernels import KERNELS

TOLERANCE = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-13}  #: of an array's norm
IN_16_BITS = ("elementwise", "reduce", "activation", "gelu")


def of_sizes(*sizes):
    """The examples of all sizes."""
    return [pytest.param(e, id=f"{e} {size}") for size in sizes for e in examples(*size)]


def assert_close(example, found, reads):
    """Errors are measured against the output's norm; where it is a sum, against that of its terms'
    magnitudes, which cancel."""
    name, constants = example.kernel, example.constants
    sizes = exact(name, [np.abs(r) for r in reads] if name == "sum" else reads, **constants)
    for y, e, size in zip(found, exact(name, reads, **constants), sizes, strict=True):
        assert np.linalg.norm(y.astype("float64") - e) <= TOLERANCE.get(y.dtype.name, 0) * np.linalg.norm(
            np.broadcast_to(size, y.shape))


@pytest.mark.few(51)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", of_sizes((3, 4), (37, 300)))
def test_the_cuda_form_is_the_reference(example, dtype):
    """Whatever the order of threads, the bits are the same."""
    reads, writes = arrays(example, dtype)
    assert_close(example, written(example.kernel, reads, writes, **example.constants)[0], reads)


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in examples(37, 30)
                                     if KERNELS[e.kernel].reference.__module__.rpartition(".")[2] in IN_16_BITS],
                         ids=str)
def test_sums_of_float16_are_made_in_float32(example):
    """The result is rounded once."""
    reads, writes = arrays(example, "float16")
    assert_close(example, written(example.kernel, reads, writes, **example.constants)[0], reads)


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", [p for p in of_sizes((3, 4), (37, 300)) if p.values[0].kernel in IN_PLACE])
def test_updates_may_be_in_place(example, dtype):
    for reads, writes in in_place(example, dtype):
        before = [r.copy() for r in reads]
        run_kernel(example.kernel, reads, writes, constants=example.constants)
        assert_close(example, writes, before)


@pytest.mark.few(34)
@pytest.mark.parametrize("example", [p for p in of_sizes((3, 4), (37, 300)) if p.values[0].kernel in STRIDED])
def test_strided_operands(example):
    reads, writes = arrays(example, "float64")
    run_kernel(example.kernel, strided(reads), writes, constants=example.constants)
    assert_close(example, writes, reads)


def test_every_kernel_has_a_cuda_form():
    ours = {name: k for name, k in KERNELS.items() if k.reference.__module__.startswith("minidl.")}
    assert [name for name, k in ours.items() if k._cuda is None] == []
