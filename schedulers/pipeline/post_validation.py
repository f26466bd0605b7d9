"""No barrier at the optimizer: each stage updates at once, and the next step validates the update.

After Qi et al. 2024 (Zero Bubble Pipeline Parallelism, section 4 and appendix C), reconstructed: clipping by the global
norm, and a loss scale, need a value from every stage before any stage may update. Waiting for it is a barrier.

- A stage updates with its gradients as they are, unless its own squares exceed the clip or are not finite: then the
total does too, since it only grows. It keeps its gradients and a copy of everything that it changes. - The next step
begins with its warm-up forwards, with the new weights; meanwhile the squares of all stages travel to all ranks, as with
a barrier. Before its first backward each rank knows the verdict. It is the same on all ranks, since all add the same
numbers in the same order, the order of one process. - If it is good, nothing else happens. Otherwise each rank undoes
its changes, scales and updates as it should have (not at all if a gradient is not finite), and runs its warm-up
forwards again; their first messages are received and ignored.

Copies of weights that another rank updates (`tied.py`) are brought after the verdict, since they are right only then.
So forwards that read them come after it as well: those of the last stages, which begin late anyhow.

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

from ...graph import ROLES, Ints, Launch, Role, Rows, StorageSpec, TaskGraph, View, moved_views
from ...passes.boundary import VERDICT, outliving
from ...passes.rewrite import sums
from ...passes.send_receive import crossing, ranks_of
from ...pricing.cost import CostModel
from ...schedule import Schedule
from ...tasks import COLLECTIVE, Kind, as_recorded, pack, task_name
from .placement import PipelineError

JUDGES = ("any_set", "scale_update", "clip_factor")  #: kernels that need a value from every stage


def waits_for_all(graph: TaskGraph) -> bool:
    """Whether updates need values from all stages."""
    return any(launch.kernel in JUDGES for own in graph.launches for launch in own)


def post_validated(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> tuple[TaskGraph, Schedule, CostModel]:
    """The body of a loop without a barrier at the optimizer: a step, and in it the late tasks that validate the step
    before; also its tasks' costs.

    `graph`: recorded stages. `schedule`: its order, one lane per rank, and one for sums over replicas: these come
    before the squares of what they sum, so all replicas have the same verdict. Raises PipelineError if a rank updates
    nothing, and so gets no verdict.
    """
    return _Rewrite(graph, schedule, cost).result()


_Buffers = dict[int, list[int]]  # storage -> its buffers that a task accesses


@dataclass
class _New:
    """A task under construction: its launches, and the buffers of each storage that they access."""

    key: int
    launches: list[Launch] = field(default_factory=list)
    buffers: _Buffers = field(default_factory=dict)

    def call(self, kernel: str, reads: Sequence[View], writes: Sequence[View], **constants: object) -> None:
        self.launches.append(Launch(kernel, tuple(reads), tuple(writes), (), tuple(constants.items())))

    def rows(self) -> tuple[list[int], list[int]]:
        """The buffers that it reads and does not make itself, and the buffers that it writes."""
        read: set[int] = set()
        made: set[int] = set()
        for launch in self.launches:
            read.update(b for view in launch.reads for b in self.buffers[view.storage] if b not in made)
            made.update(b for view in (*launch.writes, *launch.work) for b in self.buffers[view.storage])
        return sorted(read), sorted(made)


class _Rewrite:
    def __init__(self, graph: TaskGraph, schedule: Schedule, cost: CostModel) -> None:
        self.schedule, self.cost, self.rank = schedule, cost, ranks_of(graph, schedule)
        self.graph, self.brought = _without_copies(graph, self.rank)
        self.late = int(graph.micro_batch.max(initial=0)) + 1  # "micro-batch" of the first late task of a stage
        self.summing = np.flatnonzero(sums(graph)).tolist()
        self.updates = [t for t in np.flatnonzero(graph.kind == Kind.U).tolist() if t not in self.summing]
        self.roles = [spec.role for spec in graph.storages]
        self.specs: list[StorageSpec] = []  #: of new storages, each with one buffer
        self.verdicts = [self.flag(VERDICT, Role.STATE) for _ in range(schedule.ranks)]

    # ------------------------------------------------------------------------------------------------------- new places
    def place(self, name: str, view: View, role: Role) -> View:
        """A new storage, as a view of the whole."""
        self.specs.append(StorageSpec(name, view.shape, view.dtype, _bytes(view), role))
        strides = tuple(int(np.prod(view.shape[i + 1 :])) for i in range(len(view.shape)))
        return View(len(self.roles) + len(self.specs) - 1, view.shape, strides, 0, view.dtype)

    def flag(self, name: str, role: Role = Role.GRADIENT) -> View:
        return self.place(name, View(-1, (1,), (1,), 0, "int32"), role)

    def task(self, stage: int, number: int, like: Iterable[int]) -> _New:
        """Late task number `number` of its stage; it may access the storages that the tasks `like` access."""
        made = _New(int(pack(stage, Kind.U, self.late + number, late=1)))
        for t in like:
            for storage, buffers in self.touched(t).items():
                known = made.buffers.setdefault(storage, [])
                known += [b for b in buffers if b not in known]
        return made

    def touched(self, task: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for b in dict.fromkeys([*self.graph.reads[task].tolist(), *self.graph.writes[task].tolist()]):
            found.setdefault(int(self.graph.buffer_storage[b]), []).append(b)
        return found

    def know(self, task: _New, *views: View) -> None:
        """Lets a task access new storages."""
        for view in views:
            task.buffers[view.storage] = [len(self.graph.buffer_bytes) + view.storage - len(self.roles)]

    # ------------------------------------------------------------------------------------------------------------ tasks
    def result(self) -> tuple[TaskGraph, Schedule, CostModel]:
        judged = {view.storage for t in self.updates for launch in self.graph.launches[t] if launch.kernel in JUDGES
                  for view in launch.reads}
        told: dict[int, View] = {}  # squares and flags -> the views that travel
        tells: dict[int, _New] = {}
        for t in self.summing:
            own = [view for launch in self.graph.launches[t] for view in launch.writes if view.storage in judged]
            if not own:
                continue
            tells[t] = self.task(int(self.graph.unit[t]), 0, [t])
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
                made[t] = (self.rest(t), self.task(int(self.graph.unit[t]), 2, []))
        return self.assemble(tells, {r: task for r, (task, _) in verdicts.items()}, made)

    def changes(self, launch: Launch) -> bool:
        """Whether it updates a parameter, or counts updates."""
        return launch.kernel == "adam_tick" or any(self.roles[v.storage] == Role.PARAMETER for v in launch.writes)

    def judge(self, rank: int, told: dict[int, View]) -> tuple[_New, View]:
        """A rank's verdict, and the flag for no second update: the first was good, or gradients are not finite."""
        mine = [t for t in self.updates if self.rank[t] == rank]
        launches = [(t, launch) for t in mine for launch in self.graph.launches[t] if launch.kernel in JUDGES]
        if not launches:
            raise PipelineError(f"rank {rank} updates nothing, so it would not learn whether a step was clipped")
        first = launches[0][0]
        task = self.task(int(self.graph.unit[first]), 1, mine)
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
        return _New(int(self.graph.keys[t]), [launch for launch in self.graph.launches[t]
                                              if launch.kernel not in JUDGES], self.touched(t))

    def updated(self, t: int, skip: View) -> tuple[_New, _New]:
        """An update that copies what it changes and checks only its own stage; and the late task that corrects it."""
        graph, stage, verdict = self.graph, int(self.graph.unit[t]), self.verdicts[self.rank[t]]
        now = _New(int(graph.keys[t]), [], self.touched(t))
        amend = self.task(stage, 2, [t])
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
    def assemble(self, tells: dict[int, _New], verdicts: dict[int, _New],
                 made: dict[int, tuple[_New, _New]]) -> tuple[TaskGraph, Schedule, CostModel]:
        graph, old = self.graph, len(self.graph)
        amends = {t: amend for t, (_, amend) in made.items() if amend.launches}
        follow = {t: _New(int(pack(graph.unit[t], Kind.U, self.late + 3, late=1)), launches, buffers)
                  for t, (launches, buffers) in self.brought.items()}
        new = [*tells.values(), *verdicts.values(), *amends.values(), *follow.values()]
        rank = np.append(self.rank, [*(self.rank[t] for t in tells), *verdicts,
                                     *(self.rank[t] for t in (*amends, *follow))])
        reads, writes = ([r[t].tolist() for t in range(old)] for r in (graph.reads, graph.writes))
        launches = list(graph.launches)
        for t, (now, _) in made.items():
            (reads[t], writes[t]), launches[t] = now.rows(), tuple(now.launches)
        for task in new:
            for column, row in zip((reads, writes), task.rows(), strict=True):
                column.append(row)
            launches.append(tuple(task.launches))
        whole = replace(
            graph.with_storages(self.specs), keys=np.append(graph.keys, [task.key for task in new]),
            flops=np.append(graph.flops, np.zeros(len(new))),
            bytes=np.append(graph.bytes, np.zeros(len(new), graph.bytes.dtype)),
            reads=Rows.of(reads), writes=Rows.of(writes), launches=tuple(launches))
        head, begin = self.head(), old + np.arange(len(tells))
        end = old + np.arange(len(tells), len(new))
        order = np.concatenate([begin, np.flatnonzero(head), end, np.flatnonzero(~head)])
        return outliving(whole).take(order), self.ordered(whole, rank, begin, end, head), self.priced(made, new)

    def ordered(self, whole: TaskGraph, rank: Ints, begin: Ints, end: Ints, head: Ints) -> Schedule:
        """The order of each lane: the tasks `begin` of its rank, then the head, then the tasks `end`, then the rest."""
        schedule, ids = self.schedule, self.schedule.ids(self.graph)
        second = self.second()
        computes = ~np.isin(self.graph.kind[ids[schedule.ptr[:-1]]], COLLECTIVE)  # other lanes sum over replicas
        lanes, joined = [], []
        for i, lane in enumerate(schedule.lanes):
            own, pairs = (column[schedule.ptr[i] : schedule.ptr[i + 1]] for column in (ids, second))
            before, after = (tasks[rank[tasks] == lane.rank] if computes[i] else tasks[:0] for tasks in (begin, end))
            lanes.append(np.concatenate([before, own[head[own]], after, own[~head[own]]]))
            joined.append(np.append(np.zeros(len(lanes[-1]) - (~head[own]).sum(), bool), pairs[~head[own]]))
        return Schedule(schedule.lanes, np.cumsum([0, *map(len, lanes)]), whole.keys[np.concatenate(lanes)],
                        None if schedule.joined is None else np.concatenate(joined))

    def second(self) -> Ints:
        """Mask of the entries that run as one action with the entry before them."""
        joined = self.schedule.joined
        return np.zeros(len(self.schedule), bool) if joined is None else np.asarray(joined, bool)

    def head(self) -> Ints:
        """Mask of the tasks that a step may run again: the first forwards of each rank that change nothing that
        outlives the step, use no copy of another rank's weights, and need only such forwards."""
        graph, schedule = self.graph, self.schedule
        lasting = np.array([ROLES[r].persistent for r in graph.buffer_role], bool)
        free = graph.kind == Kind.F
        free[graph.writes.row_of_each()[lasting[graph.writes.ids]]] = False
        copies = [b for launches, buffers in self.brought.values() for launch in launches
                  for view in launch.writes for b in buffers[view.storage]]
        free[graph.reads.row_of_each()[np.isin(graph.reads.ids, copies)]] = False  # they come after the verdict
        ids, second = schedule.ids(graph), self.second()
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

    def priced(self, made: dict[int, tuple[_New, _New]], new: Sequence[_New]) -> CostModel:
        """The costs: a late task takes almost no time after a good verdict; an update also copies, at its own speed."""
        tasks = dict(self.cost.tasks) | {task_name(int(as_recorded(np.array([task.key]))[0])): 0.0 for task in new}
        for t, (now, _) in made.items():
            copied = 2 * sum(_bytes(launch.writes[0]) for launch in now.launches if launch.kernel == "copy")
            name = self.graph.name(t)
            tasks[name] = tasks.get(name, 0.0) * (1 + copied / max(int(self.graph.bytes[t]), 1))
        return replace(self.cost, tasks=tasks)


