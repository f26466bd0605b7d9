"""Pipeline schedules: policies from a problem to an order, each a few lines; plans of them are priced and checked.

`plan(name, ranks, micro_batches, ...)` makes a `Plan`, `price(plan, cost)` a `Price`. Nothing here knows a device.
"""

from .placement import PipelineError, Placement
from .plan import POLICIES, Plan, Policy, Versions, costs, place, plan, policy
from .pricing import Price, price
from .problem import Problem
from .stages import stage_graph

__all__ = ["POLICIES", "PipelineError", "Placement", "Plan", "Policy", "Price", "Problem", "Versions", "costs", "place",
           "plan", "policy", "price", "stage_graph"]
