"""More arrangements of a recorded step than `minidl fuzz` has: what passes make of it, plans within limits, all calls
as one graph, and two ranks. All leave the bits of the eager run, those in parts nearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from minidl import device, schedulers
from minidl.autograd.recording import record
from minidl.core.graph import TaskGraph
from minidl.core.machine import Machine
from minidl.core.placement import Refused
from minidl.core.tasks import GraphError, Kind, widths
from minidl.fusion import fused
from minidl.passes.draft import Draft
from minidl.passes.group import grouped
from minidl.passes.highway import highway
from minidl.passes.jacobi import jacobi
from minidl.passes.offload import EACH, Moves, offload
from minidl.passes.recompute import recompute
from minidl.passes.rewrite import rename, unroll
from minidl.passes.split import split
from minidl.plans.memory import MemoryLimitError
from minidl.plans.plan import Plan
from minidl.runtime.checking import random_schedule
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import CheckingExecutor, DistributedExecutor, SequentialExecutor, StreamExecutor
from minidl.testing.fuzz import Case, Run, Shuffled, Trace, arranged, left, made, nothing, outputs


def arrangements(case: Case, every: bool = True) -> Iterator[tuple[str, Callable[[], Trace | None]]]:
    """All of them. Without `every`, the slow ones (multi_region, two ranks) run for one case in twenty."""
    graph, choices = case.graph, case.choices

    def checked(graph: TaskGraph) -> Trace:
        return case.trace(CheckingExecutor(graph, random_schedule(graph, 3, choices), seed=int(choices.integers(2**31)),
                                           device=Shuffled(choices)))

    yield from arranged(case, every)
    if case.training.before is nothing:
        yield "all calls as one graph", partial(_unrolled, case)
    dropped = np.flatnonzero(choices.random(int(graph.unit.max()) + 1) < choices.choice([0.5, 1.0]))
    again = recompute(Draft.of(graph), dropped.tolist()).graph
    if len(again) > len(graph):
        yield f"recompute {', '.join(map(str, dropped))}", partial(checked, again)
    joined = grouped(Draft.of(graph), company := int(choices.integers(2, 9))).graph
    if len(joined) < len(graph):
        yield f"groups of {company}", partial(checked, joined)
    over = fused(graph, device.cpu(), ["in_place"])
    yield "results in place", partial(checked, over)
    for way in (jacobi, highway):
        with suppress(Refused):  # gradients flow through one layer, or there are no residual blocks
            yield way.__name__, partial(checked, way(Draft.of(graph))[0].graph)
    with suppress(Refused):
        moves = Moves(str(choices.choice(EACH[1:])), int(choices.integers(3)), int(choices.integers(1, 9)))
        away = offload(replace(Draft.of(graph), schedule=random_schedule(graph, 2, choices)), moves).graph
        yield f"offload {moves}", partial(checked, away)
    if choices.random() < 0.5:
        parts = {key: int(n) for key, n in zip(graph.keys.tolist(), choices.integers(1, 5, len(graph)), strict=True)}
        with suppress(Refused):  # nothing can be cut in so many parts
            cut = split(Draft.of(graph if choices.random() < 0.5 else over), parts).graph
            yield "split", partial(_in_parts, case, cut)
    yield _by_plan(case)
    if every or choices.random() < 0.05:
        yield "two ranks with the same inputs", partial(_on_two_ranks, case)


def _by_plan(case: Case) -> tuple[str, Callable[[], Trace]]:
    """A plan with random arguments, within a limit between the least that can be had and the most that is needed; the
    plain one if a pass refuses it."""
    graph, choices = case.graph, case.choices
    share, again = choices.choice([0.0, 1.0, choices.random()]), choices.choice(["none", "all", "sqrt", *["auto"] * 3])
    away = str(choices.choice(["none", "none", *EACH[1:], *["auto"] * (again == "auto")]))
    name = str(choices.choice([name for name in schedulers.names("none", exact=True) if name != "multi_region"]))
    parts: Any = [1, 1, 2, 3, "auto"][choices.integers(5)]

    def plan(limit: int | None) -> Plan:
        return schedulers.plan(graph, name, machine=Machine(memory_limit=limit), recompute=str(again), offload=away,
                               split=parts)

    def run() -> Trace:
        found = schedulers.plan(graph, name)
        try:
            found = plan(1)
        except Refused:
            pass
        except MemoryLimitError as error:
            least = error.least or max(plan(None).peak_bytes)
            found = plan(least + int(share * max(0, *(peak - least for peak in found.peak_bytes))))
        if widths(found.graph.keys):
            return _in_parts(case, found.graph)
        return case.trace(StreamExecutor(found.graph, found.schedule, device=Shuffled(choices)))

    return f"plan by {name}, recompute {again}, offload {away}, split {parts}, within {share:.0%}", run


def _in_parts(case: Case, parted: TaskGraph) -> Trace:
    """The trace of the graph. Raises RuntimeError if two orders of the graph in parts leave different bits, or if the
    results of its first call, as far as it computes them before an update, are not close to the whole graph's."""
    graph, choices, tensors = case.graph, case.choices, case.training.tensors()
    begin = {name: np.array(t.numpy()) for name, t in tensors.items()}

    def after(run: Run) -> Trace:
        for name, t in tensors.items():
            t.assign(begin[name])
        return case.trace(run)

    first = after(SequentialExecutor(parted, Shuffled(choices)))
    for lanes in (1, 3):
        order = random_schedule(parted, lanes, choices)
        other = after(CheckingExecutor(parted, order, seed=int(choices.integers(2**31)), device=Shuffled(choices)))
        if different := [what for what in first if first[what] != other[what]]:
            raise RuntimeError(f"{different[0]} of a graph in parts differs between two orders")
    whole = after(SequentialExecutor(graph, Shuffled(choices)))
    update = np.flatnonzero(graph.kind == Kind.U)
    if (graph.kind[update.min(initial=len(graph)) :] == Kind.F).any():
        return whole  # results after an update may be far away: Adam makes large steps from rounding errors
    for what in (what for what in whole if what.endswith("of call 0")):
        a, b = (_values_in(seen[what]) for seen in (whole, first))
        near = 1e-12 if a.dtype == np.float64 else 1e-3
        if a.dtype.kind == "f" and not np.allclose(a, b, near, near * np.abs(a[np.isfinite(a)]).max(initial=1e-3),
                                                   equal_nan=True):
            raise RuntimeError(f"{what} of a graph in parts is not close to the whole graph's")
    return whole


