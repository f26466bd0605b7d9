"""Each kernel's CPU form against its reference over NumPy: values, exact coverage of the output, no
memory of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers import bytes_allocated, random_array

import minidl as ml
from minidl.kernels import KERNELS, Kernel, KernelError, kernel
from minidl.kernels.masks import COMPARISONS, LOGIC

HERE = ("elementwise", "masks", "linear", "reduce", "loss", "dropout", "optimizer", "updates", "along_axis")


@dataclass
class Example:
    """One call: shapes of what is read (or arrays), shapes of what is written, constants."""

    kernel: str
    reads: tuple
    writes: tuple
    constants: dict = field(default_factory=dict)
    positive: bool = False

    def __str__(self):
        writes = ", ".join(str(w) if isinstance(w, tuple) else f"{w.dtype} {w.shape}" for w in self.writes)
        return f"{self.kernel} {writes} {self.constants}"


def examples(n=3, m=4):
    """`n`, `m` scale all of them."""
    s = (n, m)
    for name in ("add", "sub", "mul", "div", "maximum", "minimum"):
        for a, b in ((s, s), (s, (m,)), (s, (n, 1)), ((n, 1), (1, m)), ((), s)):
            yield Example(name, (a, b), (s,), positive=name == "div")
    for name in ("neg", "exp", "log", "sqrt", "sin", "cos", "tanh", "abs", "relu", "sigmoid", "copy"):
        yield Example(name, (s,), (s,), positive=name in ("log", "sqrt"))
        yield Example(name, ((m,),), ((m,),), positive=name in ("log", "sqrt"))
    yield Example("copy", ((m,),), (s,))
    for to in ("float16", "float32", "float64"):
        yield Example("cast", (s,), (np.zeros(s, to),), {"dtype": to})
    for name in ("relu_grad", "sigmoid_grad", "tanh_grad", "sqrt_grad", "abs_grad"):
        yield Example(name, (s, s), (s,), positive=name == "sqrt_grad")
    yield Example("fill", (s,), (s,), {"value": 3.0})
    for name, key in (("scale", "factor"), ("shift", "term")):
        yield Example(name, (s,), (s,), {key: 0.3})
    yield Example("lerp", (s, s), (s,), {"weight": 0.3})
    for e in (2.0, 0.5, -1.0):
        yield Example("power", (s,), (s,), {"exponent": e}, positive=True)
        yield Example("power_grad", (s, s), (s,), {"exponent": e}, positive=True)
    yield Example("div_grad", (s, (m,), s), (s,), positive=True)
    for name in ("maximum_grad", "minimum_grad"):
        yield Example(name, (s, s, s), (s,))
        yield Example(name, ((m,), s, s), (s,))
        yield Example(name, (np.ones(s), np.ones((n, 1)), s), (s,))
    yield from mask_examples(n, m)
    yield Example("matmul", ((n, m), (m, n)), ((n, n),))
    yield Example("matmul", ((2, n, m), (m, 3)), ((2, n, 3),))
    yield Example("linear", ((n, m), (2, m)), ((n, 2),))
    yield Example("linear", ((n, m), (2, m), (2,)), ((n, 2),))
    yield Example("linear_weight_grad", ((n, m), (n, 2)), ((2, m),), {"bias": False})
    yield Example("linear_weight_grad", ((n, m), (n, 2)), ((2, m), (2,)), {"bias": True})
    for axes, out in (((0,), (1, m)), ((1,), (n, 1)), ((0, 1), (1, 1)), ((), s)):
        for factor in (1.0, 0.25):
            yield Example("sum", (s,), (out,), {"axes": axes, "factor": factor})
        yield Example("max", (s,), (out,), {"axes": axes})
        top = random_array(s, 3).max(axis=axes, keepdims=True)
        yield Example("max_grad", (random_array(s, 3), top, out), (s,), {"axes": axes})
        yield Example("spread", (out, s), (s,), {"factor": 0.5})
    for shape in (s, (n,), (2, n, m)):
        yield Example("softmax", (shape,), (shape,))
        yield Example("softmax_grad", (shape, shape), (shape,))
    labels = np.arange(n) % m
    for smoothing in (0.0, 0.1):
        yield Example("cross_entropy", (s, labels), ((), s), {"smoothing": smoothing})
        yield Example("cross_entropy_grad", (s, labels, ()), (s,), {"smoothing": smoothing})
        yield Example("cross_entropy", (s, labels), ((), s), {"smoothing": smoothing, "ignore": 1})
        yield Example("cross_entropy_grad", (s, labels, ()), (s,), {"smoothing": smoothing, "ignore": 1})
    for ignore in ({}, {"ignore": 1}):
        yield Example("label_weights", ((m,), labels), (s,), ignore)
    step = np.array([7], np.uint64)
    for shape in (s, (n,), (n, 2, 3)):
        yield Example("dropout", (shape, step), (shape,), {"rate": 0.4, "seed": 5 + (9 << 32), "draw": 2, "sample": 11})
    yield Example("tick", (step,), (np.zeros(1, np.uint64),), {"draws": 3})
    for decay in (0.0, 0.1):
        yield Example("sgd", (s, s, (1,)), (s,), {"momentum": 0.0, "weight_decay": decay, "nesterov": False})
        for nesterov in (False, True):
            yield Example("sgd", (s, s, (1,), s), (s, s),
                          {"momentum": 0.9, "weight_decay": decay, "nesterov": nesterov})
        for decoupled in (False, True):
            yield Example("adam", (s, s, s, s, (1,), np.array([2.0, 0.8, 0.9])), (s, s, s),
                          {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": decay, "decoupled": decoupled},
                          positive=True)
    for more in ({}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.9}):
        states = (np.full(s, 5.0) if "centered" in more else s, *(s,) * len(more))  # v is not below the square of a
        yield Example("rmsprop", (s, s, *states, (1,)), (s,) * (2 + len(more)),
                      {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.1, **more}, positive=True)
    yield Example("adam_tick", (np.array([2.0, 0.81, 0.98]),), (np.zeros(3),), {"beta1": 0.9, "beta2": 0.99})


def mask_examples(n, m):
    s = (n, m)
    whole, mask = np.arange(n * m).reshape(s) % 3, np.arange(n * m).reshape(s) % 2 == 0
    for name in COMPARISONS:
        for a, b in ((s, s), (s, (m,)), ((n, 1), (1, m)), (whole, whole.T.copy().reshape(s)), (whole, np.array(1))):
            yield Example(name, (a, b), (mask,))
        yield Example(name, (np.ones(s), np.ones(s)), (mask,))
    for name in LOGIC:
        yield Example(name, (mask,) if name == "logical_not" else (mask, np.arange(m) % 3 == 0), (mask,))
    for of_mask, a, b in ((mask, s, s), (mask[:1], (n, 1), ()), (mask, (), (m,))):
        yield Example("where", (of_mask, a, b), (s,))
    for chosen in (False, True):
        for of_mask, dy in ((mask, s), (mask[:1], s), (mask, (n, 1))):
            yield Example("where_grad", (of_mask, dy), (s,), {"chosen": chosen})
    for axis in (0, 1):
        place = np.zeros([1 if a == axis else k for a, k in enumerate(s)], np.int64)
        yield Example("argmax", (s,), (place,), {"axis": axis})
        yield Example("argmax", (np.ones(s),), (place,), {"axis": axis})
        for tied in (s, np.ones(s), np.where(mask, np.nan, np.arange(m) % 3)):
            yield Example("argsort", (tied,), (whole,), {"axis": axis})
        for reverse in (False, True):
            yield Example("cumsum", (s,), (s,), {"axis": axis, "reverse": reverse})
    yield Example("argmax", (np.where(mask, np.nan, 1.0),), (np.zeros((n, 1), np.int64),), {"axis": 1})
    yield Example("sum", (whole,), (np.zeros((n, 1), np.int64),), {"axes": (1,)})


def arrays(example, dtype):
    """What is read, and what is to be written: full of NaN, so that every element must be."""
    def one(i, x):
        if isinstance(x, tuple):
            return np.asarray(random_array(x, i, dtype, low=0.2 if example.positive else -2.0))
        scalars = example.kernel in ("adam", "adam_tick")  # powers are float64 always
        return x.astype(dtype) if x.dtype.kind == "f" and not scalars else x.copy()

    reads = [one(i, x) for i, x in enumerate(example.reads)]
    writes = [np.full(x, np.nan, dtype) if isinstance(x, tuple) else np.zeros_like(x) for x in example.writes]
    return reads, writes


def bound(example, reads, writes):
    kernel = KERNELS[example.kernel]
    specs = kernel.work(reads, writes, **example.constants) if kernel.work else ()
    work = [np.full(shape, np.nan if np.dtype(t).kind == "f" else 1, t) for shape, t in specs]
    return kernel.bind(reads, writes, work, example.constants)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", list(examples()), ids=str)
def test_the_cpu_form_is_the_reference(example, dtype):
    reads, writes = arrays(example, dtype)
    before = [r.copy() for r in reads]
    expected = KERNELS[example.kernel].reference(np, *reads, **example.constants)
    expected = expected if isinstance(expected, tuple) else (expected,)
    thunks = bound(example, reads, writes)
    for _ in range(2):  # what is prebuilt can be called again
        for thunk in thunks:
            thunk()
        rtol = 3e-6 if dtype == "float32" else 1e-13
        for y, e in zip(writes, expected, strict=True):
            np.testing.assert_allclose(y, np.broadcast_to(e, y.shape), rtol=rtol, atol=rtol)
            assert np.asarray(e).dtype == y.dtype
    for r, b in zip(reads, before, strict=True):
        np.testing.assert_array_equal(r, b)


IN_PLACE = {"add": (0, 1), "sgd": (0, 3), "adam": (0, 2, 3), "rmsprop": (0, 2, 3, 4), "adam_tick": (0,), "tick": (0,)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", [e for e in examples() if e.kernel in IN_PLACE
                                     and len({str(r) for r in e.reads[:2]}) < 3], ids=str)
def test_updates_may_be_in_place(example, dtype):
    """Gradients are added onto one of the two, parameters and states are updated where they lie."""
    for start in range(2 if example.kernel == "add" else 1):
        reads, writes = arrays(example, dtype)
        bound_to = [p for p in IN_PLACE[example.kernel] if p < len(reads)][start:][: len(writes)]
        if any(reads[p].shape != w.shape for p, w in zip(bound_to, writes, strict=True)):
            continue
        expected = KERNELS[example.kernel].reference(np, *[r.copy() for r in reads], **example.constants)
        for thunk in bound(example, reads, [reads[p] for p in bound_to]):
            thunk()
        for p, e in zip(bound_to, expected if isinstance(expected, tuple) else (expected,), strict=True):
            np.testing.assert_allclose(reads[p], e, rtol=3e-6 if dtype == "float32" else 1e-13,
                                       atol=1e-7 if dtype == "float32" else 0)


@pytest.mark.parametrize("example", list(examples(300, 400)), ids=str)
def test_calls_make_no_array(example):
    """Arrays here have 480 kB; NumPy itself goes through broadcast operands in pieces of 8192 elements."""
    reads, writes = arrays(example, "float32")
    thunks = bound(example, reads, writes)

    def run():
        with np.errstate(all="ignore"):
            for thunk in thunks:
                thunk()

    assert bytes_allocated(run) < 150_000


STRIDED = ("add", "mul", "maximum", "sum", "max", "matmul", "linear_weight_grad", "spread", "copy", "exp", "softmax",
           "cross_entropy", "cast")


@pytest.mark.parametrize("example", [e for e in examples() if e.kernel in STRIDED], ids=str)
def test_strided_operands(example):
    """These kernels are handed views as they are."""
    reads, writes = arrays(example, "float64")
    strided = [np.asfortranarray(r) if r.ndim > 1 else np.repeat(r, 2)[::2] if r.ndim == 1 else r for r in reads]
    expected = KERNELS[example.kernel].reference(np, *reads, **example.constants)
    for thunk in bound(example, strided, writes):
        thunk()
    for y, e in zip(writes, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(y, np.broadcast_to(e, y.shape), rtol=1e-13, atol=1e-13)


def test_every_kernel_of_these_families_has_an_example():
    # sequences, optimizers
    elsewhere = {"log_softmax", "log_softmax_grad", "mse", "mse_grad", "clip_factor", "square_sum",
                 "sgd_many", "adam_many", "rmsprop_many", "cast_many", "unscale", "scale_update", "any_set", "amend"}
    mine = {name for name, k in KERNELS.items() if k.reference.__module__.rpartition(".")[2] in HERE}
    assert mine - elsewhere == {e.kernel for e in examples()}


@pytest.mark.parametrize("name", ["softmax", "softmax_grad", "log_softmax", "log_softmax_grad"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 0)])
def test_softmax_of_nothing_does_nothing(name, shape):
    kernel, count = KERNELS[name], 2 if name.endswith("grad") else 1
    reads, y = [np.ones(shape)] * count, np.ones(shape)
    for thunk in kernel.bind(reads, [y], [np.empty(s, d) for s, d in kernel.work(reads, [y])], {}):
        thunk()


def test_dropout_depends_on_the_sample_and_not_on_the_batch():
    x = np.ones((8, 6))
    constants = {"rate": 0.5, "seed": 3, "draw": 1}
    whole = KERNELS["dropout"].reference(np, x, np.array([4], np.uint64), sample=0, **constants)
    half = KERNELS["dropout"].reference(np, x[5:], np.array([4], np.uint64), sample=5, **constants)
    assert np.array_equal(whole[5:], half)
    for change in ({"seed": 4}, {"draw": 2}, {"seed": 3 + (1 << 32)}):
        assert not np.array_equal(whole, KERNELS["dropout"].reference(np, x, np.array([4], np.uint64), sample=0,
                                                                      **{**constants, **change}))
    assert not np.array_equal(whole,
                              KERNELS["dropout"].reference(np, x, np.array([5], np.uint64), sample=0, **constants))
    assert np.array_equal(whole, KERNELS["dropout"].reference(np, x, np.array([2**64 - 1], np.uint64), sample=0,
                                                              **{**constants, "draw": 6}))


def test_philox_is_philox():
    """Known answers of the generator's authors."""
    from minidl.kernels.dropout import philox

    for counter, key, answer in (
            ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
            ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
             (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))):
        words = philox(np, *(np.array([c], np.uint64) for c in counter), *key)
        assert tuple(int(w[0]) for w in words) == answer


def test_a_kernel_that_is_not_known_is_told_with_those_near_it():
    with pytest.raises(KernelError, match=r"unknown kernel 'reluu'; similar names: relu.*@kernel\('reluu'\)"):
        KERNELS["reluu"]
    tape = ml.autograd.tape.current()
    x = ml.array(np.ones(2))
    with pytest.raises(KernelError, match="unknown kernel 'nothing'"), tape.task(tape.new_unit(), ml.graph.Kind.F):
        tape.call("nothing", [x], [x])


def test_a_kernel_without_a_cpu_form_says_how_to_define_one(monkeypatch):
    monkeypatch.setitem(KERNELS, "half", Kernel("half", lambda xp, x: x / 2))
    tape = ml.autograd.tape.current()
    x, y = ml.array(np.ones(2)), ml.array(np.zeros(2))
    with (pytest.raises(KernelError, match=r"kernel half has no CPU form; define one with @"),
          tape.task(tape.new_unit(), ml.graph.Kind.F)):
        tape.call("half", [x], [y])


def test_a_kernel_is_defined_once():
    with pytest.raises(KernelError, match="kernel relu is defined twice"):
        kernel("relu")(lambda xp, x: x)
