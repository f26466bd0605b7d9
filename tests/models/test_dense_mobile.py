"""DenseNet and MobileNetV3: sizes, torch with the same weights, slabs without copies, the same bits in every order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import torch_or_skip

import minidl as ml
from minidl import models, nn
from minidl.runtime.checking import random_schedule

NAMES = ["densenet121", "densenet169", "mobilenet_v3_large"]


@pytest.mark.parametrize(("name", "arguments", "count"), [
    ("densenet121", {}, 7_978_856), ("densenet169", {}, 14_149_480), ("mobilenet_v3_large", {}, 5_483_032)])
def test_parameter_count(name: str, arguments: dict[str, Any], count: int) -> None:
    assert sum(p.size for p in models.create(name, **arguments).parameters()) == count


@pytest.mark.parametrize("growth", [12, 24])
def test_the_stem_of_densenet_for_32_pixels_is_one_convolution(growth: int) -> None:
    model = models.create("densenet121", image_size=32, growth=growth)
    assert [n for n, _ in model.features.named_children()][:2] == ["conv0", "denseblock1"]
    assert model.features.conv0.weight.shape == (2 * growth, 3, 3, 3)
    graph = ml.record(model, np.zeros((1, 32, 32, 3), np.float32))
    convolutions = [call for t in graph for call in t.launches if call.kernel == "conv2d"]
    assert len(convolutions) == 120
    assert [call.writes[0].shape[1] for call in (convolutions[0], convolutions[-1])] == [32, 4]


@pytest.mark.parametrize("width", [0.25, 0.5, 0.75, 1.0])
def test_channels_of_mobilenet(width: float) -> None:
    from minidl.models.mobilenet import divisible

    model = models.create("mobilenet_v3_large", width=width)
    weights = [value for name, value in model.state_dict().items() if value.ndim == 4]
    assert len(weights) == 46 + 2 * 8  # and the two fully connected layers: 48 beside squeeze and excite
    assert all(value.shape[0] % 8 == 0 for value in weights)
    assert model.classifier.__getattribute__("3").weight.shape == (1000, divisible(1280 * width))


def batch(model: Any, n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((n, *model.input_shape)).astype(np.float32), rng.integers(0, model.classes, n)


def torch_gradients(twin: Any, x: Any, y: Any) -> dict[str, Any]:
    torch = torch_or_skip()
    from torch_twins import images

    logits = twin(images(x).contiguous())
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)).backward()
    return {"logits": logits.detach().numpy(), **{name: p.grad.numpy().copy() for name, p in twin.named_parameters()}}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("name", "given", "n"), [*((name, {"preset": "tiny"}, 6) for name in NAMES),
                                                  ("densenet121", {"preset": "tiny", "image_size": 64}, 3),
                                                  ("mobilenet_v3_large",
                                                   {"preset": "tiny", "image_size": 64, "width": 0.25}, 4)])
def test_torch_with_the_same_weights(name: str, given: dict[str, Any], n: int, mode: str) -> None:
    """Gradients no further from float64's than twice as far as torch's own, or than 1e-6 of the largest gradient."""
    torch_or_skip()
    from torch_twins import load, twin

    ml.seed(3)
    model = models.create(name, **given)
    if name.startswith("mobilenet"):
        model.classifier.__getattribute__("2").p = 0.0
    model.train(mode == "train")
    arguments = {**models.arguments(name), **models.preset_arguments(name, "tiny"),
                 **{k: v for k, v in given.items() if k != "preset"}}
    x, y = batch(model, n)
    exact = torch_gradients(load(twin(name, arguments), model).double().train(mode == "train"), x.astype("float64"), y)
    theirs = torch_gradients(load(twin(name, arguments), model).train(mode == "train"), x, y)
    logits = model(ml.array(x))
    nn.cross_entropy(logits, ml.array(y)).backward()
    scale = max(1.0, float(np.abs(exact["logits"]).max()))
    mine, allowed = np.abs(logits.numpy() - exact["logits"]).max(), 2 * np.abs(theirs["logits"] - exact["logits"]).max()
    assert mine <= allowed + 1e-5 * scale
    floor = 1e-6 * max(np.abs(g).max() for key, g in exact.items() if key != "logits")
    for key, p in model.named_parameters():
        g = p.grad.numpy().transpose(p.axes) if p.axes else p.grad.numpy()
        error, allowed = np.linalg.norm(g - exact[key]), 2 * np.linalg.norm(theirs[key] - exact[key])
        assert error <= allowed + floor * np.sqrt(g.size), (key, error, allowed)


def test_features_of_a_dense_block_are_copied_once() -> None:
    """Forward: what a layer makes goes into the slab, and so does what the block starts from; nothing else moves."""
    model = models.create("densenet121", preset="tiny", layers=4)
    x, _ = batch(model, 2)
    graph = ml.record(model, x)
    copies = [(t.label, call) for t in graph for call in t.launches if call.kernel == "copy"]
    assert all("concat" in label for label, _ in copies)
    assert len(copies) == 4 * (4 + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["densenet121", "mobilenet_v3_large"])
def test_every_order_gives_the_same_bits(name: str) -> None:
    from test_vision_models import trained

    expected = trained(name, 1, None)
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def checked(graph: Any, rng: Any = rng, seed: int = seed) -> Any:
            return ml.CheckingExecutor(graph, random_schedule(graph, 3, rng), seed=seed)

        assert trained(name, 1, checked) == expected


@pytest.mark.few(3)
@pytest.mark.parametrize(("size", "channels", "stride"),
                         [(16, 24, 1), (4, 120, 1), (6, 100, 1), (5, 300, 1), (16, 24, 2), (12, 16, 1)])
def test_depthwise_lines_of_several_runs(size: int, channels: int, stride: int) -> None:
    """The CPU form of the three kernels against their references where a line is cut into runs of pixels."""
    from minidl.kernels import KERNELS
    from minidl.kernels.conv import Geometry

    geometry = Geometry((stride, stride), (1, 1), (1, 1), channels)
    rng = np.random.default_rng(0)
    out = geometry.output((size, size), (3, 3))
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in
                ((2, size, size, channels), (channels, 3, 3, 1), (2, *out, channels)))
    for name, reads, constants in (("conv2d", [x, w], {"geometry": geometry}),
                                   ("conv2d_input_grad", [dy, w], {"size": (size, size), "geometry": geometry}),
                                   ("conv2d_weight_grad", [x, dy],
                                    {"taps": (3, 3), "bias": False, "geometry": geometry})):
        kernel = KERNELS[name]
        expected = kernel.reference(np, *reads, **constants)
        found = np.empty(expected.shape, np.float32)
        work = [np.empty(shape, dtype) for shape, dtype in kernel.work(reads, [found], **constants)]
        for call in kernel.bind(reads, [found], work, constants):
            call()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)
