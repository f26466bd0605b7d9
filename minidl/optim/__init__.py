"""Optimizers, learning-rate schedules and loss scaling."""

from typing import TYPE_CHECKING

from ..autograd.hints import missing
from .grad_scaler import GradScaler
from .muon import Muon
from .optimizers import SGD, Adam, AdamW, NAdamW, Optimizer, ParameterGroup, RMSprop
from .rates import by_delay, cosine, step_decay, warmup

__all__ = ["SGD", "Adam", "AdamW", "GradScaler", "Muon", "NAdamW", "Optimizer", "ParameterGroup", "RMSprop", "by_delay",
           "cosine", "step_decay", "warmup"]

if not TYPE_CHECKING:  # a checker shall still know which names there are
    __getattr__ = missing(__name__, "optim", __all__)
