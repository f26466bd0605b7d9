"""Attention's scores on the CPU: blocks that stay in a core's cache, and one loop from scores to probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .exponential import exps
from .registry import inlined

SCORES = 1 << 16  #: of a block: heads of one sample, or all heads of several


def taken(n: int, h: int, scores: int) -> tuple[int, int]:
    """How many of n samples and h heads, of so many scores each, a block takes."""
    most = max(1, SCORES // max(1, scores))
    return min(n, max(1, most // max(1, h))), min(h, most)


def groups(n: int, h: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """The samples and heads of each block."""
    some, more = taken(n, h, scores)
    for i in range(0, n, max(1, some)):
        for j in range(0, h, max(1, more)):
            yield slice(i, min(i + some, n)), slice(j, min(j + more, h))


@inlined
def hide(row, keep):  # type: ignore[no-untyped-def]
    """Scores of keys that `keep` lacks become minus infinity."""
    for j in range(row.size):
        row[j] = row[j] if keep[j] != 0 else -np.inf


def softmax_scores(e, keep, first, scale, lse):  # type: ignore[no-untyped-def]
    """Scores e (n, h, t, s) become the probabilities of exp(score scale) over the keys that a query sees: the first
    query `first`, each further one one more, and only those that `keep` (n, s) has unless it is empty. lse (n, h, t),
    unless it is empty: as for `flash_attention`."""
    one = e.dtype.type(1)
    for n in range(e.shape[0]):
        for h in range(e.shape[1]):
            for i in range(e.shape[2]):
                end = min(max(i + first, 0), e.shape[3])
                row = e[n, h, i, :end]
                if keep.size:
                    hide(row, keep[n])
                top, total = exps(row, scale)
                some = total if total != 0 else one  # none: no key to see
                factor = one / some
                for j in range(end):
                    row[j] *= factor
                for j in range(end, e.shape[3]):
                    e[n, h, i, j] = 0
                if lse.size:
                    lse[n, h, i] = top * scale + np.log(some)
