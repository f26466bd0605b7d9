"""The networks, by name. Knows no data and no schedule."""

from .mlp import mlp

__all__ = ["mlp"]
