"""Compares recorded steps with eager ones: every arrangement of the tasks must be bit-identical.

A training is made from a seed, run eagerly, recorded, and run again under every scheduler of one device, in random
legal orders, and with random tasks one step late. Memory that has not been written yet differs from run to run, so a
read that comes too early changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import nn, ops, optim, schedulers
from ..autograd import random
from ..autograd.recording import record
from ..autograd.tape import micro_batch
from ..autograd.tensor import Parameter, Tensor, array
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..devices.device import CPU
from ..devices.lanes import LaneError, Work, run_program
from ..passes.boundary import cross_boundary, must_stay
from ..runtime.checking import in_turn, random_schedule
from ..runtime.executors import CheckingExecutor, SequentialExecutor, StreamExecutor

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


#: layers of random networks, by their width
LAYERS: tuple[Callable[[int], nn.Module], ...] = (
    *[lambda n: nn.Linear(n, n)] * 3, lambda n: nn.Linear(n, n, bias=False), nn.LayerNorm, nn.BatchNorm1d,
    lambda n: nn.Dropout(0.3), lambda n: nn.Tanh(), lambda n: nn.GELU(), lambda n: nn.ReLU(),
    lambda n: nn.MoE(n, 2 * n, 3, 2, capacity=2))
OPTIMIZERS = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop)


def random_training(seed: int) -> Training:
    """A training of a random network, some of whose layers are skipped, in micro-batches."""
    draw = np.random.default_rng(seed)
    width, samples, parts, depth = (int(draw.integers(*bounds)) for bounds in ((2, 9), (2, 6), (1, 4), (1, 9)))
    layers = nn.ModuleList([LAYERS[i](width) for i in draw.integers(len(LAYERS), size=depth)] + [nn.Linear(width, 3)])
    skips = [*(draw.random(depth) < 0.3).tolist(), False]
    optimizer = OPTIMIZERS[draw.integers(len(OPTIMIZERS))](layers.parameters(), 0.05)

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        losses = []
        for i in range(parts):
            with micro_batch(i, i * samples):
                h, y = inputs[2 * i : 2 * i + 2]
                for layer, skip in zip(layers, skips, strict=True):
                    h = layer(h) + h if skip else layer(h)
                losses.append(ops.mse(h, y))
                losses[-1].backward()
        optimizer.step()
        return (*losses, h)

    batches = [tuple(draw.normal(size=(samples, n)).astype("f") for n in (width, 3) * parts) for _ in range(3)]
    return Training(step, batches, [layers, optimizer])


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


class Case(NamedTuple):
    """A case that is arranged: `make(seed)` is its training, `graph` the recorded step, and `choices` draws. `looks`:
    after which calls a run's tensors are compared, besides the last one."""

    make: Callable[[int], Any]
    seed: int
    training: Training
    graph: TaskGraph
    looks: Sequence[bool]
    choices: np.random.Generator

    def trace(self, run: Run) -> Trace:
        return _trace(self.training, run, self.looks)


#: each arrangement of a case: its name, and a call that runs it, or returns None for a case that it is not for
Arrangements = Callable[[Case], Iterator[tuple[str, Callable[[], Trace | None]]]]


def arranged(case: Case, all_policies: bool = True) -> Iterator[tuple[str, Callable[[], Trace]]]:
    """The step in order, under every scheduler of one device, in random orders, and with random tasks late.
    multi_region, which may search for seconds, is one of twenty times under those unless `all_policies`."""
    graph, choices = case.graph, case.choices

    def streams(schedule: Schedule) -> Trace:
        return case.trace(StreamExecutor(graph, schedule, device=Shuffled(choices)))

    def scheduled(name: str) -> Trace:
        return streams(schedulers.plan(graph, name).schedule)

    def checked(lanes: int) -> Trace:
        return case.trace(CheckingExecutor(graph, random_schedule(graph, lanes, choices),
                                           seed=int(choices.integers(2**31)), device=Shuffled(choices)))

    def late(tasks: Sequence[int]) -> Trace:
        return streams(random_schedule(cross_boundary(graph, tasks).body[0], int(choices.integers(1, 4)), choices))

    yield "sequential", lambda: case.trace(SequentialExecutor(graph, Shuffled(choices)))
    for name in schedulers.names("none", exact=True):
        if name != "multi_region" or all_policies or choices.random() < 0.05:
            yield f"scheduler {name}", partial(scheduled, name)
    yield "threads", lambda: case.trace(StreamExecutor(graph, random_schedule(graph, 3, choices)))
    for lanes in (1, 3):
        yield f"random order on {lanes} lanes", partial(checked, lanes)
    free = np.flatnonzero(~must_stay(graph))
    if len(free):
        some = {*choices.choice(free, int(choices.integers(1, len(free) + 1)), replace=False).tolist()}
        for t in range(len(graph)):  # with all that need them
            some |= {t} if some & {*graph.preds[t].tolist()} else set()
        for tasks in sorted({tuple(free.tolist()), tuple(sorted(some))}):
            yield f"late: {', '.join(map(graph.name, tasks))}", partial(late, tasks)


