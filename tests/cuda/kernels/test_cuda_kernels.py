"""Each kernel's CUDA form, run on the CPU, against its reference over NumPy in float64: the same calls as
of the CPU forms."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from cuda_agree import written
from cuda_on_cpu import run_kernel
from forms import exact
from helpers import IMPORTABLE, PATIENCE, ROOT, bits
from kernel_examples import IN_PLACE, STRIDED, Example, arrays, examples, in_place, strided

from minidl.kernels import KERNELS, cuda
from minidl.kernels.conv import Geometry

TOLERANCE = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-13}  #: of an array's norm
IN_16_BITS = ("elementwise", "reduce", "activation", "gelu", "linear", "product_add")


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
    """With the bits that are written elsewhere."""
    for reads, writes in in_place(example, dtype):
        before = [r.copy() for r in reads]
        apart, _ = written(example.kernel, before, writes, **example.constants)
        run_kernel(example.kernel, reads, writes, constants=example.constants)
        assert bits(*writes) == bits(*apart)
        assert_close(example, writes, before)


@pytest.mark.few(34)
@pytest.mark.parametrize("example", [p for p in of_sizes((3, 4), (37, 300)) if p.values[0].kernel in STRIDED])
def test_strided_operands(example):
    reads, writes = arrays(example, "float64")
    run_kernel(example.kernel, strided(reads), writes, constants=example.constants)
    assert_close(example, writes, reads)


POOL = {"window": (2, 2), "stride": (2, 2), "padding": (0, 0)}
NARROW = ((0, 3), (3, 0), (0, 0))
#: kernel, shapes of what is read (or arrays), shapes of what is written, constants
NOTHING = [
    *((name, [(0, 3)] * count, [(0, 3)], constants) for name, count, constants in (
        ("add", 2, {}), ("copy", 1, {}), ("relu", 1, {}), ("gelu_grad", 2, {}), ("fill", 1, {"value": 1.0}),
        ("cast", 1, {"dtype": "float64"}), ("maximum_grad", 3, {}), ("max_grad", 3, {"axes": (1,)}))),
    ("sum", [(0, 5)], [(0, 1)], {"axes": (1,)}), ("sum", [(3, 0)], [(1, 0)], {"axes": (0,)}),
    *((name, [shape] * (2 if name.endswith("grad") else 1), [shape], {}) for shape in NARROW
      for name in ("softmax", "softmax_grad", "log_softmax", "log_softmax_grad")),
    ("embedding", [(3, 4), np.ones(0, np.int64)], [(0, 4)], {}),
    ("embedding_grad", [np.ones(0, np.int64), (0, 0)], [(3, 0)], {"rows": 3}),
    ("max_pool2d", [(0, 4, 4, 3)], [(0, 2, 2, 3), np.empty((0, 2, 2, 3), np.int32)], POOL),
    ("max_pool2d_grad", [np.empty((0, 2, 2, 3), np.int32), (0, 2, 2, 3)], [(0, 4, 4, 3)], {"size": (4, 4), **POOL}),
    ("avg_pool2d", [(0, 4, 4, 3)], [(0, 2, 2, 3)], POOL),
    ("avg_pool2d_grad", [(0, 2, 2, 3)], [(0, 4, 4, 3)], {"size": (4, 4), **POOL}),
    ("batch_norm_input_grad", [(0, 3), *[(3,)] * 5, (0, 3)], [(0, 3)], {}),
    ("batch_norm_eval_input_grad", [(0, 3), (3,), (3,)], [(0, 3)], {}),
    ("layer_norm", [(0, 40)], [(0, 40), (0,), (0,)], {"eps": 1.0}),
    ("layer_norm_input_grad", [(0, 40), (0,), (0,), (0, 40)], [(0, 40)], {}),
    ("squeeze_excite", [(0, 2, 2, 5), (3, 1, 1, 5), (3,), (5, 1, 1, 3), (5,)],
     [(0, 2, 2, 5), *((0, 1, 1, n) for n in (5, 3, 5))], {}),
    ("matmul_add", [(0, 4), (4, 3), (0, 3)], [(0, 3)], {})]


@pytest.mark.parametrize(("name", "reads", "writes", "constants"), NOTHING, ids=str)
def test_nothing_is_launched_for_nothing(name, reads, writes, constants):
    assert run_kernel(name, *arrays(Example(name, reads, writes), "float64"), constants=constants) == []


@pytest.mark.parametrize(("name", "reads", "writes", "constants"), [
    ("relu", [(6, 4)], [(6, 4)], {}), ("avg_pool2d", [(1, 4, 4, 3)], [(1, 2, 2, 3)], POOL),
    ("conv2d", [(1, 5, 5, 3), (3, 3, 3, 1)], [(1, 3, 3, 3)], {"geometry": Geometry((1, 1), (0, 0), (1, 1), 3)})],
    ids=str)
def test_strided_arrays_are_refused_where_they_do_not_come(name, reads, writes, constants):
    reads, writes = arrays(Example(name, reads, writes), "float64")
    with pytest.raises((cuda.LaunchError, ValueError), match="contiguous"):
        run_kernel(name, [np.repeat(reads[0], 2, axis=-1)[..., ::2], *reads[1:]], writes, constants=constants)


def test_every_kernel_has_a_cuda_form():
    ours = {name: k for name, k in KERNELS.items() if k.reference.__module__.startswith("minidl.")}
    assert [name for name, k in ours.items() if k._cuda is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("file", ["ops/test_ops.py", "ops/test_vision_ops.py", "ops/test_sequence_ops.py",
                                  "autograd/test_tensor.py", "optim/test_optim.py", "ops/test_masks.py",
                                  "ops/test_by_index.py", "ops/test_experts.py", "nn/test_torch_layers.py"])
def test_ops_pass_their_tests_on_cuda_forms(file):
    """Finite differences and torch included."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "on_cuda_forms", "-p",
                           "no:cacheprovider", str(ROOT / "tests" / file)], cwd=ROOT, capture_output=True, text=True,
                          timeout=2 * PATIENCE, env={**os.environ, "PYTHONPATH": IMPORTABLE})
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
