"""Judges of plans, written from first principles and for small ones only: each returns what is wrong, or an empty text.

They share nothing with what they are held against: they read a plan's rows themselves, take no edge from a graph but
derive what must wait for what from who reads and writes what, and find deadlocks, races and peaks by running lanes step
by step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

COMPUTE, TALK = "FOWB", ("SF", "RF", "SO", "RO")
_TASK = re.compile(r"(\d+)(AS|AG|SF|RF|SO|RO|[FOWBURA])(\d+)([/>]\d+)?(?:@(1))?")

Name = tuple[int, str, int, int]  # unit, kind with part or destination ("O/1", "SF>2"), micro-batch, whether late
Lane = tuple[int, str]
Lanes = dict[Lane, list[list[Name]]]  # actions in order; an action is one task, or several at once


def name_of(text: str) -> Name:
    unit, kind, micro_batch, index, late = _TASK.fullmatch(text).groups(default="")  # type: ignore[union-attr]
    return int(unit), kind + index, int(micro_batch), int(late or 0)


def text_of(name: Name) -> str:
    unit, kind, micro_batch, late = name
    own = kind.rstrip("0123456789/>")
    return f"{unit}{own}{micro_batch}{kind.removeprefix(own)}" + "@1" * late


def lanes_of(text: str) -> Lanes:
    """A plan's CSV as lanes. It must be one."""
    lanes: Lanes = {}
    for row in text.partition("rank,lane,task\n")[2].splitlines():  # notes may stand above
        rank, lane, action = (cell.strip() for cell in row.split(",", 2))
        lanes.setdefault((int(rank), lane), []).append([name_of(task) for task in action.strip("()").split(";")])
    return lanes


# -------------------------------------------------------------------------------------------------------------- running
@dataclass
class Run:
    """Lanes that run their actions in order, one step at a time. An action starts when all that its
    tasks need has ended.

    `needs(task)`: the tasks that must have ended before. `meets`: pairs that can only run at once, on two lanes.
    """

    lanes: Lanes
    needs: Callable[[Name], Iterable[Name]]
    meets: dict[Name, Name] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = dict.fromkeys(self.lanes, 0)
        self.ended: set[Name] = set()
        self.order: list[Name] = []

    def head(self, lane: Lane) -> list[Name]:
        rest = self.lanes[lane]
        return rest[self.at[lane]] if self.at[lane] < len(rest) else []

    def ready(self, lane: Lane) -> bool:
        action = self.head(lane)
        return bool(action) and all(need in self.ended for task in action for need in self.needs(task))

    def step(self, held: Iterable[Lane] = ()) -> bool:
        """Runs one action, of the first lane that can; False where none can."""
        heads = {task: lane for lane in self.lanes for task in self.head(lane)}
        for lane in self.lanes:
            if lane in held or not self.ready(lane):
                continue
            other = self.meets.get(self.head(lane)[0])
            if other is not None:
                if other not in heads or not self.ready(heads[other]) or heads[other] in held:
                    continue
                self._end(heads[other])
            self._end(lane)
            return True
        return False

    def _end(self, lane: Lane) -> None:
        self.ended.update(self.head(lane))
        self.order += self.head(lane)
        self.at[lane] += 1

    def all(self, held: Iterable[Lane] = ()) -> bool:
        """Runs on until nothing can; whether all has run."""
        while self.step(held):
            pass
        return all(self.at[lane] == len(self.lanes[lane]) for lane in self.lanes)


def conflicts(tasks: Sequence[tuple[Name, set[int], set[int]]]) -> dict[Name, set[Name]]:
    """For tasks (name, what it reads, what it writes) in sequential order: those before it with which each
    must keep order."""
    needs: dict[Name, set[Name]] = {}
    for i, (name, reads, writes) in enumerate(tasks):
        needs[name] = {other for other, r, w in tasks[:i] if w & (reads | writes) or r & writes}
    return needs


