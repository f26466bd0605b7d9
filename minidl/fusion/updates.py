"""The fusion rules for updates: many parameters in one launch; a weight gradient and its update in one."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.columns import grouped
from ..core.graph import Launch, View
from ..core.tasks import Kind
from ..kernels.product_update import FEW
from ..kernels.update import RULES
from .draft import Draft


def updates(draft: Draft) -> None:
    """Merges all updates into one task, with one launch for each kind. It waits for every weight gradient."""
    tasks = [i for i, e in draft.numbered() if any(launch.kernel in RULES for launch in e.launches)
             and all(launch.kernel in {*RULES, "mul"} for launch in e.launches)]
    tasks = [i for i in tasks if i == tasks[-1] or draft.moves(i, tasks[-1])]
    if len(tasks) < 2:
        return
    launches = [launch for i in tasks for launch in draft[i].launches]
    alike = grouped(((launch.kernel, len(launch.writes), _parts(launch)[1], launch.constants), launch)
                    for launch in launches if launch.kernel in RULES)
    many = [draft.launch(*_many(same), **dict(same[0].constants), count=len(same)) for same in alike.values()]
    draft.merge(tasks[-1], [*(launch for launch in launches if launch.kernel not in RULES), *many], tasks[:-1])
    draft.units.append("updates")
    draft[tasks[-1]].unit = len(draft.units) - 1


def _parts(launch: Launch) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """The operands of one parameter: itself, its gradient, states and counts; and those that all share: lr and skip."""
    rule, constants = RULES[launch.kernel], dict(launch.constants)
    reads, own = tuple(rule.order(launch.reads, **constants)), rule.own(**constants)
    return reads[:own], reads[own:]


def _many(launches: Sequence[Launch]) -> tuple[str, tuple[View, ...], tuple[View, ...]]:
    """Kernel, reads and writes of one launch for all of these: each parameter's own operands, then shared ones."""
    reads = (*(v for launch in launches for v in _parts(launch)[0]), *_parts(launches[0])[1])
    return f"{launches[0].kernel}_many", reads, tuple(v for launch in launches for v in launch.writes)


def weight_updates(draft: Draft) -> None:
    """Ends the gradient of a linear layer's weight, of few samples, with the update if nothing else reads it: on a CPU,
    this saves passes over memory. Updates come as soon as they can then, since they keep the gradient's operands."""
    if draft.device.captures:
        return
    merged = False
    for i, first in draft.alone("linear_weight_grad"):
        if first.reads[0].shape[0] > FEW or (made := draft.passed_on(grad := first.writes[0])) is None or len(
                readers := draft.readers(made)) != 1:
            continue
        launches = list(draft[to := readers[0]].launches)
        at = [k for k, launch in enumerate(launches) if grad.storage in {v.storage for v in launch.views}]
        if len(at) != 1 or not _takes(launches, at[0], first) or not draft.moves(i, to):
            continue
        own = launches.pop(at[0])
        launch = draft.launch("linear_weight_update", [*first.reads, *(v for v in own.reads if v != grad)],
                              [*own.writes, *first.writes[1:]], rule=own.kernel, **dict(first.constants),
                              **dict(own.constants))
        draft.merge(to, [launch, *launches], [i])
        merged = True
    draft.soon([i for i, e in draft.numbered() if merged and draft.kind(i) == Kind.U])


def _takes(launches: Sequence[Launch], at: int, grad: Launch) -> bool:
    """Whether launch `at` updates a weight in place, can follow parts of its gradient, and can come first."""
    update, constants, before = launches[at], dict(launches[at].constants), launches[:at]
    touched, changed = ({v.storage for v in views} for views in (update.views, update.writes))
    return (update.kernel in RULES and not update.work and update.writes[0] == update.reads[0] and
            not any(constants.get(c) for c in ("guarded", "copy")) and
            (update.reads[1], update.reads[0].shape) == (grad.writes[0], grad.writes[0].shape) and
            not any(changed & {v.storage for v in other.views} for other in (grad, *before)) and
            not any(touched & {v.storage for v in other.writes} for other in before))
