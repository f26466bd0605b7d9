"""A run that stands still: the file in which each rank says what it does and waits for, and who waits for whom, read
from the files of all ranks.

`minidl.runtime.standstill` writes the files. If a rank makes no progress, or somebody asks, a new call begins, which
all ranks answer. A rank that does not has died, was stopped, or is held by code that lets no other thread run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..system.files import FileError, read_text

FILES = "standstill-*.json"  #: one a rank
MOST = 1 << 20  #: ranks
LAST = 10  #: tasks
SEND = re.compile(r"\dS[FO]\d")  #: in the name of a send
WORDS = {"sent": "to", "received": "from"}


@dataclass(frozen=True)
class LaneState:
    """A lane (of a race, a thread). It `runs` `task`, `waits` before it for the tasks `awaits`, has `ended` its step,
    or is `between` two tasks; for `seconds` if that is known. It has ended `done` of its `tasks`."""

    name: str
    state: str
    task: str
    label: str
    seconds: float | None
    awaits: tuple[str, ...]
    done: int
    tasks: int


@dataclass(frozen=True)
class TransferState:
    """A transfer that is under way or, if not, the next one of its lane. `message`: its number, MPI's tag."""

    task: str
    label: str
    peers: tuple[int, ...]
    message: int | None
    bytes: int
    under_way: bool


@dataclass(frozen=True)
class Traffic:
    """All that was `sent` to these ranks, `received` from them, `exchanged` or `summed` with them since the run began;
    `last`: the last tasks of it in this step."""

    peers: tuple[int, ...]
    kind: str
    count: int
    bytes: int
    last: tuple[str, ...]


@dataclass(frozen=True)
class Ran:
    """A task that has begun: `begin` and `end` in seconds before the file was written; None: unknown, or not yet."""

    task: str
    lane: str
    begin: float | None
    end: float | None


