"""What tests of the engine share: finite differences, networks and graphs drawn at random, deadlines, closures."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tomllib
import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import minidl as ml
from minidl import nn, ops, optim, schedulers
from minidl.core.graph import GraphBuilder, Role, TaskGraph
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind
from minidl.devices.lanes import Threads
from minidl.passes.boundary import cross_boundary
from minidl.passes.rewrite import coarsen
from minidl.plans.memory import lifetimes
from minidl.runtime.checking import random_schedule
from minidl.runtime.comm.loopback import run_ranks

#: the clone
ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
#: PYTHONPATH of a process that imports helpers and tests, as pytest does
IMPORTABLE = os.pathsep.join(
    str(ROOT / folder)
    for folder in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"])
#: the networks of the package; `models.names()` also has those that files of tests register when they are imported
NETWORKS = ("bert", "bert_base", "bert_large", "densenet121", "densenet169", "gpt", "gpt2_medium", "gpt3_medium",
            "lenet", "mlp", "mlp_large", "ffnn", "mobilenet_v3_large", "moe_gpt", "resnet20", "resnet18", "resnet50",
            "resnet101", "resnet152", "revnet", "rnn", "snn")
#: seconds after which a test says that something hangs; more than a busy machine takes
PATIENCE = 300.0
#: of each optional package the extra that installs it
EXTRAS = {"torch": "parity", "jax": "strong", "ortools": "optimal", "matplotlib": "plot", "sphinx": "docs",
          "cupy": "cuda-check", "cuda": "cuda-check", "nvmath": "cuda-check", "cudnn": "cuda-check",
          "playwright": "browser", "PIL": "data", "transformers": "huggingface", "yaml": "huggingface",
          "jupytext": "notebooks", "nbclient": "notebooks", "nbformat": "notebooks", "google": "tensorboard"}


def need(name: str) -> Any:
    """A module of an optional package, or the test is skipped and says what to install."""
    return pytest.importorskip(name,
                               reason=f"{name} is not installed; install minidl[{EXTRAS[name.partition('.')[0]]}]")


def torch_or_skip() -> Any:
    return need("torch")


def results(name: str) -> Any:
    """A record of bench/results."""
    return json.loads((BENCH / "results" / f"{name}.json").read_text())


def drawn(count: int) -> int:
    """How many examples hypothesis draws, of `count` if MINIDL_EXAMPLES is set: a tenth in the default run."""
    return count if "MINIDL_EXAMPLES" in os.environ else max(count // 10, min(count, 4))


def until(happened: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    """Waits for an event of another process or thread; AssertionError where it never comes."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"after {seconds:g} s still not: {what}"
        time.sleep(0.02)


