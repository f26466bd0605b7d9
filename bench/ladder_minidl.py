"""The rungs of minidl: single launches on one stream and on several, the same as CUDA graphs, fused launches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from ladder_cases import Case, Precision, batches
from ladder_rungs import DeviceClock, Rung

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.autograd.tape import Tape, use
from minidl.fusion import fused
from minidl.measuring.pairs import measure_pairs
from minidl.measuring.sms import measure_sms
from minidl.plans.program import lower
from minidl.pricing.fit import fitted
from minidl.runtime.executors import GraphExecutor, StreamExecutor
from minidl.schedulers.multi_region import planned
from minidl.schedulers.single import beside

#: rungs and their schedules
PLAIN = ("E0a in_order", "E0b multi_stream", "E0b multi_region", "E1 in_order", "E2 multi_stream", "E2 multi_region")
FUSED = ("E3 in_order", "E3 multi_region")
#: further rungs of fused launches, and how the device differs in each: what one means of the chip gains. They are
#: measured if they are asked for
CHIP: dict[str, dict[str, Any]] = {
    "E3 in_order, cuBLASLt alone": {"small_products": False},
    "E3 in_order, dependent launch": {"dependent_launch": True},
    "E3 multi_region, dependent launch": {"dependent_launch": True},
    "E3 multi_region, side SMs": {}}
SIDE = "multi_region, side SMs"  #: the plan that may give the second stream a share of the chip


def scheduler_of(name: str) -> str:
    """The name of a rung's plan."""
    own = name.partition(" ")[2]
    return own if own == SIDE else own.partition(",")[0]


#: the first of these that runs represents minidl against torch; this order was chosen before measuring
BEST = ("E3 multi_region", "E2 multi_region", "E1 in_order", "E0b multi_region", "E0a in_order")
FITTED = 10  #: steps of a sample of the step to which the strength of contention is fitted
PAIRS = 60  #: pairs of groups of tasks that are measured at the same time: those with the longest common time


def sgd(model: Any) -> Callable[[Any, Any], Any]:
    """One step of SGD with momentum 0.9 on cross-entropy, as a function of a batch. Each row of logits (..., classes)
    has one label."""
    opt = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        logits = model(x)
        loss = nn.cross_entropy(logits if len(logits.shape) == 2 else logits.reshape(-1, model.classes), y)
        loss.backward()
        opt.step()
        return loss

    return step


