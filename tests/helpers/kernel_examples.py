"""Calls of kernels, as their CPU forms, their CUDA forms and their references are tested with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from helpers import random_array

from minidl.kernels.masks import COMPARISONS, LOGIC

IN_PLACE = {"add": (0, 1), "matmul_add": (2,), "sgd": (0, 3), "adam": (0, 2, 3), "nadam": (0, 2, 3),
            "rmsprop": (0, 2, 3, 4), "muon": (0, 2), "adam_tick": (0,), "nadam_tick": (0,), "tick": (0,)}
STRIDED = ("add", "mul", "maximum", "sum", "max", "matmul", "linear_weight_grad", "spread", "copy", "exp", "softmax",
           "cross_entropy", "cast")


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
    for name in ("neg", "exp", "log", "sqrt", "sin", "cos", "tanh", "abs", "relu", "sigmoid", "copy", "sign", "round",
                 "floor", "ceil", "trunc"):
        yield Example(name, (s,), (s,), positive=name in ("log", "sqrt"))
        yield Example(name, ((m,),), ((m,),), positive=name in ("log", "sqrt"))
    yield Example("copy", ((m,),), (s,))
    for to in ("float16", "float32", "float64"):
        yield Example("cast", (s,), (np.zeros(s, to),), {"dtype": to})
    for name in ("relu_grad", "sigmoid_grad", "tanh_grad", "sqrt_grad", "root_grad", "abs_grad"):
        yield Example(name, (s, s), (s,), positive=name in ("sqrt_grad", "root_grad"))
    yield Example("fill", (s,), (s,), {"value": 3.0})
    for name, key in (("scale", "factor"), ("shift", "term")):
        yield Example(name, (s,), (s,), {key: 0.3})
    yield Example("lerp", (s, s), (s,), {"weight": 0.3})
    for t, done in ((0.0, False), (1.0, True), (5.0, False)):
        yield Example("past", (s, s, np.array([t])), (s,), {"age": 3, "decay": 0.5, "done": done})
    for e in (2.0, 0.5, -1.0):
        yield Example("power", (s,), (s,), {"exponent": e}, positive=True)
        yield Example("power_grad", (s, s), (s,), {"exponent": e}, positive=True)
    yield Example("div_grad", (s, (m,), s), (s,), positive=True)
    for name in ("maximum_grad", "minimum_grad"):
        yield Example(name, (s, s, s), (s,))
        yield Example(name, ((m,), s, s), (s,))
        yield Example(name, (np.ones(s), np.ones((n, 1)), s), (s,))
    yield from mask_examples(n, m)
    yield from activation_examples(s)
    yield from loss_examples(s)
    yield Example("unslice", ((n, 2),), (s,), {"shape": s, "region": ((0, n, 1), (1, 4, 2))})
    yield Example("unslice", (((n + 1) // 2, m),), (s,), {"shape": s, "region": ((0, n, 2), (0, m, 1))})
    yield Example("max_grad", (random_array((4, 3, 5), 3), random_array((4, 3, 5), 3).max(axis=(1, 2), keepdims=True),
                               (4, 1, 1)), ((4, 3, 5),), {"axes": (1, 2)})
    yield Example("argsort", (random_array((4, 3, 5)),), (np.zeros((4, 3, 5), np.int64),), {"axis": 1})
    yield Example("cumsum", ((4, 3, 5),), ((4, 3, 5),), {"axis": 2, "reverse": True})
    yield Example("matmul_slope", ((n, m), (m, 2), (n, 2)), ((n, 2),), {"act": "relu_grad"})
    yield Example("matmul", ((n, m), (m, n)), ((n, n),))
    yield Example("matmul", ((2, n, m), (m, 3)), ((2, n, 3),))
    yield Example("matmul", ((2, 1, n, m), (5, m, 2)), ((2, 5, n, 2),))
    yield Example("matmul_add", ((n, m), (m, 2), (n, 2)), ((n, 2),))
    yield Example("linear", ((n, m), (2, m)), ((n, 2),))
    yield Example("linear", ((n, m), (2, m), (2,)), ((n, 2),))
    yield Example("linear_weight_grad", ((n, m), (n, 2)), ((2, m),), {"bias": False})
    yield Example("linear_weight_grad", ((n, m), (n, 2)), ((2, m), (2,)), {"bias": True})
    yield Example("group", ((n, m), (n, 2), (m, 3), (m, n)), ((2, m), (2,), (n, 3)), {
        "of": tuple(("linear_weight_grad", 2, 1 + bias, (("bias", bias),)) for bias in (True, False))})
    yield Example("linear_weight_update", ((n, m), (n, 2), (2, m), (1,), (2, m)), ((2, m), (2, m), (2,)), {
        "rule": "sgd", "bias": True, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True})
    yield Example("linear_weight_update", ((n, m), (n, 2), (2, m), (1,)), ((2, m),), {
        "rule": "sgd", "bias": False, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False})
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
    image, gates, hidden, w1, w2 = (n, 4, 4, m), (n, 1, 1, m), (n, 1, 1, 2), (2, 1, 1, m), (m, 1, 1, 2)
    yield Example("squeeze_excite", (image, w1, (2,), w2, (m,)), (image, gates, hidden, gates))
    yield Example("squeeze_excite_input_grad", (image, image, w1, w2, hidden, gates), (image, gates, hidden))
    yield Example("batch_norm_eval", (image, (m,), (m,), (m,), (m,)), (image, (m,)), {"eps": 1e-3}, positive=True)
    yield Example("batch_norm_eval_input_grad", (image, (m,), (m,)), (image,))
    yield Example("batch_norm_move", ((m,), (m,), (m,), (m,), np.array(3)), ((m,), (m,), np.array(0)), {
        "momentum": 0.1})
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
        for law, dtype in (("normal", "float32"), ("normal", "float64"), ("uniform", "float32"), ("uniform", "float64"),
                           ("uniform", "int64")):
            whole = {"low": -3, "span": 9} if dtype == "int64" else {"low": 0, "span": 1}
            yield Example("draw", (step,), (np.zeros(shape, dtype),), {
                "shape": shape, "dtype": dtype, "normal": law == "normal", **whole, "seed": 5 + (9 << 32), "draw": 2,
                "sample": 11})
    for shape in (s, (n,), (n, 2, 3)):
        yield Example("dither", (shape, np.random.default_rng(5).random(shape)), (shape,), {"s": 1.5})
    for values in ([0], [1], [0, 0, 0], [0, 0, 7]):
        yield Example("any_set", tuple(np.array([v], np.int32) for v in values), (np.zeros(1, np.int32),))
    yield Example("embedding", (np.arange(5)[:, None] * 7, np.array([[4, 0], [1, 1]])), (np.zeros((2, 2, 1), int),))
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
        yield Example("nadam", (s, s, s, s, (1,), np.array([2.0, 0.8, 0.9, 0.85, 0.86])), (s, s, s),
                      {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": decay}, positive=True)
    for more in ({}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.9}):
        states = (np.full(s, 5.0) if "centered" in more else s, *(s,) * len(more))  # v is not below the square of a
        yield Example("rmsprop", (s, s, *states, (1,)), (s,) * (2 + len(more)),
                      {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.1, **more}, positive=True)
    for shape in (s, (m, n), (n, n), (1, m), (m, 1)):
        for nesterov in (False, True):
            yield Example("muon", (shape, shape, shape, (1,)), (shape, shape), {
                "momentum": 0.9, "nesterov": nesterov, "coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7,
                "steps": 5, "scale": 1.5, "weight_decay": 0.1})
    yield Example("nadam_tick", (np.array([[2.0, 0.3, 0.98, 0.5, 0.51], [0.0, 1.0, 1.0, 0.0, 0.0]]),),
                  (np.zeros((2, 5)),), {"beta1": 0.9, "beta2": 0.99, "decay": 0.004})
    yield Example("adam_tick", (np.array([[2.0, 0.81, 0.98], [0.0, 1.0, 1.0]]),), (np.zeros((2, 3)),),
                  {"beta1": 0.9, "beta2": 0.99})


def activation_examples(s):
    for name in ("relu6", "hardsigmoid", "hardswish", "silu", "mish", "softsign", "gelu", "gelu_tanh"):
        yield Example(name, (s,), (s,))
        yield Example(f"{name}_grad", (s, s), (s,))
    yield Example("leaky_relu", (s,), (s,), {"slope": 0.1})
    yield Example("leaky_relu_grad", (s, s), (s,), {"slope": 0.1})
    for constants in ({"rectangle": False}, {"rectangle": True}):
        yield Example("spike", (s,), (s,), constants)
        yield Example("spike_grad", (s, s), (s,), constants)


def loss_examples(s):
    """Of each element of two arrays."""
    chances = np.abs(random_array(s)) / 2.1
    for name in ("l1", "bce_with_logits"):
        yield Example(name, (s, s), (s,))
    yield Example("kl_div", (s, chances), (s,))
    for name in ("l1_grad", "bce_with_logits_grad"):
        yield Example(name, (s, s, s), (s,))
    yield Example("bce", (chances, chances), (s,))
    for name in ("bce_grad", "bce_target_grad"):
        yield Example(name, (chances, chances, s), (s,))
    yield Example("smooth_l1", (s, s), (s,), {"beta": 0.5})
    yield Example("smooth_l1_grad", (s, s, s), (s,), {"beta": 0.5})
    yield Example("mse_grad", (s, s, ()), (s,), {"factor": 2 / 30})
    yield Example("log_softmax", (s,), (s,))
    yield Example("log_softmax_grad", (s, s), (s,))


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
            yield from (Example("argsort", (tied,), (whole,), {"axis": axis, "descending": d}) for d in (False, True))
        for reverse in (False, True):
            yield Example("cumsum", (s,), (s,), {"axis": axis, "reverse": reverse})
    for source in (s, np.ones(s), np.where(mask, np.nan, np.arange(m) % 3), whole):
        yield Example("embedding_largest", (np.arange(n) * 2 % 3, source), (whole[:1].repeat(4, 0),), {"rows": 4})
    yield Example("argmax", (np.where(mask, np.nan, 1.0),), (np.zeros((n, 1), np.int64),), {"axis": 1})
    yield Example("sum", (whole,), (np.zeros((n, 1), np.int64),), {"axes": (1,)})


def strided(reads):
    """The same numbers, elsewhere in memory."""
    return [np.asfortranarray(r) if r.ndim > 1 else np.repeat(r, 2)[::2] if r.ndim == 1 else r for r in reads]


def in_place(example, dtype):
    """What is read, and the arrays of it that are written to: gradients are added onto one of the two, parameters and
    states are updated where they lie."""
    for start in range(2 if example.kernel == "add" else 1):
        reads, writes = arrays(example, dtype)
        onto = [reads[p] for p in IN_PLACE[example.kernel] if p < len(reads)][start:][: len(writes)]
        if all(r.shape == w.shape for r, w in zip(onto, writes, strict=True)):
            yield reads, onto


def arrays(example, dtype):
    """What is read, and what is to be written: full of NaN, so that every element must be."""
    def one(i, x):
        if isinstance(x, tuple):
            return np.asarray(random_array(x, i, dtype, low=0.2 if example.positive else -2.0))
        scalars = example.kernel in ("adam", "adam_tick", "nadam", "nadam_tick", "past")  # counts are float64 always
        return x.astype(dtype) if x.dtype.kind == "f" and not scalars else x.copy()

    reads = [one(i, x) for i, x in enumerate(example.reads)]
    writes = [np.full(x, np.nan, dtype) if isinstance(x, tuple) else np.zeros_like(x) for x in example.writes]
    return reads, writes
