"""Pipeline schedules: policies from a problem to an order, each a few lines; plans of them are priced and checked.

`plan(name, ranks, micro_batches, ...)` makes a `Plan` of a synthetic pipeline, `plan_model(graph, name, ranks, cost)` one
of a recorded model; `validate(plan)` proves it and `price(plan, cost)` tells its `Price`. Nothing here knows a device.
"""

from .checking import read_plan, validate
from .communication import add_communication, swap
from .grid import grid
from .models import balanced, plan_model
from .notation import from_torch, read_schedule, to_torch
from .placement import PipelineError, Placement
from .plan import POLICIES, Plan, Policy, Versions, costs, fused_in, names, place, plan, policy
from .pricing import Price, price
from .problem import Problem
from .stages import stage_graph

__all__ = [
    "POLICIES", "PipelineError", "Placement", "Plan", "Policy", "Price", "Problem", "Versions", "add_communication",
    "balanced", "costs", "from_torch", "fused_in", "grid", "names", "place", "plan", "plan_model", "policy", "price", "read_plan",
    "read_schedule", "stage_graph", "swap", "to_torch", "validate"]
