"""Layers, losses and initial values beyond the first networks: what is recorded and refused, and kernels' forms."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from cuda_agree import DTYPES, agree, draw
from helpers import bits, bytes_allocated, random_array, refuses, torch_or_skip

import minidl as ml
import minidl.nn.functional as F
from minidl import nn, ops
from minidl.core.tasks import Kind
from minidl.kernels import KERNELS
from minidl.runtime.executors import SequentialExecutor


def values(*shape, seed=1):
    return random_array(shape, seed)


# ---------------------------------------------------------------------------------------------- losses and images
def test_a_weighted_loss_is_recorded_with_its_labels_checked() -> None:
    x, labels = values(4, 3).astype("float32"), np.array([0, 2, 1, -100])
    layer, weight = nn.Linear(3, 3), ml.array([1.0, 2.0, 0.5])

    def step(x, y):
        layer.zero_grad()
        loss = F.cross_entropy(layer(x), y, weight)
        loss.backward()
        return loss, layer.weight.grad

    graph = ml.record(step, x, labels)
    run = SequentialExecutor(graph)
    for y in (labels, labels[::-1].copy()):
        assert bits(*run(x, y)) == bits(*step(ml.array(x), ml.array(y)))
    for act in (lambda: run(x, labels + 1), lambda: step(ml.array(x), ml.array(labels + 1))):
        with pytest.raises(ValueError, match="label 3 of sample 1 is out of range"):
            act()
    with pytest.raises(ValueError, match=r"class weights are \(2,\); expected \(3,\), one for each class"):
        F.cross_entropy(ml.array(x), ml.array(labels), ml.ones(2))
    assert np.isnan(F.cross_entropy(ml.array(x), ml.array(labels * 0 - 100), weight).item())


def test_losses_refuse_in_one_line() -> None:
    x, y = ml.Parameter(np.zeros((2, 3))), ml.array(np.zeros((2, 1)))
    refuses((lambda: F.l1_loss(x, y), r"prediction \(2, 3\) and target \(2, 1\) must have one shape"),
                         (lambda: F.l1_loss(x, x, reduction="average"), "reduction is 'average'; it must be mean"),
                         (lambda: F.smooth_l1_loss(x, x, beta=0), "beta of smooth_l1_loss is 0; it must be above 0"),
                         (lambda: F.cross_entropy(x, ml.arange(2), label_smoothing=2.0), "label_smoothing is 2.0"),
                         (lambda: F.binary_cross_entropy_with_logits(x, x).backward(), "no gradient toward its tar"))


def test_group_norm_of_no_samples() -> None:
    assert ops.group_norm(ml.array(np.zeros((0, 3, 4), np.float32)), 2).shape == (0, 3, 4)


def test_weights_are_drawn_as_torch_draws_them() -> None:
    """Uniform in +-1/sqrt(inputs). A convolution has taps x channels of a group as inputs."""
    assert 0.95 < np.abs(nn.Linear(64, 64).weight.numpy()).max() * 8 <= 1
    most = np.abs(nn.Conv2d(16, 16, 3, groups=4).weight.numpy()).max()
    assert 0.95 < most * np.sqrt(9 * 16 / 4) <= 1


def test_images_refuse_in_one_line() -> None:
    x = ml.array(values(1, 3, 4, 2))
    refuses(
            (lambda: ops.conv_transpose2d(x, ml.array(values(3, 2, 2, 2))), "expected 3 channels; images have .* last"),
            (lambda: ops.conv_transpose2d(x, ml.array(values(2, 2, 2, 2)), output_padding=1), "below the stride"),
            (lambda: ops.conv_transpose2d(x, ml.array(values(2, 1, 1, 2)), padding=3), "the padding .* is too large"),
            (lambda: ops.conv1d(x, ml.array(values(2, 2, 2))), r"conv1d needs an input \(n, length, c\)"),
            (lambda: ops.interpolate(x), "give either size or scale_factor"),
            (lambda: ops.interpolate(x, 2, mode="bicubic"), "it must be nearest or bilinear"),
            (lambda: ops.adaptive_avg_pool2d(x[0], 2), "an image .n, h, w, c. is needed"),
            (lambda: ops.group_norm(x, 3), "3 groups do not divide the channels"),
            (lambda: nn.GroupNorm(2, 3), "the groups must divide the channels"),
            (lambda: nn.GroupNorm(2, 4)(x), r"does not end in 4 channels"),
            (lambda: nn.Conv1d(1, 1, 0), "kernel_size is 0; it must be a whole number >= 1"),
            (lambda: nn.RMSNorm(3)(x), "does not end in"),
            (lambda: nn.RMSNorm(0), "normalized_shape is 0; it must be a whole number >= 1"))


# -------------------------------------------------------------------------------------------------------------- modules
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, 2, 1, 1, 2), (2, 7, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 3, 3, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2), (2, 3, 4, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 3, 4)), "PReLU": (lambda: nn.PReLU(4), (6, 4))}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYERS)
def test_output_gradients_do_not_wait_for_weight_gradients(name: str) -> None:
    make, shape = LAYERS[name]
    first, layer = nn.Linear(shape[-1], shape[-1]), make()

    def step(x):
        (layer(first(x)) ** 2).sum().backward()
        return first.weight.grad, *(p.grad for p in layer.parameters())

    x = random_array(shape, 1, "float32")
    graph = ml.record(step, x)
    weight = {t.index for t in graph if t.kind == Kind.W}
    assert len(weight) >= 2
    assert all(not weight & set(graph.preds[t.index].tolist()) for t in graph if t.kind == Kind.O)
    recorded = bits(*SequentialExecutor(graph)(x))
    assert recorded == bits(*step(ml.array(x)))


def test_dropout_of_channels_drops_whole_ones() -> None:
    layer, x = nn.Dropout2d(0.5), ml.ones(6, 3, 3, 8)
    y = layer(x).numpy()
    assert ((y == y[:, :1, :1]) & ((y == 0) | (y == 2))).all()
    assert 0 < (y == 0).mean() < 1
    assert layer.eval()(x) is x
    with pytest.raises(ValueError, match="p is 1; it must be a number >= 0 and below 1"):
        nn.Dropout2d(1)


def test_an_axis_of_nothing_is_unflattened_as_others_are() -> None:
    for sizes in ((2, -1), (-1, 3), (6, 1)):
        assert nn.Unflatten(1, sizes)(ml.zeros(0, 6)).shape[1:] == nn.Unflatten(1, sizes)(ml.zeros(2, 6)).shape[1:]
    with pytest.raises(ml.ShapeError, match="reshape in unflatten: shape .* does not fit"):
        nn.Unflatten(1, (4, -1))(ml.zeros(2, 6))


def test_a_sequential_is_indexed_cut_and_counted() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)]
    model = nn.Sequential(*layers)
    assert list(model.children()) == layers
    assert (len(model), model[0], model[-1]) == (3, layers[0], layers[2])
    assert isinstance(model[:2], nn.Sequential)
    assert list(model[1:]) == layers[1:]
    assert list(model[:2].state_dict()) == ["0.weight", "0.bias"]
    with pytest.raises(IndexError):
        model[3]


def test_a_sequential_takes_its_names_from_a_dictionary() -> None:
    model = nn.Sequential({"first": nn.Linear(2, 3), "act": nn.ReLU(), "last": nn.Linear(3, 1)})
    assert [*model.state_dict()] == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert (len(model), model(ml.ones(4, 2)).shape) == (3, (4, 1))
    with pytest.raises(KeyError, match="a Sequential has a method 'forward'; give the module another name"):
        nn.Sequential({"forward": nn.Linear(2, 2)})
    torch = torch_or_skip()
    theirs = torch.nn.Sequential(OrderedDict(first=torch.nn.Linear(2, 3), last=torch.nn.Linear(3, 1)))
    model.load_state_dict({name: t.numpy() for name, t in theirs.state_dict().items()})


def test_what_is_no_module_is_not_left_out() -> None:
    refuses(*((call, r"(Sequential|Module\w+): \w+ is a \w+; use a module, like nn.ReLU\(\)") for call in (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.functional.relu), lambda: nn.Sequential([nn.Linear(2, 2)]),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU), lambda: nn.Sequential(None),
        lambda: nn.ModuleList([nn.Linear(2, 2), None]), lambda: nn.ModuleList().append(nn.ReLU),
        lambda: nn.ModuleDict({"act": nn.functional.relu}))))


# ----------------------------------------------------------------------------------------------------------------- init
def test_initial_values_follow_from_the_seed() -> None:
    def drawn():
        ml.seed(4)
        p = nn.Linear(3, 2)
        nn.init.normal_(p.weight, 1.0, 2.0)
        nn.init.uniform_(p.bias, 2.0, 3.0)
        return p

    first, second = drawn(), drawn()
    assert bits(*first.parameters()) == bits(*second.parameters())
    assert 2 <= first.bias.numpy().min() <= first.bias.numpy().max() < 3
    assert nn.init.ones_(first.bias).tolist() == [1, 1]
    assert nn.init.zeros_(first.bias).tolist() == [0, 0]
    assert nn.init._fans(nn.Conv2d(30, 20, 3).weight) == (270, 180)
    with pytest.raises(ValueError, match="has no inputs and outputs"):
        nn.init.xavier_uniform_(first.bias)
    for nonlinearity in (*nn.init.GAINS, "leaky_relu"):
        assert nn.init.calculate_gain(nonlinearity) == pytest.approx(
            torch_or_skip().nn.init.calculate_gain(nonlinearity))
    with pytest.raises(ValueError, match="unknown nonlinearity 'x'; known: linear"):
        nn.init.calculate_gain("x")


# -------------------------------------------------------------------------------------------------------------- kernels
def kernel_calls(dtype: str, shape: tuple[int, ...] = (5, 12)) -> Any:
    """(kernel, what it reads, constants) for every kernel of this file."""
    x, t, dy, w = (draw(s, i, dtype) for i, s in enumerate((shape, shape, shape, shape[-1:])))
    p, scale = np.abs(t), np.abs(draw(shape[:1], 5, dtype)) + np.array(0.5, dtype)
    p.flat[0] = 0
    for name in ("silu", "mish", "softsign"):
        yield from ((name, [x], {}), (f"{name}_grad", [x, dy], {}))
    q = 1 / (1 + np.exp(-x))
    yield from (("bce", [q, q[::-1].copy()], {}), ("bce_grad", [q, q[::-1].copy(), dy], {}))
    yield "bce_target_grad", [q, q, dy], {}
    yield "spike", [x], {"rectangle": False}
    yield from (("spike_grad", [x, dy], {"rectangle": wide}) for wide in (False, True))
    yield from (("leaky_relu", [x], {"slope": 0.1}), ("leaky_relu_grad", [x, dy], {"slope": 0.1}))
    yield from ((name, [x, t, *([dy] if name.endswith("grad") else [])], {"beta": 0.5} if "smooth" in name else {})
                for name in ("l1", "l1_grad", "smooth_l1", "smooth_l1_grad", "bce_with_logits", "bce_with_logits_grad"))
    yield "kl_div", [x, p], {}
    for weight in ([], [w]):
        yield "rms_norm", [x, *weight], {"eps": 1e-5}
        yield "rms_norm_input_grad", [x, scale, dy, *weight], {}


@pytest.mark.slow
def test_cpu_forms_make_no_array() -> None:
    for name, reads, constants in kernel_calls("float32", (300, 400)):
        wanted = KERNELS[name].reference(np, *reads, **constants)
        out = [np.empty_like(v) for v in (wanted if isinstance(wanted, tuple) else (wanted,))]
        thunks = KERNELS[name].bind(reads, out, [], constants)
        assert bytes_allocated(lambda thunks=thunks: [thunk() for thunk in thunks]) < 20_000, name


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 12), (3, 7), (2, 1500)])
def test_cuda_forms_are_the_references(shape: tuple[int, ...], dtype: str) -> None:
    for name, reads, constants in kernel_calls(dtype, shape):
        if name.startswith("rms_norm") and dtype == "float16":
            reads = [r.astype("float32") if r.ndim == 1 else r for r in reads]
        agree(name, reads, times=4, in_sums=(1, 2), **constants)
