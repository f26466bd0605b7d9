"""Every scheduler by its name, and the only way to a plan: a policy makes a schedule or a plan, and `plan` proves it.

A policy is a function `(graph, cost, machine, **options)` to a Schedule, or to a Plan if it adds more. A new policy is
one line in SCHEDULERS, or stays in a file of its own: wherever a scheduler is named, `file.py:function` and
`package.module:function` work too, and so does the CSV of a plan. Nothing here knows a device.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..graph import TaskGraph
from ..loading import function_of, needs_function
from ..plans import Machine, Plan
from ..pricing.cost import CostModel
from ..schedule import Schedule, ScheduleError
from . import data_parallel, pipeline
from .multi_region import planned as by_regions
from .single import in_order
from .single import planned as beside_the_chain

Function = Callable[..., Schedule | Plan]
#: how training is spread over ranks -> how messages describe such schedulers
KINDS = {"none": "for one device", "data": "for data-parallel ranks", "pipeline": "for a pipeline"}


@dataclass(frozen=True)
class Scheduler:
    """A policy with its name. `parallel`: the one of KINDS that it is for. `pairs`: whether it plans better if costs
    include how much tasks on two streams slow each other down."""

    name: str
    parallel: str
    function: Function
    pairs: bool = False

    @property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """Its parameters besides graph, costs and machine."""
        try:
            found = inspect.signature(self.function, eval_str=True)
        except (TypeError, ValueError, NameError):  # a user's annotations may use names that are not defined
            found = inspect.signature(self.function)
        return dict(list(found.parameters.items())[3:])

    @property
    def own(self) -> bool:
        """Whether it is a function or a file of the user's."""
        return self.name not in SCHEDULERS

    @property
    def about(self) -> str:
        """Its description, with source and closed form: its docstring without the errors."""
        text = inspect.getdoc(self.function) or ""
        return " ".join(text.partition("Raises ")[0].split())

    def known(self, **given: Any) -> dict[str, Any]:
        """The given options that it accepts and that are not None."""
        return {option: value for option, value in given.items() if option in self.options and value is not None}

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for an unknown option, or one of a wrong type."""
        known = self.options
        for option, value in given.items():
            if option not in known:
                raise ValueError(f"scheduler {self.name} takes no argument {option!r}; it takes: "
                                 f"{', '.join(known) or 'none'}")
            kind = known[option].annotation
            if kind is not inspect.Parameter.empty and not isinstance(kind, str) and not _fits(value, kind):
                raise ValueError(f"scheduler {self.name}: {option} must be of type "
                                 f"{getattr(kind, '__name__', kind)}, not {repr(value)[:40]}")


def _fits(value: Any, kind: Any) -> bool:
    try:
        return (isinstance(value, kind)
                or (isinstance(value, int) and isinstance(0.0, kind) and not isinstance(value, bool)))
    except TypeError:  # Python cannot check such types as list[int]
        return True


SCHEDULERS: dict[str, Scheduler] = {s.name: s for s in (
    Scheduler("in_order", "none", in_order),
    Scheduler("multi_stream", "none", beside_the_chain),
    Scheduler("multi_region", "none", by_regions, pairs=True),
    *(Scheduler(name, "data", function) for name, function in data_parallel.POLICIES.items()),
    *(Scheduler(name, "pipeline", pipeline.of_network(name)) for name in pipeline.POLICIES),
)}


def names(parallel: str) -> list[str]:
    """The names of the schedulers of this kind, in the order of SCHEDULERS."""
    return [s.name for s in SCHEDULERS.values() if s.parallel == parallel]


def find(name: str, parallel: str | None = None) -> Scheduler:
    """The scheduler of this name; `parallel`: of this kind. Raises ValueError, with similar names, for an unknown
    one."""
    if ":" in name:
        return Scheduler(name, parallel or "none", function_of(name))
    if name.endswith(".csv"):
        return Scheduler(name, parallel or "none", _of_file(name, parallel))
    needs_function(name)
    found = SCHEDULERS.get(name)
    if found is None:
        known = names(parallel) if parallel else list(SCHEDULERS)
        near = difflib.get_close_matches(name, known, 3, 0.3) or known
        raise ValueError(f"unknown scheduler {name!r}{f' {KINDS[parallel]}' if parallel else ''}; "
                         f"similar names: {', '.join(near)}")
    if parallel is not None and found.parallel != parallel:
        raise ValueError(f"scheduler {name} is {KINDS[found.parallel]}, not {KINDS[parallel]}; use one of: "
                         f"{', '.join(names(parallel))}")
    return found


def _of_file(path: str, parallel: str | None) -> Function:
    """The policy that reads a saved or edited plan. Raises ValueError for data-parallel ranks."""
    if parallel == "data":
        raise ValueError(f"{path}: a data-parallel plan can be checked (`minidl check`), but not run from a file, "
                         f"which does not say how its policy cuts the gradients; give the policy's name")

    def on_device(graph: TaskGraph, cost: CostModel, machine: Machine) -> Schedule:
        return Schedule.load(path)

    def on_ranks(graph: TaskGraph, cost: CostModel, machine: Machine, *, chunks: int | None = None) -> Plan:
        return pipeline.plan_schedule(graph, Schedule.load(path), cost, machine, chunks=chunks)

    return on_ranks if parallel == "pipeline" else on_device


def plan(graph: TaskGraph, policy: str | Function | Schedule | Scheduler, cost: CostModel | None = None,
         machine: Machine | None = None, **options: Any) -> Plan:
    """The plan that a policy makes of a recorded graph, proved: it is valid on every rank and within the machine's
    limits.

    `policy`: a name, a function, or a schedule. `cost`: by default from flops and bytes. Raises ValueError where the
    policy cannot plan this, PipelineError where the graph cannot be a pipeline, ScheduleError for a schedule that is
    not valid, and MemoryLimitError for a plan above the limit.
    """
    cost, machine = cost or CostModel.analytic(), machine or Machine()
    if isinstance(policy, Schedule):
        return proved(Plan("given", graph, policy, cost, machine.size, machine.memory_limit))
    chosen = (policy if isinstance(policy, Scheduler) else find(policy) if isinstance(policy, str)
              else Scheduler(_name(policy), "none", policy))
    chosen.check(options)
    made = _called(chosen, graph, cost, machine, options)
    if isinstance(made, Schedule):
        made = Plan(chosen.name, graph, made, cost, machine.size, machine.memory_limit, notes=options)
    if not isinstance(made, Plan):
        raise ValueError(f"scheduler {chosen.name} returned a {type(made).__name__}, not a Schedule or a Plan")
    if machine.replicas > 1 and made.ranks != machine.size:
        raise ValueError(f"scheduler {chosen.name} returned a plan for {made.ranks} ranks; {machine.replicas} replicas "
                         f"of {machine.ranks} ranks need one for {machine.size}, whose ranks sum gradients")
    made = replace(made, limit=machine.memory_limit, cap=machine.activation_cap)  # even if the policy has set others
    try:
        return proved(made)
    except ScheduleError as error:
        if made.placement is None:
            raise
        raise pipeline.PipelineError(f"{chosen.name}: {error.message}") from None


def proved(plan: Plan) -> Plan:
    """The plan after its proof, with the figures that the proof counts. Raises ScheduleError, or MemoryLimitError above
    the limit."""
    return plan.lowered() if plan.placement is None else pipeline.prove(plan)


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _called(chosen: Scheduler, graph: TaskGraph, cost: CostModel, machine: Machine, options: Mapping[str, Any]) -> Any:
    """The result of the policy. An error inside a user's policy becomes a ValueError that names the policy."""
    try:
        inspect.signature(chosen.function).bind(graph, cost, machine, **options)
    except TypeError as error:
        raise ValueError(f"scheduler {chosen.name}: {error}; a scheduler is a function of (graph, cost, machine)"
                         ) from None
    try:
        return chosen.function(graph, cost, machine, **options)
    except Exception as error:
        known = chosen.name in SCHEDULERS or chosen.name.endswith(".csv")
        if known or isinstance(error, ValueError):  # its message is clear
            raise
        raise ValueError(f"scheduler {chosen.name} failed: {type(error).__name__}: {error}") from error
