"""Compares recorded steps with eager ones: every arrangement of the tasks must be bit-identical.

A training is made from a seed, run eagerly, recorded, and run again under every scheduler of one device, in random
legal orders, and with random tasks one step late. Memory that has not been written yet differs from run to run, so a
read that comes too early changes the result. `random_steps` makes trainings; this module only checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from .. import schedulers
from ..autograd import random
from ..autograd.recording import record
from ..autograd.tensor import Parameter, Tensor, array
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..core.placement import Refused
from ..core.tasks import GraphError, Kind, widths
from ..devices.device import CPU
from ..devices.lanes import LaneError, Work, run_program
from ..passes.boundary import cross_boundary, must_stay
from ..passes.draft import Draft
from ..passes.highway import highway
from ..passes.jacobi import jacobi
from ..passes.offload import EACH, Moves, offload
from ..passes.recompute import recompute
from ..passes.rewrite import rename, unroll
from ..passes.split import split
from ..plans.memory import MemoryLimitError
from ..plans.plan import Plan
from ..runtime.checking import in_turn, random_schedule
from ..runtime.comm.loopback import run_ranks
from ..runtime.executors import CheckingExecutor, DistributedExecutor, SequentialExecutor, StreamExecutor

Run = Callable[..., Any]
Trace = dict[str, bytes]  #: everything observable of a run, by name


def nothing(call: int) -> None:
    """The default of `Training.before`."""


class Training(NamedTuple):
    """A step, its inputs, and what it changes.

    `step(*inputs)` returns a tensor, several, or none. `inputs`: the arrays of each call. `owners`: everything that the
    step changes: modules, optimizers, loss scalers, tensors. `before(call)` runs before each call and may set learning
    rates. Every call begins without gradients, as a recorded step does.
    """

    step: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    owners: Sequence[Any]
    before: Callable[[int], None] = nothing

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the owners, and the dropout counter, by name."""
        found = {"dropout counter": Tensor(random.dropout_counter())}
        for i, owner in enumerate(self.owners):
            found |= ({f"{i}": owner} if isinstance(owner, Tensor)
                      else {f"{i}.{name}": t for name, t in owner.named_tensors()})
        return found


@dataclass(frozen=True)
class Verdict:
    """The result for one case. `invalid`: why it does not run eagerly; `refused`: why it cannot be recorded; each one
    line, or empty. `failures`: arrangement -> its first fault. `runs`: how many arrangements ran."""

    seed: int
    invalid: str = ""
    refused: str = ""
    failures: dict[str, str] = field(default_factory=dict)
    runs: int = 0
    tasks: int = 0


def check(make: Callable[[int], Any], seed: int, every: bool = True, only: str = "") -> Verdict:
    """Runs one case in every arrangement. `make(seed)` returns a `Training` or a tuple of its fields, and must return
    the same one each time. Without `every`, the slow arrangements (multi_region, which may search for seconds, and two
    ranks) run for one case in twenty. `only`: the arrangements whose names begin so."""
    choices = np.random.default_rng([seed, 1])
    try:
        eager = _made(make, seed)
        begin, looks = _values(eager), [bool(n) for n in choices.integers(2, size=len(eager.inputs))]
        expected = _trace(eager, lambda *inputs: _fresh(eager)(*map(array, inputs)), looks)
        training = _made(make, seed)
        if different := [name for name, a in _values(training).items() if a.tobytes() != begin[name].tobytes()]:
            raise ValueError(f"{different[0]} differs between two trainings made from the same seed; "
                             f"draw everything from the seed")
    except Exception as error:
        return Verdict(seed, invalid=_line(error))
    try:
        graph = record(training.step, *training.inputs[0])
    except (ValueError, RuntimeError, TypeError) as error:
        return Verdict(seed, refused=_line(error))
    failures: dict[str, str] = {}
    if changed := [name for name, a in _values(training).items() if a.tobytes() != begin[name].tobytes()]:
        failures["record"] = f"recording changed {changed[0]}"
    runs, tensors = 0, training.tensors()
    for name, arranged in _arrangements(graph, training, make, seed, looks, choices, every):
        if not name.startswith(only):
            continue
        for key, t in tensors.items():
            t.assign(begin[key])
        try:
            found = arranged()
        except (GraphError, Refused) as error:
            if name not in MAY_REFUSE:
                failures[name] = _line(error)
            continue
        except Exception as error:
            failures[name] = _line(error)
            continue
        finally:
            runs += 1
        different = [what for what in found if found[what] != expected[what]]
        if different:
            failures[name] = f"{different[0]} differs from the eager run ({len(different)} of {len(found)} values)"
    return Verdict(seed, failures=failures, runs=runs, tasks=len(graph))


