"""The networks, by name. Knows no data and no schedule."""

from .mlp import mlp
from .registry import arguments, create, names, presets

__all__ = ["arguments", "create", "mlp", "names", "presets"]
