"""No barrier at the optimizer: each stage updates at once, and the next step validates the update.

After Qi et al. 2024 (Zero Bubble Pipeline Parallelism, section 4 and appendix C), reconstructed: clipping by the global
norm, and a loss scale, need a value from every stage before any stage may update. Waiting for it is a barrier.

- A stage updates with its gradients as they are, unless its own squares exceed the clip or are not finite: then the
  total does too, since it only grows. It keeps its gradients and a copy of everything that it changes.
- The next step begins with its warm-up forwards, with the new weights; meanwhile the squares of all stages travel to
  all ranks, as with a barrier. Before its first backward each rank knows the verdict. It is the same on all ranks,
  since all add the same numbers in the same order, the order of one process.
- If it is good, nothing else happens. Otherwise each rank undoes its changes, scales and updates as it should have (not
  at all if a gradient is not finite), and runs its warm-up forwards again; their first messages are received and
  ignored.

Copies of weights that another rank updates (`copies.py`) are brought after the verdict, since they are right only then.
So forwards that read them also come after it. They belong to the last stages, which begin late anyhow.

In the paper a prefix of the sum travels from stage to stage, and a stage updates if that is within the clip. Here the
stage's own squares are enough: in either case a step that fails is repeated on every rank, and no rank waits for the
prefix. All these tasks are in the graph, one step late (`minidl.passes.boundary`): they are proved and priced, and
their memory is planned, like any others. The runtime decides only whether the head of a step runs again.

The costs are the memory of the copies (parameters and states a second time, and gradients that outlive the step), the
copying, and the head again for each bad verdict. A barrier costs little in schedules whose ranks all end a step
together; in schedules that are parallelograms it costs the whole slope.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.graph import Ints, Launch, Role, StorageSpec, View, moved_views
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import COLLECTIVE, Kind, unpack
from ..pricing.simulation import CHAINED, Clock, Lanes
from .boundary import VERDICT, Mask, outliving
from .draft import Draft
from .rewrite import sums
from .send_receive import crossing

JUDGES = ("any_set", "scale_update", "clip_factor")  #: kernels that need a value from every stage


def post_validation(draft: Draft, barrier: bool | None = None) -> Draft:
    """The body of a loop without a barrier at the optimizer: a step, and in it the late tasks that validate the step
    before.

    `barrier`: True if updates that need values of all stages wait for these values; False if they are validated in the
    next step. By default they wait, unless the policy's source has no barrier and the step is shorter without it. Sums
    over replicas come before the squares of what they sum, so all replicas have the same verdict. Raises Refused
    if a rank updates nothing, and so gets no verdict, and for a choice that has no effect.
    """
    waits = any(launch.kernel in JUDGES for own in draft.graph.launches for launch in own)
    if barrier is not None and not waits:
        raise Refused("barrier has no effect", "the step neither clips nor scales its loss, so no update waits for "
                      "other stages", "leave it out")
    if barrier or not waits or (barrier is None and not draft.validates):
        return draft
    try:
        without = _Rewrite(draft).result()
    except Refused:
        if barrier is False:
            raise
        return draft
    return without if barrier is False or _period(without) < _period(draft) else draft


def _period(draft: Draft) -> float:
    """Time per iteration when iterations follow each other, where messages are edges."""
    lanes = Lanes.of(draft.graph, draft.order)
    return float(np.diff(Clock.of(draft.graph, draft.priced, lanes).ends(lanes, CHAINED))[-1])


_Buffers = dict[int, list[int]]  # storage -> its buffers that a task accesses


@dataclass
class _New:
    """A task under construction: its launches, and the buffers of each storage that they access. A late task is
    the late task number `number` of the stage of task `like`."""

    like: int
    number: int
    launches: list[Launch] = field(default_factory=list)
    buffers: _Buffers = field(default_factory=dict)

    def call(self, kernel: str, reads: Sequence[View], writes: Sequence[View], **constants: object) -> None:
        self.launches.append(Launch(kernel, tuple(reads), tuple(writes), (), tuple(constants.items())))

    def rows(self) -> tuple[set[int], set[int]]:
        """The buffers that it reads and does not make itself, and the buffers that it writes."""
        read: set[int] = set()
        made: set[int] = set()
        for launch in self.launches:
            read.update(b for view in launch.reads for b in self.buffers[view.storage] if b not in made)
            made.update(b for view in (*launch.writes, *launch.work) for b in self.buffers[view.storage])
        return read, made


class _Rewrite:
    def __init__(self, draft: Draft) -> None:
        draft, self.brought = _without_copies(draft)
        self.draft, self.graph, self.schedule, self.rank = draft, draft.graph, draft.order, draft.rank
        self.e = draft.edit()
        self.late = int(self.graph.micro_batch.max(initial=0)) + 1  # "micro-batch" of the first late task of a stage
        self.summing = np.flatnonzero(sums(self.graph)).tolist()
        self.updates = [t for t in np.flatnonzero(self.graph.kind == Kind.U).tolist() if t not in self.summing]
        self.roles = [spec.role for spec in self.graph.storages]
        self.own: dict[int, int] = {}  #: new storage -> its buffer
        self.verdicts = [self.flag(VERDICT, Role.STATE) for _ in range(self.schedule.ranks)]

    # ------------------------------------------------------------------------------------------------------- new places
    def place(self, name: str, view: View, role: Role) -> View:
        """A new storage, as a view of the whole."""
        at, b = self.e.place(StorageSpec(name, view.shape, view.dtype, _bytes(view), role))
        self.own[at] = b
        strides = tuple(int(np.prod(view.shape[i + 1 :])) for i in range(len(view.shape)))
        return View(at, view.shape, strides, 0, view.dtype)

    def flag(self, name: str, role: Role = Role.GRADIENT) -> View:
        return self.place(name, View(-1, (1,), (1,), 0, "int32"), role)

    def task(self, like: int, number: int, accesses: Iterable[int]) -> _New:
        """Late task number `number` of the stage of a task; it may access the storages that the tasks `accesses`
        access."""
        made = _New(like, number)
        for t in accesses:
            for storage, buffers in self.e.buffers_of(t).items():
                known = made.buffers.setdefault(storage, [])
                known += [b for b in buffers if b not in known]
        return made

    def know(self, task: _New, *views: View) -> None:
        """Lets a task access new storages."""
        task.buffers |= {view.storage: [self.own[view.storage]] for view in views}

    # ------------------------------------------------------------------------------------------------------------ tasks
    def result(self) -> Draft:
        judged = {view.storage for t in self.updates for launch in self.graph.launches[t] if launch.kernel in JUDGES
                  for view in launch.reads}
        told: dict[int, View] = {}  # squares and flags -> the views that travel
        tells: dict[int, _New] = {}
        for t in self.summing:
            own = [view for launch in self.graph.launches[t] for view in launch.writes if view.storage in judged]
            if not own:
                continue
            tells[t] = self.task(t, 0, [t])
            for view in {view.storage: view for view in own}.values():
                told[view.storage] = copy = self.place(f"{self.graph.storages[view.storage].name}, told", view,
                                                       Role.GRADIENT)
                self.know(tells[t], copy)
                tells[t].call("copy", [view], [copy])
        verdicts = {r: self.judge(r, told) for r in range(self.schedule.ranks)}
        skips = {r: skip for r, (_, skip) in verdicts.items()}
        made: dict[int, tuple[_New, _New]] = {}
        for t in self.updates:
            if any(self.changes(launch) for launch in self.graph.launches[t]):
                made[t] = self.updated(t, skips[int(self.rank[t])])
            else:
                made[t] = (self.rest(t), self.task(t, 2, []))
        return self.assemble(tells, [task for task, _ in verdicts.values()], made)

    def changes(self, launch: Launch) -> bool:
        """Whether it updates a parameter, or counts updates."""
        return launch.kernel == "adam_tick" or any(self.roles[v.storage] == Role.PARAMETER for v in launch.writes)

    def judge(self, rank: int, told: dict[int, View]) -> tuple[_New, View]:
        """A rank's verdict, and the flag for no second update: the first was good, or gradients are not finite."""
        mine = [t for t in self.updates if self.rank[t] == rank]
        launches = [(t, launch) for t in mine for launch in self.graph.launches[t] if launch.kernel in JUDGES]
        if not launches:
            raise Refused("post-validation", f"rank {rank} updates nothing, so it would not learn whether a step was "
                          f"clipped", "let updates wait (barrier=True)")
        task = self.task(launches[0][0], 1, mine)
        moves = {storage: view.storage for storage, view in told.items()}
        self.know(task, *told.values())
        task.launches = [replace(launch, reads=moved_views(launch.reads, moves)) for _, launch in launches]
        flags = [launch.writes[0] for launch in task.launches if launch.kernel == "any_set"]
        factors = [launch.writes[1] for launch in task.launches if launch.kernel == "clip_factor"]
        passed, skip = self.flag("passed"), self.flag("not to be amended")
        self.know(task, self.verdicts[rank], passed, skip)
        task.call("any_set", [*flags, *factors], [self.verdicts[rank]])
        task.call("any_set", [*flags, *factors], [passed], inverse=True)
        task.call("any_set", [passed, *flags], [skip])
        return task, skip

    def rest(self, t: int) -> _New:
        """The other launches of an update, which run only once."""
        return _New(t, 0, [launch for launch in self.graph.launches[t] if launch.kernel not in JUDGES],
                    self.e.buffers_of(t))

    def updated(self, t: int, skip: View) -> tuple[_New, _New]:
        """An update that copies what it changes and checks only its own stage; and the late task that corrects it."""
        graph, verdict = self.graph, self.verdicts[self.rank[t]]
        now = _New(t, 0, [], self.e.buffers_of(t))
        amend = self.task(t, 2, [t])
        self.know(amend, verdict, skip)
        guard = self.own_guard(t, now)
        factor = next((launch.reads[1] for launch in graph.launches[t] if self.scales(launch)), None)
        written = {v.storage for task in self.updates for launch in graph.launches[task] for v in launch.writes}
        kept: dict[View, View] = {}
        again: list[Launch] = []
        for launch in graph.launches[t]:
            if launch.kernel in JUDGES:
                continue
            if self.scales(launch):
                amend.call("amend", [launch.reads[0], launch.reads[0], verdict, *([factor] if factor else [])],
                           launch.writes)
                continue
            if not self.changes(launch):
                now.launches.append(launch)
                continue
            of_step = [v for v in launch.reads if self.roles[v.storage] == Role.SCALAR and v.storage not in written]
            for view in (*launch.writes, *of_step):
                if view not in kept:
                    kept[view] = self.place(f"{graph.storages[view.storage].name}, kept", view, Role.STATE)
                    self.know(now, kept[view])
                    self.know(amend, kept[view])
                    now.call("copy", [view], [kept[view]])
                    if view in launch.writes:
                        amend.call("amend", [view, kept[view], verdict], [view])
            lasting = {view.storage: kept[view].storage for view in of_step}
            ticks = launch.kernel == "adam_tick"
            reads = launch.reads[:1] if ticks else launch.reads[: -1 if dict(launch.constants).get("guarded") else None]
            constants = dict(launch.constants) | ({} if ticks else {"guarded": True})
            # Adam's steps count even if this stage's own check fails: other stages of the rank read them too
            now.launches.append(replace(launch, reads=reads if ticks else (*reads, guard),
                                        constants=launch.constants if ticks else tuple(constants.items())))
            again.append(replace(launch, reads=(*moved_views(reads, lasting), skip),
                                 constants=tuple(constants.items())))
        amend.launches += again
        return now, amend

    def scales(self, launch: Launch) -> bool:
        """Whether it is the product of a gradient and the clip factor."""
        return (launch.kernel == "mul" and launch.reads[0] == launch.writes[0]
                and self.roles[launch.reads[1].storage] == Role.SCALAR)

    def own_guard(self, t: int, now: _New) -> View:
        """A flag that says that the stage's own gradients exceed the clip or are not finite."""
        graph, stage = self.graph, self.graph.unit[t]
        mine = {b for s in self.summing if graph.unit[s] == stage for b in graph.writes[s].tolist()}
        judges = [launch for r in self.updates if self.rank[r] == self.rank[t] for launch in graph.launches[r]
                  if launch.kernel in JUDGES]
        source = {int(graph.buffer_storage[b]): b for b in mine}
        found: list[View] = []
        for launch in judges:
            own = [view for view in launch.reads if view.storage in source]
            now.buffers |= {view.storage: [source[view.storage]] for view in own}
            if launch.kernel == "any_set":
                found += own
            elif launch.kernel == "clip_factor" and own:
                norm, factor = (self.place(f"{name} of stage {stage}", view, Role.GRADIENT)
                                for name, view in zip(("norm", "clip factor"), launch.writes, strict=True))
                self.know(now, norm, factor)
                now.launches.append(replace(launch, reads=tuple(own), writes=(norm, factor)))
                found.append(factor)
        guard = self.flag(f"stage {stage} waits")
        self.know(now, guard)
        now.call("any_set", found, [guard])
        return guard

    # --------------------------------------------------------------------------------------------------------- assembly
    def assemble(self, tells: dict[int, _New], verdicts: list[_New], made: dict[int, tuple[_New, _New]]) -> Draft:
        graph, e, old = self.graph, self.e, len(self.graph)
        for t, (now, _) in made.items():
            (e.reads[t], e.writes[t]), e.launches[t] = now.rows(), tuple(now.launches)
            copied = 2 * sum(_bytes(launch.writes[0]) for launch in now.launches if launch.kernel == "copy")
            e.time[t] *= 1 + copied / max(int(graph.bytes[t]), 1)  # it also copies, at its own speed
        new = [*tells.values(), *verdicts, *(amend for _, amend in made.values() if amend.launches),
               *(_New(t, 3, launches, buffers) for t, (launches, buffers) in self.brought.items())]
        for task in new:  # after a good verdict they take almost no time
            reads, writes = task.rows()
            own = unpack(int(graph.keys[task.like]))
            e.task(old - 1, own.unit, Kind.U, self.late + task.number, part=own.part, late=1, reads=reads,
                   writes=writes, launches=task.launches, stage=int(self.draft.stage[task.like]))
        whole, head = e.draft, self.head()
        begin, end = np.split(old + np.arange(len(new)), [len(tells)])
        order = np.concatenate([begin, np.flatnonzero(head), end, np.flatnonzero(~head)])
        found = replace(whole, graph=outliving(whole.graph)).take(order)
        return replace(found, schedule=self.ordered(whole, begin, end, head))

    def ordered(self, whole: Draft, begin: Ints, end: Ints, head: Mask) -> Schedule:
        """The order of each lane: the tasks `begin` of its rank, then the head, then the tasks `end`, then the rest."""
        schedule, ids, rank = self.schedule, self.schedule.ids(self.graph), whole.rank
        computes = ~np.isin(self.graph.kind[ids[schedule.ptr[:-1]]], COLLECTIVE)  # other lanes sum over replicas
        lanes, joined = [], []
        for i, lane in enumerate(schedule.lanes):
            own, pairs = (column[schedule.ptr[i] : schedule.ptr[i + 1]] for column in (ids, schedule.second))
            before, after = (tasks[rank[tasks] == lane.rank] if computes[i] else tasks[:0] for tasks in (begin, end))
            lanes.append(np.concatenate([before, own[head[own]], after, own[~head[own]]]))
            joined.append(np.append(np.zeros(len(lanes[-1]) - (~head[own]).sum(), bool), pairs[~head[own]]))
        return Schedule(schedule.lanes, np.cumsum([0, *map(len, lanes)]), whole.graph.keys[np.concatenate(lanes)],
                        None if schedule.joined is None else np.concatenate(joined))

    def head(self) -> Mask:
        """Mask of the tasks that a step may run again: the first forwards of each rank that change nothing that
        outlives the step, use no copy of another rank's weights, and need only such forwards."""
        graph, schedule = self.graph, self.schedule
        free = (graph.kind == Kind.F) & ~graph.changed_by(graph.persistent)
        copies = [b for launches, buffers in self.brought.values() for launch in launches
                  for view in launch.writes for b in buffers[view.storage]]
        free[graph.reads.row_of_each()[np.isin(graph.reads.ids, copies)]] = False  # they come after the verdict
        ids, second = schedule.ids(graph), schedule.second
        free[ids[second | np.append(second[1:], False)]] = False
        lanes = [ids[schedule.ptr[i] : schedule.ptr[i + 1]].tolist() for i in range(len(schedule.lanes))]
        found = np.zeros(len(graph), bool)
        at, moved = [0] * len(lanes), True
        while moved:
            moved = False
            for i, lane in enumerate(lanes):
                while at[i] < len(lane) and free[lane[at[i]]] and found[graph.preds[lane[at[i]]]].all():
                    found[lane[at[i]]] = moved = True
                    at[i] += 1
        return found


