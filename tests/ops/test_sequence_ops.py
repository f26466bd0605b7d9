"""Ops for sequences: finite differences; joining and cutting, their copies and dependencies."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from helpers import bits, drawn, random_array, refuses, torch_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import same

import minidl as ml
from minidl import ops
from minidl.core.tasks import Kind
from minidl.runtime.checking import random_schedule
from minidl.testing.checks import gradcheck


# -------------------------------------------------------------------------------------- finite differences
def test_small_ops_finite_differences() -> None:
    x, y = random_array((3, 4)), random_array((3, 4), 5)
    gradcheck(ops.gelu, x * 2)
    gradcheck(lambda t: ops.gelu(t, "tanh"), x * 2)
    gradcheck(ops.log_softmax, x)
    gradcheck(ops.mse, x, y)
    labels = ml.array(np.array([0, 2, 1]))
    for smoothing in (0.0, 0.2, 1.0):
        gradcheck(lambda t, s=smoothing: ops.cross_entropy(t, labels, s), x)
    index = ml.array(np.array([[0, 2, 1], [2, 2, 0]]))
    gradcheck(lambda t: ops.embedding(t, index), x)
    gradcheck(lambda t: ops.embedding(t, ops.transpose(index)), x)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("affine", [0, 1, 2])
def test_layer_norm_finite_differences(axes: int, affine: int) -> None:
    shape = (2, 4) if axes == 2 else (4,)
    gradcheck(lambda *t: ops.layer_norm(*t, axes=axes, eps=0.01), random_array((3, 2, 4)),
                            *(random_array(shape, i) for i in range(affine)), rtol=1e-5)


@pytest.mark.parametrize("causal", [None, 0, 1, 5])
@pytest.mark.parametrize("mask", [None, [[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [0, 0, 0, 0]]])
def test_attention_finite_differences(causal: int | None, mask: Any) -> None:
    """Not causal, and causal with an offset."""
    keep = None if mask is None else ml.array(np.array(mask))
    seen: dict[str, Any] = {} if causal is None else {"causal": True, "offset": causal}
    gradcheck(lambda q, k, v: ops.attention(q, k, v, keep, **seen),
                            random_array((2, 1, 3, 2)), random_array((2, 1, 4, 2), 1), random_array((2, 1, 4, 3), 2))


SEEN: list[dict[str, Any]] = [{"causal": False}, {"causal": True}, {"causal": True, "offset": 1}]


@pytest.mark.parametrize("seen", SEEN, ids=str)
@pytest.mark.parametrize("mask", [None, [[1, 1, 1, 1], [1, 1, 0, 0]]])
def test_attention_with_dropout_finite_differences(seen: dict[str, Any], mask: Any) -> None:
    keep = None if mask is None else ml.array(np.array(mask))

    def f(q: Any, k: Any, v: Any) -> Any:
        ml.seed(3)  # each time the same elements
        return ops.attention(q, k, v, keep, dropout=0.4, **seen)

    gradcheck(f, random_array((2, 1, 3, 2)), random_array((2, 1, 4, 2), 1), random_array((2, 1, 4, 3), 2))


@pytest.mark.parametrize("seen", SEEN, ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0, 2])
def test_keys_are_hidden_at_any_scale(scale: float, seen: dict[str, Any]) -> None:
    """Padding, and keys that come later; an offset is that of keys from before the queries."""
    torch = torch_or_skip()
    keep = np.array([[1, 1, 1, 1], [1, 0, 1, 1]], bool)
    before = np.tri(3, 4, seen.get("offset", 0), dtype=bool) | (not seen["causal"])

    def theirs(*given: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            *given, attn_mask=torch.tensor(keep[:, None, None] & before), scale=scale)

    same(lambda *given: ops.attention(*given, ml.array(keep), scale=scale, **seen), theirs,
         [random_array((2, 2, n, 4), i) for i, n in enumerate((3, 4, 4))])


@pytest.mark.parametrize("offset", [-1, 2])
def test_an_offset_is_for_causal_attention(offset: int) -> None:
    q = ml.array(random_array((1, 1, 2, 2)))
    with pytest.raises(ValueError, match="at least 0, and is for causal attention"):
        ops.attention(q, q, q, offset=offset)


def test_attention_drops_what_dropout_of_its_probabilities_would() -> None:
    q, k, v = (ml.array(random_array((3, 2, 5, 4), i)) for i in range(3))
    with ml.no_grad():
        ml.seed(1)
        found = ops.attention(q, k, v, scale=0.5, dropout=0.3).numpy()
        ml.seed(1)
        p = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * 0.5)
        wanted = ops.matmul(ops.dropout(p, 0.3), v).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    with pytest.raises(ValueError, match="the dropout rate is 1"):
        ops.attention(q, k, v, dropout=1)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrence_in_float32_has_its_digits_and_keeps_nan(kind: str) -> None:
    """Also where tanh and sigmoid are flat, and over enough steps for a copy of the weight's columns."""
    gates, (length, n, d) = ops.recurrent.CELLS[kind].gates, (6, 5, 24)
    states = [random_array((n, d), 1)] * (2 if kind == "lstm" else 1)
    inputs = [random_array((length, n, gates * d), low=-12, high=12), *states,
              random_array((gates * d, d), 2, low=-0.3, high=0.3)]
    inputs[0][0, 2, 0] = np.nan
    y, single = (getattr(ops, kind)(*(ml.array(a.astype(dtype)) for a in inputs))[0].numpy()
                 for dtype in ("float64", "float32"))
    np.testing.assert_allclose(single, y, rtol=1e-5, atol=2e-6)
    assert np.isnan(single[:, 2]).any(axis=1).all()
    assert not np.isnan(np.delete(single, 2, axis=1)).any()


