"""Zero Bubble with fixed orders: ZB-H1, ZB-H2, and ZB-H1 over interleaved chunks. The backward is O and W apart.

O goes first because the rank below waits for it; W fills the time in which nothing else can run.
"""

from __future__ import annotations

from ...core.machine import shorten
from ...core.placement import PipelineError
from ...core.schedule import Schedule
from .flush import in_turn, round_size, rounds, same_stage
from .problem import Problem, schedule_of

MOST_HOP = 1000


def zb_h1(problem: Problem) -> Schedule:
    """1F1B whose W lags s micro-batches on rank s (Qi et al., 2023): peak p on every rank. Bubble (p-1)(F+O-W) for
    m >= p and W <= min(F, O), without latency."""
    return same_stage(problem, range(problem.ranks, 0, -1), range(problem.ranks))


def zb_h2(problem: Problem, *, hop: float = 0.0) -> Schedule:
    """Enough forwards in advance to hide the whole warm-up (Qi et al., 2023): peak 2p-1, needs m >= 2p-1.

    Bubble max(0, (p-1)(F+O+2c-2W)) in the largest span, for W <= min(F, O) and a round trip 2c of at most F+O. The
    makespan also holds the shift between ranks. `hop`: a latency in times of a forward, rounded up to 1/2, 1, 3/2, ..,
    which more forwards in advance hide as well (Shardy MPMD has 0, 1/2 and 1): with F = O = W no bubble up to c = hop;
    peak and least m are 1+2(p-1)(1+hop).
    """
    if not 0 <= hop <= MOST_HOP:
        raise PipelineError(f"zb_h2: hop is {shorten(hop)}; it must be a latency in times of a forward, from 0 to "
                            f"{MOST_HOP}")
    trip = [s * int(3 + 2 * hop - 1e-9) for s in range(problem.ranks)]  # there and back, in forwards, rounded up
    if trip[-1] >= problem.micro_batches:
        raise PipelineError(f"zb_h2: hop {hop:g} needs at least {1 + trip[-1]} micro-batches for {problem.ranks} "
                            f"ranks, not {problem.micro_batches}")
    return same_stage(problem, [1 + ahead for ahead in reversed(trip)], trip)


def interleaved_zb(problem: Problem) -> Schedule:
    """Interleaved 1F1B whose W lags r chunks on rank r (Zero Bubble's repository). Bubble (p-1)(F+O-W)/v for m >= p and
    W <= min(F, O); peak p + (v-1)(n-p)/v in rounds of n >= p micro-batches, so p if m is a multiple of p."""
    p, v, size = problem.ranks, problem.chunks, round_size(problem)
    return schedule_of([in_turn(*rounds(problem, rank, size), (v - 1) * size + p - rank, rank) for rank in range(p)])
