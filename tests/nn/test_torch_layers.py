"""Activations, losses, norms, convolutions and resampling beyond the first networks: finite differences, torch, and
each kernel's forms; and that every layer has separate output and weight gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda_agree import DTYPES, agree, draw
from helpers import bits, bytes_allocated, random_array, refuses, torch_or_skip
from parity import NCHW, NHWC, same

import minidl as ml
import minidl.nn.functional as F
from minidl import nn, ops
from minidl.core.tasks import Kind
from minidl.kernels import KERNELS
from minidl.runtime.executors import SequentialExecutor
from minidl.testing.checks import gradcheck


def both(mine: Any, theirs: Any, arrays: list[Any], dtype: str, to: Any = (), back: Any = None) -> None:
    """`theirs` takes torch.nn.functional first."""
    same(mine, partial(theirs, torch_or_skip().nn.functional), arrays, dtype, to, back)


def values(*shape, seed=1):
    return random_array(shape, seed)


def probabilities(*shape, seed=2):
    return np.abs(random_array(shape, seed)) / 2.01


# ------------------------------------------------------------------------------------------- activations, losses, norms
CASES: dict[str, tuple[Any, Any, list[Any]]] = {
    "normalize": (F.normalize, lambda t, x: t.normalize(x), [values(3, 4)]),
    "cosine_similarity": (F.cosine_similarity, lambda t, x, y: t.cosine_similarity(x, y),
                          [values(3, 4), values(3, 4, seed=2)]),
    "binary_cross_entropy": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), ml.array(probabilities(3, 4).astype(x.dtype))),
        lambda t, x: t.binary_cross_entropy(x.sigmoid(), x.new_tensor(probabilities(3, 4))), [values(3, 4)]),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, delta=0.5), lambda t, x, y: t.huber_loss(x, y, delta=0.5),
                   [values(9), values(9, seed=2) * 0.7]),
    "rms_norm": (lambda x: ops.rms_norm(x), lambda t, x: t.rms_norm(x, (4,)), [values(3, 4)]),
    "rms_norm, weight": (ops.rms_norm, lambda t, x, w: t.rms_norm(x, (9,), w), [values(2, 3, 9), values(9, seed=2)]),
    "rms_norm, two axes": (lambda x, w: ops.rms_norm(x, w, axes=2, eps=1e-3),
                           lambda t, x, w: t.rms_norm(x, (3, 2), w, 1e-3), [values(4, 3, 2), values(3, 2, seed=2)])}
for _reduction in ("mean", "none"):
    CASES |= {f"{name} {_reduction}": (lambda x, t, name=name, r=_reduction: getattr(F, name)(x, t, reduction=r),
                                       lambda t, x, y, name=name, r=_reduction: getattr(t, name)(x, y, reduction=r),
                                       [values(3, 4), values(3, 4, seed=2) * 0.7])
              for name in ("l1_loss", "mse_loss", "smooth_l1_loss")}
for _name, _constants in (("binary_cross_entropy_with_logits", {}), ("kl_div", {})):
    for _reduction in ("mean", *(["batchmean"] if _name == "kl_div" else [])):
        CASES[f"{_name} {_reduction}"] = (
            lambda x, name=_name, r=_reduction: getattr(F, name)(x, ml.array(probabilities(3, 4).astype(x.dtype)),
                                                                 reduction=r),
            lambda t, x, name=_name, r=_reduction: getattr(t, name)(x, x.new_tensor(probabilities(3, 4)), reduction=r),
            [values(3, 4)])
CASES["smooth_l1_loss 0.5"] = (lambda x, t: F.smooth_l1_loss(x, t, beta=0.5),
                               lambda t, x, y: t.smooth_l1_loss(x, y, beta=0.5), [values(9), values(9, seed=2) * 0.7])


@pytest.mark.parametrize("case", CASES)
def test_finite_differences(case: str) -> None:
    mine, _, arrays = CASES[case]
    gradcheck(mine, *arrays)


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")  # torch's advice to prefer batchmean
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_torchs(case: str, dtype: str) -> None:
    mine, theirs, arrays = CASES[case]
    both(mine, theirs, arrays, dtype)


LABELS = np.array([0, 2, 1, 2, 0])


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_are_torchs(reduction: str, smoothing: float, ignored: int) -> None:
    """With labels that do not count, outside of the classes and among them."""
    labels, weight = np.array([0, ignored, 1, 2, 0]), np.array([0.2, 3.0, 0.7])
    options = {"ignore_index": ignored, "reduction": reduction}
    for name, more in (("cross_entropy", {"label_smoothing": smoothing}), ("nll_loss", {}))[: 1 if smoothing else 2]:
        for weights in (weight, None):
            def mine(x, name=name, more=more, w=weights):
                return getattr(F, name)(x, ml.array(labels), w if w is None else ml.array(w), **options, **more)

            both(mine, lambda t, x, name=name, more=more, w=weights: getattr(t, name)(
                x, x.new_tensor(labels).long(), w if w is None else x.new_tensor(w), **options, **more), [values(5, 3)],
                "float64")
            gradcheck(mine, values(5, 3))


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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_binary_cross_entropy_are_torchs(reduction: str) -> None:
    t, weight, positive = probabilities(3, 4), np.abs(values(4, seed=3)), np.array([3.0, 0.1, 1.0, 20.0])
    for given in ({"weight": weight}, {"pos_weight": positive}, {"weight": weight, "pos_weight": positive}):
        def mine(x, given=given):
            return F.binary_cross_entropy_with_logits(x, ml.array(t), reduction=reduction,
                                                      **{k: ml.array(v) for k, v in given.items()})

        both(mine, lambda f, x, given=given: f.binary_cross_entropy_with_logits(
            x, x.new_tensor(t), reduction=reduction, **{k: x.new_tensor(v) for k, v in given.items()}),
            [values(3, 4) * 3], "float64")
        gradcheck(mine, values(3, 4))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_pixels_have_their_classes_last(reduction: str) -> None:
    labels = np.arange(12).reshape(2, 3, 2) % 4
    for mine, name in ((F.cross_entropy, "cross_entropy"), (F.nll_loss, "nll_loss")):
        both(lambda x, f=mine: f(x, ml.array(labels), reduction=reduction),
             lambda t, x, name=name: getattr(t, name)(x.contiguous(), x.new_tensor(labels).long(), reduction=reduction),
             [values(2, 3, 2, 4)], "float64", to=[NCHW])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_classes_that_are_ruled_out_are_torchs(reduction: str, weighted: bool) -> None:
    """Their logits are -inf."""
    labels, weights = np.array([1, 2, 0, -100]), np.array([0.5, 1.0, 2.0])
    logits = np.where([[0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], -np.inf, values(4, 3))
    both(lambda x: F.cross_entropy(x, ml.array(labels), ml.array(weights) if weighted else None, reduction=reduction),
         lambda t, x: t.cross_entropy(x, x.new_tensor(labels).long(), x.new_tensor(weights) if weighted else None,
                                      reduction=reduction), [logits], "float64")


def test_losses_refuse_in_one_line() -> None:
    x, y = ml.Parameter(np.zeros((2, 3))), ml.array(np.zeros((2, 1)))
    refuses((lambda: F.l1_loss(x, y), r"prediction \(2, 3\) and target \(2, 1\) must have one shape"),
                         (lambda: F.l1_loss(x, x, reduction="average"), "reduction is 'average'; it must be mean"),
                         (lambda: F.smooth_l1_loss(x, x, beta=0), "beta of smooth_l1_loss is 0; it must be above 0"),
                         (lambda: F.cross_entropy(x, ml.arange(2), label_smoothing=2.0), "label_smoothing is 2.0"),
                         (lambda: F.binary_cross_entropy_with_logits(x, x).backward(), "no gradient toward its tar"))


# --------------------------------------------------------------------------------------------- convolution, resampling
TRANSPOSED = {"plain": ((2, 3, 4, 2), (2, 3, 3, 3), {}), "stride": ((1, 3, 2, 2), (2, 2, 3, 3), {"stride": 2}),
              "padded": ((1, 3, 3, 2), (2, 3, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
              "output padding": ((1, 3, 3, 2), (2, 3, 3, 2), {"stride": 2, "padding": 1, "output_padding": 1}),
              "groups": ((1, 3, 3, 4), (4, 2, 2, 3), {"groups": 2, "stride": 2}),
              "dilated": ((1, 3, 3, 2), (2, 2, 2, 1), {"dilation": 2, "stride": 2, "output_padding": (1, 0)})}


@pytest.mark.few(1)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution(case: str, bias: bool) -> None:
    x, w, options = TRANSPOSED[case]
    outputs = w[3] * options.get("groups", 1)
    arrays = [values(*x), values(*w, seed=2), *([values(outputs, seed=3)] if bias else [])]
    gradcheck(lambda x, w, b=None: ops.conv_transpose2d(x, w, b, **options), *arrays)
    for dtype in ("float32", "float64"):
        both(lambda x, w, b=None: F.conv_transpose2d(x, w, b, **options),
             lambda t, x, w, b=None: t.conv_transpose2d(x, w, b, **options), arrays, dtype,
             to=[NCHW, NCHW, *([None] if bias else [])], back=NHWC)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"groups": 2}])
def test_convolution_along_one_axis(options: dict[str, Any]) -> None:
    arrays = [values(2, 7, 4), values(2, 3, 4 // options.get("groups", 1), seed=2), values(2, seed=3)]
    gradcheck(lambda x, w, b: ops.conv1d(x, w, b, **options), *arrays)
    for dtype in ("float32", "float64"):
        both(lambda x, w, b: F.conv1d(x, w, b, **options), lambda t, x, w, b: t.conv1d(x, w, b, **options), arrays,
             dtype, to=[(0, 2, 1), (0, 2, 1), None], back=(0, 2, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2, 3, (2, 5), (6, 1), (7, 4)])
def test_adaptive_pooling(size: Any) -> None:
    gradcheck(lambda x: ops.adaptive_avg_pool2d(x, size), values(2, 6, 5, 2))
    both(lambda x: F.adaptive_avg_pool2d(x, size), lambda t, x: t.adaptive_avg_pool2d(x, size), [values(2, 6, 5, 2)],
         "float64", to=[NCHW], back=NHWC)


@pytest.mark.parametrize("options", [{"scale_factor": 2}, {"scale_factor": (1, 3)}, {"size": (5, 7)}, {"size": (2, 2)}])
@pytest.mark.parametrize("mode", [{}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}])
def test_upsampling(mode: dict[str, Any], options: dict[str, Any]) -> None:
    gradcheck(lambda x: ops.interpolate(x, **mode, **options), values(2, 3, 4, 2))
    both(lambda x: F.interpolate(x, **mode, **options), lambda t, x: t.interpolate(x, **mode, **options),
         [values(2, 3, 4, 2)], "float64", to=[NCHW], back=NHWC)


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(2, 4), (2, 5, 4), (3, 2, 3, 4), (1, 1, 1, 4)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups: int, shape: tuple[int, ...]) -> None:
    if np.prod(shape[1:]) == groups:
        return  # one value in a group has no variance
    arrays = [values(*shape), values(4, seed=2), values(4, seed=3)]
    gradcheck(lambda x, w, b: ops.group_norm(x, groups, w, b), *arrays, rtol=1e-5, atol=1e-7)
    to = (0, len(shape) - 1, *range(1, len(shape) - 1))
    both(lambda x, w, b: F.group_norm(x, groups, w, b), lambda t, x, w, b: t.group_norm(x, groups, w, b), arrays,
         "float64", to=[to, None, None], back=(0, *range(2, len(shape)), 1))


def test_group_norm_of_no_samples() -> None:
    assert ops.group_norm(ml.array(np.zeros((0, 3, 4), np.float32)), 2).shape == (0, 3, 4)


def test_weights_of_grouped_convolutions_are_drawn_as_torch_draws_them() -> None:
    """Uniform in +-1/sqrt(taps x channels of a group)."""
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
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 3, 4))}


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