def _made(make: Callable[[int], Any], seed: int) -> Training:
    """The training of this seed. Raises ValueError if `make` returns something else."""
    random.seed(seed)
    found = make(seed)
    if not isinstance(found, tuple) or len(found) not in (3, 4) or not callable(found[0]) or not found[1]:
        raise ValueError(f"a training is (step, inputs, owners): a function, the arrays of each call, and what the "
                         f"step changes; not {found!r:.60}")
    for owner in found[2]:
        if not isinstance(owner, Tensor) and not hasattr(owner, "named_tensors"):
            raise ValueError(f"an owner is a module, an optimizer, a loss scaler or a tensor, "
                             f"not a {type(owner).__name__}")
    return Training(*found)


def _values(training: Training) -> dict[str, Any]:
    """The values with which a training begins, by name."""
    inputs = {f"input {i} of call {call}": np.array(a) for call, given in enumerate(training.inputs)
              for i, a in enumerate(given)}
    return inputs | {name: np.array(t.numpy()) for name, t in training.tensors().items()}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _fresh(training: Training) -> Run:
    """The step, which drops all gradients first, as a recorded step does."""
    for t in training.tensors().values():
        if isinstance(t, Parameter):
            t.grad = None
    return training.step


def _trace(training: Training, run: Run, looks: Sequence[bool]) -> Trace:
    """Everything observable of a run: the results of each call, and the tensors after each call for which `looks` is
    true and at the end, when the run is closed."""
    seen: Trace = {}
    tensors = training.tensors()
    for call, inputs in enumerate(training.inputs):
        training.before(call)
        seen |= _outputs(run(*inputs), call)
        if looks[call]:
            seen |= _left(tensors, call)
    if isinstance(run, StreamExecutor):
        run.close()
    return seen | _left(tensors, len(training.inputs) - 1)


def _outputs(result: Any, call: int) -> Trace:
    outputs = () if result is None else result if isinstance(result, tuple | list) else (result,)
    return {f"output {i} of call {call}": _bits(t) for i, t in enumerate(outputs)}


def _left(tensors: Mapping[str, Tensor], call: int) -> Trace:
    return {f"{name} after call {call}": _bits(t) for name, t in tensors.items()}


def _bits(t: Tensor) -> bytes:
    a = t.numpy()
    return f"{a.dtype} {a.shape} ".encode() + np.ascontiguousarray(a).tobytes()


# --------------------------------------------------------------------------------------------------------- arrangements
RANKS = "two ranks with the same inputs"
MAY_REFUSE = (RANKS,)  #: these refuse a step that does more after its updates


def _arrangements(graph: TaskGraph, training: Training, make: Callable[[int], Any], seed: int, looks: Sequence[bool],
                  choices: np.random.Generator, every: bool) -> Iterator[tuple[str, Callable[[], Trace]]]:
    """Every arrangement of the graph: its name, and a call that runs it."""

    def traced(run: Run) -> Trace:
        return _trace(training, run, looks)

    def scheduled(name: str) -> Trace:
        return traced(StreamExecutor(graph, schedulers.plan(graph, name).schedule, device=Shuffled(choices)))

    def checked(lanes: int, graph: TaskGraph = graph) -> Trace:
        return traced(CheckingExecutor(graph, random_schedule(graph, lanes, choices), seed=int(choices.integers(2**31)),
                                       device=Shuffled(choices)))

    def late(tasks: Sequence[int]) -> Trace:
        body = cross_boundary(graph, tasks).body[0]
        return traced(StreamExecutor(graph, random_schedule(body, int(choices.integers(1, 4)), choices),
                                     device=Shuffled(choices)))

    yield "sequential", lambda: traced(SequentialExecutor(graph, Shuffled(choices)))
    for name in schedulers.names("none", exact=True):
        if name != "multi_region" or every or choices.random() < 0.05:
            yield f"scheduler {name}", partial(scheduled, name)
    yield "threads", lambda: traced(StreamExecutor(graph, random_schedule(graph, 3, choices)))
    for lanes in (1, 3):
        yield f"random order on {lanes} lanes", partial(checked, lanes)
    free = np.flatnonzero(~must_stay(graph))
    if len(free):
        some = choices.choice(free, int(choices.integers(1, len(free) + 1)), replace=False)
        for tasks in sorted({tuple(free.tolist()), _with_all_that_need_them(graph, some.tolist())}):
            yield f"late: {', '.join(map(graph.name, tasks))}", partial(late, tasks)
    if training.before is nothing:
        yield "all calls as one graph", partial(_unrolled, graph, training, choices)
    dropped = np.flatnonzero(choices.random(int(graph.unit.max()) + 1) < choices.choice([0.5, 1.0]))
    again = recompute(Draft.of(graph), dropped.tolist()).graph
    if len(again) > len(graph):
        yield f"recompute {', '.join(map(str, dropped))}", partial(checked, 3, again)
    for way in (jacobi, highway):
        with suppress(Refused):  # gradients flow through one layer, or there are no residual blocks
            yield way.__name__, partial(checked, 3, way(Draft.of(graph))[0].graph)
    with suppress(Refused):
        moves = Moves(str(choices.choice(EACH[1:])), int(choices.integers(3)), int(choices.integers(1, 9)))
        away = offload(replace(Draft.of(graph), schedule=random_schedule(graph, 2, choices)), moves).graph
        yield f"offload {moves}", partial(checked, 3, away)
    if choices.random() < 0.5:
        parts = {key: int(n) for key, n in zip(graph.keys.tolist(), choices.integers(1, 5, len(graph)), strict=True)}
        with suppress(Refused):  # nothing can be cut in so many parts
            yield "split", partial(_in_parts, graph, split(Draft.of(graph), parts).graph, training, traced, choices)
    yield _by_plan(graph, training, traced, choices)
    if every or choices.random() < 0.05:
        yield RANKS, partial(_on_two_ranks, make, seed, choices)


