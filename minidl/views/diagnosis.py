"""Why a run is not as fast as predicted: measurements around it, and the advice that follows.

Reasons are facts about the plan and the machine, each with its number. None of them is proved to be the cause; if no
reason is found, the diagnosis says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..core.tasks import COMMUNICATION, RECEIVES, unpack
from ..plans.plan import PipelinePlan, Plan

FITS = 0.05  #: a prediction fits if it differs by at most this share
BALANCE = 2.0  #: flops per byte below which a core waits for memory, as in CostModel.analytic
LOADED = 0.03  #: other work is a reason from this share of the cores on
APART = 2.0  #: cores are apart if a hand-over takes so many times as long as when costs were measured
UNEVEN = 1.5  #: steps are uneven if the slowest tenth takes so many times the fastest


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a run. `others`: how many cores other processes used meanwhile; `cores`: how many it may use;
    `ranks`: how many run as threads of its process. `median`, `p10`, `p90`: the times of its steps, in milliseconds.
    `hand_over`: microseconds from a task to one on another core, measured after it; 0 if only one core is used."""

    others: float
    cores: int
    median: float
    p10: float
    p90: float
    ranks: int = 1
    hand_over: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """`headline`: the prediction and the measurement, in numbers; `reasons` and `advice`: in the same order, fewer of
    the latter where two reasons have the same."""

    headline: str
    fits: bool
    reasons: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.fits:
            return f"{self.headline}: as predicted"
        if not self.reasons:
            return (f"{self.headline}: no reason was found; --html shows the last step, measured below its prediction, "
                    f"task by task")
        return "\n".join([f"{self.headline}: {'; '.join(self.reasons)}", *(f"  {line}" for line in self.advice)])


def of_run(plan: Plan, around: Surroundings) -> Diagnosis:
    """The diagnosis of one run, by the time of its steps."""
    predicted, found = plan.predicted_step_ms, list(_costs(plan))
    headline = f"predicted {predicted:.3f} ms, measured {around.median:.3f} ms"
    if around.median >= predicted:
        found += [*_machine(plan, around), *_ranks(plan), *_tasks(plan)]
    elif not found:
        found = [("it is faster than predicted, so the costs were measured too high",
                  "Measure the costs when nothing else runs (--save-costs), and give them with --costs.")]
    return _judged(headline, around.median / predicted if predicted else 1.0, found)


def of_speedup(base: Plan, plan: Plan, around_base: Surroundings, around: Surroundings) -> Diagnosis:
    """The diagnosis of a run beside another one of the same training, by the speed-up over that one. Reasons refer to
    the run that was slower than predicted, relative to the other."""
    predicted, measured = base.predicted_step_ms / plan.predicted_step_ms, around_base.median / around.median
    slow, there = (plan, around) if measured < predicted else (base, around_base)
    found = [*_costs(slow), *_machine(slow, there), *_tasks(slow)]
    return _judged(f"predicted {predicted:.2f}x, measured {measured:.2f}x", predicted / measured, found)


def _judged(headline: str, slower: float, found: list[tuple[str, str]]) -> Diagnosis:
    """`slower`: how many times longer it took than predicted. A run that fits needs no reasons."""
    if abs(slower - 1) <= FITS:
        return Diagnosis(headline, True)
    return Diagnosis(headline, False, tuple(reason for reason, _ in found),
                     tuple(dict.fromkeys(advice for _, advice in found)))


def _costs(plan: Plan) -> Iterable[tuple[str, str]]:
    if plan.cost.source == "analytic":
        yield ("the costs are not of this machine, but computed from flops and bytes",
               "--costs measured predicts times on this machine.")
    if lanes(plan) > 1 and plan.cost.cross.source == "assumed":
        yield ("what crossing from core to core costs is assumed, since the costs were measured on one core",
               "Measure the costs where two cores can be used.")


