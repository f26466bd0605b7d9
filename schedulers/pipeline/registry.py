"""Every pipeline policy by its name: placement, whether it separates O and W, preconditions, staleness."""

from __future__ import annotations

from .flush import gpipe, interleaved, one_f_one_b
from .plan import POLICIES, Policy

POLICIES.update({
    "gpipe": Policy(gpipe, "contiguous"),
    "one_f_one_b": Policy(one_f_one_b, "contiguous"),
    "interleaved": Policy(interleaved, "looped", chunks=2, chunks_fixed=False),
})
