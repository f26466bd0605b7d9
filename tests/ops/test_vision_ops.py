"""Convolution, batch norm, pooling and mobile activations: finite differences, torch, and each CPU form against its
reference."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forms import blank, exact, on_cpu, reference
from helpers import ROOT, bytes_allocated, drawn, python, random_array, refuses, torch_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import POOLS, TOLERANCE, same

import minidl as ml
from minidl import nn, ops
from minidl.core.tasks import Kind
from minidl.kernels import KERNELS, vectors
from minidl.kernels.beside import together
from minidl.kernels.conv import PIXELS, Geometry
from minidl.kernels.depthwise import depthwise_work
from minidl.kernels.pool import TOGETHER
from minidl.testing.checks import gradcheck


@st.composite
def geometries(draw: Any) -> tuple[Any, ...]:
    """Convolutions at random, with several blocks of pixels, uneven last ones, and one filter per channel."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    each = draw(st.sampled_from([1, 2, 5, 17, 32]))
    outputs = groups * draw(st.sampled_from([1, 2, 17, 32]))
    taps = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride, dilation = (draw(st.tuples(st.integers(1, 3), st.integers(1, 2))) for _ in range(2))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    reach = [dilation[a] * (taps[a] - 1) + 1 - 2 * padding[a] for a in (0, 1)]
    size = [max(1, reach[a]) + draw(st.sampled_from([0, 1, 2, 7, 40])) for a in (0, 1)]
    return (draw(st.integers(1, 5)), *size, groups * each), (outputs, *taps, each), stride, padding, dilation, groups


@settings(max_examples=drawn(80), deadline=None)
@given(geometries(), st.integers(0, 1000))
def test_conv2d_forms_agree(case: Any, seed: int) -> None:
    x, w, stride, padding, dilation, groups = case
    geometry = Geometry(stride, padding, dilation, groups)
    rng = np.random.default_rng(seed)
    x, w, b = rng.standard_normal(x), rng.standard_normal(w), rng.standard_normal(w[0])
    y = KERNELS["conv2d"].reference(np, x, w, b, geometry=geometry)
    dy = rng.standard_normal(y.shape)
    agree("conv2d", [x, w, b], geometry=geometry)
    agree("conv2d_input_grad", [dy, w], size=x.shape[1:3], geometry=geometry)
    agree("conv2d_weight_grad", [x, dy], taps=w.shape[1:3], bias=bool(seed % 2), geometry=geometry)
    first, end = sorted(rng.choice(len(w) + 1, 2, replace=False).tolist())
    agree("conv2d_weight_grad", [x, dy[..., first:end]], taps=w.shape[1:3], bias=bool(seed % 2), geometry=geometry,
          rows=(first, len(w)))


@pytest.mark.parametrize(("samples", "size", "stride", "padding", "dilation"), [
    (4, (2, 2), 1, 1, 1), (5, (4, 3), 1, 1, 1), (16, (4, 4), 2, 1, 1), (4, (1, 1), 1, 1, 1), (5, (5, 6), 2, 0, 1),
    (4, (7, 8), 1, 2, 1), (6, (4, 4), 3, 2, 2)])
