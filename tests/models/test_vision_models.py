"""Convolutional networks: sizes, torch with the same weights, slabs without copies, the same bits in every order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from any_order import same_in_any_order
from helpers import torch_or_skip

import minidl as ml
from minidl import models, nn, optim

PARAMETERS = {"lenet": 61_706, "resnet20": 272_474, "resnet18": 11_689_512, "resnet50": 25_557_032,
              "resnet101": 44_549_160, "resnet152": 60_192_808, "densenet121": 7_978_856, "densenet169": 14_149_480,
              "mobilenet_v3_large": 5_483_032}
NAMES = [name for name in PARAMETERS if name.startswith(("lenet", "resnet"))]
# with so few layers the deeper ones of a family are the same network again
TINY = [name for name in PARAMETERS if name not in ("resnet101", "resnet152", "densenet169")]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    assert sum(p.size for p in models.create(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_form_for_32_pixels(name: str) -> None:
    """Small images are not shrunk before the first stage: the last one sees more than one pixel."""
    model = models.create(name, image_size=32, **({} if name == "lenet" else {"width": 4, "layers": 1}))
    assert model.input_shape == (32, 32, 1 if name == "lenet" else 3)
    graph = ml.record(model, np.zeros((1, *model.input_shape), np.float32))
    convolutions = [call for t in graph for call in graph.launches[t.index] if call.kernel == "conv2d"]
    assert convolutions[0].writes[0].shape[1] == (28 if name == "lenet" else 32)
    assert convolutions[-1].writes[0].shape[1] == {"lenet": 10, "resnet20": 8}.get(name, 4)
    assert graph.outputs[0].shape == (1, model.classes)


def test_images_too_small() -> None:
    with pytest.raises(ValueError, match="the least is 12"):
        models.create("lenet", image_size=8)


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


def batch(model: Any, n: int, dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((n, *model.input_shape)).astype(dtype), rng.integers(0, model.classes, n)


def torch_gradients(twin: Any, x: Any, y: Any) -> dict[str, Any]:
    torch = torch_or_skip()
    from torch_twins import images

    twin.zero_grad()
    logits = twin(images(x).contiguous())  # torch 2.13 may crash on a 7x7 over channels last
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)).backward()
    return {"logits": logits.detach().numpy(), **{name: p.grad.numpy().copy() for name, p in twin.named_parameters()}}


CASES = [*(pytest.param(name, {"preset": "tiny"}, 6, id=f"{name}-tiny") for name in TINY),
         pytest.param("lenet", {}, 8, id="lenet"), pytest.param("resnet20", {}, 4, id="resnet20"),
         pytest.param("resnet18", {"image_size": 64, "width": 16}, 3, id="resnet18-64px"),
         pytest.param("densenet121", {"preset": "tiny", "image_size": 64}, 3, id="densenet121-64px"),
         pytest.param("mobilenet_v3_large", {"preset": "tiny", "image_size": 64, "width": 0.25}, 4,
                      id="mobilenet-64px")]


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("name", "given", "n"), CASES)
def test_torch_with_the_same_weights(name: str, given: dict[str, Any], n: int, mode: str) -> None:
    """Outputs and gradients no further from float64's than twice as far as torch's own, or than 1e-5 of the outputs and
    1e-6 of the largest gradient, since some are zero in theory."""
    torch_or_skip()
    from torch_twins import load, twin

    ml.seed(3)
    model = models.create(name, **given)
    if name.startswith("mobilenet"):
        model.classifier.__getattribute__("2").p = 0.0
    model.train(mode == "train")
    arguments = {**models.arguments(name), **(models.preset_arguments(name, "tiny") if "preset" in given else {}),
                 **{key: value for key, value in given.items() if key != "preset"}}
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


def test_running_statistics_like_torch() -> None:
    torch_or_skip()
    from torch_twins import load, twin

    model = models.create("resnet20", preset="tiny")
    arguments = {**models.arguments("resnet20"), **models.preset_arguments("resnet20", "tiny")}
    other = load(twin("resnet20", arguments), model)
    for _ in range(3):
        x, y = batch(model, 5)
        torch_gradients(other, x, y)
        model(ml.array(x))
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(value, other.state_dict()[key].numpy(), rtol=1e-4, atol=1e-6, err_msg=key)


def training(name: str, micro_batches: int) -> Any:
    """Makes a step, and all that it leaves, running statistics included."""
    def make() -> Any:
        ml.seed(5)
        model = models.create(name, preset="tiny")
        opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(*parts: Any) -> Any:
            for m in range(micro_batches):
                with ml.micro_batch(m, 2 * m):
                    loss = nn.cross_entropy(model(parts[2 * m]), parts[2 * m + 1])
                    loss.backward()
            opt.step()
            return loss

        return step, [t for owner in (model, opt) for _, t in owner.named_tensors()]

    return make


@pytest.mark.few(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", TINY)
def test_every_order_gives_the_same_bits(name: str, micro_batches: int) -> None:
    model = models.create(name, preset="tiny")
    parts = [part for _ in range(micro_batches) for part in batch(model, 2)]
    same_in_any_order(training(name, micro_batches), [parts] * 2, range(2))


def test_features_of_a_dense_block_are_copied_once() -> None:
    """Forward: what a layer makes goes into the slab, and so does what the block starts from; nothing else moves."""
    model = models.create("densenet121", preset="tiny", layers=4)
    x, _ = batch(model, 2)
    graph = ml.record(model, x)
    copies = [(t.label, call) for t in graph for call in t.launches if call.kernel == "copy"]
    assert all("concat" in label for label, _ in copies)
    assert len(copies) == 4 * (4 + 1)