def _by_plan(graph: TaskGraph, training: Training, traced: Callable[[Run], Trace],
             choices: np.random.Generator) -> tuple[str, Callable[[], Trace]]:
    """A plan with random arguments, within a limit between the least that can be had and the most that is needed; the
    plain one if a pass refuses it."""
    share, again = choices.choice([0.0, 1.0, choices.random()]), choices.choice(["none", "all", "sqrt", *["auto"] * 3])
    away = str(choices.choice(["none", "none", *EACH[1:], *["auto"] * (again == "auto")]))
    name = str(choices.choice([name for name in schedulers.names("none", exact=True) if name != "multi_region"]))
    parts: Any = [1, 1, 2, 3, "auto"][choices.integers(5)]

    def plan(limit: int | None) -> Plan:
        return schedulers.plan(graph, name, machine=Machine(memory_limit=limit), recompute=str(again), offload=away,
                               split=parts)

    def run() -> Trace:
        made = schedulers.plan(graph, name)
        try:
            made = plan(1)
        except Refused:
            pass
        except MemoryLimitError as error:
            least = error.least or max(plan(None).peak_bytes)
            made = plan(least + int(share * max(0, *(peak - least for peak in made.peak_bytes))))
        if widths(made.graph.keys):
            return _in_parts(graph, made.graph, training, traced, choices)
        return traced(StreamExecutor(made.graph, made.schedule, device=Shuffled(choices)))

    return f"plan by {name}, recompute {again}, offload {away}, split {parts}, within {share:.0%}", run


def _in_parts(graph: TaskGraph, parted: TaskGraph, training: Training, traced: Callable[[Run], Trace],
              choices: np.random.Generator) -> Trace:
    """The trace of the graph. Raises RuntimeError if two orders of the graph in parts leave different bits, or if the
    results of its first call, as far as it computes them before an update, are not close to the whole graph's."""
    tensors = training.tensors()
    begin = {name: np.array(t.numpy()) for name, t in tensors.items()}

    def after(run: Run) -> Trace:
        for name, t in tensors.items():
            t.assign(begin[name])
        return traced(run)

    first = after(SequentialExecutor(parted, Shuffled(choices)))
    for lanes in (1, 3):
        order = random_schedule(parted, lanes, choices)
        other = after(CheckingExecutor(parted, order, seed=int(choices.integers(2**31)), device=Shuffled(choices)))
        if different := [what for what in first if first[what] != other[what]]:
            raise RuntimeError(f"{different[0]} of a graph in parts differs between two orders")
    whole = after(SequentialExecutor(graph, Shuffled(choices)))
    update = np.flatnonzero(graph.kind == Kind.U)
    if (graph.kind[update.min(initial=len(graph)) :] == Kind.F).any():
        return whole  # results after an update may be far away: Adam makes large steps from rounding errors
    for what in (what for what in whole if what.endswith("of call 0")):
        a, b = (_values_in(seen[what]) for seen in (whole, first))
        near = 1e-12 if a.dtype == np.float64 else 1e-3
        if a.dtype.kind == "f" and not np.allclose(a, b, near, near * np.abs(a[np.isfinite(a)]).max(initial=1e-3),
                                                   equal_nan=True):
            raise RuntimeError(f"{what} of a graph in parts is not close to the whole graph's")
    return whole