@contextmanager
def settings(device: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
    """Calls that are bound inside are bound with these attributes of the device."""
    before = {key: getattr(device, key) for key in wanted}
    try:
        for key, value in wanted.items():
            setattr(device, key, value)
        yield
    finally:
        for key, value in before.items():
            setattr(device, key, value)


class Ours:
    """The minidl side of one network: trainings that all begin with the same weights and batches."""

    def __init__(self, case: Case, precision: Precision, device: Any) -> None:
        self.case, self.precision, self.device = case, precision, device
        device.tf32 = precision.tf32
        model = self.model()
        self.batches = [tuple(self._pinned(array) for array in batch)
                        for batch in batches(case, model)]

    def model(self) -> Any:
        with use(Tape(self.device)):
            ml.seed(0)
            return models.create(self.case.model, **self.case.arguments)

    def _pinned(self, array: Any) -> Any:
        """Pinned memory, as for torch's batches."""
        host = self.device.pinned(array.shape, str(array.dtype))
        host[...] = array
        return host

    def recorded(self, name: str, dropout: bool = True) -> tuple[Any, Any]:
        """A model with its initial weights, and a rung's step as a graph."""
        model = self.model()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout) and not dropout:
                layer.eval()
        with use(Tape(self.device)), self.precision.autocast():
            graph = ml.record(sgd(model), *self.batches[0])
        return model, fused(graph, self.device) if name.startswith("E3") else graph

    def rung(self, name: str, schedule: Any) -> tuple[Rung, Any]:
        """A rung and its model."""
        begin = time.perf_counter()
        model, graph = self.recorded(name)
        lanes = StreamExecutor if name.startswith("E0") else GraphExecutor
        with settings(self.device, CHIP.get(name, {})):
            run: Any = lanes(graph, schedule, device=self.device)
        turn = itertools.cycle(self.batches)
        body = run._body[0]
        one_graph = ((lambda: body.bound.load(next(turn)), body.lanes.run) if isinstance(run, GraphExecutor)
                     and len(run._body) == 1 else (None, None))
        return Rung(lambda: run(*next(turn)), DeviceClock(self.device), time.perf_counter() - begin, run.peak_bytes,
                    {"tasks": len(graph)}, *one_graph, run.close,
                    self._resident(graph, schedule, name) if one_graph[0] else None), model

    def _resident(self, graph: Any, schedule: Any, name: str) -> Callable[[], Any]:
        """A step on a batch that is on the device, as torch's: one graph, without uploads and other copies of inputs,
        whose memory is not used again. It is made at the first call, since it trains."""

        @cache
        def made() -> tuple[Callable[[], None], Any]:
            with settings(self.device, CHIP.get(name, {})):
                run = GraphExecutor(replace(graph, outputs=(*graph.outputs, *graph.inputs)), schedule,
                                    device=self.device)
                run(*self.batches[0])
                return self.device.captured(replace(run._body[0].lanes.work, feed=None)).run, run

        return lambda: made()[0]()

    def _fitted(self, name: str, schedule: Any, cost: Any) -> Any:
        """The costs with the strength of contention that a step of `schedule` shows, captured as the rung. It is on the
        device already: what the host takes would count as contention."""
        _, graph = self.recorded(name)
        step, clock, run = self._resident(graph, schedule, name), DeviceClock(self.device), lower(graph, schedule)
        microseconds = statistics.median(clock.seconds(step, FITTED) * 1e6 for _ in range(5))
        return fitted(run.graph, run.schedule, cost, max(microseconds, 1.0))

    def losses(self, name: str, steps: int) -> list[float]:
        """The losses of the first steps of a rung's graph, in order and without dropout, to compare with torch."""
        _, graph = self.recorded(name, dropout=False)
        run = StreamExecutor(graph, schedulers.in_order(graph), device=self.device)
        found = [float(run(*batch)) for batch in itertools.islice(itertools.cycle(self.batches), steps)]
        run.close()
        return found

    def plans(self, names: Sequence[str], costs: Callable[[Any, Any], Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Schedules for the graph of these rungs, and the predicted milliseconds per step of each; in order alone
        needs no costs, and has no prediction. No prediction uses a step of the schedule that it predicts."""
        _, graph = self.recorded(names[0])
        wanted, made = {scheduler_of(name) for name in names}, {"in_order": schedulers.in_order(graph)}
        if wanted == {"in_order"}:
            return made, {}
        cost = alone = costs(graph, self.device)
        # always on two streams: whether they hide launches is what the ladder measures
        captured = [name for name in names if cost.corun and not name.startswith("E0")]
        if "multi_stream" in wanted or captured:
            made["multi_stream"] = beside(graph, cost)
        if captured:
            cost = self._fitted(captured[0], made["multi_stream"], cost)
        if "multi_region" in wanted:
            made["multi_region"] = schedulers.multi_region(graph, cost)
        if SIDE in wanted:
            cost = replace(cost, sms=measure_sms(graph, self.device))
            made[SIDE] = planned(graph, cost, ml.Machine(), side_sms="auto").schedule
        runs = {scheduler: lower(graph, schedule) for scheduler, schedule in made.items()}

        def predicted(scheduler: str, run: Any) -> float:
            own = alone if scheduler == "multi_stream" else cost.divided(run.schedule.side_sms)
            return round(float(ml.simulate(run.graph, run.schedule, own).makespan + cost.step) / 1e3, 5)

        return made, {scheduler: predicted(scheduler, run) for scheduler, run in runs.items()}


def measured_costs(graph: Any, device: Any, most: int = PAIRS) -> Any:
    """The costs of single tasks, and of at most `most` pairs of groups at the same time; other pairs slow each other
    by what both need of the device."""
    cost = ml.measure(graph, device=device)
    groups, pairs = schedulers.profile_groups(graph, cost)
    return replace(cost,
                   corun=measure_pairs(graph, cost, groups, longest(graph, cost, groups, pairs)[:most], device=device))


def longest(graph: Any, cost: Any, groups: Any, pairs: Any) -> list[tuple[str, str]]:
    """Pairs by the time that both of them take, longest first."""
    times: dict[str, float] = {}
    for task, microseconds in enumerate(cost.durations(graph)):
        name = groups.get(graph.name(task), "")
        times[name] = times.get(name, 0.0) + float(microseconds)
    return sorted(pairs, key=lambda pair: -min(times.get(pair[0], 0.0), times.get(pair[1], 0.0)))


def best(rungs: Sequence[str]) -> str:
    """The rung of these that is compared with torch."""
    return next(name for name in BEST if name in rungs)
