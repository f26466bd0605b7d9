"""Which parameters of a network are matrices of hidden layers: for optimizers that treat matrices as such."""

from __future__ import annotations

from ..autograd.tensor import Parameter
from .experts import GroupedLinear
from .module import Linear, Module
from .sequence import Embedding

__all__ = ["hidden_matrices"]


def hidden_matrices(network: Module) -> tuple[list[Parameter], list[Parameter]]:
    """The matrices of a network's hidden layers, and its other parameters, each in the order of `parameters()`.

    A matrix is a parameter with two axes; several that a layer stacks (torch's in_proj_weight, the gates of a recurrent
    layer) are one. No hidden matrix is the weight of an embedding, or of the head: the last linear layer, if it has as
    many outputs as the network has classes, and no embedding is the head (`tied`). Convolutions have four axes, and
    experts stack matrices and biases.
    """
    outside = {id(p) for module in network.modules() if isinstance(module, Embedding | GroupedLinear)
               for p in module.parameters()}
    linear = [module for module in network.modules() if isinstance(module, Linear)]
    if linear and not network.tied and network.classes in (0, linear[-1].weight.shape[0]):
        outside.add(id(linear[-1].weight))
    every = network.parameters()
    found = [p for p in every if len(p.shape) == 2 and id(p) not in outside]
    chosen = {id(p) for p in found}
    return found, [p for p in every if id(p) not in chosen]
