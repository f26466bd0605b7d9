"""Learning-rate schedules: pure functions from the number of a step, from 0 on, to its learning rate.

    rate = optim.warmup(optim.cosine(0.1, steps=1000), steps=50)
    for n in range(1000):
        optimizer.lr = rate(n)          # a buffer: recorded steps read it too
        step(x, y)

They have no state but the step's number, so a run that resumes at step n continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Rate = Callable[[int], float]


def step_decay(lr: float, every: int, factor: float = 0.1) -> Rate:
    """lr, multiplied by `factor` (at most 1) after every `every` steps."""
    _check(every, lr=lr, factor=factor)
    if factor > 1:
        raise ValueError(f"the factor of the learning-rate schedule is {factor}; it must be at most 1")
    return lambda n: lr * factor ** (n // every)


def cosine(lr: float, steps: int, floor: float = 0.0) -> Rate:
    """From lr at step 0 down to `floor` at `steps` along half a cosine (Loshchilov, Hutter 2017), then `floor`."""
    _check(steps, lr=lr, floor=floor)
    return lambda n: floor + (lr - floor) * (1 + math.cos(math.pi * min(n, steps) / steps)) / 2


def warmup(rate: Rate, steps: int, start: float = 0.0) -> Rate:
    """Linear from `start` times rate(0) at step 0 up to rate(0) at step `steps`, where `rate` begins."""
    _check(steps, start=start)
    return lambda n: rate(0) * (start + (1 - start) * n / steps) if n < steps else rate(n - steps)


def by_delay(rate: Rate, delay: int, steps: int) -> Rate:
    """rate(n) / (delay + 1)^p with p = 1 - n / steps, and rate(n) from `steps` on: for weights whose gradients are so
    many updates late (PipeMare, 1910.05124, its first technique, where tau is `delay + 1`)."""
    _check(steps, delay=delay)
    return lambda n: rate(n) / (delay + 1) ** (1 - min(n / steps, 1))


def _check(steps: int, **numbers: float) -> None:
    """Raises ValueError."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"the steps of the learning-rate schedule are {steps!r}; they must be a whole number >= 1")
    for name, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"the {name} of the learning-rate schedule is {value!r}; it must be a finite number >= 0")