def _values_in(bits: bytes) -> Any:
    """The array that `_bits` has written, flat."""
    header, _, values = bits.partition(b") ")
    return np.frombuffer(values, header.split()[0].decode())


def _with_all_that_need_them(graph: TaskGraph, tasks: Sequence[int]) -> tuple[int, ...]:
    found, stack = set(tasks), list(tasks)
    while stack:
        new = [s for s in graph.succs[stack.pop()].tolist() if s not in found]
        found.update(new)
        stack += new
    return tuple(sorted(found))


def _unrolled(graph: TaskGraph, training: Training, choices: np.random.Generator) -> Trace:
    """All calls unrolled into one graph and run in a random legal order, with one, two, or one copy per call of each
    buffer. If a call returns parameters or states, only the last call's values are observable."""
    calls = len(training.inputs)
    lasting = [i for i, view in enumerate(graph.outputs) if graph.storages[view.storage].role.persistent]
    graph = rename(unroll(graph, calls), int(choices.integers(1, calls + 1)))
    run = CheckingExecutor(graph, random_schedule(graph, 3, choices), seed=int(choices.integers(2**31)),
                           device=Shuffled(choices))
    result = run(*(a for inputs in training.inputs for a in inputs))
    outputs = () if result is None else result if isinstance(result, tuple) else (result,)
    each = len(outputs) // calls
    seen = _left(training.tensors(), calls - 1)
    for call in range(calls):
        seen |= _outputs(outputs[call * each : (call + 1) * each], call)
    return {what: value for what, value in seen.items()
            if what not in {f"output {i} of call {c}" for i in lasting for c in range(calls - 1)}}


def _on_two_ranks(make: Callable[[int], Any], seed: int, choices: np.random.Generator) -> Trace:
    """Two data-parallel ranks with equal inputs: the mean of equal gradients is the gradient, so both ranks must leave
    what one process leaves, also if they have shares of everything."""
    name = str(choices.choice(schedulers.names("data", exact=True)))
    machine, again = Machine(2, collective=lambda sizes: 1.0), str(choices.choice(["none", "all", "sqrt"]))
    options = schedulers.find(name).known(part_bytes=40, bucket_bytes=100) | {"recompute": again}
    shard = choices.choice(["0", "1", "2,prefetch=0", "3,prefetch=0,keep=none", "3"])
    shard = "0" if name not in ("barrier", "buckets", "no_overlap") else str(shard)
    own = []
    for _ in range(2):
        training = _made(make, seed)
        graph = record(training.step, *training.inputs[0])
        try:
            plan = schedulers.plan(graph, name, machine=machine, shard=shard, **options)
        except Refused:
            plan, shard = schedulers.plan(graph, name, machine=machine, **options), "0"
        own.append((training, training.tensors(), plan))

    def work(communicator: Any) -> Trace:
        training, tensors, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        seen: Trace = {}
        for call, inputs in enumerate(training.inputs):
            training.before(call)
            seen |= _outputs(run(*inputs), call)
        run.settle()
        run.whole()
        run.close()
        return seen | _left(tensors, len(training.inputs) - 1) if shard == "0" or not communicator.rank else {}

    first, second = run_ranks(2, work)
    if shard == "0" and first != second:
        raise RuntimeError(f"two ranks differ under {name}")
    return cast(Trace, first)


class Shuffled(CPU):
    """A CPU whose lanes run in one thread, in a random order that their waits allow. New memory holds random bytes."""

    def __init__(self, choices: np.random.Generator) -> None:
        self.choices, self.blas_threads = choices, 1

    def allocate(self, nbytes: int) -> Any:
        memory = super().allocate(nbytes)
        memory[...] = self.choices.choice([0x00, 0x3F, 0x7F, 0xFF])
        return memory

    def lanes(self, work: Work, trace: bool = False) -> Any:
        return _RandomLanes(work, self.choices)


class _RandomLanes:
    """Lanes as a device has them, see `minidl.devices.lanes`."""

    def __init__(self, work: Work, choices: np.random.Generator) -> None:
        self.work, self.choices = work, choices
        self.calls = {t: work.calls(t, None) for tasks in work.tasks for t in tasks}

    def run(self) -> None:
        order = [*in_turn(self.work.tasks, self.work.waits, self.choices)]
        assert len(order) == sum(map(len, self.work.tasks)), "every lane waits"
        for task in order:
            stop = run_program(self.calls[task])
            if stop.error is not None:
                raise LaneError(stop.error, task, next(i for i, own in enumerate(self.work.tasks) if task in own))

    def close(self) -> None:
        """Does nothing: there are no threads."""
