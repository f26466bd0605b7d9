"""Mixed precision: parameters stay float32, products are made in 16 bits.

`autocast` says in which type; an op says by its `precision` how it takes its inputs, and casts are part of its tasks.
So the graph has the same tasks in any precision. Gradients come back in the type of what they belong to: those of
parameters in float32, the master weights.
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
    """Raises DeviceError where 16-bit floats cannot be used."""
    if not device.halves:
        raise DeviceError(f"{dtype} needs a CUDA device; {device.name} computes in float32 and float64")
    if dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401  NumPy knows the type by its name from then on
        except ImportError:
            raise DeviceError("bfloat16 needs ml_dtypes; pip install 'minidl[cuda13]' (or [cuda12])") from None


@contextmanager
def autocast(dtype: str) -> Iterator[None]:
    """Products inside (linear, matmul, conv2d, attention, recurrent layers) are made in `dtype`, bfloat16 or float16,
    from float32 inputs and parameters that are rounded to it; losses and softmax in float32; all else in the type it is
    given.

    A parameter is rounded once inside; an optimizer's step ends that. float64 is left alone. Raises ValueError for
    another type and DeviceError where there is no such arithmetic.
    """
    if dtype not in HALVES:
        raise ValueError(f"autocast is to {' or '.join(HALVES)}, not {dtype!r}")
    tape = tapes.current()
    usable(dtype, tape.device)
    before = tape.autocast, tape.rounded
    tape.autocast, tape.rounded = dtype, {}
    try:
        yield
    finally:
        tape.autocast, tape.rounded = before


def taken(precision: str, dtypes: Sequence[str], low: str | None) -> list[str]:
    """The types in which an op takes inputs of these types; `low` is that of the `autocast` in force. `precision`:
    `any`, as they are; `low`, rounded to `low`; `widest`, floats in the widest of their types; `full`, in float32 at
    least."""
    if precision == "low" and low is not None:
        return [low if t in ("float32", *HALVES) else t for t in dtypes]
    floats = {t for t in dtypes if t in (*FLOATS, *HALVES)}
    if precision == "full" or (precision == "widest" and len(floats) > 1):
        wide = max({"float32", *floats} - {*HALVES})
        return [wide if t in HALVES else t for t in dtypes]
    return list(dtypes)
