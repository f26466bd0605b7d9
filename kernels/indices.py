"""The range of labels, tokens and other indices: out of range, a kernel would read or write other memory.

Eager ops check an index that they get, executors the inputs of a recorded step before it runs. What a step computes
itself, such as an argmax, is not checked.
"""

from __future__ import annotations

from typing import Any

from .registry import jitted

#: kernels whose second operand is an index: (the axis of the first operand that it counts, what it is called)
INDEXED = {"cross_entropy": (-1, "label"), "embedding": (0, "index"), "label_weights": (0, "label")}


def check_range(what: str, index: Any, length: int, ignored: int | None = None) -> None:
    """Raises ValueError that names the first element of a NumPy array of whole numbers that is neither in
    0..length - 1 nor `ignored`. `what`: label or index."""
    if not jitted(_any_outside)(index, length):
        return
    bad = (index < 0) | (index >= length)
    if ignored is not None:
        bad &= index != ignored
    if bad.any():
        at = int(bad.argmax())
        value = int(index.flat[at])
        raise ValueError(f"label {value} of sample {at} is out of range: the model has classes 0 to {length - 1}"
                         if what == "label" else
                         f"index {value} (element {at}) is out of range: there are rows 0 to {length - 1}")


def _any_outside(index, length):  # type: ignore[no-untyped-def]
    for value in index.flat:  # noqa: SIM110
        if value < 0 or value >= length:
            return True
    return False