def test_few_pixels_have_the_bits_of_many(samples: int, size: tuple[int, int], stride: int, padding: int, dilation: int,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops of `small` and of `direct` give equal bits, as a whole and in parts."""
    geometry = Geometry((stride,) * 2, (padding,) * 2, (dilation,) * 2, 1)
    shapes = (samples, *size, 37), (21, 3, 3, 37), (21,)
    x, w, b = (random_array(shape, seed, "float32") for seed, shape in enumerate(shapes))
    y = KERNELS["conv2d"].reference(np, x, w, b, geometry=geometry)
    dy = random_array(y.shape, 4, "float32")
    calls = [("conv2d", [x, w, b], {}), ("conv2d_input_grad", [dy, w], {"size": size})]
    small = [agree(name, reads, 2e-5, geometry=geometry, **more)[0] for name, reads, more in calls]
    dw = agree("conv2d_weight_grad", [x, dy], 2e-5, taps=(3, 3), bias=False, geometry=geometry)[0]
    for rows in ((0, 8), (8, 21), (3, 4)):
        part = agree("conv2d_weight_grad", [x, dy[..., slice(*rows)]], 2e-5, taps=(3, 3), bias=False, geometry=geometry,
                     rows=(rows[0], 21))
        np.testing.assert_array_equal(part[0], dw[slice(*rows)])
    for (name, reads, more), whole in zip(calls, small, strict=True):
        part = agree(name, [reads[0][:4], *reads[1:]], 2e-5, geometry=geometry, **more)[0]
        np.testing.assert_array_equal(part, whole[:4])
    monkeypatch.setattr("minidl.kernels.conv.TAPS", 0)
    for (name, reads, more), before in zip(calls, small, strict=True):
        np.testing.assert_array_equal(agree(name, reads, 2e-5, geometry=geometry, **more)[0], before)


@pytest.mark.few(4)
@pytest.mark.parametrize(("samples", "size", "padding", "channels", "outputs"), [
    (6, (7, 6), (1, 1), 32, 48), (3, (8, 9), (0, 2), 64, 32), (3, (9, 8), (3, 1), 32, 32), (16, (4, 4), (1, 1), 16, 64),
    (1, (17, 15), (2, 0), 64, 16), (40, (6, 6), (0, 0), 32, 32), (2, (16, 16), (1, 1), 144, 48),
    (4, (16, 16), (1, 1), 16, 16)])
def test_fewer_products_for_many_channels(samples: int, size: tuple[int, int], padding: tuple[int, int], channels: int,
                                          outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops of `winograd`, and the loops of other processors with the same scratch arrays, are right as a whole and
    in parts of the outputs. Errors are no larger, of the weights' gradient at most half as large again. The bits of a
    sample do not depend on the samples beside it."""
    geometry = Geometry((1, 1), padding, (1, 1), 1)
    shapes = (samples, *size, channels), (outputs, 3, 3, channels), (outputs,)
    x, w, b = (random_array(shape, seed, "float32") for seed, shape in enumerate(shapes))
    y = KERNELS["conv2d"].reference(np, x, w, b, geometry=geometry)
    dy, own = random_array(y.shape, 4, "float32"), {"taps": (3, 3), "bias": True, "geometry": geometry}
    calls: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("conv2d", [x, w, b], {"geometry": geometry}),
        ("conv2d_input_grad", [dy, w], {"size": size, "geometry": geometry}), ("conv2d_weight_grad", [x, dy], own)]
    errors = []
    for wide in dict.fromkeys((vectors.AVX2, False)):
        monkeypatch.setattr(vectors, "AVX2", wide)
        found = [agree(name, reads, 2e-4, **constants)[0] for name, reads, constants in calls]
        for rows in ((0, 8), (0, 16), (8, outputs), (outputs - 3, outputs)):
            part = agree("conv2d_weight_grad", [x, dy[..., slice(*rows)]], 2e-4, **own, rows=(rows[0], outputs))[0]
            np.testing.assert_array_equal(part, found[2][slice(*rows)])
        for (name, reads, constants), whole in zip(calls[:2], found, strict=False):
            if samples < 3 or whole[1:, ..., 0].size < PIXELS:
                continue
            part = agree(name, [reads[0][1:], *reads[1:]], 2e-4, **constants)[0]
            np.testing.assert_array_equal(part, whole[1:])
        errors.append([np.square(v - exact(name, reads, **constants)[0]).mean() ** 0.5
                       for v, (name, reads, constants) in zip(found, calls, strict=True)])
    assert (np.array(errors[0]) <= np.array([1, 1, 1.5]) * errors[-1]).all()


