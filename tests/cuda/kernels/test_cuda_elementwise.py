"""Elementwise kernels, reductions and copies on CUDA, run on the CPU: shapes, strides and numbers that are
easily got wrong."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from cuda_on_cpu import run_kernel
from forms import exact
from helpers import bits, drawn, random_array
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.kernels import KERNELS, cuda
from minidl.kernels.reduce import _plan

SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 7.0, 2.5, -2.5, 1e-30, 80.0, -80.0, np.inf, -np.inf, np.nan])
quick = settings(deadline=None, max_examples=drawn(60))


def run(name, reads, size, kind=None, /, seed=0, **constants):
    """What a kernel writes, of this shape and type, into memory that was full of NaN (or true)."""
    kind = np.dtype(kind or reads[0].dtype)
    y = np.full(size, np.nan if kind.kind in "fV" else 1, kind)
    run_kernel(name, reads, [y], seed=seed, **constants)
    return y


def wanted(name, *reads, **constants):
    """The reference in float64."""
    return exact(name, reads, **constants)[0]


def packed(calls):
    """The `Strides` of a launch."""
    (content,) = (a.content for a in calls[0].arguments if isinstance(a, cuda.Struct))
    return np.frombuffer(content, cuda.STRIDES)[0]


@st.composite
def views(draw, axes=5, longest=5):
    """Two arrays that broadcast to a shape, seen in any order of axes, with gaps, from any place."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 4, longest]), max_size=axes)))

    def view(seed, broadcast):
        own = [draw(st.sampled_from([n, 1])) if broadcast else n for n in shape]
        if broadcast:
            own = own[draw(st.integers(0, len(own))):]
        order = draw(st.permutations(range(len(own))))
        gaps = [draw(st.sampled_from([1, 1, 2])) for _ in own]
        memory = np.asarray(random_array([own[a] * gaps[a] for a in order], seed, "float32"))
        back = memory.transpose(np.argsort(order)) if own else memory
        return back[(*(slice(g - 1, None, g) for g in gaps), ...)]

    return shape, view(1, True), view(2, True), view(3, False)


# --------------------------------------------------------------------------------------------------------- broadcasting
@quick
@given(views())
def test_operands_of_any_strides(drawn):
    shape, a, b, y = drawn
    run_kernel("sub", [a, b], [y])
    np.testing.assert_array_equal(y, np.broadcast_to(a, shape) - np.broadcast_to(b, shape))
    np.testing.assert_array_equal(run("copy", [a], shape), np.broadcast_to(a, shape))
    found = run("maximum_grad", [a, b, y], shape)
    np.testing.assert_array_equal(found, np.broadcast_to(wanted("maximum_grad", a, b, y), shape))


@quick
@given(views())
def test_only_the_output_is_written(drawn):
    shape, a, _, y = drawn
    memory = y if y.base is None else y.base
    before, inside = bits(memory), y.copy()
    run_kernel("copy", [a], [y])
    y[...] = inside
    assert bits(memory) == before


def lying(*shape):
    return random_array(shape, 1, "float32")


@pytest.mark.parametrize(("x", "y", "vector"), [
    (lying(64, 32), lying(64, 32), 4), (lying(64, 32), lying(32), 4), (lying(64, 32), lying(64, 1), 4),
    (lying(7, 9, 32), lying(7, 1, 32), 4), (lying(6, 30), lying(6, 30), 4), (lying(6, 30), lying(30), 1),
    (lying(7), lying(7), 1), (lying(), lying(), 1),
    *((x, lying(2, 32), vector) for x, vector in (  # a place that is not aligned is taken one by one
        (lying(2, 33)[:, :32], 1), (lying(2, 33)[:, 1:], 1), (lying(2, 36)[:, 4:], 4)))])
def test_four_at_a_time_where_memory_allows(x, y, vector):
    out = np.empty(np.broadcast_shapes(x.shape, y.shape), "float32")
    calls = run_kernel("mul", [x, y], [out])
    assert packed(calls)["vector"] == vector
    assert calls[0].blocks[0] * calls[0].threads[0] - out.size // vector < 256
    np.testing.assert_array_equal(out, x * y)


