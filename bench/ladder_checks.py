"""Checks before any timing: the bits of minidl's rungs, and losses against torch in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ladder_minidl import FUSED, PLAIN, Ours
from ladder_torch import Theirs

COMPARED = 3  #: steps whose losses are compared: later ones drift apart with any rounding


def said(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(found, wanted)) / np.abs(wanted)))


def same(bits: Mapping[str, bytes], losses: Mapping[str, Sequence[float]], steps: int,
         rounding: float) -> dict[str, Any]:
    """Compares minidl's rungs after `steps` steps: rungs with the same launches must have the same bits; rungs that
    fuse must have the same first losses, with a relative error of at most `rounding` each."""
    plain = [name for name in bits if name in PLAIN]
    equal = [len({bits[name] for name in bits if name in kind}) for kind in (PLAIN, FUSED)]
    found = {"steps": steps, "rungs": plain, "equal_bits": equal[0] == 1 and equal[1] <= 1,
             "finite": bool(np.isfinite(list(losses.values())).all())}
    off = {name: apart(losses[name], losses[plain[0]]) for name in bits if name not in PLAIN}
    return {**found, **({"fused_losses_apart": off, "fused_agrees": max(off.values()) <= 2 * rounding} if off else {})}


def against_float64(ours: Ours, theirs: Theirs, rungs: Sequence[str], steps: int) -> dict[str, Any]:
    """Errors of the first losses against torch in float64: ours may be twice torch's own in the same precision."""
    exact = theirs.losses(steps, exact=True)
    its = apart(theirs.losses(steps, exact=False), exact)
    allowed = max(2 * its, ours.precision.rounding)
    errors = {name: apart(ours.losses(name, steps), exact) for name in rungs}
    return {"steps": steps, "float64": exact, "errors": errors, "error_of_torch": its, "allowed": allowed,
            "agrees": max(errors.values()) <= allowed}


def passed(entry: Mapping[str, Any]) -> bool:
    """Whether all checks of a network have passed, and every rung of minidl runs."""
    correct = entry["correct"]
    agree = correct.get("fused_agrees", True) and correct.get("losses", {}).get("agrees", True)
    return bool(correct["equal_bits"] and correct["finite"] and agree
                and not any(name.startswith("E") for name in entry["left_out"]))
