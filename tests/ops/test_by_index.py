"""Sums and copies by index, and the functions of torch that networks on graphs use beside them: finite differences,
torch, recorded steps in any order, and one line for what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from any_order import same_in_any_order, trained
from helpers import random_array, refuses, torch_or_skip

import minidl as ml
from minidl import nn, ops
from minidl.passes.draft import Draft
from minidl.passes.split import split
from minidl.runtime.checking import random_schedule
from minidl.testing.checks import gradcheck


def values(*shape: int, seed: int = 1) -> Any:
    return random_array(shape, seed)


def whole(m: Any, a: Any) -> Any:
    """A tensor of whole numbers or of bool, ours or torch's."""
    return ml.array(np.array(a)) if m is ml else m.tensor(a)


X, AT, FEW = values(4, 3), [0, 2, 2, 0, 3], [[0, 2], [1, 1], [0, 0]]
def test_an_element_of_src_without_an_index_has_no_gradient() -> None:
    """Torch has no gradient if `src` is larger than the index."""
    gradcheck(lambda x, s: x.scatter_add(0, ml.array(np.array(FEW)), s), X, values(4, 3, seed=2))
    gradcheck(lambda x, s: x.scatter(0, ml.array(np.array(FEW)), s), X, values(4, 3, seed=2))


def test_rows_of_one_place_are_added_in_their_order_and_the_last_copy_stays() -> None:
    index, source = ml.array(np.array([1, 1, 0, 1])), np.array([1e8, 1.0, 3.0, -1e8], "float32")
    assert ml.zeros(2).index_add(0, index, source).tolist() == [3, 0]  # not 1
    assert ml.zeros(2).scatter_add(0, index, source).tolist() == ml.bincount(index, source).tolist() == [3, 0]
    assert ml.zeros(2).scatter(0, index, source).tolist() == [3, -1e8]
    x = ml.Parameter(source)
    ml.zeros(2).scatter(0, index, x).sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1]


def test_whole_numbers_are_counted_and_copied_as_in_torch() -> None:
    torch = torch_or_skip()
    for x, weights, least in (([1, 4, 1], None, 0), ([1, 4, 1], None, 7), ([], None, 0), ([], None, 2),
                              ([0, 2, 2], [0.5, 0.25, 3.0], 0), ([0, 2, 2], [1, 2, 3], 5)):
        mine, theirs = (m(x, dtype=d) for m, d in ((ml.array, "int64"), (torch.tensor, torch.int64)))
        found = ml.bincount(mine, weights and ml.array(weights), minlength=least)
        wanted = torch.bincount(theirs, weights and torch.tensor(weights), minlength=least)
        assert (found.tolist(), found.dtype) == (wanted.tolist(), str(wanted.dtype).removeprefix("torch."))
    for m, ones in ((ml, lambda x: ml.ones_like(x)), (torch, torch.ones_like)):
        index = whole(m, [[0, 2], [1, 1]])
        zeros = m.zeros_like(whole(m, np.zeros((2, 3), int)))
        assert zeros.scatter_add(1, index, ones(index)).tolist() == [[1, 0, 1], [0, 2, 0]]
        assert zeros.scatter(1, index, 4).tolist() == [[4, 0, 4], [0, 4, 0]]
        assert zeros[0].index_add(0, index[0], index[0]).tolist() == [0, 0, 2]
    gradcheck(lambda w: ml.bincount(ml.array([1, 4, 1]), w), values(3))


def test_steps_are_torchs_at_their_kinks() -> None:
    torch = torch_or_skip()
    x = np.array([0.5, -0.5, 1.5, 2.5, -2.5, -0.0, 0.0, 7.0, np.inf, -np.inf, 1e15, np.nan])
    for name in ("sign", "round", "floor", "ceil", "trunc"):
        p, t = ml.Parameter(x), torch.tensor(x, requires_grad=True)
        found, wanted = getattr(p, name)(), getattr(t, name)()
        found.sum().backward()
        wanted.sum().backward()
        np.testing.assert_array_equal(found.numpy()[:-1], wanted.detach().numpy()[:-1])
        assert np.isnan(found.numpy()[-1])  # torch's sign of NaN is 0
        np.testing.assert_array_equal(p.grad.numpy(), t.grad.numpy())
    for decimals in (2, 1, -1):
        x = np.array([0.125, 2.675, -0.25, 25.0, 35.0, 1234.5678], "float32")
        np.testing.assert_array_equal(ml.round(ml.array(x), decimals=decimals).numpy(),
                                      torch.round(torch.tensor(x), decimals=decimals).numpy())


def test_the_gradient_of_a_distance_that_is_0_is_0() -> None:
    torch = torch_or_skip()
    x, y = values(3, 2) * [1, 1.3], values(4, 2, seed=2) * [1, 1.3]
    y[1] = x[0]
    for p in (1.0, 2.0, float("inf")):
        mine, theirs = [ml.Parameter(a) for a in (x, y)], [torch.tensor(a, requires_grad=True) for a in (x, y)]
        found, wanted = ml.cdist(*mine, p), torch.cdist(*theirs, p)
        assert found.numpy()[0, 1] == 0
        found.sum().backward()
        wanted.sum().backward()
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-12)