def _without_copies(graph: TaskGraph, rank: Ints) -> tuple[TaskGraph, dict[int, tuple[list[Launch], _Buffers]]]:
    """The graph whose updates do not bring weights of other ranks to copies (`tied.py`), and these launches of each
    task, with the buffers of each storage that they access. Late tasks launch them, when the weights are valid."""
    reader, buffer, writer = crossing(graph, rank)
    foreign = ((graph.kind == Kind.U) & ~sums(graph))[writer]
    reads, writes = ([row.tolist() for row in map(rows.__getitem__, range(len(graph)))]
                     for rows in (graph.reads, graph.writes))
    launches, found = list(graph.launches), dict[int, tuple[list[Launch], _Buffers]]()
    for t in np.unique(reader[foreign]).tolist():
        theirs = set(graph.buffer_storage[buffer[foreign & (reader == t)]].tolist())
        mine = [launch for launch in launches[t] if launch.reads and launch.reads[0].storage in theirs]
        launches[t] = tuple(launch for launch in launches[t] if launch not in mine)
        moved = {view.storage for launch in mine for view in launch.views} - {
            view.storage for launch in launches[t] for view in launch.views}
        buffers: _Buffers = {}
        for b in dict.fromkeys([*reads[t], *writes[t]]):
            buffers.setdefault(int(graph.buffer_storage[b]), []).append(b)
        found[t] = mine, {storage: buffers[storage] for launch in mine for storage in
                          (view.storage for view in launch.views)}
        reads[t], writes[t] = ([b for b in row[t] if graph.buffer_storage[b] not in moved] for row in (reads, writes))
    return replace(graph, reads=Rows.of(reads), writes=Rows.of(writes), launches=tuple(launches)), found


def _bytes(view: View) -> int:
    return int(np.prod(view.shape, dtype=np.int64)) * np.dtype(view.dtype).itemsize
