"""Schedulers: pure functions `(graph, cost, machine)` to a schedule or a plan. No device, no MPI, no clock.

This package has the schedulers for a single device and the registry of all by name; data-parallel ones are in
`schedulers.data_parallel`, pipelines in `schedulers.pipeline`.
"""

from .multi_region import multi_region, profile_groups
from .registry import SCHEDULERS, Scheduler, find, names, plan
from .single import in_order, multi_stream

__all__ = ["SCHEDULERS", "Scheduler", "find", "in_order", "multi_region", "multi_stream", "names",
           "plan", "profile_groups"]
