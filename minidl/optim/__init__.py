"""Optimizers, learning-rate schedules and loss scaling."""

from .grad_scaler import GradScaler
from .optimizers import SGD, Adam, AdamW, Optimizer, ParameterGroup, RMSprop
from .rates import cosine, step_decay, warmup

__all__ = ["SGD", "Adam", "AdamW", "GradScaler", "Optimizer", "ParameterGroup", "RMSprop", "cosine", "step_decay",
           "warmup"]