@pytest.mark.parametrize("channels", [12, 13])
def test_a_layer_joins_a_slab(channels):
    """As in a DenseNet: channels of a dense array to their place among more channels; the rest of the slab stays."""
    slab, x = np.full((2, 3, 3, 64), np.nan, "float32"), random_array((2, 3, 3, channels), 1, "float32")
    window = slab[..., 16 : 16 + channels]
    calls = run_kernel("copy", [x], [window])
    s = packed(calls)
    assert (s["axes"], s["vector"]) == (2, 4 if channels == 12 else 1)  # rows, and channels that are neighbours
    assert s["length"][:2].tolist() == [18, channels]
    assert s["step"][:2, :2].tolist() == [[64, 1], [channels, 1]]
    np.testing.assert_array_equal(window, x)
    assert np.isnan(np.delete(slab, np.s_[16 : 16 + channels], axis=3)).all()
    before = slab.copy()
    run_kernel("add", [window, x], [window])
    np.testing.assert_array_equal(window, x + x)
    np.testing.assert_array_equal(slab[..., :16], before[..., :16])


def test_an_output_with_other_neighbours_is_written_in_its_own_order():
    x, y = random_array((8, 12), 1, "float32"), np.empty((12, 8), "float32").T
    s = packed(run_kernel("add", [x.T.copy().T, x], [y]))
    np.testing.assert_array_equal(y, x + x)
    assert s["step"][0, :2].tolist() == [8, 1]


def test_more_axes_than_kernels_take():
    x = np.zeros((3,) * 14, "float32")[(slice(None, None, 2),) * 14]
    with pytest.raises(cuda.LaunchError, match="at most six axes"):
        run_kernel("copy", [x], [np.empty(x.shape, "float32")])


def test_places_beyond_two_billion():
    memory = np.empty(2**31 + 8, bool)  # of which two pages are touched
    far = memory[3 :: 2**31]
    far[...] = [False, True]
    assert run("copy", [far], (2,)).tolist() == [False, True]
    run_kernel("copy", [np.array([True, False])], [far])
    assert far.tolist() == [True, False]
    whole = np.lib.stride_tricks.as_strided(np.zeros(4, "float32"), (2**20, 2**20), (0, 0))
    (launch,) = KERNELS["copy"].cuda_calls([whole], [whole], [], {})
    assert packed([launch])["count"] == 2**40
    assert launch.blocks == (132 * 16,)


# ---------------------------------------------------------------------------------------------------------------- types
@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "float64"])
def test_copies_of_any_type(dtype):
    x = (random_array((6, 8), 1) * 1e4).astype(dtype)
    for view, shape in ((x, (6, 8)), (x[::2, 1::3], (3, 3)), (x.T, (8, 6)), (x[0], (5, 8))):
        assert bits(run("copy", [view], shape)) == bits(np.broadcast_to(view, shape).copy())


