"""Holds recorded steps against eager ones: every bit that they return and leave, however their tasks are arranged.

A training is made anew from a seed, run eagerly, recorded, and run again under every scheduler of one device, in random
legal orders, and with random tasks one step late. Memory that nobody has written yet differs from run to run, so that
what is read too early differs too. Knows no way to make trainings: see `random_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import random, schedulers
from .boundary import cross_boundary, must_stay
from .device import CPU
from .executors import CheckingExecutor, SequentialExecutor, StreamExecutor
from .executors.checking import random_schedule
from .graph import TaskGraph
from .lanes import LaneError, Work
from .recording import record
from .streams import run_program
from .tensor import Parameter, Tensor, array

Run = Callable[..., Any]


class Training(NamedTuple):
    """`step(*inputs)` returns a tensor, several, or none. `inputs`: the arrays of each call. `owners`: all that the step
    changes: modules, optimizers, loss scalers, tensors. `before(call)`, where given, may set learning rates.

    Calls are compared as a recorded step begins them: without gradients of the call before."""

    step: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    owners: Sequence[Any]
    before: Callable[[int], None] = lambda call: None

    def tensors(self) -> dict[str, Tensor]:
        """What a training leaves, by name."""
        found = {"dropout counter": Tensor(random.dropout_counter())}
        for i, owner in enumerate(self.owners):
            found |= {f"{i}": owner} if isinstance(owner, Tensor) else {f"{i}.{name}": t for name, t in owner.named_tensors()}
        return found


@dataclass(frozen=True)
class Verdict:
    """What became of a case. `invalid`: why it does not run eagerly; `refused`: why it cannot be recorded, in one line;
    `failures`: of each arrangement that went wrong its name and what was wrong first. `runs`: how many arrangements ran."""

    seed: int
    invalid: str = ""
    refused: str = ""
    failures: dict[str, str] = field(default_factory=dict)
    runs: int = 0
    tasks: int = 0


def check(make: Callable[[int], Any], seed: int, searched: float = 1.0) -> Verdict:
    """Runs one case in every way. `make(seed)` gives a `Training`, or a tuple that makes one, the same each time. `searched`:
    in which share of cases multi_region makes a schedule too, for which it may search for seconds."""
    choices = np.random.default_rng([seed, 1])
    try:
        eager = _made(make, seed)
        begin, looks = _values(eager), choices.integers(2, size=len(eager.inputs)).astype(bool)
        expected = _trace(eager, lambda *inputs: _fresh(eager)(*map(array, inputs)), looks)
        training = _made(make, seed)
        if different := [name for name, a in _values(training).items() if a.tobytes() != begin[name].tobytes()]:
            raise ValueError(f"{different[0]} is another in a second training of the same seed; draw everything from the seed")
    except Exception as error:
        return Verdict(seed, invalid=_line(error))
    try:
        graph = record(training.step, *training.inputs[0])
    except (ValueError, RuntimeError, TypeError) as error:
        return Verdict(seed, refused=_line(error))
    failures: dict[str, str] = {}
    if changed := [name for name, a in _values(training).items() if a.tobytes() != begin[name].tobytes()]:
        failures["record"] = f"recording changed {changed[0]}"
    runs = 0
    for name, start in _arrangements(graph, choices, searched):
        runs += 1
        for key, t in training.tensors().items():
            t.assign(begin[key])
        try:
            run = start()
            found = _trace(training, run, looks)
            if hasattr(run, "close"):
                run.close()
        except Exception as error:
            failures[name] = _line(error)
            continue
        different = [what for (what, a), (_, b) in zip(expected, found, strict=True) if a != b]
        if different:
            failures[name] = f"{different[0]} differs from the eager run ({len(different)} of {len(expected)} values)"
    return Verdict(seed, failures=failures, runs=runs, tasks=len(graph))


def _made(make: Callable[[int], Any], seed: int) -> Training:
    """Raises ValueError for what is no training."""
    random.seed(seed)
    found = make(seed)
    if not isinstance(found, tuple) or len(found) not in (3, 4) or not callable(found[0]) or not found[1]:
        raise ValueError(f"a training is (step, inputs, owners): a function, the arrays of each call, and what the step changes; not {found!r:.60}")
    for owner in found[2]:
        if not isinstance(owner, Tensor) and not hasattr(owner, "named_tensors"):
            raise ValueError(f"an owner is a module, an optimizer, a loss scaler or a tensor, not a {type(owner).__name__}")
    return Training(*found)


def _values(training: Training) -> dict[str, Any]:
    """What a training begins with, by name."""
    inputs = {f"input {i} of call {call}": np.array(a) for call, given in enumerate(training.inputs) for i, a in enumerate(given)}
    return inputs | {name: np.array(t.numpy()) for name, t in training.tensors().items()}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _fresh(training: Training) -> Run:
    """The step as a recorded one begins: without gradients of the step before."""
    for t in training.tensors().values():
        if isinstance(t, Parameter):
            t.grad = None
    return training.step


def _trace(training: Training, run: Run, looks: Any) -> list[tuple[str, bytes]]:
    """All that can be seen of a run, by name: what each call returns, and what there is after those calls at which somebody
    looks, and at the end."""
    seen: list[tuple[str, bytes]] = []
    tensors = training.tensors()
    for call, inputs in enumerate(training.inputs):
        training.before(call)
        result = run(*inputs)
        outputs = () if result is None else result if isinstance(result, tuple | list) else (result,)
        seen += [(f"output {i} of call {call}", _bits(t)) for i, t in enumerate(outputs)]
        if looks[call] or call == len(training.inputs) - 1:
            seen += [(f"{name} after call {call}", _bits(t)) for name, t in tensors.items()]
    return seen


def _bits(t: Tensor) -> bytes:
    a = t.numpy()
    return f"{a.dtype} {a.shape} ".encode() + np.ascontiguousarray(a).tobytes()


# ---------------------------------------------------------------------------------------------------------- arrangements
def _arrangements(graph: TaskGraph, choices: np.random.Generator, searched: float) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Name and maker of everything that can run the graph."""

    def device() -> Any:
        return Shuffled(choices)

    def scheduled(name: str) -> Run:
        return StreamExecutor(graph, schedulers.single(name, graph), device=device())

    def checked(lanes: int) -> Run:
        return CheckingExecutor(graph, random_schedule(graph, lanes, choices), seed=int(choices.integers(2**31)), device=device())

    def late(tasks: Sequence[int]) -> Run:
        body = cross_boundary(graph, tasks).body[0]
        return StreamExecutor(graph, random_schedule(body, int(choices.integers(1, 4)), choices), device=device())

    yield "sequential", lambda: SequentialExecutor(graph, device())
    for name in schedulers.SINGLE:
        if name != "multi_region" or choices.random() < searched:
            yield f"scheduler {name}", partial(scheduled, name)
    yield "threads", lambda: StreamExecutor(graph, random_schedule(graph, 3, choices))
    for lanes in (1, 3):
        yield f"random order on {lanes} lanes", partial(checked, lanes)
    free = np.flatnonzero(~must_stay(graph))
    if len(free):
        some = choices.choice(free, int(choices.integers(1, len(free) + 1)), replace=False)
        for tasks in sorted({tuple(free.tolist()), _with_all_that_need_them(graph, some.tolist())}):
            yield f"late: {', '.join(map(graph.name, tasks))}", partial(late, tasks)


