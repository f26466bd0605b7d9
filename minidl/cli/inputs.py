"""The inputs of a plan by the flags: the scheduler, the recorded step and the costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import schedulers
from ..core.report import UNITS
from ..pricing.cost import CostModel
from ..system.files import read_text
from . import show
from .flags import UsageError, chosen, hinted, kind_of

if TYPE_CHECKING:
    from ..training.recorded import Recorded


def scheduler_of(arguments: Any, name: str | None = None) -> schedulers.Scheduler:
    """The scheduler of the flags, or the one called `name`. Raises UsageError if none is given to check with, and for
    one of another --parallel or an argument of a wrong type."""
    parallel = kind_of(arguments)
    if arguments.command == "check" and name is None and "--scheduler" not in arguments.given:
        known = ", ".join(schedulers.names(parallel))
        raise UsageError(f"the policy is missing; give --scheduler NAME, one of: {known}")
    try:
        found = schedulers.find(name or arguments.scheduler, parallel)
        found.check({option: value for option, value in arguments.scheduler_arg if option in found.options})
        return found
    except ValueError as error:
        raise UsageError(str(error)) from None


def named(arguments: Any) -> list[str]:
    """The names of the schedulers of a command: all for a curve or a memory limit alone, unless it says one."""
    if arguments.command == "check" and arguments.plan.endswith(".csv"):
        return [arguments.plan]
    every = arguments.command == "plan" and (arguments.curve or arguments.offload == "auto") and (
        arguments.subject == "s" and not {"--scheduler", "--scheduler-arg"} & arguments.given)
    return schedulers.names("none", exact=True) if every else chosen(arguments)


def unmeasured(name: str) -> CostModel:
    """Analytic costs, or a file's. Raises UsageError for a file with times in another known unit than microseconds."""
    cost = CostModel.analytic() if name == "analytic" else CostModel.load(name)
    if UNITS.get(cost.unit, 1.0) != 1.0:
        raise UsageError(f"{name} has times in {cost.unit}; links and devices are timed in microseconds: multiply its "
                         f"times by {UNITS[cost.unit]:g}, divide bandwidths by it, and write \"unit\": \"us\"")
    return cost


def costs(arguments: Any, recorded: Recorded) -> CostModel:
    """The costs by --costs and --pairs: measured now, from flops and bytes, or from a file."""
    from ..measuring.far import measure_far
    from ..measuring.sms import measure_sms

    if arguments.costs != "measured":
        cost = unmeasured(arguments.costs)
        if beyond := cost.beyond(recorded.graph):
            show.note(f"{arguments.costs} has times of tasks that this step does not have: {', '.join(beyond[:3])}")
    else:
        with show.progress("measuring costs", 1.0) as done:
            cost = recorded.measure(done)
    # a plan may copy out by the flags, or as its order says
    copies = arguments.offload != "none" or arguments.command == "check" or arguments.curve or arguments.resume
    if cost.far is None and cost.source != "analytic" and (
            copies or any(name.endswith(".csv") for name in named(arguments))):
        cost = replace(cost, far=measure_far(recorded.device))
    asked = arguments.pairs
    if (asked is None and cost.corun is None and arguments.subject == "s"
        and any(schedulers.find(name).pairs for name in named(arguments))):
        asked = "measured" if arguments.costs == "measured" else "estimated"
    if asked in ("measured", "estimated"):
        with show.progress("measuring pairs", 1.0) as done:
            cost = recorded.with_pairs(cost, asked == "measured", done)
    if arguments.side_sms is not None and cost.sms is None:
        with show.progress("measuring parts of the GPU", 1.0) as done:
            cost = replace(cost, sms=measure_sms(recorded.graph, recorded.device, done))
    if arguments.save_costs:
        cost.save(arguments.save_costs)
    return cost


def log_of(arguments: Any) -> Any:
    """The log of --replay: of orders under a hint, else of versions; None without one. Raises FileError, ValueError."""
    from ..runtime import version_log
    from ..training import realised

    if not (name := arguments.replay):
        return None
    kind, read = (("log of orders", realised.from_lines) if hinted(arguments) else
                  ("version log", version_log.from_lines))
    return read(read_text(name, kind).splitlines(), name)
