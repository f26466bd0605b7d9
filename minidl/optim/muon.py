"""Muon: matrices move by their momentum, made nearly orthogonal; AdamW trains what else there is, in the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized

from ..autograd.tensor import Tensor
from .grad_scaler import GradScaler
from .optimizers import AdamW, Parameters, groups_of

#: the name of an adjustment -> the factor of the learning rate of an (m, n) matrix
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n))}


class Muon(AdamW):
    """Muon (Jordan et al. 2024) as torch's: `parameters` are matrices; the rule is in `minidl.kernels.muon`. `ns_steps`
    Newton-Schulz steps with `ns_coefficients` make a direction whose singular values are near 1; `eps` is the least
    norm that a direction is divided by. `adjust_lr_fn`: "original" (the default), or "match_rms_adamw" (Liu et al.
    2025), under which a matrix moves as far as by AdamW, so that one learning rate and weight decay fit both.

    `others`: parameters of any shape, or groups of them, that AdamW trains with `betas`: embeddings, heads, vectors and
    convolutions; `nn.hidden_matrices` divides a network. Raises ValueError for a parameter of `parameters` that is no
    matrix. torch computes directions in bfloat16, this one in the parameter's type.
    """

    def __init__(self, parameters: Parameters, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
                 eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: str | None = None, *, others: Parameters = (),
                 betas: tuple[float, float] = (0.9, 0.999), max_norm: float | None = None,
                 scaler: GradScaler | None = None) -> None:
        matrices, rest = (groups_of(some) if not isinstance(some, Sized) or len(some) else []
                          for some in (parameters, others))
        for p in (p for group in matrices for p in group["params"] if len(p.shape) != 2):
            raise ValueError(f"Muon trains matrices, and {p.name} has the shape {p.shape}; give it in others, which "
                             f"AdamW trains")
        if adjust_lr_fn is not None and adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; it must be {' or '.join(map(repr, ADJUSTMENTS))}")
        if not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
            raise ValueError(f"ns_steps is {ns_steps!r}; it must be a whole number from 1 to 99")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients are {ns_coefficients}; they must be three numbers")
        first = sum(len(group["params"]) for group in matrices)
        self._others = range(first, first + sum(len(group["params"]) for group in rest))
        self.momentum, self.nesterov, self.ns_steps = momentum, bool(nesterov), ns_steps
        self.ns_coefficients, self.matrix_eps = tuple(map(float, ns_coefficients)), float(eps)
        self.adjust_lr_fn = adjust_lr_fn or "original"
        super().__init__([*matrices, *rest], lr, betas, weight_decay=weight_decay, max_norm=max_norm, scaler=scaler)
        self._checked("matrix_eps", rates=("momentum",))

    def orthogonal(self, i: int) -> bool:
        """Whether an orthogonal direction moves parameter i, not AdamW. Groups that come later are divided by shape."""
        return i not in self._others and len(self.parameters[i].shape) == 2

    def states_of(self, i: int) -> list[Tensor]:
        return super().states_of(i)[: 1 if self.orthogonal(i) else 2]

    def update(self, i: int) -> None:
        if not self.orthogonal(i):
            super().update(i)
            return
        p, states = self.parameters[i], self.states_of(i)
        self.call("muon", [p, self.gradient(i), *states, self._group_of[i].rate], [p, *states],
                  **self.constants(i, "momentum", "nesterov", "weight_decay"), coefficients=self.ns_coefficients,
                  eps=self.matrix_eps, steps=self.ns_steps, scale=ADJUSTMENTS[self.adjust_lr_fn](*p.shape))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        unused = {f"square.{i}" for i in range(len(self.parameters)) if self.orthogonal(i)}
        yield from (pair for pair in super().named_tensors() if pair[0] not in unused)
