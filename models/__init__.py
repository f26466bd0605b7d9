"""The networks, by name. Knows no data and no schedule."""

from .lenet import lenet
from .mlp import mlp
from .registry import arguments, create, names, preset_arguments, presets
from .resnet import resnet18, resnet20, resnet50, resnet101, resnet152

__all__ = ["arguments", "create", "lenet", "mlp", "names", "preset_arguments", "presets", "resnet18", "resnet20", "resnet50", "resnet101", "resnet152"]
