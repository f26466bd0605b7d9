"""Pipeline schedules: policies from a problem to an order, each a few lines; their plans are proved and priced.

`minidl.plan` makes the plans, of a recorded network or of a `Pipeline` on given times. Nothing here knows a device.
"""

from ...core.placement import PipelineError, Placement, Versions
from ...passes.send_receive import add_communication
from ...plans.plan import PipelinePlan
from .bounds import bounds
from .grid import grid
from .models import balanced, cut, in_stages
from .network import OF_ORDERS, options_of
from .notation import for_torch, from_torch, read_file, read_schedule, to_torch
from .policy import Policy
from .pricing import Price, price
from .problem import Problem, costs
from .proof import chunks_in, prove
from .stages import stage_graph
from .synthetic import Pipeline

__all__ = ["OF_ORDERS", "Pipeline", "PipelineError", "PipelinePlan", "Placement", "Policy", "Price",
           "Problem", "Versions", "add_communication", "balanced", "bounds", "chunks_in", "costs", "cut",
           "for_torch", "from_torch", "grid", "in_stages", "options_of", "price", "prove", "read_file",
           "read_schedule", "stage_graph", "to_torch"]
