"""`plan`, `check`, `explain` and `simulate`: schedules without running them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..graph import TaskGraph, parse_task, repack, task_name
from ..pricing.cost import CostModel
from ..pricing.explain import explain as explain_task
from ..pricing.simulation import simulate as price
from ..program import lower
from ..runtime.memory import MemoryLimitError
from ..schedule import Schedule, ScheduleError
from ..training.trainer import Recorded, predict
from ..views.timeline import Timeline
from . import data_parallel, pipeline, show
from .flags import UsageError, job
from .training import check_outputs, check_scheduler, costs


def plan(arguments: Any) -> int:
    """Schedules a step and says what it costs."""
    check_outputs(arguments)
    if arguments.subject in "cp":
        return pipeline.plan(arguments)
    if arguments.curve:
        return _curve(arguments)
    recorded, cost = _recorded(arguments)
    p = predict(recorded, cost)
    show.notes(recorded.notes)
    timeline = price(p.graph, p.schedule, cost)
    if arguments.save:
        p.schedule.save(arguments.save)
    _draw(arguments, timeline)
    record = {"tasks": len(p.graph), "edges": p.graph.edges, "waits": p.waits, "predicted_step_ms": round(p.predicted_step_ms, 4),
              "peak_bytes": p.peak_bytes}
    show.emit(arguments, record, lambda: p.schedule.grid() + "\n\n" + show.table(("what", "value"), list(record.items())))
    return 0


def _curve(arguments: Any) -> int:
    """Predicted step time against memory limit."""
    if arguments.scheduler != "multi_region":
        raise UsageError(f"--curve is for --scheduler multi_region; {arguments.scheduler} gives nothing back for memory")
    if arguments.memory_limit is not None:
        raise UsageError("--curve shows a plan for every memory limit: leave --memory-limit out")
    recorded, cost = _recorded(arguments)
    found = recorded.region_plan(cost, curve=True)
    show.notes(found.notes)
    points = [{"memory_limit": c.peak_bytes, "predicted_step_ms": round((c.makespan + cost.step) / 1000, 4), "plan": c.name}
              for c in found.curve]
    record = {"smallest_limit": found.smallest_limit, "curve": points}
    show.emit(arguments, record, lambda: show.table(("memory limit", "predicted ms", "plan"), [tuple(p.values()) for p in points]))
    return 0


def check(arguments: Any) -> int:
    """Exit 0 for a valid plan, priced where costs are given; 1 for one that is not, with the culprit marked in its grid. Raises
    ScheduleError for what is no plan."""
    if arguments.subject in "cp":
        return pipeline.check(arguments)
    planned = Schedule.load(arguments.plan)
    recorded = Recorded(job(arguments))
    try:
        program = lower(recorded.graph, planned, memory_limit=arguments.memory_limit)
        schedule = program.schedule
    except (ScheduleError, MemoryLimitError) as error:
        why = error if isinstance(error, ScheduleError) else ScheduleError(str(error))
        record = {"valid": False, "error": why.message, "tasks": list(why.tasks)}
        show.emit(arguments, record, f"not valid: {why.message}\n{why.grid}".rstrip())
        return 1
    record = {"valid": True, "tasks": len(schedule), "waits": len(program.body[0].waits), "peak_bytes": program.peak_bytes}
    price_text = ""
    if "--costs" in arguments.given:
        record["predicted_step_ms"] = round(predict(recorded, costs(arguments, recorded), planned).predicted_step_ms, 4)
        price_text = f", {record['predicted_step_ms']:.3f} ms a step predicted"
    show.emit(arguments, record, lambda: f"{schedule.grid()}\n\nvalid: {len(schedule)} tasks, {record['waits']} waits, "
                                         f"{program.peak_bytes:,} bytes at the peak{price_text}")
    return 0


def explain(arguments: Any) -> int:
    """When a task may start and must end, what it waits for and who waits for it."""
    check_outputs(arguments)
    if arguments.subject in "cp":
        return pipeline.explain(arguments)
    recorded, cost = _recorded(arguments)
    p = predict(recorded, cost)
    show.notes(recorded.notes)
    found = explain_task(p.graph, p.schedule, cost, _as_planned(p.graph, arguments.task))
    show.emit(arguments, found.as_json(), str(found))
    return 0


def _as_planned(graph: TaskGraph, name: str) -> str:
    """The name of this task in a plan: 4W0, or 4W0@1 where it runs one step late. Raises GraphError for what is no name."""
    key = int(parse_task(name))
    late = int(repack(key, late=1))
    here, one_step_late = (graph.find(np.array([key, late])) >= 0).tolist()
    return task_name(late) if one_step_late and not here else name


def simulate(arguments: Any) -> int:
    """A model's plan on measured or given costs, or a data-parallel or pipeline policy on given times."""
    check_outputs(arguments)
    if arguments.subject in "rl":
        return data_parallel.simulate(arguments)
    if arguments.subject in "cp":
        return pipeline.simulate(arguments)
    recorded, cost = _recorded(arguments)
    p = predict(recorded, cost)
    show.notes(recorded.notes)
    timeline = replace(price(p.graph, p.schedule, cost), peak_bytes=p.peak_bytes)
    _draw(arguments, timeline)
    if arguments.trace:
        timeline.save(arguments.trace)
    record = {"predicted_step_ms": round(p.predicted_step_ms, 4), **timeline.summary()}
    show.emit(arguments, record, timeline.report)
    return 0


def _recorded(arguments: Any) -> tuple[Recorded, CostModel]:
    check_scheduler(arguments.scheduler)
    recorded = Recorded(job(arguments))
    return recorded, costs(arguments, recorded)


def _draw(arguments: Any, timeline: Timeline) -> None:
    if arguments.svg:
        from ..files import write_atomic
        from ..views.draw import timeline_svg

        write_atomic(arguments.svg, timeline_svg(timeline))