@pytest.mark.few(2)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("kind", ["rnn", "rnn relu", "gru", "lstm"])
def test_recurrence_finite_differences(kind: str, bias: int, reverse: bool) -> None:
    gates, d, n, length = ops.recurrent.CELLS[kind.split()[0]].gates, 2, 2, 3
    states = [random_array((n, d), i, low=-0.5, high=0.5) for i in range(2 if kind == "lstm" else 1)]
    rest = [random_array((gates * d, d), 7), *[random_array((gates * d,), 8)][:bias]]
    options: dict[str, Any] = {"relu": kind == "rnn relu"} if kind.startswith("rnn") else {}

    def joined(*tensors: Any) -> Any:
        """All that comes out, once."""
        y, *last = getattr(ops, kind.split()[0])(*tensors, reverse=reverse, **options)
        return ops.concat([y, *(ops.reshape(t * 0.5, (1, n, d)) for t in last)])

    gradcheck(joined, random_array((length, n, gates * d), 4) * 0.9, *states, *rest, rtol=1e-5)


# ------------------------------------------------------------------------------------- joining and cutting
def test_concat_finite_differences() -> None:
    a, b, c = random_array((3, 2)), random_array((3, 4), 1), random_array((3, 1), 2)
    gradcheck(lambda *t: ops.concat(t, 1), a, b, c)
    gradcheck(lambda *t: ops.concat(t, -1, room=9), a, b, c)

    def dense(a: Any, b: Any, c: Any) -> Any:
        """As in a dense block: what is joined is used, and joined again; once past the end, once beside it."""
        x = ops.concat([a, b], 1, room=9)
        y = ops.concat([x, c.tanh()], 1)
        z = ops.concat([y, (y * y)[:, :2]], 1)
        other = ops.concat([x, x[:, 1:3] * 2.0], 1)  # x is not the last in its slab any more
        past = ops.concat([z, c], 1)  # no room
        return ops.concat([z * z, other, past, x], 1)

    gradcheck(dense, a, b, c, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_of_joined_arrays_has_the_parts_that_it_touches(axis: int) -> None:
    """Along any axis: others need not be ready when it is read."""
    widths = (2, 3, 1)
    arrays = [np.ones((n, 4) if axis == 0 else (4, n), np.float32) for n in widths]
    found: dict[tuple[int, int], list[str]] = {}

    def step(*arrays: Any) -> Any:
        joined = ops.concat([x * 2 for x in arrays], axis)
        for begin, end in ((0, 2), (2, 5), (5, 6), (1, 3), (3, 6)):
            taken = joined[begin:end] if axis == 0 else joined[:, begin:end]
            found[begin, end] = [part.name.partition("concat")[2] for part in taken.parts]
        return joined.sum()

    ml.record(step, *arrays)
    assert found == {(0, 2): ["[0:2]"], (2, 5): ["[2:5]"], (5, 6): ["[5:6]"], (1, 3): ["[0:2]", "[2:5]"],
                     (3, 6): ["[2:5]", "[5:6]"]}


def test_slices_finite_differences() -> None:
    x = random_array((4, 5))
    gradcheck(lambda t: t[1:, ::2] * t[0, 1:4], x)
    gradcheck(lambda t: t[..., 1] + t[:, 0] * t[:, -1] + t[:, 2:3].reshape(4), x)
    gradcheck(lambda t: t[3] * t[1:][2] + t[::3][1], x)
    gradcheck(lambda t: t[1:1].sum() + t[0, 0] * t[3, 4], x)
    gradcheck(lambda t: ops.concat(ops.split(t, [2, 3], 1)[::-1], 1) * t, x)


@settings(max_examples=drawn(60), deadline=None)
@given(draw=st.data())
def test_slices_are_those_of_numpy(draw: Any) -> None:
    shape = draw.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    a = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    index: list[Any] = [draw.draw(st.one_of(
        st.slices(n).filter(lambda s: s.step is None or s.step > 0),
        *([st.integers(-n, n - 1)] if n else []))) for n in shape]
    if draw.draw(st.booleans()):
        index[draw.draw(st.integers(0, len(index))) :] = [Ellipsis]
    wanted = a[tuple(index)]
    found = ml.array(a)[tuple(index)]
    assert found.shape == wanted.shape
    assert (found.numpy() == wanted).all()
    p = ml.Parameter(a)
    weights = random_array(wanted.shape)
    if wanted.size:
        (p[tuple(index)] * ml.array(weights)).sum().backward()
        g = np.zeros_like(a)
        g[tuple(index)] = weights
        assert (p.grad.numpy() == g).all()


def launches(graph: Any, unit: str, kind: Kind) -> list[Any]:
    """The launches of all tasks of a kind whose unit has this name."""
    return [launch for task in graph if task.kind == kind and graph.unit_names[task.unit] == unit
            for launch in task.launches]


def copied(graph: Any) -> int:
    """How many numbers the joins copy."""
    return sum(int(np.prod(launch.writes[0].shape)) for launch in launches(graph, "concat", Kind.F))


def test_a_dense_block_copies_only_what_is_new_and_each_region_has_its_own_dependencies() -> None:
    n, growth, layers = 2, 3, 5
    weights = [ml.Parameter(random_array((growth, growth * (i + 1)), i, "float32")) for i in range(layers)]

    def step(x: Any, room: int) -> Any:
        for w in weights:
            x = ops.concat([x, ops.linear(x, w)], 1, room=room)
        loss = (x * x).sum()
        loss.backward()
        return loss

    x = random_array((n, growth), dtype="float32")
    room = growth * (layers + 1)
    graph = ml.record(lambda x: step(x, room), x)
    assert copied(graph) == n * room  # everything once
    assert copied(ml.record(lambda x: step(x, 0), x)) == n * growth * sum(range(2, layers + 2))
    storages = {v.storage for launch in launches(graph, "concat", Kind.F) for v in launch.writes}
    assert len(storages) == 1
    joined = [task for task in graph if task.kind == Kind.F and graph.unit_names[task.unit] == "concat"]
    assert [len(task.writes) for task in joined] == [2, 1, 1, 1, 1]
    # the third layer's input is the first three regions: nothing that is joined later concerns it
    third = [task for task in graph if task.kind == Kind.F and any(launch.kernel == "linear"
                                                                   for launch in task.launches)][2]
    assert {b.storage for b in third.reads} > storages
    assert sum(b.storage in storages for b in third.reads) == 3
    # gradients are views: no copy for what was there before, one for what was new
    assert [launch.writes[0].shape for launch in launches(graph, "concat", Kind.O)] == [(n, growth)] * layers


def test_several_slices_of_one_tensor_fill_its_gradient_once() -> None:
    w = ml.Parameter(random_array((4, 4), dtype="float32"))

    def step(x: Any) -> Any:
        y = ops.linear(x, w)
        loss = (y[:, 0] * y[:, 1] * y[:, 2] + y[:, 3]).sum()
        loss.backward()
        return w.grad

    graph = ml.record(step, random_array((3, 4), dtype="float32"))
    kernels = [launch.kernel for task in graph for launch in task.launches]
    assert kernels.count("unslice") == 1


def test_joining_and_cutting_refuse() -> None:
    x = ml.array(np.ones((2, 3)))
    for act in (lambda: ops.concat([x, x[:, :2]], 0), lambda: ops.concat([x, x], 2), lambda: x[1, 2, 0],
                lambda: x[::-1],
                lambda: x["a"], lambda: x[..., ...], lambda: ops.concat([]), lambda: ops.split(x, [1, 1], -1)):
        refuses((act, ""), error=ValueError)
    with pytest.raises(IndexError):
        x[2]
    assert [t.shape for t in x] == [(3,), (3,)]


# a program over a pool of tensors (2, w): each line takes what earlier ones made
LINES = st.lists(st.tuples(st.sampled_from(["concat", "grow", "slice", "tanh", "square", "row"]), st.integers(0, 9),
                           st.integers(0, 9),
                           st.integers(0, 9)), min_size=1, max_size=10)


def run_program(lines: Any, pool: list[Any], concat: Any) -> Any:
    """A scalar that depends on all that was made. `concat(tensors, room)`; all else is the same in both libraries."""
    for name, a, b, c in lines:
        x, y = pool[a % len(pool)], pool[b % len(pool)]
        width = x.shape[1]
        match name:
            case "concat" if width + y.shape[1] < 40:
                pool.append(concat([x, y], 0))
            case "grow" if width + y.shape[1] < 40:
                pool.append(concat([x, y], 3 * c))
            case "slice":
                begin = b % width
                pool.append(x[:, begin : begin + 1 + c % (width - begin) : 1 + c % 2])
            case "tanh":
                pool.append(x.tanh())
            case "square":
                pool.append(x * x * 0.5)
            case "row":
                pool.append(x * x[b % 2])
    total = None
    for t in pool:
        total = (t * t).sum() if total is None else total + (t * t).sum()
    return total


@settings(max_examples=drawn(80), deadline=None)
@given(lines=LINES, seed=st.integers(0, 2**31))
def test_programs_that_join_and_cut_have_torchs_gradients_in_any_order(lines: Any, seed: int) -> None:
    torch = torch_or_skip()
    arrays = [random_array((2, 1 + i), i, low=-1, high=1) for i in range(3)]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    run_program(lines, list(theirs), lambda t, room: torch.concat(t, 1)).backward()
    mine = [ml.Parameter(a) for a in arrays]

    def step() -> Any:
        loss = run_program(lines, [p + 0.0 for p in mine], lambda t, room: ops.concat(t, 1, room))
        loss.backward()
        return tuple(p.grad for p in mine)

    eager = step()
    for g, t in zip(eager, theirs, strict=True):
        np.testing.assert_allclose(g.numpy(), t.grad.numpy(), rtol=1e-9, atol=1e-12)
    wanted = bits(*eager)
    for p in mine:
        p.grad = None
    graph = ml.record(step)
    assert bits(*ml.SequentialExecutor(graph)()) == wanted
    rng = np.random.default_rng(seed)
    assert bits(*ml.CheckingExecutor(graph, random_schedule(graph, 3, rng), seed=seed)()) == wanted


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_in_float32_is_as_good_as_its_type(form: str) -> None:
    """Everywhere, also where exponential functions end."""
    x = np.concatenate([np.linspace(-15, 15, 30001), [-1e30, -100.0, 0.0, 100.0, 1e30]]).astype(np.float32)
    single, exact = (ml.Parameter(x.astype(dtype)) for dtype in ("float32", "float64"))
    for p in (single, exact):
        ops.gelu(p, form).sum().backward()
    y, wanted = ops.gelu(single, form).numpy(), ops.gelu(exact, form).numpy()
    assert np.abs(y - wanted).max(where=np.abs(x) < 20, initial=0) < 1e-6
    if "on_cuda_forms" not in sys.modules:  # 1 + erf cancels far below 0 there, as in torch
        np.testing.assert_allclose(y[np.abs(x) < 3], wanted[np.abs(x) < 3], rtol=2e-6, atol=1e-12)
    np.testing.assert_array_equal(y[-2:], x[-2:])
    np.testing.assert_allclose(single.grad.numpy(), exact.grad.numpy(), atol=2e-6)
    assert np.isnan(ops.gelu(ml.array(np.array([np.nan], np.float32)), form).numpy()[0])