def assert_same(found, expected):
    """The same bits, with every NaN as one: a GPU's conversions make NaN canonical, NumPy's keep its payload."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    assert bits(np.where(nan, 0, found)) == bits(np.where(nan, 0, expected))


@pytest.mark.few(4)
@pytest.mark.parametrize(("x", "y"), list(itertools.product(("float16", "float32", "float64"), repeat=2)))
def test_casts_round_once(x, y):
    ties = np.array([1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-40, 65519.999, 65520, 1 + 2.0**-24 + 2.0**-50,
                     3e-8, 2.0**-25, -1e-320])
    with np.errstate(over="ignore"):
        values = np.concatenate([SPECIAL, ties, random_array((37,), 1)]).astype(x)
        strided = np.stack([values, values])[:, ::3].T
        for z in (values, strided):
            assert_same(run("cast", [z], z.shape, y, dtype=y), z.astype(y))


def test_casts_to_bfloat16():
    import ml_dtypes

    values = np.concatenate([SPECIAL, [1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38], random_array((37,), 1)]).astype("float32")
    low = run("cast", [values], values.shape, ml_dtypes.bfloat16, dtype="bfloat16")
    np.testing.assert_array_equal(low.astype("float32"), values.astype(ml_dtypes.bfloat16).astype("float32"))
    np.testing.assert_array_equal(run("cast", [low], low.shape, "float32", dtype="float32"), low.astype("float32"))
    np.testing.assert_array_equal(run("copy", [low[::2]], low[::2].shape).astype("float32"), low[::2].astype("float32"))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [0.0, -1.5, 0.1])
def test_fill(dtype, value):
    x = np.zeros((5, 7), dtype)
    np.testing.assert_array_equal(run("fill", [x], x.shape, value=value), np.full_like(x, value))


# -------------------------------------------------------------------------------------------------------------- numbers
def pairs(dtype):
    """Two arrays in which each special number meets each."""
    return [np.ascontiguousarray(p).reshape(-1).astype(dtype) for p in np.meshgrid(SPECIAL, SPECIAL)]


OF_ONE = ["neg", "exp", "sqrt", "tanh", "abs", "relu", "sigmoid", "relu6", "hardsigmoid", "hardswish", "gelu",
          "gelu_tanh"]
OF_TWO = ["add", "mul", "div", "maximum", "minimum", *(f"{name}_grad" for name in (
    "relu", "abs", "relu6", "hardsigmoid", "hardswish", "tanh", "sigmoid", "gelu_tanh"))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_special_numbers(name, dtype):
    reads = pairs(dtype)[: 1 if name in OF_ONE else 2]
    with np.errstate(over="ignore"):
        expected = wanted(name, *reads).astype(dtype)
    np.testing.assert_allclose(run(name, reads, reads[0].shape), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_of_gelu_at_special_numbers(dtype):
    """dx = g (1 / 2 + erf(z) / 2 + v d) with z = v / sqrt(2) and d = c exp(-v^2 / 2). For v < 0 the first two terms
    cancel, which leaves their absolute errors. With u half an ulp of 1, and at most 2 ulp from erf and from exp (CUDA's
    guide):

    - erf(z) is wrong by 2 u, and by 2 u z erf'(z) <= u since z is rounded; half of it, and the sum's rounding: 2 u;
    - v d is wrong by a share of (v^2 / 2 + 7) u: v^2 as an exponent, 4 u from exp, c and two products;
    - the outer sum and product are wrong by 2 u of the result.
    """
    v, g = pairs(dtype)
    found = run("gelu_grad", [v, g], v.shape)
    with np.errstate(all="ignore"):
        expected = wanted("gelu_grad", v, g)
        u, w = np.finfo(dtype).eps / 2, np.minimum(np.abs(v.astype("float64")), 40)  # beyond it the limits are exact
        error = u * (np.abs(g) * (2 + w * np.exp(-w * w / 2) / np.sqrt(2 * np.pi) * (w * w / 2 + 7))
                     + 2 * np.abs(expected)) + np.finfo(dtype).tiny
        finite = np.isfinite(expected)
        assert (np.abs(found - expected) <= error)[finite].all()
    np.testing.assert_array_equal(found[~finite], expected[~finite])


@pytest.mark.parametrize("name", ["maximum_grad", "minimum_grad"])
def test_who_wins(name):
    a, b = pairs("float32")
    dy = np.where(np.arange(a.size) % 3, 2.0, np.inf).astype("float32")
    np.testing.assert_array_equal(run(name, [a, b, dy], a.shape), wanted(name, a, b, dy))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 31, 33, 257, 1003, 4099])
@pytest.mark.parametrize("name", ["relu", "hardswish", "gelu", "relu_grad", "hardswish_grad", "gelu_grad"])
def test_contiguous_arrays_of_any_size_and_alignment(name, size):
    for begin in (0, 1, 4):
        reads = [random_array((size + begin,), i, "float32")[begin:] for i in range(2 if name.endswith("_grad") else 1)]
        memory = np.full(size + begin + 4, 9, "float32")
        y = memory[begin : begin + size]
        calls = run_kernel(name, reads, [y], seed=size)
        assert len(calls) == (size > 0)
        np.testing.assert_allclose(y, wanted(name, *reads), rtol=2e-6, atol=2e-7)
        assert (memory[:begin] == 9).all()
        assert (memory[begin + size :] == 9).all()


# ----------------------------------------------------------------------------------------------------------- reductions
def close(y, x, e, axes):
    """A sum's error is measured against the sum of magnitudes."""
    assert y.shape == e.shape
    size = np.sum(np.abs(x).astype("float64"), axis=axes, keepdims=True)
    assert (np.abs(y - e) <= (1e-6 if y.dtype == np.float32 else 1e-15) * size).all()