def multiset(lanes: Lanes, wanted: Iterable[Name]) -> str:
    have, want = Counter(t for lane in lanes.values() for action in lane for t in action), Counter(wanted)
    return f"too many or few: {have - want} {want - have}" if have != want else ""


# ------------------------------------------------------------------------------------------------------------ pipelines
@dataclass
class Pipeline:
    """A plan of stages: what is asked of it."""

    ranks: int
    micro_batches: int
    chunks: int | None = None
    cap: float | None = None
    kept: float = 1.0

    def judge(self, text: str) -> str:
        lanes = lanes_of(text)
        compute = {lane: [a for action in actions if (a := [t for t in action if t[1][:2] not in TALK])]
                   for lane, actions in lanes.items()}
        compute = {lane: actions for lane, actions in compute.items() if actions}
        tasks = [t for actions in compute.values() for action in actions for t in action]
        talk = [(t, lane) for lane, actions in lanes.items() for action in actions for t in action if t[1][:2] in TALK]
        rank = {t: lane[0] for lane, actions in compute.items() for action in actions for t in action}
        if any(len(action) > 1 and any(t[1][:2] in TALK for t in action) for actions in lanes.values()
               for action in actions):
            return "a message in a pair"
        top = max((t[0] for t in tasks if t[1] == "F"), default=0)
        stages = self.ranks * self.chunks if self.chunks else max(self.ranks, top + 1)
        if stages % self.ranks:
            return "some ranks have more stages than others"
        if any(t[1] not in COMPUTE or t[3] for t in tasks) or len(tasks) != len(set(tasks)):
            return "kinds, or twice"
        found = set(tasks)
        both = self._bidirectional(rank)
        if both:
            stages = self.ranks
        if any(t[0] >= stages or t[2] >= self.micro_batches for t in tasks):
            return "out of range"
        for s in range(stages):
            for i in range(self.micro_batches):
                if (s, "F", i, 0) not in found or ((s, "B", i, 0) in found) == ((s, "O", i, 0) in found) \
                        or ((s, "O", i, 0) in found) != ((s, "W", i, 0) in found):
                    return f"stage {s}, micro-batch {i} is not computed once"
        if any(lane[0] >= self.ranks for lane in lanes):
            return "no such rank"
        home = {s: {rank[t] for t in tasks if t[0] == s} for s in range(stages)}
        if not both and any(len(ranks) > 1 for ranks in home.values()):
            return "a stage on two ranks"
        if len({lane[0] for lane in compute}) < len(compute):
            return "two lanes compute"
        half = -(-self.micro_batches // 2) if both else self.micro_batches

        def back(s: int, i: int) -> Name:
            return (s, "B", i, 0) if (s, "B", i, 0) in found else (s, "O", i, 0)

        def ends(s: int, i: int) -> Name:
            return (s, "B", i, 0) if (s, "B", i, 0) in found else (s, "W", i, 0)

        def needs(task: Name) -> list[Name]:
            s, kind, i, _ = task
            if kind == "F":
                return [(s - 1, "F", i, 0)] if s else []
            before: list[Name] = [(s, "F", i, 0)]
            if kind in "OB" and s + 1 < stages:
                before.append(back(s + 1, i))
            if kind == "W":
                before.append((s, "O", i, 0))
            if kind in "WB" and i not in (0, half):
                before.append(ends(s, i - 1))
            return before

        crossing = {}  # (who makes it, who reads it) -> its send and receive
        for t in tasks:
            for n in needs(t):
                if rank[n] != rank[t]:
                    kind = "F" if n[1] == "F" else "O"
                    crossing[n, t] = tuple((n[0], f"{end}{kind}>{rank[t]}", n[2], 0) for end in "SR")
        if not Run(compute, needs).all():
            return "deadlock"
        if not talk:
            lanes = self._with_messages(compute, crossing, rank)
        else:
            wanted = Counter((task, place) for (n, t), pair in crossing.items()
                             for task, place in zip(pair, (rank[n], rank[t]), strict=True))
            if Counter((t, lane[0]) for t, lane in talk) != wanted:
                return "other messages than the plan needs"
        received = {(n, t): pair[1] for (n, t), pair in crossing.items()}
        made = {pair[0]: n for (n, _), pair in crossing.items()}

        def waits(task: Name) -> list[Name]:
            if task in made:
                return [made[task]]
            return [received.get((n, task), n) for n in needs(task)] if task[1][:2] not in TALK else []

        if not Run(lanes, waits, dict(crossing.values()) | {r: s for s, r in crossing.values()}).all():
            return "deadlock under rendezvous"
        self.waits = _events(lanes, waits)
        self.peaks = [0.0] * self.ranks
        for lane, actions in compute.items():
            self.peaks[lane[0]] = _peak(actions, self.kept) * self.ranks / stages
        return "over the cap" if self.cap is not None and max(self.peaks) > self.cap + 1e-9 else ""

    def _bidirectional(self, rank: dict[Name, int]) -> bool:
        p, m = self.ranks, self.micro_batches
        if p < 2 or self.chunks not in (None, 2) or any(t[0] >= p for t in rank):
            return False
        one_way = all(len({r for t, r in rank.items() if t[0] == s}) == 1 for s in range(p))
        if self.chunks is None and one_way:
            return False
        return all(r == (p - 1 - t[0] if 2 * t[2] >= m else t[0]) for t, r in rank.items())

    def _with_messages(self, compute: Lanes, crossing: dict[tuple[Name, Name], tuple[Name, Name]],
                       rank: dict[Name, int]) -> Lanes:
        """A lane for each peer and direction, each in the order in which the messages are made."""
        lanes = dict(compute)
        for actions in compute.values():
            for task in (t for action in actions for t in action):
                for (n, t), (send, receive) in crossing.items():
                    if n == task:
                        lanes.setdefault((rank[n], f"send {rank[t]}"), []).append([send])
                        lanes.setdefault((rank[t], f"receive {rank[n]}"), []).append([receive])
        return lanes


def _peak(actions: list[list[Name]], kept: float) -> float:
    """Live stages on a lane, from the start of F to the end of the last O, W or B; `kept` of each after O."""
    last = {t[:3:2]: i for i, action in enumerate(actions) for t in action}
    live: dict[tuple[int, ...], float] = {}
    peak = 0.0
    for i, action in enumerate(actions):
        live.update({t[:3:2]: 1.0 for t in action if t[1] == "F"})
        peak = max(peak, sum(live.values()))
        for t in action:
            if t[1] == "O":
                live[t[:3:2]] = kept
            if last[t[:3:2]] == i:
                live.pop(t[:3:2], None)
    return peak


def _events(lanes: Lanes, waits: Callable[[Name], Iterable[Name]]) -> int:
    """How many waits for tasks of other lanes of the same rank stay when each that the others imply is left
    out, one by one."""
    place = {t: (lane, i) for lane, actions in lanes.items()
             for i, t in enumerate(t for action in actions for t in action)}
    pairs = {(t, n) for t in place for n in waits(t) if n in place and place[n][0] != place[t][0]
             and place[n][0][0] == place[t][0][0]}
    count = 0
    for t, n in sorted(pairs):
        (lane, i), (other, j) = place[t], place[n]
        count += not any((a, b) != (t, n) and place[a][0] == lane and place[b][0] == other and place[a][1] <= i
                         and place[b][1] >= j for a, b in pairs)
    return count


@dataclass
class Stale(Pipeline):
    """Stages on the ranks of their number, and weights that change after every `every` micro-batches: `version(stage,
    micro-batch)` is what F and the backward of a micro-batch read. With `backward` it is what F reads, and the backward
    what `backward` says; each must be the newest then."""

    every: int = 1
    version: Callable[[int, int], int] = lambda stage, micro_batch: 0
    of_stage: Callable[[int], int] = lambda stage: stage
    backward: Callable[[int, int], int] | None = None

    def judge(self, text: str) -> str:
        wrong = super().judge(text)
        if wrong:
            return wrong
        for lane, actions in lanes_of(text).items():
            done: Counter[int] = Counter()
            for action in actions:
                for s, kind, i, _ in action:
                    if kind[:2] in TALK:
                        continue
                    if lane[0] != self.of_stage(s):
                        return "not in its place"
                    if self.version(s, i) * self.every > done[s]:
                        return f"version {self.version(s, i)} is not there yet"
                    reads = self.version if kind == "F" or self.backward is None else self.backward
                    if self.backward is not None and reads(s, i) != done[s] // self.every:
                        return f"version {reads(s, i)} is not the newest"
                done.update(s for s, kind, _, _ in action if kind in "WB")
        return ""


@dataclass
class Parts:
    """LayerPipe: which rank runs each part of a layer, how old the weights are that F and O read, how many
    versions there are."""

    ranks: int
    batches: int
    layers: int
    rank: dict[tuple[int, str], int]  # (layer, kind); kind "O/1" is the second part of an O
    delay: Sequence[int]
    ring: Sequence[int]
    cap: float | None = None

    def judge(self, text: str) -> str:
        lanes, size = lanes_of(text), self.layers
        tasks = [(unit, kind, i, 0) for unit, kind in self.rank for i in range(self.batches)]
        wrong = multiset(lanes, tasks)
        if wrong:
            return wrong
        if any(self.rank[t[:2]] != lane[0] for lane, actions in lanes.items() for action in actions for t in action):
            return "not in its place"
        if len({lane[0] for lane in lanes}) < len(lanes):
            return "two lanes compute"

        def parts(layer: int, kind: str, i: int) -> list[Name]:
            return [(layer, k, i, 0) for k in (kind, f"{kind}/1") if (layer, k) in self.rank]

        def reads(layer: int, i: int) -> int:
            return max(0, i - self.delay[layer])

        def needs(task: Name) -> list[Name]:
            layer, kind, i, _ = task
            below = parts(layer - 1, "F", i) if layer else []
            if kind == "F":
                before = below
            else:
                above = parts(layer + 1, "O", i) if layer + 1 < size else parts(layer, "F", i)
                before = above + (below if kind == "W" else parts(layer, "F", i))
            if kind == "W":
                before += parts(layer, "W", i - 1) if i else []
                gone = i + 1 - self.ring[layer]  # the version whose place it takes
                if gone >= 0:
                    before += [t for j in range(self.batches) if reads(layer, j) == gone for k in "FO"
                               for t in parts(layer, k, j)]
            elif reads(layer, i):
                before += parts(layer, "W", reads(layer, i) - 1)
            return before

        if not Run(lanes, needs).all():
            return "deadlock"
        self.peaks = [0.0] * self.ranks
        for lane, actions in lanes.items():
            last = {(t[0], t[2]): at for at, action in enumerate(actions) for t in action}
            for at in range(len(actions)):  # the lane stands in this action while all others go on as far as they can
                run = Run(lanes, needs)
                while run.at[lane] < at:
                    run.step()
                run.all(held={lane})
                live = [(u, i) for (u, i), end in last.items() if end >= at
                        and ((u, "F", i, 0) in run.ended or any(t[:2] == (u, "F") and t[2] == i for t in actions[at]))]
                self.peaks[lane[0]] = max(self.peaks[lane[0]], len(live) * self.ranks / size)
        return "over the cap" if self.cap is not None and max(self.peaks) > self.cap + 1e-9 else ""


@dataclass
class Network:
    """A recorded network's stages. `tasks`: (name, reads, writes) in sequential order, O and W apart."""

    ranks: int
    stages: int
    tasks: Sequence[tuple[Name, set[int], set[int]]]
    cap: float | None = None

    def judge(self, text: str) -> str:
        lanes = lanes_of(text)
        rows = [(t, lane[0]) for lane, actions in lanes.items() for action in actions for t in action]
        joint = {(t[0], t[2]) for t, _ in rows if t[1] == "B"}
        group = {name: (name[0], "B", name[2], 0) if name[1] in "OW" and (name[0], name[2]) in joint else name
                 for name, _, _ in self.tasks}
        wrong = multiset(lanes, set(group.values()))
        if wrong:
            return wrong
        rank = dict(rows)
        if any(not 0 <= r < self.ranks for r in rank.values()):
            return "no such rank"
        if set(rank.values()) != set(range(self.ranks)):
            return "a rank without a task"
        home: dict[int, set[int]] = {}
        for t, r in rank.items():
            home.setdefault(t[0], set()).add(r)
        if any(len(where) > 1 for where in home.values()):
            return "a stage on two ranks"
        if len({lane[0] for lane in lanes}) < len(lanes):
            return "two lanes compute"
        before: dict[Name, set[Name]] = {t: set() for t in group.values()}
        for t, others in conflicts(self.tasks).items():
            before[group[t]] |= {group[o] for o in others} - {group[t]}
        if not Run(lanes, before.__getitem__).all():
            return "deadlock"
        owner: dict[int, Name] = {}
        first: dict[int, set[int]] = {}  # ranks that read a buffer before anybody wrote it
        for name, reads, writes in self.tasks:
            task = group[name]
            for b in reads:
                if b not in owner:
                    first.setdefault(b, set()).add(rank[task])
                elif rank[owner[b]] != rank[task] and owner[b][1] not in "FOBU":
                    return f"no message carries buffer {b}"
            for b in writes:
                if rank[owner.get(b, task)] != rank[task] or (b not in owner and first.get(b, set()) - {rank[task]}):
                    return f"two ranks hold buffer {b}"
                owner[b] = task
        self.peaks = [0.0] * self.ranks
        for lane, actions in lanes.items():
            own = [[t for t in action if t[1] in COMPUTE] for action in actions]
            self.peaks[lane[0]] = _peak(own, 1.0) * self.ranks / self.stages
        return "over the cap" if self.cap is not None and max(self.peaks) > self.cap + 1e-9 else ""


# ----------------------------------------------------------------------------------------------------------- one device
@dataclass
class Device:
    """A step on one device, or of one rank of several that run the same. `tasks`: (name, reads, writes) in sequential
    order; `kept`: buffers that outlive a step;
    `given`: those that the caller loads; `outputs`: those that the caller reads."""

    tasks: Sequence[tuple[Name, set[int], set[int]]]
    kept: set[int]
    given: set[int]
    outputs: set[int]

    def judge(self, text: str) -> str:
        """Three steps in a row, task by task: a late one runs beside the next step. What late tasks touch and their own
        step makes or is given has two places, used in turn; all else has one."""
        lanes = lanes_of(text)
        late = {t[:3] for actions in lanes.values() for action in actions for t in action if t[3]}
        names = [name for name, _, _ in self.tasks]
        wrong = multiset(lanes, [(*n[:3], int(n[:3] in late)) for n in names])
        if wrong:
            return wrong
        if any(lane[0] for lane in lanes):
            return "no such rank"
        if len({lane for lane, actions in lanes.items() for action in actions
                for t in action if t[1].partition("/")[0] in ("A", "AS", "AG")}) > 1:
            return "ranks could communicate in different orders"
        on_time = [t for t in self.tasks if t[0][:3] not in late]
        touched = set[int]().union(*(r | w for n, r, w in self.tasks if n[:3] in late))
        made = set[int]().union(self.given, *(w for _, _, w in on_time))
        twice = (touched & made) - self.kept
        steps = 3
        trace = [((*n[:3], t),
                  {(b, t % 2 if b in twice else 0, t if b in self.given and b not in twice else 0) for b in r},
                  {(b, t % 2 if b in twice else 0, 0) for b in w}) for t in range(steps) for n, r, w in self.tasks]
        if any(n[1] not in "WU" for n in names if n[:3] in late):
            return "only W and U can be late"
        if any(w & self.outputs for n, _, w in self.tasks if n[:3] in late):
            return "an output comes too late"
        call = {n: n[3] + (n[:3] in late) for n, _, _ in trace}
        needs = conflicts(trace)  # type: ignore[arg-type]
        for t, others in needs.items():
            if any(call[o] > call[t] for o in others):
                return "a task runs after one that needs it"

        def before(task: Name) -> list[Name]:
            """Within the second step, in which tasks of two steps run."""
            mine = (*task[:3], 1 - task[3])
            return [(*o[:3], 1 - o[3]) for o in needs[mine] if call[o] == 1]

        return "" if Run(lanes, before).all() else "deadlock"


# --------------------------------------------------------------------------------------------------------------- memory
def overlap(lanes: Lanes, tasks: Sequence[tuple[Name, set[int], set[int]]], launches: dict[Name, list[set[int]]],
            place: dict[int, tuple[int, int]], given: set[int], kept: set[int]) -> str:
    """Whether two storages that can be alive at once share bytes. `launches`: of each task, one after the other, the
    storages that each launch touches. `place`: begin and end of each storage; `given` are there from the start, `kept`
    to the end."""
    needs = conflicts(tasks)
    users: dict[int, set[Name]] = {s: {t for t, own in launches.items() if s in set().union(*own)} for s in place}
    early = {}  # what can start while a task has not ended
    for task, _, _ in tasks:
        run = Run(lanes, lambda t, task=task: needs[t] | ({("never", "", 0, 0)} if t == task else set()))  # type: ignore[misc]
        run.all()
        early[task] = run.ended | {t for lane in lanes if run.ready(lane) or task in run.head(lane)
                                   for t in run.head(lane)}

    def within(task: Name, s: int, t: int) -> bool:
        after = launches[task][1 + max(i for i, own in enumerate(launches[task]) if s in own):]
        return sum(t in own for own in after) == sum(t in own for own in launches[task])

    def before(s: int, t: int) -> bool:
        return s not in kept and t not in given and not any(
            b in early[a] and not (a == b and within(a, s, t)) for a in users[s] for b in users[t])

    for s, (begin, end) in place.items():
        for t, (other, last) in place.items():
            if s < t and begin < last and other < end and not before(s, t) and not before(t, s):
                return f"storages {s} and {t} share bytes while both are alive"
    return ""


# ---------------------------------------------------------------------------------------------------------------- races
def race(lanes: Lanes, tasks: Sequence[tuple[Name, set[int], set[int]]], waits: Iterable[tuple[Name, Name]]) -> str:
    """Whether lanes and waits alone keep every order within a rank, whatever messages between ranks do; and whether all
    can run, where these are awaited. Of two that write a buffer the readers between them keep the order.

    For each pair that must keep its order the first task is held up for ever: if the second can start, it is a race.
    """
    rank = {t: lane[0] for lane, actions in lanes.items() for action in actions for t in action}
    order, direct = conflicts(tasks), set[tuple[Name, Name]]()
    for i, (t, reads, writes) in enumerate(tasks):
        for b in reads | writes:
            writer = max((j for j in range(i) if b in tasks[j][2]), default=-1)
            readers = [tasks[j][0] for j in range(writer + 1, i) if b in tasks[j][1]]
            if b in writes:
                direct |= {(o, t) for o in readers}
            if writer >= 0 and (b in reads or not readers):
                direct.add((tasks[writer][0], t))
    after: dict[Name, set[Name]] = {t: set() for t in rank}
    for waiter, awaited in waits:
        after[waiter].add(awaited)
    if not Run(lanes, lambda t: after[t] | {o for o in order[t] if rank[o] != rank[t]}).all():
        return "deadlock"
    for t, others in order.items():
        for o in others:
            if rank[o] == rank[t] and (o, t) in direct:
                run = Run(lanes, lambda task, o=o: after[task] | ({("never", "", 0, 0)} if task == o else set()))  # type: ignore[misc]
                run.all()
                if (t in run.ended
                    or any(t in run.head(lane) and all(n in run.ended for n in after[t]) for lane in lanes)):
                    return f"{t} can run before {o}"
    return ""
