"""Infinities, NaN, the largest and smallest numbers, and points where a function has no slope: every activation and
loss has its limit there, by all forms of its kernel; elsewhere torch is right."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import run_kernel
from forms import on_cpu
from helpers import random_array, torch_or_skip

import minidl as ml
import minidl.nn.functional as F
from minidl import ops
from minidl.kernels import KERNELS

inf, nan = np.inf, np.nan
DTYPES, FORMS = ["float32", "float64"], [on_cpu, run_kernel]


def slopes(function: Any, *arrays: Any) -> list[Any]:
    """The value, and the gradients of its sum."""
    given = [ml.Parameter(a) for a in arrays]
    y = function(*given)
    y.sum().backward()
    return [y.numpy(), *(p.grad.numpy() for p in given)]


def points(dtype: str) -> Any:
    """Where a function may overflow, underflow or divide by 0: both signs of all of them."""
    kind = np.finfo(dtype)
    found = [0, inf, kind.tiny, kind.tiny / 8, kind.smallest_subnormal, kind.max, kind.max / 4, 1e38, 3e38, 1e19,
             1e9, 3000, 745.2, 710, 709, 104, 103.9, 88, 87.5, 50, 20.5, 20, 19, 13.3, 13, 9.1, 7.9, 6, 5, 3, 2.5, 2,
             1.5, 1, 0.5, 1e-3, 1e-8, 1e-30, *([1e300, 1.5e154] if dtype == "float64" else [])]
    return np.array([*found, *(-v for v in found), nan], dtype)


#: of a function: its value and its slope at minus infinity and at infinity
LIMITS: dict[str, tuple[Any, tuple[float, float], tuple[float, float]]] = {
    "relu": (F.relu, (0, 0), (inf, 1)), "relu6": (F.relu6, (0, 0), (6, 0)), "tanh": (F.tanh, (-1, 0), (1, 0)),
    "sigmoid": (F.sigmoid, (0, 0), (1, 0)), "hardsigmoid": (F.hardsigmoid, (0, 0), (1, 0)),
    "hardswish": (F.hardswish, (0, 0), (inf, 1)), "silu": (F.silu, (0, 0), (inf, 1)),
    "gelu": (F.gelu, (0, 0), (inf, 1)), "gelu_tanh": (lambda x: F.gelu(x, "tanh"), (0, 0), (inf, 1)),
    "mish": (F.mish, (0, 0), (inf, 1)), "softplus": (F.softplus, (0, 0), (inf, 1)),
    "logsigmoid": (F.logsigmoid, (-inf, 1), (0, 0)), "softsign": (F.softsign, (-1, 0), (1, 0)),
    "leaky_relu": (F.leaky_relu, (-inf, 0.01), (inf, 1)),
    "leaky_relu 0": (lambda x: F.leaky_relu(x, 0), (0, 0), (inf, 1)),
    "1 ** x": (lambda x: 1**x, (1, 0), (1, 0)), "elu": (F.elu, (-1, 0), (inf, 1)),
    "celu": (lambda x: F.celu(x, 0.5), (-0.5, 0), (inf, 1)),
    "selu": (F.selu, (-1.7580993408473766, 0), (inf, 1.0507009873554805)),
    "hardtanh": (F.hardtanh, (-1, 0), (1, 0)), "exp": (ops.exp, (0, 0), (inf, inf)),
    "sqrt": (ops.sqrt, (nan, nan), (inf, 0)), "log": (ops.log, (nan, 0), (inf, 0)),
    "abs": (ops.absolute, (inf, -1), (inf, 1)), "square": (lambda x: x**2, (inf, -inf), (inf, inf)),
    "reciprocal": (lambda x: 1 / x, (0, 0), (0, 0)),
    "prelu": (lambda x: F.prelu(x, ml.array(np.full(1, 0.5, x.dtype))), (-inf, 0.5), (inf, 1)),
    "glu": (lambda x: F.glu(ml.stack([ops.full_like(x, 2.0), x], -1)).reshape(-1), (0, 0), (2, 0)),
}
PLAIN = ("exp", "log", "sqrt", "abs", "square", "reciprocal")  #: torch's own values at infinity are the limits
#: there the other functions are as at infinity, or straight lines
FAR = {"float32": np.array([1e38, 3e38, np.finfo("float32").max], "float32"),
       "float64": np.array([1e38, 1e300, np.finfo("float64").max])}


@pytest.mark.parametrize("name", LIMITS)
def test_every_activation_has_its_limits(name: str) -> None:
    function, low, high = LIMITS[name]
    for dtype in DTYPES:
        y, dx = slopes(function, np.array([-inf, inf], dtype))
        np.testing.assert_allclose(y, [low[0], high[0]], rtol=1e-6)
        np.testing.assert_allclose(dx, [low[1], high[1]], rtol=1e-6)
        for sign, (value, slope) in ((-1, low), (1, high)) if name not in PLAIN else ():
            y, dx = slopes(function, sign * FAR[dtype])
            with np.errstate(over="ignore"):
                far = sign * FAR[dtype] * np.array(slope, dtype)
            np.testing.assert_allclose(y, far if np.isinf(value) else np.full_like(y, value), rtol=1e-6)
            np.testing.assert_allclose(dx, np.full_like(y, slope), rtol=1e-6, atol=1e-70)


def test_nan_stays_nan() -> None:
    for name, (function, *_) in LIMITS.items():
        for dtype in DTYPES:
            assert np.isnan(slopes(function, np.array([nan, 1], dtype))[0][0]) or name == "1 ** x", name


def _torchs(torch: Any, name: str) -> Any:
    f = torch.nn.functional
    return {"leaky_relu 0": lambda x: f.leaky_relu(x, 0.0), "1 ** x": lambda x: 1**x,
            "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"), "celu": lambda x: f.celu(x, 0.5),
            "prelu": lambda x: f.prelu(x, torch.full((1,), 0.5, dtype=x.dtype)), "square": torch.square,
            "glu": lambda x: f.glu(torch.stack([torch.full_like(x, 2), x], -1)).reshape(-1)}.get(
                name) or getattr(f, name, None) or getattr(torch, name)


@pytest.mark.parametrize("name", LIMITS)
def test_every_activation_is_torchs_where_torch_has_a_value(name: str) -> None:
    """Where torch overflows (GELU at 3e38) or multiplies infinity with 0, the limits above count. The sigmoid comes
    from a tanh, which leaves its absolute error."""
    torch = torch_or_skip()
    for dtype, tolerance in (("float32", 2e-5), ("float64", 3e-8)):  # torch has 1/6 and 1/alpha in float32
        x = points(dtype)
        t = torch.tensor(x, requires_grad=True)
        y = _torchs(torch, name)(t)
        y.sum().backward()
        for found, wanted in zip(slopes(LIMITS[name][0], x), (y.detach().numpy(), t.grad.numpy()), strict=True):
            counts = ~np.isnan(x) & (np.isfinite(wanted) | (name in PLAIN))
            np.testing.assert_allclose(found[counts], wanted[counts], rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------ all three forms
def _calls(dtype: str) -> Any:
    """(kernel, what it reads): numbers, and pairs of numbers with shares, at all points."""
    x, ones = points(dtype), np.ones_like(points(dtype))
    for name in ("relu", "relu6", "hardsigmoid", "hardswish", "silu", "gelu", "gelu_tanh", "mish", "softsign",
                 "sign", "round", "floor", "ceil", "trunc"):
        yield name, [x]
    for name in ("hardsigmoid", "hardswish", "silu", "gelu", "gelu_tanh", "mish", "softsign"):
        yield f"{name}_grad", [x, ones]
    y = np.array([0, 1, 1e-30, inf, nan], dtype)
    yield "root_grad", [y, np.full_like(y, 3)]
    pairs, shares = (np.ascontiguousarray(p).reshape(-1) for p in np.meshgrid(x, np.array([0, 0.25, 1], dtype)))
    for name in ("bce_with_logits", "kl_div"):
        yield name, [pairs, shares]
    yield "bce_with_logits_grad", [pairs, shares, np.ones_like(pairs)]
    chances, shares = (np.ascontiguousarray(p).reshape(-1) for p in np.meshgrid(
        np.array([0, 1e-44, 1e-30, 0.5, 1, nan], dtype), np.array([0, 0.25, 1], dtype)))
    yield "bce", [chances, shares]
    for name in ("bce_grad", "bce_target_grad"):
        yield name, [chances, shares, np.ones_like(chances)]


@pytest.mark.parametrize(("dtype", "form"), list(itertools.product(DTYPES, FORMS)))
def test_all_forms_of_a_kernel_have_the_same_limits(dtype: str, form: Any) -> None:
    tolerance = {"float32": 2e-6, "float64": 1e-13}[dtype]
    for name, reads in _calls(dtype):
        with np.errstate(all="ignore"):
            wanted, found = KERNELS[name].reference(np, *reads), np.full_like(reads[0], 7)
            form(name, reads, [found])
        counts = ~np.isnan(reads[0]) if name.endswith("grad") else slice(None)
        np.testing.assert_allclose(found[counts], wanted[counts], rtol=tolerance, atol=10 * tolerance, err_msg=name)


# --------------------------------------------------------------------------------------------------------------- losses
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_at_infinity(dtype: str) -> None:
    def array(*values: float) -> Any:
        return np.array(values, dtype)

    x, t = array(inf, -inf, inf, -inf, inf, -inf), array(1, 1, 0, 0, 0.5, 0.5)
    for pos_weight in (None, 2.0, 1.0, 0.5):
        weight = None if pos_weight is None else ml.array(array(pos_weight))
        y, dx = slopes(lambda p, w=weight: F.binary_cross_entropy_with_logits(p, ml.array(t), reduction="none",
                                                                              pos_weight=w), x)
        np.testing.assert_array_equal(y, [0, inf, inf, 0, inf, inf])
        w = 1 if pos_weight is None else pos_weight
        np.testing.assert_allclose(dx, [0, -w, 1, 0, 0.5, -w / 2])
    y, dx = slopes(lambda p: F.kl_div(p, ml.array(array(0, 0.5, 0)), reduction="none"), array(-inf, -inf, nan))
    np.testing.assert_array_equal(y, [0, inf, nan])
    np.testing.assert_array_equal(dx, [0, -0.5, 0])
    for name, at, slope in (("l1_loss", inf, 1), ("smooth_l1_loss", inf, 1), ("huber_loss", inf, 1),
                            ("mse_loss", inf, inf)):
        y, dx, dt = slopes(lambda a, b, name=name: getattr(F, name)(a, b, reduction="none"), array(inf, 0, -inf),
                           array(0, inf, 1))
        np.testing.assert_array_equal(y, [at] * 3, name)
        np.testing.assert_array_equal(dx, [slope, -slope, -slope], name)
        np.testing.assert_array_equal(dt, [-slope, slope, slope], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_of_0_and_1_have_torchs_losses_and_slopes(dtype: str) -> None:
    x, t = (np.array(v, dtype) for v in ([0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0.5, 0.5]))
    y, dx = slopes(lambda p: F.binary_cross_entropy(p, ml.array(t), reduction="none"), x)
    np.testing.assert_allclose(y, [0, 100, 100, 0, 50, 50])
    np.testing.assert_allclose(dx, [0, 1e12, -1e12, 0, -5e11, 5e11], rtol=1e-6)


def test_a_weight_of_prelu_learns_nothing_from_what_is_above_0() -> None:
    _, dx, dw = slopes(F.prelu, np.array([[inf], [-2.0], [0.0]]), np.array([0.5]))
    np.testing.assert_array_equal(dx.ravel(), [1, 0.5, 0.5])
    np.testing.assert_array_equal(dw, [-2])


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_gates_that_are_shut_let_no_gradient_through(name: str) -> None:
    """A slope of 1e-7 times an input of 1e30 would be one of 1e23."""
    ml.seed(0)
    layer = getattr(ml.nn, name)(2, 3)
    layer(ml.array(np.full((2, 1, 2), [1e30, -1e30], "float32")))[0].sum().backward()
    for p in layer.parameters():
        assert np.abs(p.grad.numpy()).max() < 10


# ------------------------------------------------------------------------------------------------------ singular points
def std(x: Any) -> Any:
    return x.std(1, correction=1)


SINGULAR: dict[str, tuple[Any, list[float], list[float]]] = {  # of a row: the function, the row, its gradient
    "norm of zeros": (lambda x: x.norm(2.0, 1), [0, 0, 0], [0, 0, 0]),
    "norm of squares that are 0": (lambda x: x.norm(2.0, 1), [1e-200, 0, 0], [0, 0, 0]),
    "norm 1 of zeros": (lambda x: x.norm(1.0, 1), [0, 2, 0], [0, 1, 0]),
    "norm inf of zeros": (lambda x: x.norm(inf, 1), [0, 0, 0], [0, 0, 0]),
    "norm of all": (lambda x: x.norm(), [0, 0, 0], [0, 0, 0]),
    "std of equal numbers": (std, [3, 3, 3], [0, 0, 0]),
    "std": (std, [1, 2, 3], [-0.5, 0, 0.5]),
    "std with no correction": (lambda x: x.std(1, correction=0), [5, 5, 5], [0, 0, 0]),
    "var of equal numbers": (lambda x: x.var(1, correction=1), [5, 5, 5], [0, 0, 0]),
    "abs": (ops.absolute, [0, -1, 1], [0, -1, 1]), "relu": (F.relu, [0, -1, 1], [0, 0, 1]),
    "clamp": (lambda x: x.clamp(-1, 1), [-1, 1, 2], [1, 1, 0]), "hardtanh": (F.hardtanh, [-1, 1, 0], [0, 0, 1]),
    "relu6": (F.relu6, [0, 6, 5], [0, 0, 1]), "hardsigmoid": (F.hardsigmoid, [-3, 3, 0], [0, 0, 1 / 6]),
    "hardswish": (F.hardswish, [-3, 3, 0], [0, 1, 0.5]), "elu": (F.elu, [0, 1, 2], [1, 1, 1]),
    "prelu": (lambda x: F.prelu(x, ml.array(np.full(1, 0.5, x.dtype))), [0, 1, -1], [0.5, 1, 0.5]),
    "power 0": (lambda x: x**0, [0, inf, nan], [0, 0, 0]), "power 1/2": (lambda x: x**0.5, [0, 1, 4], [inf, 0.5, 0.25]),
    "power 2": (lambda x: x**2, [0, 1, -1], [0, 2, -2]), "sqrt": (ops.sqrt, [0, 1, 4], [inf, 0.5, 0.25]),
    "maximum": (lambda x: ml.maximum(x, x * 0 + 1), [1, 2, 0], [0.5, 1, 0]),
    "maximum, right": (lambda x: ml.maximum(x * 0 + 1, x), [1, 2, 0], [0.5, 1, 0]),
    "minimum": (lambda x: ml.minimum(x, x * 0 + 1), [1, 2, 0], [0.5, 0, 1]),
    "minimum, right": (lambda x: ml.minimum(x * 0 + 1, x), [1, 2, 0], [0.5, 0, 1]),
    "amax": (lambda x: x.amax(1), [2, 2, 1], [0.5, 0.5, 0]),
    "amax of equal": (lambda x: x.amax(1), [0, 0, 0], [1 / 3] * 3),
    "max": (lambda x: x.max(dim=1).values, [2, 2, 1], [1, 0, 0]),
    "normalize": (lambda x: F.normalize(x), [0, 0, 0], [1e12, 1e12, 1e12]),
    "log_softmax of -inf": (lambda x: x.log_softmax(-1), [-inf, -inf, -inf], [nan, nan, nan]),
    "softmax of one -inf": (lambda x: x.softmax(-1)[:, :1], [0, -inf, -inf], [0, 0, 0]),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_points(name: str) -> None:
    function, row, wanted = SINGULAR[name]
    for dtype in DTYPES:
        _, dx = slopes(function, np.array([row], dtype))
        np.testing.assert_allclose(dx[0], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [(1, 2), (3, 7), (4, 5), (9, 3)])
def test_nearest_pixels_are_copies(size: tuple[int, int]) -> None:
    """A mask of minus infinity stays where it is."""
    x = random_array((2, 4, 5, 1))
    x[0, 1, 2], x[0, 3, 0], x[1, 0, 0] = -inf, nan, inf
    rows, columns = (np.arange(m) * n // m for n, m in zip((4, 5), size, strict=True))
    y = F.interpolate(ml.array(x), size).numpy()
    np.testing.assert_array_equal(y, x[:, rows][:, :, columns])


def test_rows_that_are_constant_or_zero_are_torchs() -> None:
    torch = torch_or_skip()
    f = torch.nn.functional
    rows = np.array([[0, 0, 0, 0], [3, 3, 3, 3], [1, 2, 3, 5], [1e-30, 0, 0, 0], [0, 0, 1e15, 0]])
    other = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]], "float64")
    factor = np.array([1.0, 2, 3, 5])

    def weighted(function: Any, *arguments: Any) -> Any:
        return lambda x: function(x, *arguments) * (ml.array if isinstance(x, ml.Tensor) else torch.tensor)(factor)

    for mine, theirs, *arrays in (
            *((weighted(getattr(F, name), *how), weighted(getattr(f, name), *how), rows) for name, *how in (
                ("layer_norm", (4,)), ("rms_norm", (4,)), ("group_norm", 2),
                *(("normalize", p) for p in (1.0, 2.0, inf)))),
            *((lambda x, p=p: x.norm(p, 1), lambda x, p=p: x.norm(p, 1), rows) for p in (1.0, 2.0, inf)),
            (std, lambda x: x.std(1), rows), (F.cosine_similarity, f.cosine_similarity, rows, other)):
        given = [torch.tensor(a, requires_grad=True) for a in arrays]
        y = theirs(*given)
        y.sum().backward()
        for found, wanted in zip(slopes(mine, *arrays), (y.detach(), *(g.grad for g in given)), strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-9, atol=1e-9)


# ----------------------------------------------------------------------------------------------------- one order of nan
def test_nan_is_the_largest_in_every_order() -> None:
    x = np.array([1, nan, 3, 2, nan, inf, -inf, 2, -0.0, 0])
    rising, falling = [6, 8, 9, 0, 3, 7, 2, 5, 1, 4], [1, 4, 5, 2, 3, 7, 0, 8, 9, 6]  # equal ones keep their order
    for dtype in DTYPES:
        for columns in (1, 2):  # neighbours in memory, and not
            t = ml.array(np.stack([x] * columns, 1).astype(dtype))
            for down, places in ((False, rising), (True, falling)):
                assert t.argsort(0, descending=down).numpy()[:, 0].tolist() == places
                values, found = t.sort(0, descending=down)
                assert found.numpy()[:, -1].tolist() == places
                np.testing.assert_array_equal(values.numpy()[:, 0], x[places])
                np.testing.assert_array_equal(t.topk(4, 0, largest=down).values.numpy()[:, 0], x[places[:4]])
            assert t.argmax(0).numpy()[0] == t.argmin(0).numpy()[0] == 1  # min and max: any NaN makes NaN
            assert np.isnan([t.amax().item(), t.amin().item(), t.max(dim=0).values.numpy()[0]]).all()
    for descending in (False, True):
        read, y = np.array([x, x[::-1]]).T.copy(), np.zeros((10, 2), np.int64)
        wanted = KERNELS["argsort"].reference(np, read, axis=0, descending=descending)
        for form in FORMS:
            form("argsort", [read], [y], axis=0, descending=descending)
            np.testing.assert_array_equal(y, wanted)


def test_the_gradient_follows_a_falling_order() -> None:
    weight = ml.array(np.array([1.0, 2, 4]))
    _, dx = slopes(lambda x: x.sort(descending=True)[0] * weight, np.array([5.0, 7, 6]))
    assert dx.tolist() == [4, 1, 2]


# ------------------------------------------------------------------------------------------------------------------ pad
def test_what_is_cut_from_one_side_is_still_reflected_on_the_other() -> None:
    x = ml.array(np.arange(1.0, 5))
    for pad, mode, wanted in (((-2, 2), "reflect", [3, 4, 3, 2]), ((3, -1), "reflect", [4, 3, 2, 1, 2, 3]),
                              ((-3, 1), "reflect", [4, 3]), ((-4, 2), "replicate", [4, 4]), ((1, -4), "replicate", [1]),
                              ((-5, 2), "reflect", [2]), ((-1, 2), "circular", [2, 3, 4, 2, 3]),
                              ((-1, 2), "constant", [2, 3, 4, 0, 0])):
        assert F.pad(x, pad, mode).tolist() == wanted, (pad, mode)


def test_pad_is_torchs_wherever_torch_pads() -> None:
    torch = torch_or_skip()
    tried = 0
    for mode in ("reflect", "replicate", "circular", "constant"):
        for n in (1, 3):
            x = np.arange(1.0, n + 1).reshape(1, 1, n)
            for before in range(-n - 1, n + 1):
                for after in range(-n - 1, n + 1):
                    if mode == "circular" and (min(before, after) <= -n or n + min(before, 0) + min(after, 0) <= 0):
                        continue  # there torch returns memory that nobody has written
                    try:
                        wanted = torch.nn.functional.pad(torch.tensor(x), (before, after), mode=mode)
                    except (RuntimeError, ValueError):
                        continue
                    np.testing.assert_array_equal(F.pad(ml.array(x), (before, after), mode).numpy(), wanted.numpy())
                    tried += 1
    assert tried > 100
