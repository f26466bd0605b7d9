"""Schedulers: pure functions `(graph, cost, machine)` to a Schedule, or an Ordered with notes. No device, no MPI,
no clock.

This package has the schedulers for a single device and the registry of all by name; data-parallel ones are in
`schedulers.data_parallel`, pipelines in `schedulers.pipeline`.
"""

from .multi_region import multi_region, profile_groups
from .ordered import Ordered
from .planner import plan
from .registry import SCHEDULERS, Scheduler, find, names
from .single import in_order, multi_stream

__all__ = ["SCHEDULERS", "Ordered", "Scheduler", "find", "in_order", "multi_region", "multi_stream",
           "names", "plan", "profile_groups"]
