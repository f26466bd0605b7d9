"""Attention and recurrent layers: the CUDA forms, run on the CPU, against their references in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from covering import pairs
from cuda_agree import near, written
from cuda_on_cpu import run_kernel
from forms import blank, exact, reference

from minidl.kernels import cuda

RTOL = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-13}


def numbers(shape, seed=0, dtype="float64", low=-2.0):
    return np.random.default_rng([seed, *shape]).uniform(low, 2.0, shape).astype(dtype)


def transposed(a):
    """The same values, the first two axes the other way round in memory."""
    return np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) if a.ndim > 1 else np.repeat(a, 2)[::2]


def heads(a):
    """(n, h, t, d) as it comes from a projection (n, t, 3, h, d)."""
    wide = np.zeros((a.shape[0], a.shape[2], 3, a.shape[1], a.shape[3]), a.dtype)
    wide[:, :, 1] = a.swapaxes(1, 2)
    return wide.transpose(2, 0, 3, 1, 4)[1]


def check(name, reads, dtype, forms=(), **constants):
    """In each form of the operands the reference's numbers; with another order of threads the same bits."""
    expected, all_calls = exact(name, reads, **constants), []
    for given in ([r.astype(dtype) if r.dtype.kind == "f" else r for r in reads], *forms):
        found, calls = written(name, given, blank(expected, dtype), **constants)
        near(found, expected, RTOL[dtype])
        all_calls.append(calls)
    return all_calls


# ------------------------------------------------------------------------------------------------------------ attention
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 3, 5, 7, 4, 6), (3, 2, 33, 31, 8, 5), (1, 2, 3, 1025, 4, 4),
          (2, 2, 4, 257, 3, 3), (2, 1, 0, 4, 3, 3)]


@pytest.mark.parametrize(*pairs(1, shape=SHAPES, dtype=[*RTOL], seen=[
    {"causal": False}, {"causal": True}, {"causal": True, "offset": 2}]))
def test_attention(shape, seen, dtype):
    n, h, t, s, d, e = shape
    q, k, v, dy = (numbers(x, i) for i, x in enumerate([(n, h, t, d), (n, h, s, d), (n, h, s, e), (n, h, t, e)]))
    keep = np.random.default_rng(3).integers(0, 3, (n, s))
    keep[0] = np.arange(s) > s // 2  # causal queries of the first half see nothing
    given = [a.astype(dtype) for a in (q, k, v)]
    strided = [heads(a) for a in given]
    constants = {"scale": 0.5, **seen}
    plain = check("attention", [q, k, v], dtype, [strided, [transposed(a) for a in given]], **constants)
    check("attention", [q, k, v, keep], dtype, [[*strided, transposed(keep)], [*given, keep != 0]], **constants)
    _, p = reference("attention", [q, k, v, keep], **constants)
    back = check("attention_grad", [q, k, v, p, dy], dtype, [[*strided, p.astype(dtype), heads(dy.astype(dtype))]],
                 scale=0.5)
    if t and n > 1 and h > 1:
        assert [len(calls) for calls in plain] == [3, 4, 4]  # one launch copies all that products cannot take
        assert [len(calls) for calls in back] == [5, 6]
    assert all(isinstance(c, cuda.Product | cuda.Grid) for calls in plain for c in calls)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", list(RTOL))
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_attention_with_dropout(shape, dtype):
    n, h, t, s, d, e = shape
    q, k, v, dy = (numbers(x, i) for i, x in enumerate([(n, h, t, d), (n, h, s, d), (n, h, s, e), (n, h, t, e)]))
    keep, counter = np.random.default_rng(3).integers(0, 3, (n, s)), np.array([5], np.uint64)
    dropout = {"scale": 0.5, "rate": 0.25, "seed": 7, "draw": 2, "sample": 3}
    strided = [heads(a.astype(dtype)) for a in (q, k, v)]
    for seen in ({"causal": False}, {"causal": True}, {"causal": True, "offset": 2}):
        constants = {**seen, **dropout}
        check("attention_dropout", [q, k, v, counter], dtype, [[*strided, counter]], **constants)
        check("attention_dropout", [q, k, v, keep, counter], dtype, [[*strided, keep, counter]], **constants)
    _, p = reference("attention", [q, k, v, keep], scale=0.5, causal=False)
    check("attention_dropout_grad", [q, k, v, p, counter, dy], dtype,
          [[*strided, p.astype(dtype), counter, heads(dy.astype(dtype))]], **dropout)


