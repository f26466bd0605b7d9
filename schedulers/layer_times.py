"""Data-parallel schedules on given times: a chain of layers as a graph, and the cost of its communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..core.graph import GraphBuilder, Role, TaskGraph
from ..core.machine import PlanError
from ..core.tasks import Kind
from ..passes.synchronise import times_of_sums
from ..pricing.cost import CostModel


def layers(forward: Sequence[float], output_grad: Sequence[float], weight_grad: Sequence[float],
           exchange: Sequence[float] = (), *, parts: int = 8, micro_batches: int = 1) -> tuple[TaskGraph, CostModel]:
    """One step of a chain of layers with given times, and its costs. A gradient has `parts` bytes, so plan it with
    `part_bytes=1`.

    Layer 0 is nearest the input and has no output gradient: `output_grad[0]` is not used. Updates take no time. A layer
    whose `exchange` is above 0 has experts on all ranks: tokens go to them (`2X0` in layer 2, backward `2X0/1`) and
    come back (`2X0/2`, backward `2X0/3`), and each of these takes so long. Each of the micro-batches takes its share of
    all times. Raises PlanError for lists of different lengths.
    """
    times = {"forward": forward, "output_grad": output_grad, "weight_grad": weight_grad}
    times |= {"exchange": exchange} if len(exchange) else {}
    if len({len(t) for t in times.values()}) > 1 or not len(forward):
        raise PlanError(f"each list needs one time per layer, but there are "
                        f"{', '.join(f'{len(t)} for {n}' for n, t in times.items())}")
    builder, count = GraphBuilder(), len(forward)
    travels = [len(exchange) > 0 and exchange[i] > 0 for i in range(count)]
    w = [builder.buffer(f"w{i}", 1, Role.PARAMETER) for i in range(count)]
    g = [builder.buffer(f"g{i}", parts, Role.GRADIENT) for i in range(count)]
    for m in range(micro_batches):
        x = [builder.buffer(f"x{i}", 1, Role.INPUT if i == 0 else Role.ACTIVATION) for i in range(count + 1)]
        dx = [builder.buffer(f"dx{i}", 1, Role.GRADIENT) for i in range(count + 1)]

        def sent(layer: int, part: int, source: int, m: int = m) -> int:
            """The buffer that an exchange fills."""
            made = builder.buffer(f"{layer}X{m}/{part}", 1, Role.ACTIVATION)
            builder.task(layer, Kind.X, m, part=part, reads=[source], writes=[made])
            return made

        given, dy = list[int](), dx[count]
        for i in range(count):
            last = [dx[count]] if i == count - 1 else []
            given.append(sent(i, 0, x[i]) if travels[i] else x[i])
            builder.task(i, Kind.F, m, reads=[given[i], w[i]], writes=[x[i + 1], *([] if travels[i] else last)])
            x[i + 1] = sent(i, 2, x[i + 1]) if travels[i] else x[i + 1]
            dy = x[count] if travels[i] and last else dy  # the loss takes no time
        for i in reversed(range(count)):
            dy = sent(i, 3, dy) if travels[i] else dy
            builder.task(i, Kind.W, m, reads=[given[i], dy, *([g[i]] if m else [])], writes=[g[i]])
            if i:
                builder.task(i, Kind.O, m, reads=[dy, w[i]], writes=[dx[i]])
                dy = sent(i, 1, dx[i]) if travels[i] else dx[i]
    for i in range(count):
        builder.task(i, Kind.U, reads=[w[i], g[i]], writes=[w[i]])
    share = {name: [t / micro_batches for t in times] for name, times in
             {"F": forward, "O": output_grad, "W": weight_grad, "X": exchange}.items() if len(times)}
    return builder.build(name="layers"), CostModel(kinds={**share, "U": 0.0}, unit="")


def with_communication(graph: TaskGraph, cost: CostModel, time: Callable[[Mapping[int, int]], float]) -> CostModel:
    """The costs, with the communication of a synchronised graph added (`times_of_sums`)."""
    found = {graph.name(t): each for t, each in times_of_sums(graph, time).items()}
    return replace(cost, tasks={**cost.tasks, **found})