@quick
@given(st.data())
def test_sums_and_maxima_over_any_axes(data):
    shape, _, _, x = data.draw(views(4, 9))
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(shape)))) if shape else st.just(()))))
    out = tuple(1 if a in axes else n for a, n in enumerate(shape))
    close(run("sum", [x], out, axes=axes, factor=0.5), x, wanted("sum", x, axes=axes, factor=0.5), axes)
    if all(shape[a] for a in axes):
        top = run("max", [x], out, axes=axes)
        np.testing.assert_array_equal(top, x.max(axis=axes, keepdims=True))
        dy = random_array(out, 5, "float32")
        np.testing.assert_allclose(run("max_grad", [x, top, dy], shape, axes=axes),
                                   wanted("max_grad", x, top, dy, axes=axes), rtol=1e-6)


LARGE = [((5000, 3), (0,)), ((5000, 70), (0,)), ((3, 9000), (1,)), ((30000,), (0,)), ((100, 90, 5), (0, 1)),
         ((4, 3000, 5), (1,)), ((4, 3000, 5), (0, 1, 2)), ((2, 6, 900, 4), (0, 2)),
         ((3000, 2), (1,)), ((2, 3000), (0,))]


@pytest.mark.few(5)
@pytest.mark.parametrize(("shape", "axes"), LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reductions_of_many(shape, axes, dtype):
    out = tuple(1 if a in axes else n for a, n in enumerate(shape))
    x = np.round(random_array(shape, 1, dtype), 1)  # with ties
    y = run("sum", [x], out, axes=axes, factor=0.25, seed=1)
    close(y, x, wanted("sum", x, axes=axes, factor=0.25), axes)
    assert bits(run("sum", [x], out, axes=axes, factor=0.25, seed=2)) == bits(y)
    top = run("max", [x], out, axes=axes)
    np.testing.assert_array_equal(top, x.max(axis=axes, keepdims=True))
    dy = random_array(out, 2, dtype)
    np.testing.assert_allclose(run("max_grad", [x, top, dy], shape, axes=axes),
                               wanted("max_grad", x, top, dy, axes=axes), rtol=1e-6 if dtype == "float32" else 1e-14)
    view = np.ascontiguousarray(x.T).T  # the same order whatever the strides
    assert bits(run("sum", [view], out, axes=axes, factor=0.25)) == bits(y)


def test_large_reductions_are_made_in_parts():
    """Few outputs of many inputs would leave most of a device idle."""
    assert [_plan(shape, axes)[1].parts > 1 for shape, axes in LARGE] == [True] * 8 + [False] * 2
    for shape, axes in [*LARGE, ((2**20, 64), (0,)), ((2**31 + 5,), (0,)), ((64, 49, 2048), (1,)),
                        ((2**24, 2), (1,)), ((1, 1), (0, 1))]:
        outputs, fold = _plan(shape, axes)
        assert 256 % fold.lanes == 0
        assert fold.blocks * 256 >= outputs * fold.lanes
        assert fold.blocks * fold.parts < 2**31
        assert fold.blocks * fold.parts <= 2 * 1056 or fold.parts == 1


@pytest.mark.parametrize(("shape", "axes"), [((30000,), (0,)), ((4, 3000, 5), (1,)), ((0, 3), (0,)), ((), ())])
def test_binding_reads_no_memory(shape, axes):
    """The arrays may lie where the host cannot look."""
    def nowhere(shape, dtype="float32"):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return (np.ndarray(shape, dtype, (ctypes.c_ubyte * nbytes).from_address(4096)) if nbytes
                else np.empty(shape, dtype))

    out = tuple(1 if a in axes else n for a, n in enumerate(shape))
    whole = tuple((0, n, 1) for n in shape)
    for name, reads, y, constants in (("sum", [shape], out, {"axes": axes}), ("max", [shape], out, {"axes": axes}),
                                      ("max_grad", [shape, out, out], shape, {"axes": axes}),
                                      ("spread", [out, shape], shape, {}),
                                      ("unslice", [shape], shape, {"shape": shape, "region": whole}),
                                      ("relu", [shape], shape, {}),
                                      ("copy", [out], shape, {}), ("div_grad", [shape, out, shape], shape, {}),
                                      ("fill", [out], out, {"value": 1.0})):
        arrays, write = [nowhere(r) for r in reads], nowhere(y)
        kernel = KERNELS[name]
        work = [nowhere(*spec) for spec in kernel.cuda_work(arrays, [write], **constants)] if kernel.cuda_work else []
        for launch in kernel.cuda_calls(arrays, [write], work, constants):
            cuda.Packed(launch)


@pytest.mark.parametrize("shape", [(3, 40), (3, 9000)])
def test_a_maximum_of_what_is_no_number(shape):
    x = random_array(shape, 1, "float32")
    x[0, 7] = np.nan
    x[1] = -np.inf
    top = run("max", [x], (3, 1), axes=(1,))
    np.testing.assert_array_equal(top, x.max(axis=1, keepdims=True))
    dy = random_array((3, 1), 2, "float32")
    np.testing.assert_allclose(run("max_grad", [x, top, dy], shape, axes=(1,)),
                               wanted("max_grad", x, top, dy, axes=(1,)), rtol=1e-6)


def test_sums_of_nothing():
    x = np.empty((0, 5), "float32")
    assert run("sum", [x], (1, 5), axes=(0,)).tolist() == [[0] * 5]


@quick
@given(views())
def test_spread_reaches_all_places(drawn):
    shape, dy, _, x = drawn
    np.testing.assert_array_equal(run("spread", [dy, x], shape, factor=0.5), np.broadcast_to(dy / 2, shape))


# --------------------------------------------------------------------------------------------------------------- slices
@quick
@given(st.data())
def test_a_region_among_zeros(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=5)))
    region = []
    for n in shape:
        begin = data.draw(st.sampled_from([0, 0, min(1, n)]))
        end = data.draw(st.sampled_from([n, max(n - 1, begin)]))
        region.append((begin, end, data.draw(st.sampled_from([1, 1, 2, 3]))))
    size = [len(range(*r)) for r in region]
    order = data.draw(st.permutations(range(len(size))))
    dy = (random_array([size[a] for a in order], 1, "float32").transpose(np.argsort(order)) if size
          else np.ones((), "float32"))
    constants = {"shape": shape, "region": tuple(region)}
    np.testing.assert_array_equal(run("unslice", [dy], shape, "float32", **constants),
                                  wanted("unslice", dy, **constants))


@pytest.mark.parametrize(("shape", "region", "axes"), [
    ((4, 5, 6), ((0, 4, 1), (0, 1, 1), (0, 6, 1)), 2), ((4, 5, 6), ((1, 3, 1), (0, 5, 1), (0, 6, 1)), 1),
    ((4, 5, 6), ((0, 4, 1), (0, 5, 1), (2, 4, 1)), 2), ((4, 5, 6), ((0, 4, 2), (0, 5, 1), (0, 6, 1)), 2)])
def test_whole_axes_of_a_region_are_one(shape, region, axes):
    dy = random_array([len(range(*r)) for r in region], 1, "float32")
    dx = np.full(shape, np.nan, "float32")
    (launch,) = run_kernel("unslice", [dy], [dx], shape=shape, region=region)
    (content,) = (a.content for a in launch.arguments if isinstance(a, cuda.Struct))
    assert np.frombuffer(content[:4], np.int32)[0] == axes
    np.testing.assert_array_equal(dx, wanted("unslice", dy, shape=shape, region=region))
