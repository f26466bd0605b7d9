"""Forwards on ranks of their own, as in a pipeline whose forwards and backwards are cut apart (`roundpipe`).

The forwards of a stage count as a separate stage, which shares its parameters with the backward's: that one's rank
updates them, and the forward's has copies (`copies.py`). Backwards read results of forwards by messages.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.tasks import Kind
from .draft import Draft


def forwards_apart(draft: Draft) -> Draft:
    """The forwards on stages of their own."""
    return replace(draft, stage=draft.stage + draft.placement.stages * (draft.graph.kind == Kind.F))