@pytest.mark.slow
@pytest.mark.may_skip
@pytest.mark.skipif(not vectors.WIDE, reason="the test before is this one if there is no AVX-512")
def test_fewer_products_with_half_as_wide_registers() -> None:
    said = "from minidl.kernels import vectors; assert (vectors.WIDE, vectors.AVX2) == (False, True)"
    same = "-m", "pytest", "-q", "-n0", "-m", "", __file__, "-k", test_fewer_products_for_many_channels.__name__
    for command in (("-c", said), same):
        done = python(*command, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("x", "w", "stride", "padding", "pixels"), [
    ((5, 28, 28, 1), (6, 5, 5, 1), 1, (2, 2), 2), ((4, 7, 10, 3), (3, 3, 3, 3), 1, (0, 1), 5),
    ((1, 9, 21, 2), (1, 5, 5, 2), 2, (2, 2), 11), ((3, 8, 8, 3), (8, 3, 5, 3), 1, (1, 2), 2),
    ((3, 8, 7, 3), (8, 3, 3, 3), 1, (1, 1), 1), ((3, 8, 8, 3), (8, 1, 1, 3), 1, (0, 0), 1),
    ((3, 8, 8, 3), (12, 3, 3, 3), 1, (1, 1), 1), ((3, 0, 8, 3), (4, 1, 3, 3), 1, (0, 1), 4)])
def test_few_outputs_of_neighbouring_pixels_are_made_together(x: Any, w: Any, stride: int, padding: Any, pixels: int
                                                              ) -> None:
    """With and without a bias and a relu; where lines cannot be divided, as before."""
    geometry = Geometry((stride, stride), padding, (1, 1), 1)
    y = (x[0], *geometry.output(x[1:3], w[1:3]), w[0])
    assert together(w[0], y[2], w[2], stride, 1, 1) == pixels
    x, w, b, dy = (random_array(shape, seed, "float64") for seed, shape in enumerate((x, w, w[:1], y)))
    for bias, act in (([], ""), ([b], ""), ([b], "relu")):
        agree("conv2d", [x, w, *bias], geometry=geometry, **({"act": act} if act else {}))
    agree("conv2d_input_grad", [dy, w], size=x.shape[1:3], geometry=geometry)
    dw = agree("conv2d_weight_grad", [x, dy], taps=w.shape[1:3], bias=True, geometry=geometry)[0]
    if len(w) > 1:
        part = agree("conv2d_weight_grad", [x, dy[..., 1:]], taps=w.shape[1:3], bias=True, geometry=geometry,
                     rows=(1, len(w)))[0]
        np.testing.assert_array_equal(part, dw[1:])


@pytest.mark.few(3)
@pytest.mark.parametrize(("size", "channels", "stride"),
                         [(16, 24, 1), (4, 120, 1), (6, 100, 1), (5, 300, 1), (16, 24, 2), (12, 16, 1)])
def test_depthwise_lines_of_several_runs(size: int, channels: int, stride: int) -> None:
    """Where a line is cut into runs of pixels."""
    geometry = Geometry((stride, stride), (1, 1), (1, 1), channels)
    shapes = (2, size, size, channels), (channels, 3, 3, 1), (2, *geometry.output((size, size), (3, 3)), channels)
    x, w, dy = (random_array(shape, seed, "float32") for seed, shape in enumerate(shapes))
    agree("conv2d", [x, w], 2e-5, geometry=geometry)
    agree("conv2d_input_grad", [dy, w], 2e-5, size=(size, size), geometry=geometry)
    agree("conv2d_weight_grad", [x, dy], 2e-5, taps=(3, 3), bias=False, geometry=geometry)


def agree(name: str, reads: list[Any], tolerance: float = 1e-11, **constants: Any) -> Sequence[Any]:
    """Runs a kernel's CPU form on arrays full of NaN and compares with its reference; twice, for the same bits."""
    expected, before = reference(name, reads, **constants), [v.copy() for v in reads]
    results = [on_cpu(name, reads, blank(expected), **constants) for _ in range(2)]
    for found, again, wanted in zip(*results, expected, strict=True):
        np.testing.assert_array_equal(found, again)
        scale = max(1.0, np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * scale, err_msg=name)
    for then, now in zip(before, reads, strict=True):
        np.testing.assert_array_equal(then, now)
    return results[0]