@dataclass(frozen=True)
class Doing:
    """The state of a step. `order`: the tasks that each lane has begun in it."""

    step: int = 0
    lanes: tuple[LaneState, ...] = ()
    transfers: tuple[TransferState, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    last: tuple[Ran, ...] = ()
    order: dict[str, tuple[str, ...]] | None = None

    @property
    def running(self) -> list[LaneState]:
        return [lane for lane in self.lanes if lane.state == "runs"]

    def ended(self, task: str) -> bool:
        """Whether a transfer of this step has ended."""
        return (any(task in names for names in (self.order or {}).values())
                and not any(t.task == task for t in self.transfers))


@dataclass(frozen=True)
class Waiting:
    """A rank waits for `what` from or to `peers` (none: all others)."""

    peers: tuple[int, ...]
    what: str
    seconds: float


@dataclass(frozen=True)
class RankState:
    """The file of a rank. `call`: the number of the request that it answers, for the reason `why`. `still`: seconds
    without progress. `stack`: where Python is, innermost first. `error`: what ended the rank, by itself if `own`."""

    run: str
    command: str
    begun: float
    time: float
    call: int
    why: str
    rank: int
    ranks: int
    host: str
    process: int
    patience: float
    still: float
    wait: Waiting | None
    doing: Doing
    stack: tuple[str, ...]
    error: str
    own: bool

    @property
    def waits(self) -> bool:
        """Whether it does nothing else than to wait for other ranks."""
        return self.wait is not None and not self.doing.running


# ---------------------------------------------------------------------------------------------------------------- files
def path_of(folder: str | Path, rank: int) -> Path:
    return Path(folder) / FILES.replace("*", str(rank))


def parsed(path: Path) -> RankState:
    """The content of a file. Raises ValueError in one line for any other content, and FileError."""
    try:
        state = _made(RankState, json.loads(read_text(path, "standstill")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged, or no file of a standstill ({str(error)[:100]})") from None
    if not 0 <= state.rank < state.ranks <= MOST:
        raise ValueError(f"{path.name} is damaged: it is of rank {state.rank} of {state.ranks}")
    return state


_hints = cache(get_type_hints)


def _made(kind: Any, value: Any) -> Any:
    """A value of this type, from JSON. Raises ValueError if it is none."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        if missing := hints.keys() - value.keys():
            raise ValueError(f"{min(missing)} is missing")
        return kind(**{name: _made(hint, value[name]) for name, hint in hints.items()})
    if origin is tuple and isinstance(value, list):
        return tuple(_made(inner[0], v) for v in value)
    if origin is dict and isinstance(value, dict):
        return {k: _made(inner[1], v) for k, v in value.items()}
    if origin is UnionType:
        return None if value is None else _made(inner[0], value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    return value


@dataclass(frozen=True)
class Found:
    """The files of the newest run in a folder. `states`: by rank; `notes`: what was left out, a line each; `damaged`:
    ranks whose file cannot be read."""

    states: dict[int, RankState]
    notes: tuple[str, ...]
    damaged: frozenset[int]

    @property
    def first(self) -> RankState:
        return self.states[min(self.states)]

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered the last call."""
        call = max(state.call for state in self.states.values())
        return [r for r in range(self.first.ranks) if r not in self.damaged
                and (r not in self.states or (self.states[r].call < call and not self.states[r].error))]


def read(folder: str | Path) -> Found:
    """Reads the files of a folder. Raises FileError if there are none, and ValueError if all are damaged."""
    files = sorted(Path(folder).glob(FILES))
    if not files:
        raise FileError(2, f"no file of a standstill ({FILES}) is here; a run writes them with --patience SECONDS,DIR",
                        str(folder))
    states, notes, damaged = list[RankState](), list[str](), set[int]()
    for path in files:
        try:
            states.append(parsed(path))
        except (ValueError, FileError) as error:
            notes.append(f"{error}; left out")
            damaged |= {int(n) for n in re.findall(r"-(\d{1,7})\.json$", path.name)}
    if not states:
        raise ValueError(f"{folder}: {notes[0].removesuffix('; left out')}"
                         + (f", and so are {len(notes) - 1} more" if len(notes) > 1 else ""))
    newest = max(states, key=lambda s: (s.begun, s.run)).run
    for run in sorted({s.run for s in states} - {newest}):
        old = [s.rank for s in states if s.run == run]
        notes.append(f"{numbered(old)} of another run ({run}) left out; {newest} is the newest")
    mine = sorted((s for s in states if s.run == newest), key=lambda s: s.time)
    return Found({s.rank: s for s in mine}, tuple(notes), frozenset(damaged - {s.rank for s in mine}))


# --------------------------------------------------------------------------------------------------- who waits for whom
@dataclass(frozen=True)
class Verdict:
    """Why a run stands still. `kind`: `failed` (a rank has an error), `silent` (a rank does not answer), `slow` (a
    rank computes while others wait), `cycle` (ranks, or lanes of one rank, wait for each other), `lost` (a message or a
    sum does not come although nobody holds it up) or `none`. `ranks`: to look at."""

    kind: str
    ranks: tuple[int, ...]
    text: str


def verdict(found: Found) -> Verdict:
    """Follows the waits from the rank that has waited longest to the one for which nobody else is the reason."""
    states, silent = found.states, set(found.silent)
    if failed := sorted((s.time, r) for r, s in states.items() if s.error and s.own):
        rank = failed[0][1]
        return Verdict("failed", (rank,), f"rank {rank} failed: {states[rank].error}")
    waiting = {r: s for r, s in states.items() if s.waits and r not in silent}
    if not waiting:
        return _alone(states, silent)
    way = [max(waiting, key=lambda r: waiting[r].wait.seconds)]  # type: ignore[union-attr]
    while True:
        rank = way[-1]
        peer = _next(waiting, rank, states, silent)
        if (lost := _lost(states, rank, peer)) is not None:
            return lost
        if peer in way:
            way = way[way.index(peer):]
            break
        if peer not in waiting:
            return _end(states, silent, found.damaged, peer, _chain(states, [*way, peer]))
        way.append(peer)
    wants = {waiting[r].wait.what for r in way}  # type: ignore[union-attr]
    if len(wants) == 1 and len(way) > 1:
        return Verdict("lost", tuple(way), f"{numbered(way)} wait in the same exchange ({wants.pop()}), which does "
                                           f"not end: the network between them, or a rank that they do not wait for")
    return Verdict("cycle", tuple(way), f"the ranks wait for each other: {_chain(states, [*way, way[0]])}")


def _next(waiting: Mapping[int, RankState], rank: int, states: Mapping[int, RankState], silent: set[int]) -> int:
    """Of the ranks for which this one waits, the one that is most likely the reason."""
    wait = waiting[rank].wait
    assert wait is not None
    peers = [p for p in wait.peers or range(waiting[rank].ranks) if p != rank] or [rank]

    def reason(peer: int) -> int:
        if peer in silent or peer not in states:
            return 0
        if peer not in waiting:
            return 1
        return 2 if waiting[peer].wait.what != wait.what else 3  # type: ignore[union-attr]

    return min(peers, key=reason)


def _lost(states: Mapping[int, RankState], rank: int, peer: int) -> Verdict | None:
    """Whether a message for which a rank waits has ended at its other end."""
    mine, theirs = states[rank], states.get(peer)
    # its name at the other end: `2SF0>1` of `2RF0>1`, and the other way round
    far = re.sub(r"(?<=\d)[SR](?=[FO]\d)", lambda found: "RS"["SR".index(found[0])], what(mine))
    if far == what(mine) or theirs is None or (theirs.doing.step, theirs.doing.ended(far)) < (mine.doing.step, True):
        return None
    did = "sent" if "S" in far else "received"
    return Verdict("lost", (rank, peer), f"{_wants(mine)} {'from' if did == 'sent' else 'to'} rank {peer}, which has "
                                         f"{did} it ({far} has ended there): the message was lost between them")


def _chain(states: Mapping[int, RankState], way: list[int]) -> str:
    """`rank 0 waits for 1RO0>0 from rank 1, which waits for ... from rank 0`."""
    links = [f"{_wants(states[r], first=i == 0)} {'to' if SEND.search(what(states[r])) else 'from'} rank {way[i + 1]}"
             for i, r in enumerate(way[:-1])]
    return ", ".join(links)


def what(state: RankState) -> str:
    return state.wait.what if state.wait is not None else ""


def _wants(state: RankState, first: bool = True) -> str:
    """`rank 0 waits for 1RO0>0 (the receive of the gradient of layers.2, micro-batch 0 to rank 0; message 7)`."""
    label = next((f" ({t.label}{'' if t.message is None else f'; message {t.message}'})"
                  for t in state.doing.transfers if t.task == what(state)), "")
    return f"{f'rank {state.rank}' if first else 'which'} waits for {what(state)}{label}"


def _end(states: Mapping[int, RankState], silent: set[int], damaged: frozenset[int], rank: int, chain: str) -> Verdict:
    """The verdict where the chain of waits ends at a rank that waits for no other."""
    if rank in damaged:
        return Verdict("silent", (rank,), f"{chain}, whose file is damaged")
    if rank in silent:
        known = states.get(rank)
        last = ("wrote no file" if known is None else
                f"did not answer (it wrote its file for an earlier call: {known.why})")
        return Verdict("silent", (rank,), f"rank {rank} {last}: it has died, was stopped, is held by code that lets no "
                                          f"other thread run, or writes elsewhere; {chain}")
    return Verdict("slow", (rank,), f"{_at_work(states[rank])}; {chain}")


def _alone(states: Mapping[int, RankState], silent: set[int]) -> Verdict:
    """The verdict where no rank waits for another."""
    if silent:
        return Verdict("silent", tuple(sorted(silent)), f"{numbered(silent)} did not answer: died, stopped, or held by "
                                                        f"code that lets no other thread run")
    still = [s for s in states.values() if s.still >= s.patience]
    if not still:
        return Verdict("none", (), "all ranks make progress")
    state = max(still, key=lambda s: s.still)
    waits = [f"{lane.name} waits before {lane.task} for {', '.join(lane.awaits)}" for lane in state.doing.lanes
             if lane.state == "waits" and lane.awaits]
    if waits and not state.doing.running:
        return Verdict("cycle", (state.rank,), f"the lanes of rank {state.rank} wait, and none runs a task: "
                                               f"{'; '.join(waits)}")
    return Verdict("slow", (state.rank,), "; lane ".join([_at_work(state), *waits]))


def _at_work(state: RankState) -> str:
    if running := state.doing.running:
        tasks = " and ".join(f"{lane.task} ({lane.label}) on lane {lane.name}" for lane in running)
        long = max((lane.seconds for lane in running if lane.seconds is not None), default=state.still)
        return f"rank {state.rank} runs {tasks}, for {long:.1f} s"
    if state.still < state.patience:
        return f"rank {state.rank} makes progress (step {state.doing.step}, {state.still:.1f} s ago), and is slower"
    where = f", in {state.stack[0]}" if state.stack else ""
    return f"rank {state.rank} runs no task and waits for no other rank{where}, for {state.still:.1f} s"


# ----------------------------------------------------------------------------------------------------------------- text
def numbered(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def text(found: Found) -> str:
    """The verdict, a line for each rank, then what each lane of it does and what it has sent and received."""
    judged, first = verdict(found), found.first
    lines = [f"{first.run}: {first.command}, {first.ranks} rank{'s' * (first.ranks > 1)}",
             f"{judged.kind}: {judged.text}", ""]
    for rank in range(first.ranks):
        state = found.states.get(rank)
        lines += ([f"rank {rank}: {'its file is damaged' if rank in found.damaged else 'no file'}"] if state is None
                  else _of_rank(state, rank in found.silent))
    return "\n".join(lines)


def _of_rank(state: RankState, silent: bool) -> list[str]:
    doing = state.doing
    head = f"rank {state.rank} on {state.host} (process {state.process}), step {doing.step}, "
    head += f"no progress for {state.still:.1f} s" if state.still >= 1 else "makes progress"
    lines = [head + ("; did not answer the last call" if silent else "")]
    if state.error:
        lines.append(f"  ended: {state.error}")
    if state.wait is not None:
        whom = numbered(state.wait.peers) if state.wait.peers else "all others"
        lines.append(f"  waits for {whom}: {state.wait.what}, for {state.wait.seconds:.1f} s")
    for lane in doing.lanes:
        told = f"  lane {lane.name}: {lane.done} of {lane.tasks} tasks, {lane.state}"
        told += f" {'before ' * (lane.state == 'waits')}{lane.task} ({lane.label})" if lane.task else ""
        lines.append(told + (f", for {lane.seconds:.1f} s" if lane.seconds is not None and lane.task else "")
                     + (f", for {', '.join(lane.awaits)}" if lane.awaits else ""))
    for t in doing.transfers:
        number = "" if t.message is None else f", message {t.message}"
        lines.append(f"  transfer {t.task} ({t.label}{number}, {t.bytes:,} bytes, {numbered(t.peers)}): "
                     f"{'under way' if t.under_way else 'next'}")
    for moved in doing.traffic:
        last = f", last {', '.join(moved.last)}" if moved.last else ""
        lines.append(f"  {moved.kind} {WORDS.get(moved.kind, 'with')} {numbered(moved.peers)}: {moved.count:,}, "
                     f"{moved.bytes:,} bytes{last}")
    if doing.last:
        lines.append("  last tasks: " + ", ".join(
            ran.task + (f" {ran.begin:.3f} s ago" if ran.begin is not None else "") for ran in doing.last))
    if state.stack and not doing.running and state.wait is None:
        lines += [f"  at {frame}" for frame in state.stack[:4]]
    return lines