def _with_all_that_need_them(graph: TaskGraph, tasks: Sequence[int]) -> tuple[int, ...]:
    found, stack = set(tasks), list(tasks)
    while stack:
        new = [s for s in graph.succs[stack.pop()].tolist() if s not in found]
        found.update(new)
        stack += new
    return tuple(sorted(found))


class Shuffled(CPU):
    """A CPU whose lanes run in one thread, in a random order that their waits allow, and whose new memory holds anything."""

    def __init__(self, choices: np.random.Generator) -> None:
        self.choices, self.blas_threads = choices, 1

    def allocate(self, nbytes: int) -> Any:
        memory = super().allocate(nbytes)
        memory[...] = self.choices.choice([0x00, 0x3F, 0x7F, 0xFF])
        return memory

    def lanes(self, work: Work, trace: bool = False) -> Any:  # type: ignore[override]
        return _RandomLanes(work, self.choices)


class _RandomLanes:
    """Lanes as a device has them, see `minidl.lanes`."""

    def __init__(self, work: Work, choices: np.random.Generator) -> None:
        self.tasks, self.choices = work.tasks, choices
        self.calls = {t: work.calls(t, None) for tasks in work.tasks for t in tasks}
        self.awaited: dict[int, set[int]] = {}
        for waiter, source in work.waits:
            self.awaited.setdefault(waiter, set()).add(source)

    def run(self) -> None:
        queues, done = [list(tasks)[::-1] for tasks in self.tasks], set[int]()
        while any(queues):
            ready = [lane for lane, queue in enumerate(queues) if queue and self.awaited.get(queue[-1], set()) <= done]
            lane = ready[int(self.choices.integers(len(ready)))]
            task = queues[lane].pop()
            stop = run_program(self.calls[task])
            if stop.error is not None:
                raise LaneError(stop.error, task, lane)
            done.add(task)

    def close(self) -> None:
        """Nothing is left to end."""
