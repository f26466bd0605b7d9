"""`plan`, `check`, `explain` and `simulate`: schedules without running them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.chakra import on_all_ranks
from ..core.draw import timeline_svg
from ..core.graph import TaskGraph
from ..core.placement import Refused
from ..core.schedule import Schedule, ScheduleError
from ..core.tasks import parse_task, repack, task_name
from ..core.work import Work
from ..passes.group import group_of
from ..plans.memory import MemoryLimitError
from ..plans.plan import PipelinePlan, Plan
from ..pricing.explain import FalseWait, FalseWaits, LaneTime, false_waits
from ..pricing.explain import explain as explain_task
from ..schedulers.pipeline import for_torch, price
from ..schedulers.saved import slips
from ..system.files import write_atomic
from ..system.process import paused
from ..views.page import Shown
from . import curves, hints, show
from . import data_parallel_plans as data_parallel
from . import pipeline_plans as pipeline
from .beside import beside
from .flags import UsageError
from .inputs import named
from .problem import Problem, given, problem


def planned(arguments: Any) -> Plan:
    """The proved plan for the flags. Prints its remarks."""
    asked, names = problem(arguments), named(arguments)
    made = asked.plan() if len(names) == 1 else _fastest(asked, names)
    show.note(*made.remarks)
    return made


def _fastest(asked: Problem, names: Sequence[str]) -> Plan:
    """The fastest plan within the job's memory limit by any of these schedulers. Raises MemoryLimitError if nothing
    fits, and Refused if none of them can plan this."""
    assert asked.recorded is not None
    found, errors, usual = list[Plan](), list[MemoryLimitError | Refused](), asked.recorded.job
    for name in names:
        asked.recorded.job = replace(usual, scheduler=name)
        try:
            found.append(asked.plan())
        except (MemoryLimitError, Refused) as error:
            errors.append(error)
    if not found:
        least = min((e.least for e in errors if isinstance(e, MemoryLimitError) and e.least), default=None)
        if least is None:
            raise errors[-1]
        raise MemoryLimitError(f"no plan fits the limit of {usual.memory_limit:,} bytes; the least that can be had is "
                               f"{least:,}", least)
    best = min(found, key=lambda plan: plan.step)
    return best.with_known(remarks=(*best.remarks, f"of {', '.join(names)}, {best.scheduler} is the fastest predicted"))


@paused
def plan(arguments: Any) -> int:
    """Schedules a step and prints its cost."""
    if arguments.curve:
        return curves.show_curve(arguments)
    made = planned(arguments)
    if arguments.save and arguments.format == "torch":
        if not isinstance(made, PipelinePlan):
            raise UsageError("--format torch is the grid of a pipeline; give --parallel pipeline or --ranks")
        write_atomic(arguments.save, for_torch(made))
    elif arguments.save and arguments.format == "chakra":
        timeline = on_all_ranks(made.timeline, made.ranks)
        show.write_trace(replace(timeline, work=_work(made)), os.path.join(arguments.save, f"plan{show.CHAKRA}"),
                         arguments.trace_factor)
    elif arguments.save:
        made.schedule.save(arguments.save)
        if isinstance(made, PipelinePlan) and made.synthetic and (made.stale or made.slices > 1
                                                                  or made.placement.apart):
            show.note(f"check it with --scheduler {made.scheduler}, which gives the "
                      + ("weight versions" if made.stale else "slices" if made.slices > 1 else "ranks of backwards"))
    own, text = _figures(arguments, made) or ({}, lambda m: show.order(m.schedule, m.as_json()))
    record = {**made.as_json(), "remarks": [*made.remarks], **own}
    _draw(arguments, made, record)
    return show.emit(arguments, record, lambda: text(made))


def _figures(arguments: Any, plan: Plan) -> tuple[dict[str, Any], Callable[[Any], str]] | None:
    """The further output of a plan for ranks: figures, and the function that makes their text; None for one rank."""
    if arguments.subject in "rl":
        return data_parallel.figures(plan), data_parallel.text
    if isinstance(plan, PipelinePlan):
        return price(plan).as_json() | pipeline.said(plan), pipeline.text
    return None


def check(arguments: Any) -> int:
    """Returns 0 for a valid plan, and prices it if a network's costs are given; 1 for a plan that is not valid, with
    the culprit marked in its grid. Raises ScheduleError for a file that is not a plan."""
    order = given(arguments)
    assert isinstance(order.scheduler.function, Schedule)
    show.note(*slips(order.scheduler.function))
    try:
        made = order.plan()
    except (ScheduleError, MemoryLimitError) as error:
        why = error if isinstance(error, ScheduleError) else ScheduleError(str(error))
        record = {"valid": False, "error": why.message, "tasks": list(why.tasks)}
        return show.emit(arguments, record, f"not valid: {why.message}\n{why.grid}".rstrip(), 1)
    record = {"valid": True, "tasks": len(made.schedule), "waits": made.waits,
              "peak_bytes": max(made.peak_bytes, default=None)}
    words, where = [f"{record['tasks']} tasks", f"{record['waits']} waits"], ""
    if isinstance(made, PipelinePlan):
        record["peak_activations"], where = list(made.peaks), f" on {made.ranks} ranks"
        words.append(f"{max(made.peaks):g} activations at the peak")
    if record["peak_bytes"]:
        words.append(f"{record['peak_bytes']:,} bytes at the peak")
    if arguments.model and "--costs" in arguments.given:
        record["predicted_step_ms"] = round(made.predicted_step_ms, 4)
        words.append(f"{made.predicted_step_ms:.3f} ms a step predicted")
    record["remarks"] = [*made.remarks]
    valid = f"valid{where}: {', '.join(words)}"
    return show.emit(arguments, record, lambda: "\n".join([made.schedule.grid(show.width()), "", valid, *made.remarks]))


def explain(arguments: Any) -> int:
    """Prints when a task may start and must end, and the tasks on both ends of its edges; without a task, which waits
    the order alone makes."""
    made = planned(arguments)
    graph, schedule, _ = made.priced
    found = (explain_task(graph, schedule, made.cost, _as_planned(graph, arguments.task)) if arguments.task
             else false_waits(graph, schedule, made.cost))
    record = {**found.as_json(), "remarks": [*made.remarks]}
    if arguments.html:
        show.write_page(arguments, record, [Shown.of(made)], getattr(found, "task", ""))
    return show.emit(arguments, record, _of_order(found) if isinstance(found, FalseWaits) else str(found))


def _of_order(found: FalseWaits) -> str:
    """The cost of an order, as two tables."""
    lanes, waits = ([name.replace("_", " ") for name in each._fields] for each in (LaneTime, FalseWait))
    words = (f"the largest of {found.count:,} waits" if found.count > len(found.largest) else "all waits"
             if found.count else "no task waits")
    unit = f", in {found.unit}" if found.unit else ""
    tables = [show.table(lanes, found.lanes), f"{words} by the order alone{unit}"]
    tables += [show.table(waits, found.largest)] * bool(found.count)
    still = ", ".join(f"{name} {time:.4g}" for name, time in found.exposed.items())
    return "\n\n".join(tables + [f"a lane only waits for exchanges{unit}: {still}"] * bool(still))


def _as_planned(graph: TaskGraph, name: str) -> str:
    """The task's name in a plan: 4W0, or 4W0@1 if it is one step late, or its group's. Raises GraphError if invalid."""
    key = group_of(graph, int(parse_task(name)))
    late = int(repack(key, late=1))
    here, one_step_late = (graph.find(np.array([key, late])) >= 0).tolist()
    return task_name(late if one_step_late and not here else key)


def simulate(arguments: Any) -> int:
    """Prices a model's plan on measured or given costs, or a data-parallel or pipeline policy on given times."""
    if arguments.table:
        return pipeline.table(arguments)
    made = planned(arguments)
    if isinstance(made, PipelinePlan):
        made = beside(arguments, made)
    found = _figures(arguments, made)
    varies = made.chosen_sums or getattr(made, "hint", None) is not None or arguments.loads is not None
    if varies and found is not None:
        columns, (figures, plain) = hints.simulated(arguments, made), found
        found = figures | {"steps": columns}, lambda made: f"{plain(made)}\n\n{hints.text(columns)}"
    if found is None:
        timeline = replace(made.timeline, peak_bytes=max(made.peak_bytes, default=0), work=_work(made))
        found = ({"predicted_step_ms": round(made.predicted_step_ms, 4), **timeline.summary()},
                 lambda made: timeline.report(show.width()))
    record, text = {**found[0], "remarks": [*made.remarks]}, found[1]
    _draw(arguments, made, record)
    return show.emit(arguments, record, lambda: text(made))