def test_attention_of_nothing_and_to_nothing():
    """Where there is no key, the result is 0; NaN is to be seen."""
    q, k = numbers((2, 1, 3, 4)), np.empty((2, 1, 0, 4))
    y, p = np.full((2, 1, 3, 5), np.nan), np.empty((2, 1, 3, 0))
    run_kernel("attention", [q, k, np.empty((2, 1, 0, 5))], [y, p], scale=1.0, causal=False)
    assert (y == 0).all()
    k = numbers((2, 1, 6, 4))
    k[1, 0, 4] = np.nan
    p = np.zeros((2, 1, 3, 6))
    run_kernel("attention", [q, k, numbers((2, 1, 6, 5))], [y, p], scale=1.0, causal=False)
    assert np.isnan(p[1]).all()
    assert np.isfinite(p[0]).all()


def test_scores_may_be_large():
    """The largest is taken away before exp."""
    q, k = numbers((1, 1, 4, 8), dtype="float32") * 100, numbers((1, 1, 9, 8), 1, dtype="float32") * 100
    check("attention", [q, k, np.ones((1, 1, 9, 2), "float32")], "float32", scale=1.0, causal=False)


# ------------------------------------------------------------------------------------------------------------ recurrent
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
SIZES = [(1, 1, 1), (3, 5, 33), (2, 80, 4), (2, 1, 257), (3, 0, 2)]


def wide(a):
    """Every other element."""
    return np.repeat(a, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize(*pairs(1, kind=["rnn", "rnn relu", "gru", "lstm"], dtype=[*RTOL], reverse=[False, True]))
def test_recurrence(kind, reverse, dtype):
    name, _, relu = kind.partition(" ")
    constants = {"reverse": reverse, **({"relu": bool(relu)} if name == "rnn" else {})}
    for (steps, n, d), bias in itertools.product(SIZES, (False, True)):
        wider = GATES[name] * d
        states = [numbers((n, d), i) / 2 for i in range(2 if name == "lstm" else 1)]
        reads = [numbers((steps, n, wider), 4) / 2, *states, numbers((wider, d), 5) / d**0.5 / 2,
                 *([numbers((wider,), 6)] if bias else [])]
        given = [r.astype(dtype) for r in reads]
        forward = check(name, reads, dtype, [[transposed(r) for r in given], [wide(r) for r in given]], **constants)
        out, *saved = reference(name, reads, **constants)
        w = reads[1 + len(states)]
        dy = numbers((steps + (name == "lstm"), n, d), 9)
        reads = {"rnn": [dy, w, out], "gru": [dy, w, out, *saved], "lstm": [dy, w, *saved]}[name]
        kept = [r.astype(dtype) for r in reads[2:]]
        back = check(f"{name}_grad", reads, dtype,
                     [[f(r.astype(dtype)) for r in reads[:2]] + kept for f in (transposed, wide)], **constants)
        if n:  # a product and a launch for each step of time, and little beside
            for calls in (forward[0], back[0]):
                assert sum(isinstance(c, cuda.Product) for c in calls) == steps
                assert len(calls) <= 2 * steps + 2


@pytest.mark.wide
def test_gates_far_from_zero():
    """Sigmoids and hyperbolic tangents end at 0 and 1, without NaN."""
    gx = np.array([[[-1e4, 1e4, -1e4, 1e4]], [[1e4, -1e4, 1e4, -1e4]]], "float32")
    zero, w = np.zeros((1, 1), "float32"), np.ones((4, 1), "float32")
    check("lstm", [gx, zero, zero, w], "float32", reverse=False)
    check("gru", [gx[..., :3], zero, w[:3]], "float32", reverse=False)