def python(*argv: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, in the clone; if it hangs, the test fails."""
    return subprocess.run([sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, **variables})


#: a program that is interrupted in the import of a module, its first argument
IN_AN_IMPORT = """
import os, signal, sys

class Finder:
    module = sys.argv.pop(1)

    def find_spec(self, name, *_):
        if name == self.module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from minidl.__main__ import run
run()
"""


def interruptible(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """A process that takes SIGINT. The tests may ignore it, and a process inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def replace_call(lanes: Any, call: Callable[[], Any], task: int | None = None) -> None:
    """Puts a call in the place of the first one of a task, by default of the first task, on the first lane."""
    if isinstance(lanes, Threads):
        first = 0 if task is None else lanes.work.tasks[0].index(task)
        lanes._programs[0][bisect_right(lanes._phases[0], 3 * first)] = call
        return
    lane = lanes._lanes[0]
    at = 0 if task is None else lane.tasks.index(task)
    lane.by_python.append((call, lane.tasks[at]))
    lane.table[at] = lane.python_address, len(lane.by_python) - 1


def random_array(shape: Sequence[int], seed: int = 0, dtype: str = "float64", low: float = -2.0,
                 high: float = 2.0) -> Any:
    """Evenly spaced numbers in random order, none of them near zero, so that no kink and no tie is near."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    grid = (np.arange(count) + 0.5) / max(count, 1) * (high - low) + low
    grid = np.where(np.abs(grid) < 0.01, 0.02, grid)
    return rng.permutation(grid).reshape(tuple(shape)).astype(dtype)


def bits(*arrays: Any) -> bytes:
    """What must be equal when two runs are equal bit for bit."""
    return b"|".join(np.ascontiguousarray(a.numpy() if isinstance(a, ml.Tensor) else a).tobytes() for a in arrays)


def refuses(*rows: tuple[Callable[[], Any], str], error: Any = (ValueError, TypeError, IndexError, NotImplementedError)
            ) -> None:
    """Each call raises such an error, in one line that matches the text beside it, if there is one."""
    for act, message in rows:
        with pytest.raises(error, match=message or None) as caught:
            act()
        assert "\n" not in str(caught.value)


@contextmanager
def deadline(seconds: float = PATIENCE) -> Iterator[None]:
    """Fails instead of hanging; for the main thread."""

    def late(*_: Any) -> None:
        raise AssertionError(f"still running after {seconds:g} s: a hang")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """The system refuses half-way to write a file of more bytes, as a full disk does."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def together(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work(communicator)` returns on each loop-back rank, in time."""
    with deadline():
        return run_ranks(ranks, work)


def bytes_allocated(call: Callable[[], Any]) -> int:
    """How far the memory that Python and NumPy know of grew at most during the call, in bytes."""
    call()  # whatever is made once is made
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - before


def arrays_left(call: Callable[[], Any]) -> int:
    """Bytes of array data (NumPy's own domain of tracemalloc) that the call leaves behind."""
    domain = np.lib.tracemalloc_domain
    call()
    gc.collect()
    tracemalloc.start()
    try:
        kept = call()
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, domain)])
    finally:
        tracemalloc.stop()
    del kept
    return sum(trace.size for trace in snapshot.traces)


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The functions of the engine that are called in Python."""
    found, engine = list[str](), str(Path(ml.__file__).parent)

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(engine):
            found.append(frame.f_code.co_qualname)

    gc.collect()  # nothing is left that could be finalized in between
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert found
    return found


def kernels(graph: TaskGraph) -> Counter[str]:
    """How often a graph launches each kernel."""
    return Counter(launch.kernel for task in graph.launches for launch in task)


# ----------------------------------------------------------------------------------------------------- graphs at random
def closure(count: int, pairs: Any) -> Any:
    """Boolean matrix: reach[i, j] where a way leads from i to j."""
    reach = np.zeros((count, count), bool)
    for i, j in np.asarray(pairs, np.int64).reshape(-1, 2).tolist():
        reach[i, j] = True
    for k in range(count):
        reach |= reach[:, k][:, None] & reach[k][None, :]
    return reach


def edge_pairs(graph: TaskGraph) -> list[tuple[int, int]]:
    return list(zip(graph.preds.ids.tolist(), graph.preds.row_of_each().tolist(), strict=True))


def lane_pairs(graph: TaskGraph, schedule: Schedule) -> list[tuple[int, int]]:
    """Neighbours on each lane, as task ids."""
    ids = schedule.ids(graph)
    return [pair for i in range(len(schedule.lanes))
            for pair in itertools.pairwise(ids[schedule.ptr[i] : schedule.ptr[i + 1]].tolist())]


def may_share(graph: TaskGraph, schedule: Schedule) -> Any:
    """Boolean matrix: whether two storages are never alive at the same time, by comparison of their lifetimes."""
    lives = lifetimes(graph, schedule)
    before = (lives.last[:, None, :] <= lives.known[None, :, :]).all(axis=2)
    unused = np.ones(len(graph.storages), bool)
    unused[lives.used] = False
    share = before | before.T | unused[:, None] | unused[None, :]
    for a, b in itertools.combinations(range(len(share)), 2):
        if any(t != u and lives.action[t] == lives.action[u] for t in lives.joined[a] for u in lives.joined[b]):
            share[a, b] = share[b, a] = False
    np.fill_diagonal(share, False)
    return share


def planned(*tasks: tuple[str, str, str], nbytes: int = 8) -> TaskGraph:
    """A graph without kernels: ("0F0", "x w", "y") is a task, what it reads, what it writes."""
    builder = GraphBuilder()
    names: dict[str, int] = {}
    for name, reads, writes in tasks:
        for b in (*reads.split(), *writes.split()):
            if b not in names:
                names[b] = builder.buffer(b, nbytes)
        own = ml.core.graph.unpack(ml.core.graph.parse_task(name))
        builder.task(own.unit, Kind(own.kind), own.micro_batch, part=own.part, destination=own.destination,
                     late=own.late, iteration=own.iteration, reads=[names[b] for b in reads.split()],
                     writes=[names[b] for b in writes.split()], nbytes=nbytes)
    return builder.build()


def network(layers: int, nbytes: int = 1000) -> TaskGraph:
    """A step of a plain network without kernels: F, then O and W of each layer, then U."""
    b = GraphBuilder()
    x = b.buffer("x", nbytes, Role.INPUT)
    weights = [b.buffer(f"w{i}", nbytes, Role.PARAMETER) for i in range(layers)]
    activations = [x]
    for i in range(layers):
        activations.append(b.buffer(f"a{i}", nbytes))
        b.task(i, Kind.F, reads=[activations[i], weights[i]], writes=[activations[i + 1]])
    gradient, grads = activations[-1], []
    for i in reversed(range(layers)):
        grads.append((i, b.buffer(f"dw{i}", nbytes, Role.GRADIENT)))
        b.task(i, Kind.W, reads=[activations[i], gradient], writes=[grads[-1][1]])
        if i:
            below = b.buffer(f"d{i}", nbytes, Role.GRADIENT)
            b.task(i, Kind.O, reads=[gradient, weights[i]], writes=[below])
            gradient = below
    for i, g in sorted(grads):
        b.task(i, Kind.U, reads=[g, weights[i]], writes=[weights[i]])
    return b.build()


@st.composite
def planned_graphs(draw: Any, tasks: int = 12, buffers: int = 5) -> TaskGraph:
    """Tasks that read and write a few buffers in any way."""
    names = st.lists(st.integers(0, buffers - 1), max_size=3)
    builder = GraphBuilder()
    for b in range(buffers):
        builder.buffer(f"b{b}", draw(st.sampled_from([0, 1, 256, 300, 1024])))
    for unit in range(draw(st.integers(1, tasks))):
        builder.task(unit, draw(st.sampled_from([Kind.F, Kind.O, Kind.W, Kind.U])), reads=draw(names),
                     writes=draw(names), flops=float(draw(st.integers(0, 9))), nbytes=draw(st.integers(0, 4000)))
    return builder.build()


@st.composite
def scheduled_graphs(draw: Any, tasks: int = 12, buffers: int = 5, lanes: int = 4,
                     ranks: int = 1) -> tuple[TaskGraph, Schedule]:
    """A graph and a legal schedule of it."""
    graph = draw(planned_graphs(tasks, buffers))
    schedule = random_schedule(graph, draw(st.integers(1, lanes)),
                               np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    if ranks > 1:
        on = [draw(st.integers(0, ranks - 1)) for _ in schedule.lanes]
        schedule = Schedule(tuple(Lane(r, f"l{i}") for i, r in enumerate(on)), schedule.ptr, schedule.keys)
    return graph, schedule


# --------------------------------------------------------------------------------------------------- networks at random
class Network(nn.Module):
    """Layers by name over a row of `width` numbers; what is in `plan` decides. Some share parameters, some leave the
    straight line."""

    CHOICES = ("linear", "linear_no_bias", "tied", "relu", "tanh", "sigmoid", "dropout", "residual", "gain", "softmax",
               "center", "gram", "norm", "swap", "square", "maximum", "reshape")

    def __init__(self, plan: Sequence[str], width: int, classes: int) -> None:
        self.plan, self.width = tuple(plan), width
        self.tied = nn.Linear(width, width)
        self.gain = ml.Parameter(np.linspace(0.5, 1.5, width, dtype=np.float32))
        for i, name in enumerate(plan):
            if name.startswith("linear"):
                setattr(self, f"layer{i}", nn.Linear(width, width, bias=name == "linear"))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        first = x
        for i, name in enumerate(self.plan):
            x = self.apply(i, name, x, first)
        return self.head(x)

    def apply(self, i: int, name: str, x: Any, first: Any) -> Any:
        match name:
            case "linear" | "linear_no_bias":
                return getattr(self, f"layer{i}")(x)
            case "tied":
                return self.tied(x)
            case "relu" | "tanh" | "sigmoid" | "softmax":
                return getattr(ops, name)(x)
            case "dropout":
                return ops.dropout(x, 0.25)
            case "residual":
                return x + ops.tanh(x) * first
            case "gain":
                return x * self.gain
            case "center":
                return x - x.mean(0, keepdims=True)
            case "gram":
                return ops.matmul(ops.matmul(x, x.T) * 0.1, x)
            case "norm":
                return x / ((x * x).sum(1, keepdims=True) + 1.0).sqrt()
            case "swap":
                return ops.relu(x.T).T
            case "square":
                return x * x * 0.5
            case "maximum":
                return ops.maximum(x, self.gain)
            case "reshape":
                return x.reshape(-1, 1, self.width).tanh().reshape(-1, self.width)
        raise AssertionError(name)


def sgd(p: Any) -> Any:
    return optim.SGD(p, 0.05)


def sgd_momentum(p: Any) -> Any:
    return optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def adam(p: Any) -> Any:
    return optim.Adam(p, 0.01, weight_decay=0.01)


class Case:
    """One training set-up, made anew from its seed as often as it is asked for."""

    def __init__(self, plan: Sequence[str], *, width: int = 5, classes: int = 3, batch: int = 4, micro_batches: int = 1,
                 optimizer: Callable[[Any], Any] = sgd_momentum, dtype: str = "float32", seed: int = 0) -> None:
        self.plan, self.width, self.classes, self.batch = tuple(plan), width, classes, batch
        self.micro_batches, self.optimizer, self.dtype, self.seed = micro_batches, optimizer, dtype, seed

    def __repr__(self) -> str:
        return (f"Case({self.plan}, width={self.width}, batch={self.batch}, micro_batches={self.micro_batches}, "
                f"optimizer={self.optimizer.__name__}, dtype={self.dtype!r}, seed={self.seed})")

    def batches(self, steps: int) -> list[tuple[Any, ...]]:
        """For each step its inputs: images and labels of each micro-batch."""
        rng = np.random.default_rng(self.seed)
        return [tuple(v for _ in range(self.micro_batches)
                      for v in (rng.normal(size=(self.batch, self.width)).astype(self.dtype),
                                rng.integers(0, self.classes, self.batch))) for _ in range(steps)]

    def make(self) -> tuple[Any, Any, Callable[..., Any]]:
        """Model, optimizer, step."""
        ml.seed(self.seed)
        model = Network(self.plan, self.width, self.classes).astype(self.dtype)
        opt = self.optimizer(model.parameters())

        def step(*inputs: Any) -> Any:
            total = None
            for m in range(self.micro_batches):
                with ml.micro_batch(m, m * self.batch):
                    loss = nn.cross_entropy(model(inputs[2 * m]), inputs[2 * m + 1])
                    loss.backward()
                total = loss if total is None else total
            opt.step()
            return total, loss

        return model, opt, step

    def state(self, model: Any, opt: Any) -> bytes:
        return bits(*(t for _, t in model.named_tensors()), *(t for _, t in opt.named_tensors()))

    def trained(self, executor: Callable[[Any], Any] | None, steps: int = 2) -> bytes:
        """Everything that training leaves, as bytes: losses, parameters, optimizer states. `executor(graph)` makes what
        runs the recorded step; None trains eagerly."""
        model, opt, step = self.make()
        data = self.batches(steps)
        if executor is None:
            losses = [step(*(ml.array(v) for v in values)) for values in data]
        else:
            run = executor(ml.record(step, *data[0]))
            losses = [run(*values) for values in data]
            if hasattr(run, "close"):
                run.close()
        return bits(*(t for pair in losses for t in pair)) + b"#" + self.state(model, opt)


@st.composite
def cases(draw: Any, layers: int = 6) -> Case:
    """Networks at random: layers, sizes, micro-batches, optimizer, type."""
    return Case(draw(st.lists(st.sampled_from(Network.CHOICES), max_size=layers)), width=draw(st.integers(1, 6)),
                classes=draw(st.integers(1, 4)), batch=draw(st.integers(1, 5)), micro_batches=draw(st.integers(1, 3)),
                optimizer=draw(st.sampled_from([sgd, sgd_momentum, adam])),
                dtype=draw(st.sampled_from(["float32", "float64"])), seed=draw(st.integers(0, 2**31)))


SMALL = Case(("linear", "relu", "tied", "dropout", "tied", "gain"), width=6, micro_batches=2)


def recorded(case: Case = SMALL) -> TaskGraph:
    """The graph of a case's step."""
    _, _, step = case.make()
    return ml.record(step, *case.batches(1)[0])


def late_schedule(graph, late, schedule):
    """A schedule of a recorded step in which these tasks are late; `schedule(body)` arranges a body."""
    return schedule(cross_boundary(graph, late).body[0])


def in_stages(graph, stages=2):
    """The graph with its units in stages: fewer tasks, which have many launches."""
    return coarsen(graph, graph.unit * stages // len(graph.unit_names))[0]


def replicas(graph, name, cost=None, collective=None, ranks=2, limit=None, **options):
    """The named data-parallel plan, told those options that it takes."""
    return ml.plan(graph, name, cost, ml.Machine(ranks, limit, collective=collective),
                   **schedulers.find(name).known(**options))


def classified(model: nn.Module, opt: Any) -> Callable[[Any, Any], Any]:
    """The function of a training step."""
    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return step


def recorded_classifier(model: nn.Module, opt: Any, samples: int, features: int) -> TaskGraph:
    """A training step of a network that classifies vectors."""
    return ml.record(classified(model, opt), np.zeros((samples, features), np.float32), np.zeros(samples, np.int64))
