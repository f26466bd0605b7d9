"""Data-parallel schedules on given times: a chain of layers as a graph, and the cost of its communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..core.graph import GraphBuilder, Role, TaskGraph
from ..core.machine import PlanError
from ..core.tasks import Kind
from ..passes.synchronise import times_of_sums
from ..pricing.cost import CostModel


def layers(forward: Sequence[float], output_grad: Sequence[float], weight_grad: Sequence[float], *, parts: int = 8
           ) -> tuple[TaskGraph, CostModel]:
    """One step of a chain of layers with given times, and its costs. A gradient has `parts` bytes, so plan it with
    `part_bytes=1`.

    Layer 0 is nearest the input and has no output gradient: `output_grad[0]` is not used. Updates take no time. Raises
    PlanError for lists of different lengths.
    """
    times = {"forward": forward, "output_grad": output_grad, "weight_grad": weight_grad}
    if len({len(t) for t in times.values()}) > 1 or not len(forward):
        raise PlanError(f"each list needs one time per layer, but there are "
                        f"{', '.join(f'{len(t)} for {n}' for n, t in times.items())}")
    builder, count = GraphBuilder(), len(forward)
    x = [builder.buffer(f"x{i}", 1, Role.INPUT if i == 0 else Role.ACTIVATION) for i in range(count + 1)]
    dx = [builder.buffer(f"dx{i}", 1, Role.WORKSPACE) for i in range(count + 1)]
    w = [builder.buffer(f"w{i}", 1, Role.PARAMETER) for i in range(count)]
    g = [builder.buffer(f"g{i}", parts, Role.GRADIENT) for i in range(count)]
    for i in range(count):
        builder.task(i, Kind.F, reads=[x[i], w[i]], writes=[x[i + 1], *([dx[count]] if i == count - 1 else [])])
    for i in reversed(range(count)):
        builder.task(i, Kind.W, reads=[x[i], dx[i + 1]], writes=[g[i]])
        if i:
            builder.task(i, Kind.O, reads=[dx[i + 1], w[i]], writes=[dx[i]])
    for i in range(count):
        builder.task(i, Kind.U, reads=[w[i], g[i]], writes=[w[i]])
    cost = CostModel(kinds={"F": list(forward), "O": list(output_grad), "W": list(weight_grad), "U": 0.0}, unit="")
    return builder.build(name="layers"), cost


def with_communication(graph: TaskGraph, cost: CostModel, time: Callable[[Mapping[int, int]], float]) -> CostModel:
    """The costs, with the communication of a synchronised graph added (`times_of_sums`)."""
    found = {graph.name(t): each for t, each in times_of_sums(graph, time).items()}
    return replace(cost, tasks={**cost.tasks, **found})