def _without_copies(draft: Draft) -> tuple[Draft, dict[int, tuple[list[Launch], _Buffers]]]:
    """The draft whose updates do not bring weights of other ranks to copies (`copies.py`), and these launches of each
    task, with the buffers of each storage that they access. Late tasks launch them, when the weights are valid."""
    graph, e, found = draft.graph, draft.edit(), dict[int, tuple[list[Launch], _Buffers]]()
    reader, buffer, writer = crossing(graph, draft.rank)
    foreign = ((graph.kind == Kind.U) & ~sums(graph))[writer]
    for t in np.unique(reader[foreign]).tolist():
        theirs = {e.storage_of[b] for b in buffer[foreign & (reader == t)].tolist()}
        mine = [launch for launch in e.launches[t] if launch.reads and launch.reads[0].storage in theirs]
        e.launches[t] = tuple(launch for launch in e.launches[t] if launch not in mine)
        buffers = e.buffers_of(t)
        found[t] = mine, {view.storage: buffers[view.storage] for launch in mine for view in launch.views}
        moved = found[t][1].keys() - {view.storage for launch in e.launches[t] for view in launch.views}
        for row in (e.reads, e.writes):
            row[t] = {b for b in row[t] if e.storage_of[b] not in moved}
    return e.draft if found else draft, found


def _bytes(view: View) -> int:
    return int(np.prod(view.shape, dtype=np.int64)) * np.dtype(view.dtype).itemsize
