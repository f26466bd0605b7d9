"""The networks of `strongest`, each for three engines that get the same weights: ours, torch's twin, JAX's function.

What an engine needs is imported only by its part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests" / "helpers")]


class Network(NamedTuple):
    """`ours(dropout)` and `torch(dropout)` make a model, `jax()` a function of `in_jax`; `shape`: of a batch; labels
    are one of `classes` for each of `labels`. Tokens if there is a `vocabulary`, which learn with AdamW, others with
    SGD and momentum."""

    ours: Callable[[float], Any]
    torch: Callable[[float], Any]
    jax: Callable[[], Any]
    shape: tuple[int, ...]
    labels: int
    classes: int = 10
    vocabulary: int = 0
    dropout: float = 0.0

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """A batch at random, always the same."""
        rng = np.random.default_rng(0)
        x = (rng.integers(1, self.vocabulary, self.shape) if self.vocabulary else
             rng.standard_normal(self.shape, np.float32))
        return x, rng.integers(0, self.classes, self.labels)


def _jax(name: str, *given: Any) -> Callable[[], Any]:
    def made() -> Any:
        import in_jax

        found = getattr(in_jax, name)
        return found(*given) if given else found

    return made


def _known(name: str, batch: int, forward: str, shape: tuple[int, ...], **given: Any) -> Network:
    """One of our networks by name, with the twin of the tests; without dropout."""

    def ours(dropout: float) -> Any:
        from minidl import models, nn

        model = models.create(name, **given)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def torch(dropout: float) -> Any:
        from torch_twins import twin

        from minidl import models

        return twin(name, {**models.arguments(name), **given})

    return Network(ours, torch, _jax(forward), (batch, *shape), batch)


def _language(name: str, rows: int, **given: Any) -> Network:
    given = {"vocabulary": 256, "dropout": 0.0, **given}

    def ours(dropout: float) -> Any:
        from minidl import models

        return models.create(name, preset="small", **given)

    def torch(dropout: float) -> Any:
        from torch_language import twin

        from minidl import models

        return twin(name, {**models.arguments(name), **models.preset_arguments(name, "small"), **given})

    length, heads = given.get("length", 128), given.get("heads", 4)
    return Network(ours, torch, _jax(name, heads), (rows, length), rows * length, 256, 256)


def _untuned(name: str, batch: int, shape: tuple[int, ...], labels: int = 1, dropout: float = 0.0) -> Network:
    def made(kit: Any, dropout: float) -> Any:
        import untuned

        more = {"dropout": dropout} if dropout else {}
        return getattr(untuned, name)(untuned.MINIDL if kit is None else untuned.in_torch(), **more)

    return Network(lambda dropout: made(None, dropout), lambda dropout: made("torch", dropout), _jax(name),
                   (batch, *shape), batch * labels, dropout=dropout)


def _recurrent(kind: str, batch: int) -> Network:
    def ours(dropout: float) -> Any:
        import recurrent

        from minidl import nn

        return recurrent.classifier(nn, kind)

    def torch(dropout: float) -> Any:
        import recurrent
        from torch import nn

        return recurrent.classifier(nn, kind)

    return Network(ours, torch, _jax("recurrent", kind), (28, batch, 28), batch)


def _mlp(batch: int, features: int, hidden: int, layers: int) -> Network:
    return _known("mlp", batch, "mlp", (features,), features=features, hidden=hidden, layers=layers)


IMAGE = 32, 32, 3
NETWORKS = {
    "MLP 16 x 64, batch 8": _mlp(8, 64, 64, 16),
    "MLP 784-512-512-10, batch 1": _mlp(1, 784, 512, 3),
    "MLP 784-512-512-10, batch 64": _mlp(64, 784, 512, 3),
    "MLP 1024-2048-2048-10, batch 256": _mlp(256, 1024, 2048, 3),
    "MLP 4 x 512 with norms, batch 64": _untuned("norms", 64, (512,)),
    "LeNet, batch 64": _known("lenet", 64, "lenet", (28, 28, 1)),
    "VGG with dropout, batch 32": _untuned("vgg", 32, IMAGE, dropout=0.5),
    "ResNet-20, batch 1": _known("resnet20", 1, "resnet20", IMAGE),
    "ResNet-20, batch 32": _known("resnet20", 32, "resnet20", IMAGE),
    "MobileNetV3 .25 at 32 px, batch 32": _known("mobilenet_v3_large", 32, "mobilenet", IMAGE, width=0.25,
                                                 image_size=32, classes=10),
    "U-Net, batch 8": _untuned("unet", 8, IMAGE, 32 * 32),
    "LSTM 28 x 128, batch 64": _recurrent("LSTM", 64),
    "GRU 28 x 128, batch 64": _recurrent("GRU", 64),
    "GPT 4 x 128, 2 x 128 tokens": _language("gpt", 2),
    "GPT 6 x 384, 4 x 256 tokens": _language("gpt", 4, length=256, width=384, layers=6, heads=6),
    "GPT 2 x 256, 2 x 2048 tokens": _language("gpt", 2, length=2048, width=256, layers=2, heads=4),
    "BERT 4 x 128, 8 x 128 tokens": _language("bert", 8, head="masked"),
}


def twin(network: Network, dropout: float, state: dict[str, np.ndarray]) -> Any:
    """The network in torch, channels last, with our weights."""
    import torch
    import torch_language
    import torch_twins

    load = torch_language.load if network.vocabulary else torch_twins.load
    made = load(network.torch(dropout), SimpleNamespace(state_dict=lambda: state))
    return made.to(memory_format=torch.channels_last) if len(network.shape) == 4 else made
