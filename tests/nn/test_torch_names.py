"""Functions, methods and layers with torch's names that are made of other ops, or have a kernel along one axis: finite
differences, torch, recorded steps, and one line for what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import random_array, refuses

import minidl as ml
import minidl.nn.functional as F
from minidl import nn


def values(*shape: int, seed: int = 1) -> Any:
    return random_array(shape, seed)


X = values(3, 4)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_orders_are_numpys(axis: int) -> None:
    """With ties, NaN and infinities, for short and long axes."""
    for shape in ((4, 5, 3), (1, 70, 70), (65, 1, 2), (3, 1, 1)):
        x = np.round(random_array(shape, 4), 1)
        x[x == 0.5] = np.nan
        x[x == -0.5] = -np.inf
        np.testing.assert_array_equal(ml.array(x).argsort(axis).numpy(), np.argsort(x, axis, kind="stable"))
        falling = np.argsort(np.where(np.isnan(x), -np.inf, np.where(np.isinf(x), 1e9, -x)), axis, kind="stable")
        np.testing.assert_array_equal(ml.array(x).argsort(axis, descending=True).numpy(), falling)  # NaN is the largest
    many = np.random.default_rng(0).integers(0, 100, 20_000).astype("float32")
    np.testing.assert_array_equal(ml.array(many).argsort().numpy(), np.argsort(many, kind="stable"))


def test_masks_of_special_numbers_and_places() -> None:
    x = np.array([1.0, np.nan, np.inf, -np.inf])
    for name in ("isnan", "isinf", "isfinite"):
        np.testing.assert_array_equal(getattr(ml, name)(ml.array(x)).numpy(), getattr(np, name)(x))
    t = ml.array(values(3, 4))
    assert ((t.eq(t)) & t.ge(t) & t.le(t) & ~t.ne(t) & ~t.lt(t) & ~ml.gt(t, t)).all()
    np.testing.assert_array_equal(t.index_select(1, ml.array([3, 0])).numpy(), t.numpy()[:, [3, 0]])
    assert [row.tolist() for row in t] == t.tolist()


def test_random_whole_numbers_and_likes() -> None:
    ml.seed(3)
    drawn = ml.randint(2, 5, (100,))
    assert (drawn.dtype, set(drawn.tolist())) == ("int64", {2, 3, 4})
    assert set(ml.randint(2, (50,)).tolist()) == {0, 1}
    assert sorted(ml.randperm(9).tolist()) == list(range(9))
    x = ml.zeros(2, 3, dtype="float64")
    for like in (ml.full_like(x, 7), ml.rand_like(x), ml.randn_like(x)):
        assert (like.shape, like.dtype) == ((2, 3), "float64")
    assert ml.full_like(x, 7).tolist() == [[7.0] * 3] * 2
    with pytest.raises(ValueError, match="randint: low is 3 and high 3; low must be below high"):
        ml.randint(3, 3, (1,))


def test_a_network_is_walked_frozen_and_kept_by_name() -> None:
    class Net(nn.Module):
        def __init__(self):
            self.heads = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 1)})
            self.register_buffer("scale", ml.full((2,), 2.0))

        def forward(self, x, head):
            return self.heads[head](x * self.scale)

    net, seen = Net(), []
    assert [name for name, _ in net.named_modules()] == ["", "heads", "heads.a", "heads.b"]
    assert net.apply(lambda m: seen.append(type(m).__name__)) is net
    assert seen == ["Linear", "Linear", "ModuleDict", "Net"]
    assert list(net.state_dict()) == ["heads.a.weight", "heads.a.bias", "heads.b.weight", "heads.b.bias", "scale"]
    assert [name for name, _ in net.named_buffers()] == ["scale"]
    assert ("a" in net.heads, "c" in net.heads, len(net.heads), list(net.heads)) == (True, False, 2, ["a", "b"])
    assert [m for _, m in net.heads.items()] == [*net.heads.values()]
    net.heads["c"] = nn.ReLU()
    assert [*net.heads.keys()] == ["a", "b", "c"]
    net.heads["a"].requires_grad_(False)
    net(ml.ones(1, 2), "b").sum().backward()
    assert net.heads["b"].weight.grad is not None
    assert not any(p.requires_grad for p in net.heads["a"].parameters())
    with pytest.raises(KeyError, match="has a method 'items'"):
        net.heads["items"] = nn.ReLU()


@pytest.mark.parametrize("made", [lambda n, x: n.mean * 0.5 + x.mean(0), lambda n, x: x[1], lambda n, x: n.layer(x)[0]])
def test_a_state_that_is_set_to_a_result_stays_a_state(made: Any) -> None:
    """As a registered buffer of torch does; a gradient goes through it as through any tensor."""
    net, x = nn.Module(), ml.array(values(4, 3)) * 1.0
    net.layer = nn.Linear(3, 3, dtype="float64")
    net.register_buffer("mean", np.zeros(3))
    for _ in range(2):
        net.mean = made(net, x)
    assert list(net.state_dict()) == ["layer.weight", "layer.bias", "mean"]
    assert [name for name, _ in net.named_buffers()] == ["mean"]
    saved = net.state_dict()
    net.mean = net.mean * 2.0
    net.load_state_dict(saved)
    assert net.mean.tolist() == saved["mean"].tolist()
    net.other = x[0]
    assert list(net.state_dict()) == list(saved), "what was no state is none"
    net.mean = net.layer(x).mean(0)
    net.mean.sum().backward()
    assert net.layer.bias.grad.tolist() == [1.0] * 3


def test_a_parameter_is_not_replaced_by_a_tensor_as_in_torch() -> None:
    layer = nn.Linear(3, 2)
    for tensor in (layer.weight * 2.0, ml.zeros(2, 3)):
        with pytest.raises(TypeError, match=r"weight is a parameter of a Linear, .*weight.assign\(values\) replaces"):
            layer.weight = tensor
    weight, layer.bias = layer.weight, None
    layer.weight = nn.Parameter(values(2, 3))
    del layer.weight
    layer.weight = weight * 2.0
    assert not layer.parameters()


def test_what_does_not_fit_is_one_line() -> None:
    x, image = ml.array(X), ml.array(values(1, 3, 4, 2))
    refuses(
            (lambda: F.pad(image, (1, 1, 1, 1)), r"channels last.*write \(0, 0, left, right, top, bottom\)"),
            (lambda: F.pad(x, (1,)), "two for each axis"), (lambda: F.pad(x, (1, 1), "mirror"), "the mode is 'mirror'"),
            (lambda: F.pad(x, (4, 0), "reflect"), "reflect can add at most 3"),
            (lambda: F.pad(x, (-3, -2)), "leave fewer than none"),
            (lambda: x.topk(5), "k is 5; an axis of 4 elements has from 1 to 4"), (lambda: x.norm(3), "1, 2 or inf"),
            (lambda: x.flip(), "the axes are missing"), (lambda: x.roll((1, 2), 0), "2 shifts and 1 axes"),
            (lambda: ml.array([1.0]).tril(), "no rows and columns"), (lambda: F.glu(x[:, :3]), "no two halves"),
            (lambda: ml.einsum("...i,i->...", x, x[0]), "write an axis for each"),
            (lambda: ml.einsum("ii->i", x), "diagonals are not supported"),
            (lambda: ml.einsum("ij,jk->ik", x), "names 2 operands, and 1 are given"),
            (lambda: ml.einsum("ij,jk->ik", x, x), "'j' is 4 in one operand of .* and 3 in another"),
            (lambda: ml.einsum("ij->k", x), "'k' of the result is in no operand"),
            (lambda: F.pixel_shuffle(image, 2), "multiple of 2 x 2"),
            (lambda: nn.TransformerEncoderLayer(8, 2), "batch_first=True"),
            (lambda: F.max_pool1d(image, 2), "max_pool1d needs an input .n, length, c."),
            (lambda: nn.ZeroPad2d((1, 2)), "left, right, top, bottom"))
