"""The networks, by name. Knows no data and no schedule."""

from .bert import bert, bert_base, bert_large
from .densenet import densenet121, densenet169
from .gpt import gpt, gpt2_medium, gpt3_medium
from .lenet import lenet
from .mlp import ffnn, mlp
from .mobilenet import mobilenet_v3_large
from .moe_gpt import moe_gpt
from .registry import arguments, create, learning_rate, names, preset_arguments, presets
from .resnet import resnet18, resnet20, resnet50, resnet101, resnet152
from .revnet import revnet
from .rnn import rnn
from .snn import snn

__all__ = ["arguments", "bert", "bert_base", "bert_large", "create", "densenet121", "densenet169", "ffnn", "gpt",
           "gpt2_medium", "gpt3_medium", "learning_rate", "lenet", "mlp", "mobilenet_v3_large", "moe_gpt",
           "names", "preset_arguments", "presets", "resnet18", "resnet20", "resnet50", "resnet101", "resnet152",
           "revnet", "rnn", "snn"]