def _machine(plan: Plan, around: Surroundings) -> Iterable[tuple[str, str]]:
    cores = f"{around.cores} core{'s' * (around.cores != 1)}"
    if around.others >= LOADED * around.cores:
        yield (f"other processes used {around.others:.2f} of {cores}, and costs assume free cores",
               "Measure again when nothing else runs.")
    threads = lanes(plan) * around.ranks
    if threads > around.cores:
        what = (f"{around.ranks} ranks as threads" if around.ranks > 1 else f"{threads} streams")
        yield f"{what} on {cores}", "Take at most as many streams and ranks as there are cores."
    if plan.cost.sync and around.hand_over >= APART * plan.cost.sync:
        yield (f"handing a task to another core took {around.hand_over:.2f} us after the run, and {plan.cost.sync:.2f} "
               f"when costs were measured: the host of a virtual machine may have moved its cores to other caches",
               "Run it again: two streams gain most while their cores share a cache.")
    if around.p90 > UNEVEN * around.p10:
        yield (f"steps take {around.p10:.3f} to {around.p90:.3f} ms (p10 to p90)",
               "Uneven steps are a sign of other work on the machine; give more --steps, and compare medians.")


def _ranks(plan: Plan) -> Iterable[tuple[str, str]]:
    """The assumptions of a prediction for several ranks, if they concern a share of the step that matters."""
    least, link, summing = FITS * plan.step, plan.cost.link, plan.notes.get("communication", 0.0)
    if plan.ranks > 1 and plan.cost.cores == 1 and summing >= least:
        yield (f"each rank has one core, which also sums gradients: {summing / 1000:.3f} ms a step",
               "Give each rank a second core" + ("." if plan.scheduler == "buckets" else
                                                 ", or sum larger parts (--scheduler buckets)."))
    if isinstance(plan, PipelinePlan) and not plan.synthetic and link.core:
        messages = int(np.isin(unpack(plan.priced.schedule.keys).kind, RECEIVES).sum()) // plan.placement.ranks
        if messages * link.latency >= least:
            yield (f"each rank waits for {messages} messages a step, which take {link.latency:.0f} us each and more",
                   "Larger micro-batches need fewer messages.")


def _tasks(plan: Plan) -> Iterable[tuple[str, str]]:
    graph, cost = plan.graph, plan.cost
    works = ~np.isin(unpack(graph.keys).kind, COMMUNICATION)
    time = (cost.durations(graph) + cost.launch)[works]
    if not len(time) or not time.sum():
        return
    # of the time, half is in tasks that last longer than this
    order = np.argsort(time)
    typical = float(time[order][np.searchsorted(np.cumsum(time[order]), time.sum() / 2)])
    beside, handing = lanes(plan) > 1, cost.sync + cost.wake
    if beside and typical < 10 * max(handing, 20.0):
        over = f", and handing one to another stream takes {handing:.0f} us" if handing else ""
        yield (f"tasks last {typical:.0f} us{over}",
               "Longer tasks gain more: a larger --batch-size, or a larger network.")
    low = (graph.flops[works] < BALANCE * graph.bytes[works]) & (graph.bytes[works] > 0)
    share = float(time[low].sum() / time.sum())
    if beside and share >= 0.5:
        yield (f"memory bound: {share:.0%} of the time is in tasks with fewer than {BALANCE:g} flops per byte",
               "Such tasks share the memory's bandwidth and gain little side by side.")
    if beside and cost.corun is None:
        yield ("the prediction ignores interference between concurrent tasks"
               + ", except in the memory's bandwidth" * (cost.memory is not None),
               "--pairs measured measures how much they slow each other down, and predicts with it.")


def lanes(plan: Plan) -> int:
    """The most lanes of a rank that compute."""
    schedule = plan.schedule
    works = ~np.isin(unpack(schedule.keys).kind, COMMUNICATION)
    return int(np.bincount(schedule.rank_of_lane[np.unique(schedule.lane_of_each()[works])], minlength=1).max())
