"""Pipeline schedules: policies from a problem to an order, each a few lines; their plans are proved and priced.

`plan(name, ranks, micro_batches, ...)` makes the `Plan` of a synthetic pipeline, `read_plan(schedule, ...)` that of a
given schedule, and `minidl.plan` that of a recorded network (by `plan_network`). All plans go through `prove`, and
`price(plan)` is a plan's `Price`. Nothing here knows a device.
"""

from ...passes.send_receive import add_communication, swap
from ...plans import Plan, Versions
from .follow import with_followers
from .grid import grid
from .models import balanced, cut
from .network import of_network, plan_network, plan_schedule
from .notation import from_torch, read_schedule, to_torch
from .placement import PipelineError, Placement
from .planner import plan
from .policies import POLICIES, Policy, groups, names, place, policy, slices_of, update_every
from .pricing import Price, price
from .problem import Problem, costs
from .proof import chunks_in, prove, read_plan
from .replicas import add_all_reduces
from .stages import fused_in, stage_graph

__all__ = [
    "POLICIES", "PipelineError", "Placement", "Plan", "Policy", "Price", "Problem", "Versions", "add_all_reduces",
    "add_communication", "balanced", "chunks_in", "costs", "cut", "from_torch", "fused_in", "grid", "groups",
    "names", "of_network", "place", "plan", "plan_network", "plan_schedule", "policy", "price", "prove",
    "read_plan", "read_schedule", "slices_of", "stage_graph", "swap", "to_torch", "update_every",
    "with_followers"]