class Graph(nn.Module):
    """A network on a graph, whose sums, counts and copies are by index."""

    def __init__(self) -> None:
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Any, edges: Any) -> Any:
        n, (source, target) = x.shape[0], edges
        degree = ml.bincount(target, minlength=n).clamp(min=1).float()
        h = self.first(x)
        h = h.index_add(0, target, h[source]) / degree.unsqueeze(1)
        h = h.scatter(1, source[:n].unsqueeze(1), ml.cdist(h, h[:2]).prod(1, keepdim=True))
        wide = target.unsqueeze(1).expand(-1, 8)
        return self.last(ml.zeros(n, 8).scatter_add(0, wide, h[source]) + h.diagonal().sum())


def made() -> Any:
    ml.seed(1)
    model = Graph()
    opt = ml.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any, edges: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x, edges), y)
        loss.backward()
        opt.step()
        return loss

    return step, model.parameters()


EDGES = np.array([[0, 1, 2, 3, 4, 4, 0, 5], [1, 2, 2, 2, 0, 1, 2, 0]])
BATCH = (random_array((6, 3), 4, "float32"), EDGES, np.arange(6) % 2)


def test_a_recorded_network_has_the_bits_of_the_eager_one_on_any_schedule_and_in_parts() -> None:
    same_in_any_order(made, [BATCH] * 3, (1, 2))
    parts = [trained(made, [BATCH] * 3, lambda g, s=s: ml.CheckingExecutor(
        h := split(Draft.of(g), 2).graph, random_schedule(h, 3, np.random.default_rng(s)), seed=s)) for s in (1, 2)]
    assert parts[0] == parts[1]


def test_a_recorded_step_checks_its_indices_before_it_runs() -> None:
    run = ml.SequentialExecutor(ml.record(Graph(), *BATCH[:2]))
    run(*BATCH[:2])
    for bad in (-1, 6):
        edges = EDGES.copy()
        edges[1, 3] = bad
        with pytest.raises(ValueError, match=rf"index {bad} \(element 11\) is out of range: there are rows 0 to 5"):
            run(BATCH[0], edges)
    with pytest.raises(ValueError, match=r"recorded step does not know the largest number; give the length: minlength"):
        ml.record(lambda x: ml.bincount(x), EDGES[0])
    with pytest.raises(RuntimeError, match=r"a recorded step does not know them; use where\(mask, x, 0\)"):
        ml.record(lambda x: x.masked_select(x > 0), X)
    found = ml.record(lambda x: x.masked_select(X > 0), X)  # a mask with values
    assert ml.SequentialExecutor(found)(X).tolist() == X[X > 0].tolist()


def test_what_does_not_fit_is_one_line() -> None:
    x, index = ml.array(X), ml.array(np.array(AT))
    refuses(
            (lambda: x.index_add(0, index, ml.ones(4, 3)), r"index \(5,\) and source \(4, 3\) do not fit shape \(4, 3\)"
                                                           r" along axis 0; expected \(5,\) and \(5, 3\)"),
            (lambda: x.index_add(0, index, ml.ones(5, 3)), "index_add: types differ: float64, float32"),
            (lambda: x.index_add(0, index.float(), ml.ones(5, 3)), "index_add: an index is int64, not float32|types"),
            (lambda: x.index_add(0, ml.array([4]), X[:1]), "index 4 is out of range for an axis of length 4"),
            (lambda: x.index_add(0, ml.array([-1]), X[:1]), "index -1 is out of range .* counts from 0"),
            (lambda: x.index_add(2, index, X), "axis 2"), (lambda: ml.zeros(0, 3).index_add(0, [0], ml.ones(1, 3)),
                                                           "index 0 is out of range for an axis of length 0"),
            (lambda: x.scatter_add(0, ml.array(FEW), ml.ones(2, 2, dtype="float64")),
             r"scatter_add: index \(3, 2\) does not fit src \(2, 2\)"),
            (lambda: x.scatter_add(1, ml.array(AT), X[0]), r"index \(5,\) does not fit src \(3,\)"),
            (lambda: x.scatter(0, ml.array([AT]), 1.0), r"scatter: index \(1, 5\) does not fit shape \(4, 3\)"),
            (lambda: x.scatter(1, ml.array([[3]]), 1.0), "index 3 is out of range for an axis of length 3"),
            (lambda: x.gather(0, ml.array([AT])), r"gather: index \(1, 5\) does not fit shape \(4, 3\)"),
            (lambda: x.scatter(1, ml.array([[0]])), "give either src or value"),
            (lambda: ml.bincount(x), "bincount: x is float64"),
            (lambda: ml.bincount(ml.array([1, -2])), "bincount: x holds -2"),
            (lambda: ml.bincount(index, X), r"weights \(4, 3\)"),
            (lambda: ml.cdist(x, X[:, :2]), r"cdist: rows of \(4, 3\) and \(4, 2\) have no distances"),
            (lambda: ml.cdist(x, x, 3.0), "p is 3.0; it must be 1, 2 or inf"),
            (lambda: x.diagonal(0, 1, -1), "dim1 1 and dim2 -1 are one axis"), (lambda: x.prod(2), "axis 2"),
            (lambda: index.prod(), "needs float32 or float64, not int64; whole numbers"),
            (lambda: x.masked_select(index), "the mask is int64, not bool"),
            (lambda: x.masked_select(X[:2] > 0), r"x \(4, 3\) and mask \(2, 3\) do not broadcast"))
    assert ops.index_add is ml.Tensor.index_add
