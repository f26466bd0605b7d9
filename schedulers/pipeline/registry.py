"""Every pipeline policy by its name: placement, whether it separates O and W, preconditions, staleness."""

from __future__ import annotations

from collections.abc import Callable

from .dualpipe import dualpipe, dualpipe_v
from .fast_forward import fast_forward, fast_forward_greedy, fast_forward_push, fast_forward_strict
from .flush import gpipe, interleaved, one_f_one_b
from .looped import looped_bfs, modulo, modulo_greedy
from .plan import POLICIES, Policy
from .zero_bubble import interleaved_zb, zb_h1, zb_h2


def _at_least(what: str, bound: Callable[[int], int]) -> Callable[[int, int, int], str | None]:
    def needs(ranks: int, micro_batches: int, chunks: int) -> str | None:
        least = bound(ranks)
        return None if micro_batches >= least else f"needs {what} micro-batches, so {least} for {ranks} ranks, " \
                                                   f"not {micro_batches}"
    return needs


def _dualpipe(ranks: int, micro_batches: int, chunks: int) -> str | None:
    if ranks % 2 or micro_batches % 2:
        return f"needs even numbers of ranks and micro-batches, not {ranks} and {micro_batches}"
    return _at_least("at least 2p", lambda p: 2 * p)(ranks, micro_batches, chunks)


POLICIES.update({
    "gpipe": Policy(gpipe, "contiguous"),
    "one_f_one_b": Policy(one_f_one_b, "contiguous"),
    "looped_bfs": Policy(looped_bfs, "looped", chunks=2, chunks_fixed=False),
    "fast_forward": Policy(fast_forward, "contiguous", splits=True),
    "fast_forward_strict": Policy(fast_forward_strict, "contiguous", splits=True),
    "fast_forward_greedy": Policy(fast_forward_greedy, "contiguous", splits=True),
    "fast_forward_push": Policy(fast_forward_push, "contiguous", splits=True,
                                needs=_at_least("more than p", lambda p: p + 1)),
    "modulo": Policy(modulo, "looped", splits=True, chunks=2, chunks_fixed=False),
    "modulo_greedy": Policy(modulo_greedy, "looped", splits=True, chunks=2, chunks_fixed=False),
    "zb_h1": Policy(zb_h1, "contiguous", splits=True),
    "zb_h2": Policy(zb_h2, "contiguous", splits=True, needs=_at_least("at least 2p-1", lambda p: 2 * p - 1)),
    "interleaved_zb": Policy(interleaved_zb, "looped", splits=True, chunks=2, chunks_fixed=False),
    "dualpipe": Policy(dualpipe, "bidirectional", splits="partly", chunks=2, needs=_dualpipe),
    "dualpipe_v": Policy(dualpipe_v, "wave", splits="partly", chunks=2, needs=_at_least("at least 2p", lambda p: 2 * p)),
    "interleaved": Policy(interleaved, "looped", chunks=2, chunks_fixed=False),
})
