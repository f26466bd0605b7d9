"""Matrix products, the affine layer and sums over rows on CUDA, run on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cuda_agree import near, written
from cuda_on_cpu import run, run_kernel
from forms import blank, exact
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.kernels import cuda
from minidl.kernels.linear import dense, dense_copies, dense_work, layout, product
from minidl.kernels.sums import cuda_row_sums, cuda_row_sums_work

RTOL = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-13}


def numbers(*shape, dtype="float64", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def forms(x):
    """The same values as they may lie in memory."""
    yield x
    yield np.asfortranarray(x)
    wide = np.repeat(x, 2, axis=-1)[..., ::2]
    yield wide
    if x.ndim > 2:
        yield np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, 0)), 0, 1)


# ------------------------------------------------------------------------------------------------------- sums over rows
@pytest.mark.parametrize("dtype", list(RTOL))
@pytest.mark.parametrize(("rows", "columns"),
                         [(0, 3), (1, 1), (31, 33), (257, 1), (1000, 7), (3000, 16), (2100, 70), (3, 0)])
def test_row_sums(rows, columns, dtype):
    base = (numbers(rows, columns) + 1).astype(dtype)
    for x in forms(base):
        found = []
        for seed in (0, 7):
            out = np.full(columns, np.nan, dtype)
            work = [np.full(s, np.nan, t) for s, t in cuda_row_sums_work(rows, columns)]
            for call in cuda_row_sums(x, out, *work):
                run(call, seed)
            found.append(out)
        near(found[:1], [base.astype("float64").sum(axis=0)], RTOL[dtype])
        assert found[0].tobytes() == found[1].tobytes()


@given(rows=st.integers(1, 2**33), columns=st.integers(1, 2**20))
def test_row_sums_of_any_size_fit_a_grid(rows, columns):
    """Nothing of this size is run: the launches' geometry alone, on arrays that repeat one element."""
    x, out = np.broadcast_to(np.zeros((), "float32"), (rows, columns)), np.empty(columns, "float32")
    work = [np.broadcast_to(np.zeros((), t), s) for s, t in cuda_row_sums_work(rows, columns)]
    calls = cuda_row_sums(x, out, *work)
    parts = math.prod(work[0].shape[:1]) if work else 1
    for call in calls:
        cuda.check(call)
        assert math.prod(call.threads) == 512
        assert call.threads[0] & (call.threads[0] - 1) == 0
        assert call.blocks[0] * call.threads[0] >= columns
    assert calls[0].blocks[1] == parts
    assert parts * calls[0].arguments[-1] >= rows
    assert sum(math.prod(s) for s, _ in cuda_row_sums_work(rows, columns)) < 2**20  # little beside what is added


# ------------------------------------------------------------------------------------------------------------- products
def blas(p):
    """What cuBLAS would do: reads the elements where `layout` says that they are, and no others."""
    def matrices(x):
        transposed, leading, count, apart = layout(x)
        r, c = x.shape[-2:]
        outer, inner = (c, r) if transposed else (r, c)
        assert leading >= inner > 0
        size = x.dtype.itemsize
        lying = np.lib.stride_tricks.as_strided(x, (count, outer, inner), (apart * size, leading * size, size))
        return lying.swapaxes(1, 2) if transposed else lying

    a, b, out = map(matrices, (p.a, p.b, p.out))
    assert len({len(a), len(b), len(out)}) == 1
    y = a @ b + (0 if p.bias is None else p.bias)
    out[...] = y + out if p.accumulate else y


@settings(max_examples=drawn(300), deadline=None)
@given(st.data())
def test_products_are_laid_out_as_a_blas_wants(data):
    lead = data.draw(st.lists(st.integers(1, 3), max_size=3))
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))

    def operand(r, c, own_lead):
        """Axes in any order, parts of a larger array, repeated axes."""
        shape = [*own_lead, r, c]
        order = data.draw(st.permutations(range(len(shape))))
        steps = [data.draw(st.sampled_from((1, 1, 1, 2))) for _ in shape]
        whole = numbers(*(shape[i] * steps[i] for i in order))
        x = whole[tuple(slice(None, None, steps[i]) for i in order)].transpose(np.argsort(order))
        if data.draw(st.integers(0, 5)) == 0:
            x = np.broadcast_to(x[..., :1], shape)
        assert x.shape == tuple(shape)
        return x

    def part(lead):
        """Leading axes that broadcast to `lead`."""
        return [data.draw(st.sampled_from((length, length, 1)))
                for length in lead][data.draw(st.integers(0, len(lead))) :]

    a, b = operand(m, k, lead), operand(k, n, part(lead))
    if data.draw(st.booleans()):
        a, b = a[tuple(slice(0, 1) if data.draw(st.booleans()) else slice(None) for _ in lead)], operand(k, n, lead)
    bias = numbers(n) if data.draw(st.booleans()) else None
    accumulate = data.draw(st.booleans())
    before = numbers(*lead, m, n, seed=3)
    out = before.copy() if data.draw(st.booleans()) else np.repeat(before, 2, axis=-2)[..., ::2, :]
    work = [np.full(s, np.nan, t) for s, t in dense_work(a, b)]
    (x, y), copies = dense([a, b], work)
    assert len(copies) <= 1
    for call in copies:
        run(call)
    calls = product(x, y, out, bias, accumulate)
    assert sum(isinstance(call, cuda.Product) for call in calls) <= math.prod(lead)
    for call in calls:  # the bias of float64 is added by a launch of its own
        (blas if isinstance(call, cuda.Product) else run)(call)
    expected = a @ b + (0 if bias is None else bias) + (before if accumulate else 0)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