def _draw(arguments: Any, made: Plan, record: dict[str, Any]) -> None:
    """Writes the predicted timeline as a picture, as a trace and as a page with `record`, if the flags ask for them."""
    if not (arguments.html or arguments.svg or arguments.trace):
        return
    shown = Shown.of(made, iterations=data_parallel.SHOWN if arguments.subject in "rl" else 1)
    if arguments.html:
        show.write_page(arguments, record, [shown])
    if arguments.svg:
        versions = ({int(k): int(v) for k, v in zip(made.schedule.keys, made.versions.read, strict=True)}
                    if isinstance(made, PipelinePlan) and made.versions is not None else None)
        write_atomic(arguments.svg, timeline_svg(shown.timeline, versions=versions))
    if arguments.trace:
        show.write_trace(replace(shown.timeline, work=_work(made)), arguments.trace, arguments.trace_factor)


def _work(made: Plan) -> Work | None:
    """The work of the tasks of a network's plan; with floors if the costs have a device's rates."""
    if not made.graph.launches:
        return None
    from ..measuring.work import by_rates, work_of

    rates = [made.cost.kinds[name] for name in ("flops_per_us", "bytes_per_us") if name in made.cost.kinds]
    return work_of(made.graph, by_rates(*rates) if len(rates) == 2 else None)  # type: ignore[arg-type]
