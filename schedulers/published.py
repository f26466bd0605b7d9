"""The two hand-written schedules (maps) in the released code of out-of-order backprop, to compare ours with.

DenseNet-121: every weight gradient runs on the second stream beside the backward pass of its own layer; in the last
dense block they run one step late, beside the next forward, the highest layer first. MobileNetV3-Large: the same, but
nothing is late; the first depthwise convolution stays on the main stream, and the one of layer 7 waits for the output
gradient of layer 2. (Their network has one more convolution in its first block, so their numbers from 2 on are one
higher.)
"""

from __future__ import annotations

from ..core.graph import TaskGraph
from ..core.machine import PlanError
from ..core.schedule import Schedule
from ..core.tasks import Kind
from ..pricing.cost import CostModel
from .movable import SUB, Place, Step

MAPS = ("densenet121", "mobilenet_v3")


def published(graph: TaskGraph, name: str, cost: CostModel | None = None) -> Schedule:
    """The map of this name for its network, of any width or growth. Raises PlanError for another network or name."""
    if name not in MAPS:
        raise PlanError(f"unknown map {name!r}; known: {', '.join(MAPS)}")
    step = Step.of(graph, cost or CostModel.analytic())
    places = {i: Place(SUB, item.release) for i, item in enumerate(step.items)}
    unit = [int(graph.unit[item.tasks[0]]) for item in step.items]
    weights = [i for i, item in enumerate(step.items) if graph.kind[item.tasks[0]] == Kind.W]
    if name == "densenet121":
        late = [i for i in weights if "/denseblock4/" in graph.unit_names[unit[i]]]
        if not late:
            raise PlanError(f"the map densenet121 is for a DenseNet; {graph.name_of_graph} has no dense block 4")
        # in recorded order, which is the backward pass's: the highest first
        return step.schedule(places | {i: Place(SUB, 0, late=True) for i in late})
    layers = [i for i in sorted(weights, key=unit.__getitem__)
              if "/fc" not in graph.unit_names[unit[i]]]  # without squeeze-and-excite
    if len(layers) != 48:
        raise PlanError(f"the map mobilenet_v3 is for MobileNetV3-Large with its 48 layers; "
                        f"{graph.name_of_graph} has {len(layers)}")
    del places[layers[1]]
    places[layers[7]] = Place(SUB, next(n for n, t in enumerate(step.chain) if graph.unit[t] == unit[layers[2]]
                                        and graph.kind[t] == Kind.O))
    return step.schedule(places)
