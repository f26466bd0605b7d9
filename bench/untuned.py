"""A VGG, a U-Net and an MLP with norms, for which nothing in minidl was tuned: one text for minidl and for torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from minidl import nn, ops


class Kit(NamedTuple):
    """What a network is made of: modules, functions, images joined along their channels, the axes of lines and columns,
    and an image's pixels as rows."""

    nn: Any
    functional: Any
    join: Callable[..., Any]
    axes: tuple[int, int]
    rows: Callable[[Any], Any]


MINIDL = Kit(nn, nn.functional, partial(ops.concat, axis=-1), (1, 2), lambda x: x.reshape(-1, x.shape[-1]))


def in_torch() -> Kit:
    import torch

    return Kit(torch.nn, torch.nn.functional, partial(torch.cat, dim=1), (2, 3),
               lambda x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]))


def norms(kit: Kit, width: int = 512, layers: int = 4) -> Any:
    """Linear layers, each with a layer norm and GELU."""

    class Norms(kit.nn.Module):  # type: ignore[misc,name-defined]
        input_shape, classes = (width,), 10

        def __init__(self) -> None:
            super().__init__()
            self.layers = kit.nn.ModuleList([kit.nn.Linear(width, width) for _ in range(layers)])
            self.norms = kit.nn.ModuleList([kit.nn.LayerNorm(width) for _ in range(layers)])
            self.head = kit.nn.Linear(width, 10)

        def forward(self, x: Any) -> Any:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = kit.functional.gelu(norm(layer(x)))
            return self.head(x)

    return Norms()


def vgg(kit: Kit, dropout: float = 0.0) -> Any:
    """Six convolutions of a quarter of VGG's width (Simonyan and Zisserman, 2014), for images of 32 pixels."""

    class VGG(kit.nn.Module):  # type: ignore[misc,name-defined]
        input_shape, classes = (32, 32, 3), 10

        def __init__(self) -> None:
            super().__init__()
            self.convs = kit.nn.ModuleList(
                [kit.nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise((3, 32, 32, 64, 64, 128, 128))])
            self.hidden, self.drop = kit.nn.Linear(128, 256), kit.nn.Dropout(dropout)
            self.head = kit.nn.Linear(256, 10)

        def forward(self, x: Any) -> Any:
            for i, conv in enumerate(self.convs):
                x = kit.functional.relu(conv(x))
                x = kit.functional.max_pool2d(x, 2) if i % 2 else x
            return self.head(self.drop(kit.functional.relu(self.hidden(x.mean(kit.axes)))))

    return VGG()


def unet(kit: Kit) -> Any:
    """A class for each pixel of an image of 32 pixels, by three scales of 16, 32 and 64 channels (Ronneberger, Fischer,
    Brox, 2015)."""

    class UNet(kit.nn.Module):  # type: ignore[misc,name-defined]
        input_shape, classes, labels = (32, 32, 3), 10, 32 * 32

        def __init__(self) -> None:
            super().__init__()
            sizes = (3, 16), (16, 32), (32, 64), (64, 32), (32, 16)
            self.first = kit.nn.ModuleList([kit.nn.Conv2d(i, o, 3, padding=1) for i, o in sizes])
            self.second = kit.nn.ModuleList([kit.nn.Conv2d(o, o, 3, padding=1) for _, o in sizes])
            self.up = kit.nn.ModuleList([kit.nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in sizes[3:]])
            self.head = kit.nn.Conv2d(16, 10, 1)

        def forward(self, x: Any) -> Any:
            def both(i: int, x: Any) -> Any:
                return kit.functional.relu(self.second[i](kit.functional.relu(self.first[i](x))))

            fine = both(0, x)
            middle = both(1, kit.functional.max_pool2d(fine, 2))
            coarse = both(2, kit.functional.max_pool2d(middle, 2))
            x = both(3, kit.join([middle, self.up[0](coarse)]))
            return kit.rows(self.head(both(4, kit.join([fine, self.up[1](x)]))))

    return UNet()
