"""The networks, by name. Knows no data and no schedule."""

from .densenet import densenet121, densenet169
from .gpt import gpt, gpt2_medium, gpt3_medium
from .lenet import lenet
from .mlp import mlp
from .mobilenet import mobilenet_v3_large
from .registry import arguments, create, names, preset_arguments, presets
from .resnet import resnet18, resnet20, resnet50, resnet101, resnet152

__all__ = ["arguments", "create", "densenet121", "densenet169", "gpt", "gpt2_medium", "gpt3_medium", "lenet", "mlp",
           "mobilenet_v3_large", "names", "preset_arguments", "presets", "resnet18", "resnet20", "resnet50",
           "resnet101", "resnet152"]