def _values_in(bits: bytes) -> Any:
    """The array that `_bits` has written, flat."""
    header, _, values = bits.partition(b") ")
    return np.frombuffer(values, header.split()[0].decode())


def _unrolled(case: Case) -> Trace:
    """All calls unrolled into one graph and run in a random legal order, with one, two, or one copy per call of each
    buffer. If a call returns parameters or states, only the last call's values are observable."""
    graph, training, choices = case.graph, case.training, case.choices
    calls = len(training.inputs)
    lasting = [i for i, view in enumerate(graph.outputs) if graph.storages[view.storage].role.persistent]
    graph = rename(unroll(graph, calls), int(choices.integers(1, calls + 1)))
    run = CheckingExecutor(graph, random_schedule(graph, 3, choices), seed=int(choices.integers(2**31)),
                           device=Shuffled(choices))
    result = run(*(a for inputs in training.inputs for a in inputs))
    found = () if result is None else result if isinstance(result, tuple) else (result,)
    each = len(found) // calls
    seen = left(training.tensors(), calls - 1)
    for call in range(calls):
        seen |= outputs(found[call * each : (call + 1) * each], call)
    return {what: value for what, value in seen.items()
            if what not in {f"output {i} of call {c}" for i in lasting for c in range(calls - 1)}}


def _on_two_ranks(case: Case) -> Trace | None:
    """None for a step that ranks refuse, since it does more after its updates."""
    with suppress(GraphError, Refused):
        return _two_ranks(case)
    return None


def _two_ranks(case: Case) -> Trace:
    """Two data-parallel ranks with equal inputs: the mean of equal gradients is the gradient, so both ranks must leave
    what one process leaves, also if they have shares of everything."""
    choices = case.choices
    name = str(choices.choice(schedulers.names("data", exact=True)))
    machine, again = Machine(2, collective=lambda sizes: 1.0), str(choices.choice(["none", "all", "sqrt"]))
    options = schedulers.find(name).known(part_bytes=40, bucket_bytes=100) | {"recompute": again}
    shard = choices.choice(["0", "1", "2,prefetch=0", "3,prefetch=0,keep=none", "3"])
    shard = "0" if name not in ("barrier", "buckets", "no_overlap") else str(shard)
    own = []
    for _ in range(2):
        training = made(case.make, case.seed)
        graph = record(training.step, *training.inputs[0])
        try:
            plan = schedulers.plan(graph, name, machine=machine, shard=shard, **options)
        except Refused:
            plan, shard = schedulers.plan(graph, name, machine=machine, **options), "0"
        own.append((training, training.tensors(), plan))

    def work(communicator: Any) -> Trace:
        training, tensors, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        seen: Trace = {}
        for call, inputs in enumerate(training.inputs):
            training.before(call)
            seen |= outputs(run(*inputs), call)
        run.settle()
        run.whole()
        run.close()
        return seen | left(tensors, len(training.inputs) - 1) if shard == "0" or not communicator.rank else {}

    first, second = run_ranks(2, work)
    if shard == "0" and first != second:
        raise RuntimeError(f"two ranks differ under {name}")
    return cast(Trace, first)