def test_products_are_few():
    """One for what lies in one piece: a taller matrix, transposed operands, heads; else one an index of
    the shortest axis."""
    def calls(a, b, shape):
        assert not dense_work(a, b)
        return product(a, b, np.empty(shape))

    (tall,) = calls(numbers(5, 6, 3, 4), numbers(4, 2), (5, 6, 3, 2))
    assert tall.a.shape == (90, 4)
    assert len(calls(numbers(5, 6, 3, 4), numbers(5, 6, 2, 4).swapaxes(-1, -2), (5, 6, 3, 2))) == 1
    assert len(calls(numbers(5, 6, 4, 3).swapaxes(-1, -2), numbers(4, 2), (5, 6, 3, 2))) == 1
    assert len(calls(numbers(5, 1, 3, 4), numbers(1, 6, 4, 2), (5, 6, 3, 2))) == 5
    assert len(dense_work(numbers(5, 3, 6, 4).swapaxes(1, 2))) == 1  # heads of a projection
    assert len(calls(numbers(1, 3, 6, 4).swapaxes(1, 2), numbers(1, 3, 6, 4).transpose(0, 2, 3, 1), (1, 6, 3, 3))) == 1
    with pytest.raises(ValueError, match="does not support operands"):
        product(numbers(3, 8)[:, ::2], numbers(4, 2), np.empty((3, 2)))


def test_products_of_nothing():
    out = np.full((2, 3), 7.0)
    assert product(numbers(0, 4), numbers(4, 3), np.empty((0, 3))) == []
    assert product(numbers(2, 0), numbers(0, 3), out, accumulate=True) == []
    for bias in (np.arange(3.0), None):
        for call in product(numbers(2, 0), numbers(0, 3), out, bias):
            run(call)
        assert (out == (0 if bias is None else bias)).all()
    run_kernel("matmul_add", [numbers(2, 0), numbers(0, 3), out], [out])
    assert (out == 0).all(), "nothing is added in place"


def test_dense_copies_of_many_axes_and_sizes():
    arrays = [numbers(2, 3, 2, 3, 2, 5).transpose(5, 1, 3, 0, 4, 2), numbers(700, 33).T,
              numbers(1, 1), numbers(0, 3, 2)]
    for seed in (0, 5):
        found = [np.full(a.shape, np.nan) for a in arrays]
        (call,) = dense_copies(list(zip(arrays, found, strict=True)))
        run(call, seed)
        for a, f in zip(arrays, found, strict=True):
            np.testing.assert_array_equal(a, f)


# -------------------------------------------------------------------------------------------------------------- kernels
def check(name, *reads, **constants):
    """The CUDA form against the reference in float64, in each form that the operands may lie in."""
    dtype, expected = reads[0].dtype, exact(name, reads, **constants)
    for strided in zip(*(list(forms(r))[:3] for r in reads), strict=True):
        near(written(name, strided, blank(expected, dtype), **constants)[0], expected, RTOL[dtype.name])


@pytest.mark.parametrize("dtype", list(RTOL))
@pytest.mark.parametrize(("n", "i", "o"), [(1, 1, 1), (31, 33, 7), (4, 257, 10), (5, 0, 3), (0, 4, 3), (1100, 3, 2)])
def test_linear(n, i, o, dtype):
    x, w, b, dy = (numbers(*s, dtype=dtype, seed=k) for k, s in enumerate([(n, i), (o, i), (o,), (n, o)]))
    check("linear", x, w)
    check("linear", x, w, b)
    check("linear_weight_grad", x, dy, bias=False)
    check("linear_weight_grad", x, dy, bias=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_dense_layer_is_one_call_that_may_end_in_relu(dtype):
    """Even in float64, where a larger product has no bias."""
    x, w, b, y = *(numbers(*shape, dtype=dtype) for shape in ((4, 3), (5, 3), (5,))), np.empty((4, 5), dtype)
    first, *rest = run_kernel("linear", [x, w, b], [y], constants={"act": "relu"})
    np.testing.assert_allclose(y, np.maximum(x @ w.T + b, 0), rtol=1e-5)
    assert (y == 0).any()
    assert isinstance(first, cuda.Product)
    assert (rest, first.bias.shape, first.act) == ([], (5,), "relu")