DIGEST = """
import hashlib
import numpy as np
from minidl.kernels import KERNELS, vectors
from minidl.kernels.beside import together
from minidl.kernels.conv import PIXELS, Geometry

rng, digest = np.random.default_rng(0), hashlib.sha256()
for stride in (1, 2):
    geometry = Geometry((stride, stride), (1, 1), (1, 1), 1)
    shapes = (2, 9, 9, 5), (18, 3, 3, 5), (2, *geometry.output((9, 9), (3, 3)), 18)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in shapes)
    for name, reads, out, constants in (("conv2d", [x, w], dy, {}), ("conv2d_input_grad", [dy, w], x, {"size": (9, 9)}),
                                        ("conv2d_weight_grad", [x, dy], w, {"taps": (3, 3), "bias": False})):
        kernel, y = KERNELS[name], np.empty_like(out)
        work = [np.empty(*s) for s in kernel.work(reads, [y], geometry=geometry, **constants)]
        for thunk in kernel.bind(reads, [y], work, {"geometry": geometry, **constants}):
            thunk()
        digest.update(y.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor is named")
def test_conv2d_has_the_same_bits_on_a_processor_with_shorter_vectors(tmp_path: Path) -> None:
    older = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [python("-c", DIGEST, **more) for more in ({}, older)]
    assert runs[0].returncode == runs[1].returncode == 0, runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.slow
def test_conv2d_touches_no_memory_but_its_arrays() -> None:
    done = python("tests/ops/guarded_convolutions.py", "100", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


@pytest.mark.few(2)
@pytest.mark.parametrize(("groups", "each"), [(1, 16), (1, 1), (4, 4), (16, 1)])
def test_conv2d_calls_allocate_nothing(groups: int, each: int) -> None:
    """Everything large is among the arrays that were bound; a call makes small Python objects at most."""
    geometry = Geometry((1, 1), (1, 1), (1, 1), groups)
    x, w = np.ones((8, 16, 16, groups * each), "f"), np.ones((16, 3, 3, each), "f")
    dy = np.ones((8, 16, 16, 16), "f")
    for name, reads, writes, constants in [
            ("conv2d", [x, w], [dy], {}), ("conv2d_input_grad", [dy, w], [x], {"size": (16, 16)}),
            ("conv2d_weight_grad", [x, dy], [w], {"taps": (3, 3), "bias": False})]:
        kernel = KERNELS[name]
        out = [np.empty_like(v) for v in writes]
        work = [np.empty(shape, dtype) for shape, dtype in kernel.work(reads, out, geometry=geometry, **constants)]
        thunks = kernel.bind(reads, out, work, {"geometry": geometry, **constants})
        assert bytes_allocated(lambda thunks=thunks: [thunk() for thunk in thunks] and None) < 8192, name


def test_conv2d_errors() -> None:
    def of(x: Any, w: Any, bias: Any = None, **arguments: Any) -> Any:
        arrays = (None if shape is None else ml.array(np.ones(shape, "f")) for shape in (x, w, bias))
        return lambda: ops.conv2d(*arrays, **arguments)

    refuses((of((2, 5, 5), (3, 3, 3, 2)), "needs an input"), (of((2, 5, 5, 3), (3, 3, 3, 2)), "does not fit weight"),
            (of((2, 5, 5, 4), (3, 3, 3, 2), groups=2), "a multiple of 2 outputs"),
            (of((2, 5, 5, 2), (3, 7, 3, 2)), "larger than the image"),
            (of((2, 5, 5, 2), (3, 3, 3, 2), dilation=3), "larger than the image"),
            (of((2, 5, 5, 2), (3, 3, 3, 2), stride=0), "stride is 0"),
            (of((2, 5, 5, 2), (3, 3, 3, 2), padding=(1, -1)), "padding is"),
            (of((2, 5, 5, 2), (3, 3, 3, 2), (2,)), "bias"), (of((2, 5, 5, 2), (0, 3, 3, 2)), "has no elements"),
            (of((2, 5, 5, 0), (3, 1, 1, 0)), "has no elements"))


@pytest.mark.few(1)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3])
def test_a_convolution_of_no_images_has_gradients_of_zero(groups: int, window: int) -> None:
    x, w, b = (ml.Parameter(np.ones(s, "f")) for s in ((0, 5, 5, 4), (4, window, window, 4 // groups), (4,)))
    y = ops.conv2d(x * 1.0, w, b, padding=window // 2, groups=groups)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 5, 5, 4)
    assert not w.grad.numpy().any()
    assert not b.grad.numpy().any()


# ----------------------------------------------------------------------------------------------- batch norm
def statistics(channels: int, dtype: str = "float64") -> list[Any]:
    """Running mean, variance and count as arrays."""
    return [random_array((channels,), 5, dtype), random_array((channels,), 6, dtype, 0.5, 2.0), np.array(3, np.int64)]


@pytest.mark.few(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2), (2, 2, 3, 2)])
def test_batch_norm_finite_differences(shape: tuple[int, ...], training: bool) -> None:
    channels = shape[-1]
    running = [ml.array(v) for v in statistics(channels)]
    arrays = [random_array(shape, 1), random_array((channels,), 2), random_array((channels,), 3)]
    gradcheck(lambda x, w, b: ops.batch_norm(x, w, b, running, training=training), *arrays, rtol=2e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", ["nothing", "weights", "input", "bias"])
def test_batch_norm_with_some_operands_frozen(frozen: str, training: bool) -> None:
    """The sums are made wherever they are first needed."""
    arrays = [random_array((3, 2, 2, 2), 1), random_array((2,), 2), random_array((2,), 3)]

    def gradients(fixed: set[int]) -> list[Any]:
        running = [ml.array(v) for v in statistics(2)]
        operands = [ml.array(a) if i in fixed else ml.Parameter(a) for i, a in enumerate(arrays)]
        y = ops.batch_norm(*operands, running, training=training)
        (y * ml.array(random_array(y.shape, 4))).sum().backward()
        return [None if t.grad is None else t.grad.numpy() for t in operands]

    whole = gradients(set())
    fixed = {"nothing": set(), "weights": {1, 2}, "input": {0}, "bias": {2}}[frozen]
    for i, (g, w) in enumerate(zip(gradients(fixed), whole, strict=True)):
        if i in fixed:
            assert g is None
        else:
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_batch_norm_in_eval_mode_is_differentiated_with_the_mean_that_it_used(between: bool, recorded: bool) -> None:
    x, z = random_array((4, 3), 1), random_array((4, 3), 5)
    operands = [ml.Parameter(random_array(s, i)) for i, s in enumerate([(4, 3), (3,), (3,)], 1)]
    running = [ml.array(v) for v in statistics(3)]

    def step(x: Any, z: Any) -> Any:
        y = ops.batch_norm(operands[0] * x, *operands[1:], running, training=False)
        if between:
            ops.batch_norm(z, *operands[1:], running)
        (y * y).sum().backward()
        return tuple(p.grad for p in operands)

    found = ml.SequentialExecutor(ml.record(step, x, z))(x, z) if recorded else step(ml.array(x), ml.array(z))
    still = [ml.array(v) for v in statistics(3)]
    again = [ml.Parameter(p.numpy()) for p in operands]
    y = ops.batch_norm(again[0] * ml.array(x), *again[1:], still, training=False)
    (y * y).sum().backward()
    for g, p in zip(found, again, strict=True):
        np.testing.assert_array_equal(g.numpy(), p.grad.numpy())


def test_batch_norm_is_differentiated_twice_with_sums_of_their_own() -> None:
    """Also where nothing but the output gradient is asked for."""
    x = ml.Parameter(random_array((4, 3), 1))
    y = ops.batch_norm(x * 1.0 + ml.array(random_array((4, 3), 2)), *(ml.array(random_array((3,), i)) for i in (3, 4)),
                       [ml.array(v) for v in statistics(3)])
    first, second = ((y * ml.array(random_array((4, 3), i))).sum() for i in (6, 7))
    found = []
    for loss in (first, second, second, first):
        x.grad = None
        loss.backward(retain_graph=True)
        found.append(x.grad.numpy().tobytes())
    assert found[0] == found[3] != found[1] == found[2]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("shape", "momentum", "eps"), [((7, 5), 0.1, 1e-5), ((3, 4, 5), 0.3, 1e-3),
                                                        ((33, 4, 5, 17), 0.01, 1e-3)])
def test_batch_norm_torch(shape: tuple[int, ...], momentum: float, eps: float, training: bool, dtype: str) -> None:
    torch = torch_or_skip()
    channels = shape[-1]
    axes = (0, len(shape) - 1, *range(1, len(shape) - 1)) if len(shape) > 2 else None
    back = (0, *range(2, len(shape)), 1) if axes else None
    ours = [ml.array(v) for v in statistics(channels, dtype)]
    theirs = [torch.from_numpy(v) for v in statistics(channels, dtype)]
    same(lambda x, w, b: ops.batch_norm(x, w, b, ours, training=training, momentum=momentum, eps=eps),
         lambda x, w, b: torch.nn.functional.batch_norm(x, *theirs[:2], w, b, training, momentum, eps),
         [random_array(shape, 1) + 3, *(random_array((channels,), i) for i in (2, 3))], dtype, (axes, None, None), back)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy() + training * (mine.dtype == "int64"), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(2, 1), (65, 3), (5, 7, 4, 20), (128, 16)])
def test_batch_norm_forms_agree(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    channels = shape[-1]
    x, dy, w, b = (rng.standard_normal(s) + 2 for s in (shape, shape, channels, channels))
    running = statistics(channels)
    _, mean, rstd, *_ = agree("batch_norm", [x, w, b, *running], eps=1e-5, momentum=0.1)
    moved = agree("batch_norm", [x, w, b, *running], eps=1e-5, momentum=0.1)[3:]
    own = agree("batch_norm", [x, w, b, *(np.zeros_like(v) for v in running)], eps=1e-5, momentum=1.0)[3:5]
    assert [v.tobytes() for v in agree("batch_norm_move", [*own, *running], momentum=0.1)] == [
        v.tobytes() for v in moved]
    agree("batch_norm_eval", [x, w, b, *running[:2]], eps=1e-5)
    dw, db = agree("batch_norm_weight_grad", [x, mean, rstd, dy])
    agree("batch_norm_input_grad", [x, mean, rstd, w, dw, db, dy])
    agree("batch_norm_eval_input_grad", [dy, w, rstd])


def test_batch_norm_sums_precede_the_output_gradient() -> None:
    """W -> O is an edge of the graph, and running statistics are a state that the forward task writes."""
    first, norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
    graph = ml.record(lambda x: norm(first(x)).sum().backward(), np.ones((2, 2, 2, 2), "f"))
    unit = next(t.unit for t in graph if any(call.kernel == "batch_norm" for call in graph.launches[t.index]))
    by_kind = {t.kind: t.index for t in graph if t.unit == unit}
    assert set(by_kind) == {Kind.F, Kind.O, Kind.W}
    assert by_kind[Kind.W] in graph.preds[by_kind[Kind.O]].tolist()
    assert by_kind[Kind.W] < by_kind[Kind.O]


def test_recording_changes_no_statistics() -> None:
    norm = nn.BatchNorm2d(3)
    before = norm.state_dict()
    ml.record(lambda x: norm(x), np.ones((2, 2, 2, 3), "f"))
    for name, value in norm.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    norm(np.ones((2, 2, 2, 3), "f"))
    assert norm.num_batches_tracked.item() == 1
    norm.eval()(np.ones((1, 1, 1, 3), "f"))
    assert norm.num_batches_tracked.item() == 1


def test_batch_norm_errors() -> None:
    refuses((lambda: nn.BatchNorm1d(3)(np.ones((1, 3), "f")), "one value per channel"),
            (lambda: nn.BatchNorm2d(3)(np.ones((2, 2, 2, 4), "f")), "does not fit weight"),
            (lambda: nn.BatchNorm2d(3)(np.ones((2, 3), "f")), "needs 4 axes"),
            (lambda: ops.batch_norm(*(ml.array(np.ones(s)) for s in ((3, 0), (0,), (0,))), [
                ml.array(v) for v in statistics(0)], training=False), r"shape \(3, 0\) has no channels"))


# ----------------------------------------------------------------------------------------------- pools
@pytest.mark.few(10)
@pytest.mark.parametrize("times", [1, TOGETHER + 1])
@pytest.mark.parametrize("case", POOLS)
def test_pool_forms_agree(case: str, times: int) -> None:
    shape, window, stride, padding, *ceil = POOLS[case]
    shape = (*shape[:3], times * shape[3])
    given = {"window": window, "stride": stride or window, "padding": padding}
    more = {"ceil": True} if ceil else {}
    geometry = {name: ops.windows.lengths(value, name, 0) for name, value in given.items()}
    x = random_array(shape, 1)
    x[0, 0, 0] = np.nan
    y, tap = agree("max_pool2d", [x], **geometry, **more)
    assert np.isnan(y[0, 0, 0]).all()
    dy = random_array(y.shape, 2)
    agree("max_pool2d_grad", [tap, dy], size=shape[1:3], **geometry)
    agree("avg_pool2d", [random_array(shape, 1)], **geometry, **more)
    agree("avg_pool2d_grad", [dy], size=shape[1:3], **geometry)


@settings(max_examples=drawn(60), deadline=None)
@given(st.tuples(st.integers(1, 3), st.integers(2, 7), st.integers(2, 7), st.integers(1, 2 * TOGETHER + 1)),
       st.integers(0, 1000))
def test_pooling_pixels_in_fours_writes_the_memory_of_its_samples_alone(shape: Any, seed: int) -> None:
    """Its vectors reach over a pixel's channels: equal values, NaN, and neighbours of a part of the samples."""
    rng, geometry = np.random.default_rng(seed), {"window": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    x = rng.choice(np.array([0, 0, 1, 2, np.nan], rng.choice(["float32", "float64"])), shape)
    y, tap = KERNELS["max_pool2d"].reference(np, x, **geometry)
    dy = random_array(y.shape, seed, str(x.dtype))
    dx = KERNELS["max_pool2d_grad"].reference(np, tap, dy, size=shape[1:3], **geometry)
    for name, reads, expected, more in (("max_pool2d", [x], [y, tap], {}),
                                        ("max_pool2d_grad", [tap, dy], [dx], {"size": shape[1:3]})):
        whole = [np.full((len(array) + 2, *array.shape[1:]), 77, array.dtype) for array in expected]
        for thunk in KERNELS[name].bind(reads, [array[1:-1] for array in whole], [], geometry | more):
            thunk()
        for array, wanted in zip(whole, expected, strict=True):
            np.testing.assert_array_equal(array[1:-1], wanted, strict=True)
            assert (array[[0, -1]] == 77).all()


def test_pool_errors() -> None:
    image = ml.array(np.ones((1, 4, 4, 1), "f"))
    refuses((lambda: ops.max_pool2d(image, 5), "larger than the image"),
            (lambda: ops.avg_pool2d(image, 2, padding=2), "more than half"),
            (lambda: ops.max_pool2d(image[0], 2), "needs an image"))


def test_rows_that_no_window_reaches_have_room() -> None:
    """Two windows of 2 at rows 0 and 5 of an image of 8 with a row of zeros around it: kernels copy all 8."""
    (rows, _), _ = depthwise_work((1, 8, 8, 2), (2, 2, 2, 1), (1, 2, 2, 2), ((5, 5), (1, 1), (1, 1)), "float32")[0]
    assert rows >= 1 + 8


# ----------------------------------------------------------------------------------------------- layers
def test_weights_in_memory_and_in_a_state_dict() -> None:
    layer = nn.Conv2d(3, 4, 2)
    shapes = {name: (v.shape, v.flags.c_contiguous) for name, v in layer.state_dict().items()}
    assert shapes == {"weight": ((4, 3, 2, 2), True), "bias": ((4,), True)}
    with pytest.raises(ValueError, match="in the model"):
        layer.load_state_dict(layer.state_dict() | {"weight": layer.weight.numpy()})
    before = layer.state_dict()["weight"]
    layer.astype("float64")
    assert layer.weight.dtype == "float64"
    np.testing.assert_array_equal(layer.state_dict()["weight"], before.astype("float64"))


def test_images_with_channels_first_are_told() -> None:
    x = np.ones((2, 3, 8, 8), np.float32)
    for layer in (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(3)):
        with pytest.raises(ml.ShapeError, match=r"looks like \(n, c, h, w\): x.transpose\(0, 2, 3, 1\)"):
            layer(x)
        layer(x.transpose(0, 2, 3, 1))


def test_a_convolution_counts_a_product_and_a_sum_for_each_tap() -> None:
    w = ml.Parameter(random_array([5, 3, 3, 3]))
    graph = ml.record(lambda x: ops.conv2d(x, w, padding=1), random_array([2, 6, 6, 3]))
    assert graph.flops.sum() == 2 * (2 * 6 * 6 * 5) * (3 * 3 * 3)