def check(make: Callable[[int], Any], seed: int, arrangements: Arrangements = arranged) -> Verdict:
    """Runs one case in every arrangement. `make(seed)` returns a `Training` or a tuple of its fields, and must return
    the same one each time."""
    choices = np.random.default_rng([seed, 1])
    try:
        eager = made(make, seed)
        begin, looks = _values(eager), [bool(n) for n in choices.integers(2, size=len(eager.inputs))]
        expected = _trace(eager, lambda *inputs: _fresh(eager)(*map(array, inputs)), looks)
        training = made(make, seed)
        if different := _changed(training, begin):
            raise ValueError(f"{different} differs between two trainings made from the same seed; "
                             f"draw everything from the seed")
    except Exception as error:
        return Verdict(seed, invalid=line(error))
    try:
        graph = record(training.step, *training.inputs[0])
    except (ValueError, RuntimeError, TypeError) as error:
        return Verdict(seed, refused=line(error))
    changed = _changed(training, begin)
    failures, runs = {"record": f"recording changed {changed}"} if changed else {}, 0
    for name, arrangement in arrangements(Case(make, seed, training, graph, looks, choices)):
        for key, t in training.tensors().items():
            t.assign(begin[key])
        runs += 1
        try:
            found = arrangement()
        except Exception as error:
            failures[name] = line(error)
            continue
        if found and (wrong := [what for what in found if found[what] != expected[what]]):
            failures[name] = f"{wrong[0]} differs from the eager run ({len(wrong)} of {len(found)} values)"
    return Verdict(seed, failures=failures, runs=runs, tasks=len(graph))


def made(make: Callable[[int], Any], seed: int) -> Training:
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


def _changed(training: Training, begin: dict[str, Any]) -> str:
    """The first value of a training that is not as it began; empty without any."""
    return next((name for name, a in _values(training).items() if a.tobytes() != begin[name].tobytes()), "")


def line(error: BaseException) -> str:
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
        seen |= outputs(run(*inputs), call)
        if looks[call]:
            seen |= left(tensors, call)
    if isinstance(run, StreamExecutor):
        run.close()
    return seen | left(tensors, len(training.inputs) - 1)


def outputs(result: Any, call: int) -> Trace:
    """The tensors that a call returned."""
    found = () if result is None else result if isinstance(result, tuple | list) else (result,)
    return {f"output {i} of call {call}": _bits(t) for i, t in enumerate(found)}


def left(tensors: Mapping[str, Tensor], call: int) -> Trace:
    """The tensors as they are after a call."""
    return {f"{name} after call {call}": _bits(t) for name, t in tensors.items()}


def _bits(t: Tensor) -> bytes:
    a = t.numpy()
    return f"{a.dtype} {a.shape} ".encode() + np.ascontiguousarray(a).tobytes()


class Shuffled(CPU):
    """A CPU whose lanes run in one thread, in a random order that their waits allow. New memory holds random bytes."""

    def __init__(self, choices: np.random.Generator) -> None:
        self.choices, self.blas_threads = choices, 1

    def allocate(self, nbytes: int) -> Any:
        memory = super().allocate(nbytes)
        memory[...] = self.choices.choice([0x00, 0x3F, 0x7F, 0xFF])
        return memory

    arena = lasting = allocate

    def lanes(self, work: Work, trace: bool = False, stamped: bool = False) -> Any:
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
