"""Mixed precision: parameters stay float32, products are computed in 16 bits.

`autocast` sets the 16-bit type. The attribute `precision` of an op says in which types it takes its inputs, and the
casts are part of the op's own tasks, so the graph has the same tasks in any precision. A gradient has the type of its
tensor: the gradients of parameters, which are the master weights, are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..runtime.device import DeviceError
from . import tape as tapes
from .tensor import FLOATS

HALVES = ("bfloat16", "float16")


def usable(dtype: str, device: Any) -> None:
    """Raises DeviceError where this device or this installation has no such 16-bit floats."""
    if not device.halves:
        raise DeviceError(f"{dtype} needs a CUDA device; {device.name} computes in float32 and float64")
    if dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401  NumPy knows the type by its name from then on
        except ImportError:
            raise DeviceError("bfloat16 needs ml_dtypes: pip install 'minidl[cuda13]' (or [cuda12])") from None


@contextmanager
def autocast(dtype: str) -> Iterator[None]:
    """Computes products inside (linear, matmul, conv2d, attention, recurrent layers) in `dtype`, bfloat16 or float16:
    float32 inputs and parameters are rounded to it. Losses and softmax are computed in float32, all other ops in the
    type of their inputs.

    A parameter is rounded once, until an optimizer's step changes it. float64 is left alone. Raises ValueError for
    another type, and DeviceError where the device does not compute in this type.
    """
    if dtype not in HALVES:
        raise ValueError(f"autocast takes {' or '.join(HALVES)}, not {dtype!r}")
    tape = tapes.current()
    usable(dtype, tape.device)
    before = tape.autocast, tape.rounded
    tape.autocast, tape.rounded = dtype, {}
    try:
        yield
    finally:
        tape.autocast, tape.rounded = before


def input_dtypes(precision: str, dtypes: Sequence[str], low: str | None) -> list[str]:
    """The types to which an op casts inputs of these types. `low`: the type of the `autocast` in force.

    `precision`: `any` leaves them; `low` rounds to `low`; `widest` takes all floats to the widest of their types;
    `full` takes them to at least float32.
    """
    if precision == "low" and low is not None:
        return [low if t in ("float32", *HALVES) else t for t in dtypes]
    floats = {t for t in dtypes if t in (*FLOATS, *HALVES)}
    if precision == "full" or (precision == "widest" and len(floats) > 1):
        wide = max({"float32", *floats} - {*HALVES})
        return [wide if t in HALVES else t for t in dtypes]
    return list(dtypes)
