"""A training step on one GPU, rung by rung: torch from eager to its autotuning compiler, minidl from single launches to one fused graph.

    python bench/ladder.py [--models TEXT] [--seconds 20] [--budget SECONDS] [--strict] [--pairs estimated] [--no-compile] [--quick] [--resume] [--out FILE.json]

| rung | what |
|---|---|
| B0   | torch, eager |
| B1   | torch, eager, tuned: channels last if that is faster, fused optimizer |
| B2   | B1 as one CUDA graph |
| B3   | torch.compile, reduce-overhead |
| B4   | torch.compile, max-autotune |
| B5   | torch.compile with apex's torchsched as one CUDA graph, where apex is installed |
| E0a  | minidl, launch by launch, one stream |
| E0b  | the same launches on several streams, out of order |
| E1   | E0a as one CUDA graph |
| E2   | E0b as one CUDA graph |
| E3   | fused launches, as one CUDA graph |

SGD with momentum on random images, batch 32, float32; products and convolutions round their inputs to TF32 on both sides,
with `--strict` on neither. Each step takes its batch from the host's memory, torch from pinned memory. First correctness:
E0 to E2 must leave the same bits, and the losses of the first steps are held against torch in float64. Then time: groups
of steps between two events, rungs in turn. The record is written whenever something is finished; `--resume` goes on with
it. Needs a GPU; without one it says so and ends with 2.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from common import RESULTS, machine, ratio, save, sgd_step, spread

import minidl as ml
from minidl import models, nn, schedulers
from minidl.corun import CoRun
from minidl.crossing import steady
from minidl.device import DeviceError
from minidl.executors import GraphExecutor, SteadyExecutor, StreamExecutor
from minidl.fusion import fused
from minidl.measure_pairs import measure_pairs
from minidl.tape import Tape, use

BATCH = 32
CYCLE = 4  #: batches that steps take in turn
#: rungs and their schedules
PLAIN = ("E0a in_order", "E0b multi_stream", "E0b multi_region", "E1 in_order", "E2 multi_stream", "E2 multi_region")
FUSED = ("E3 in_order", "E3 multi_region")
#: rungs of which the second is meant to be faster
STEPS = (("E0a", "E0b"), ("E1", "E2"), ("E3 in_order", "E3 multi_region"), ("E0a", "E1"), ("E1", "E3"))
#: the first of these that is there stands for minidl against torch: chosen before anything is measured
BEST = ("E3 multi_region", "E2 multi_region", "E1 in_order", "E0b multi_region", "E0a in_order")
COMPARED = 3  #: steps whose losses are held against float64: later ones drift apart with any rounding
#: relative errors of a loss that are as good as none, without and with TF32
ROUNDING = {False: 1e-4, True: 1e-3}


@dataclass(frozen=True)
class Case:
    """A network and its batch size."""

    model: str
    arguments: Mapping[str, Any]
    batch: int = BATCH

    def complete(self) -> dict[str, Any]:
        """All arguments, those of the preset spelled out."""
        given = dict(self.arguments)
        preset = given.pop("preset", None)
        return {**models.arguments(self.model), **(models.preset_arguments(self.model, preset) if preset else {}), **given}


def _cases() -> dict[str, Case]:
    """The small images of both networks first, then both at full size, then what lies between."""
    order = [("m", 0.25, 32), ("d", 12, 32), ("m", 1.0, 224), ("d", 32, 224), ("m", 1.0, 32), ("d", 32, 32), ("m", 0.25, 224), ("d", 12, 224),
             ("m", 0.5, 32), ("m", 0.75, 32), ("d", 24, 32), ("m", 0.5, 224), ("m", 0.75, 224), ("d", 24, 224)]
    kinds = {"m": ("mobilenet_v3_large", "width", "a"), "d": ("densenet121", "growth", "k")}
    found = {}
    for kind, value, size in order:
        name, argument, letter = kinds[kind]
        case = Case(name, {argument: value, "image_size": size, "classes": 10 if size == 32 else 1000})
        found[f"{name} {letter}{value:g} {size}px b{BATCH}"] = case
    return found


CASES = _cases()


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds for a network and of warming up each rung, steps in a group, groups at least, steps
    after which bits are compared, single steps whose cost on the host is taken."""

    seconds: float = 20.0
    warm_up: float = 1.0
    group: int = 20
    groups: int = 10
    steps: int = 50
    single: int = 30


QUICK = Effort(seconds=2.0, warm_up=0.2, group=5, groups=3, steps=10, single=5)


# ---------------------------------------------------------------------------------------------------------------- clocks
class HostClock:
    """For devices whose steps are done when they return."""

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        """Of one step, when `times` are issued in a row."""
        begin = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - begin) / times

    def wait(self) -> None:
        """Until all that was issued is done."""


class DeviceClock:
    """Between two events on the main stream of one of our devices: a step ends there."""

    def __init__(self, device: Any) -> None:
        self.driver, self.main = device.driver, device.main
        self.begin, self.end = self.driver.event(True), self.driver.event(True)
        self.start, self.stop = self.driver.record(self.begin, self.main), self.driver.record(self.end, self.main)

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        self.start()
        for _ in range(times):
            step()
        self.stop()
        self.wait()
        return float(self.driver.elapsed(self.begin, self.end)) / 1e6 / times

    def wait(self) -> None:
        self.driver.synchronize(self.main)


class TorchClock:
    """Between two events on torch's stream."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, step: Callable[[], Any], times: int) -> float:
        self.begin.record()
        for _ in range(times):
            step()
        self.end.record()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1e3 / times

    def wait(self) -> None:
        self.torch.cuda.synchronize()


@dataclass
class Rung:
    """A way to run a step, with weights of its own. `step()` issues one on the next batch and waits for nothing;
    `ready_s`: what it took to get there (recording, planning, capturing, compiling)."""

    step: Callable[[], Any]
    clock: Any
    ready_s: float
    peak_bytes: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None

    def host_us(self, times: int) -> list[float]:
        """Microseconds that the caller spends on single steps, each issued to a device that has nothing to do."""
        found = []
        for _ in range(times):
            self.clock.wait()
            begin = time.perf_counter()
            self.step()
            found.append((time.perf_counter() - begin) * 1e6)
        return found


def batches(case: Case, shape: Sequence[int], classes: int) -> list[tuple[Any, Any]]:
    """Random images (n, h, w, c) and labels."""
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((case.batch, *shape), np.float32), rng.integers(0, classes, case.batch)) for _ in range(CYCLE)]


# ---------------------------------------------------------------------------------------------------------------- minidl
class Ours:
    """The minidl side of one network: trainings that all begin with the same weights and batches."""

    def __init__(self, case: Case, device: Any) -> None:
        self.case, self.device = case, device
        model = self._model()
        self.batches = batches(case, model.input_shape, model.classes)

    def _model(self) -> Any:
        with use(Tape(self.device)):
            ml.seed(0)
            return models.create(self.case.model, **self.case.arguments)

    def recorded(self, dropout: bool = True) -> tuple[Any, Any]:
        """A model with its first weights, and a step of it as a graph."""
        model = self._model()
        for layer in model.modules():
            if isinstance(layer, nn.Dropout) and not dropout:
                layer.eval()
        with use(Tape(self.device)):
            return model, ml.record(sgd_step(model), *self.batches[0])

    def executor(self, graph: Any, schedule: Any, lanes: type[StreamExecutor]) -> Any:
        border = steady(graph, schedule).border
        if border is None:
            return lanes(graph, schedule, device=self.device)
        return SteadyExecutor(border, schedule.only, device=self.device, lanes=lanes)

    def rung(self, schedule: Any, lanes: type[StreamExecutor], change: Callable[[Any, Any], Any] | None = None) -> tuple[Rung, Any]:
        """And its model. `change(graph, device)`: a pass that the recorded graph goes through."""
        begin = time.perf_counter()
        model, graph = self.recorded()
        graph = change(graph, self.device) if change else graph
        run = self.executor(graph, schedule, lanes)
        turn = itertools.cycle(self.batches)
        clock = DeviceClock(self.device) if self.device.captures else HostClock()
        rung = Rung(lambda: run(*next(turn)), clock, time.perf_counter() - begin, run.peak_bytes, {"tasks": len(graph)}, run.close)
        return rung, model

    def losses(self, steps: int) -> list[float]:
        """Of the first steps, without dropout: what torch is compared with."""
        _, graph = self.recorded(dropout=False)
        run = self.executor(graph, schedulers.in_order(graph), StreamExecutor)
        found = [float(run(*batch)) for batch in itertools.islice(itertools.cycle(self.batches), steps)]
        run.close()
        return found


def measured_costs(graph: Any, device: Any, estimated: bool = False) -> Any:
    """Of tasks, and of pairs side by side: measured too, or estimated from flops and bytes."""
    cost = ml.CostModel.measure(graph, device=device)
    groups, pairs = schedulers.profile_groups(graph, cost)
    return replace(cost, corun=CoRun.estimated(graph, groups, pairs) if estimated else measure_pairs(graph, cost, groups, pairs, device=device))


def plans(graph: Any, cost: Any) -> dict[str, Any]:
    return {"in_order": schedulers.in_order(graph), "multi_stream": schedulers.multi_stream(graph, cost=cost),
            "multi_region": schedulers.multi_region(graph, cost)}


def predicted_ms(graph: Any, schedule: Any, cost: Any) -> float:
    run = steady(graph, schedule)
    return round(float(ml.simulate(run.graph, run.schedule, cost).makespan + cost.step) / 1e3, 5)


def our_rungs(ours: Ours, costs: Callable[[Any, Any], Any], effort: Effort, rounding: float) -> tuple[dict[str, Rung], dict[str, Any]]:
    """All rungs that the device can have, trained for the steps that are compared, and what is known of them. One that
    fails is left out and says why."""
    rungs: dict[str, Rung] = {}
    bits: dict[str, bytes] = {}
    losses: dict[str, list[float]] = {}
    about: dict[str, Any] = {"planning_s": 0.0, "predicted_ms": {}, "left_out": {}}
    captures = ours.device.captures

    def trained(names: Sequence[str], change: Callable[[Any, Any], Any] | None) -> int:
        """The number of tasks."""
        _, graph = ours.recorded()
        graph = change(graph, ours.device) if change else graph
        begin = time.perf_counter()
        cost = costs(graph, ours.device)
        made = plans(graph, cost)
        about["planning_s"] = round(about["planning_s"] + time.perf_counter() - begin, 3)
        for name in names:
            schedule, lanes = made[name.split()[1]], StreamExecutor if name.startswith("E0") else GraphExecutor
            try:
                rung, model = ours.rung(schedule, lanes, change)
                losses[name] = [float(rung.step()) for _ in range(min(COMPARED, effort.steps))]
                for _ in range(effort.steps - COMPARED):
                    rung.step()
                bits[name] = b"".join(p.numpy().tobytes() for p in model.parameters())
            except Exception as error:  # the others are worth measuring; `passed` is False
                about["left_out"][name] = said(error)
                continue
            rungs[name] = rung
            if lanes is GraphExecutor:
                about["predicted_ms"][name] = predicted_ms(graph, schedule, cost)
        return len(graph)

    about["tasks"] = trained(PLAIN if captures else [name for name in PLAIN if name.startswith("E0")], None)
    if captures:
        try:
            about["fused_tasks"] = trained(FUSED, fused)
        except Exception as error:
            about["left_out"]["E3"] = said(error)
    if not any(name in PLAIN for name in rungs):
        raise RuntimeError(f"no rung runs: {about['left_out']}")
    plain = [name for name in bits if name in PLAIN]
    apart = {name: _apart(losses[name], losses[plain[0]]) for name in bits if name in FUSED}
    about["correct"] = {"steps": effort.steps, "rungs": plain, "equal_bits": len({bits[name] for name in plain}) == 1,
                        "finite": bool(np.isfinite([losses[name] for name in bits]).all()),
                        **({"fused_losses_apart": apart, "fused_agrees": max(apart.values()) <= rounding} if apart else {})}
    return rungs, about


def said(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.subtract(found, wanted)) / np.abs(wanted)))


# ----------------------------------------------------------------------------------------------------------------- torch
class Theirs:
    """The torch side of one network: twins with the weights of our model, on `where` (cuda, or cpu to try it out)."""

    def __init__(self, ours: Ours, where: str, tf32: bool) -> None:
        import torch
        import torch_twins

        self.torch, self.twins, self.ours, self.where = torch, torch_twins, ours, where
        self.model = ours._model()
        self.format = torch.contiguous_format
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True

    def network(self, dtype: Any = None, dropout: bool = True) -> Any:
        case, torch = self.ours.case, self.torch
        twin = self.twins.twin(case.model, case.complete())
        network = self.twins.load(twin, self.model).to(self.where, dtype or torch.float32).to(memory_format=self.format)
        rates = [layer.rate for layer in self.model.modules() if isinstance(layer, nn.Dropout)]
        if rates and dropout:
            network.classifier[2] = torch.nn.Dropout(rates[0])
        return network

    def host(self, dtype: Any = None) -> list[tuple[Any, Any]]:
        """The batches as torch reads them, pinned where a GPU is."""
        found = []
        for x, y in self.ours.batches:
            images = self.twins.images(x).to(dtype or self.torch.float32).contiguous(memory_format=self.format)
            labels = self.torch.from_numpy(y)
            found.append((images.pin_memory(), labels.pin_memory()) if self.where != "cpu" else (images, labels))
        return found

    def optimizer(self, network: Any, fused: bool) -> Any:
        return self.torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=fused or None)

    def on_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = batch
        return x.to(self.where, non_blocking=True), y.to(self.where, non_blocking=True)

    def losses(self, steps: int, dtype: Any) -> list[float]:
        network = self.network(dtype, dropout=False)
        opt, found = self.optimizer(network, False), []
        for batch in itertools.islice(itertools.cycle(self.host(dtype)), steps):
            opt.zero_grad()
            x, y = self.on_device(batch)
            loss = self.torch.nn.functional.cross_entropy(network(x), y)
            loss.backward()
            opt.step()
            found.append(float(loss.detach()))
        return found

    def eager(self, fused: bool) -> Callable[[], Any]:
        network = self.network()
        return self._loop(self.with_loss(network), self.optimizer(network, fused))

    def with_loss(self, network: Any) -> Any:
        """The network with its loss, which compilers then see too."""
        torch = self.torch

        class WithLoss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, x: Any, y: Any) -> Any:
                return torch.nn.functional.cross_entropy(self.network(x), y)

        return WithLoss()

    def _loop(self, loss_of: Any, opt: Any, before: Callable[[], None] = lambda: None) -> Callable[[], Any]:
        turn = itertools.cycle(self.host())

        def step() -> Any:
            before()
            opt.zero_grad(set_to_none=True)
            loss = loss_of(*self.on_device(next(turn)))
            loss.backward()
            opt.step()
            return loss

        return step

    def choose_format(self) -> str:
        """Channels last where eager steps are faster with them."""
        torch, seconds = self.torch, {}
        for name, self.format in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
            step = self.eager(True)
            self.clock().seconds(step, 5)
            seconds[name] = min(self.clock().seconds(step, 10) for _ in range(3))
        fastest = min(seconds, key=seconds.__getitem__)
        self.format = torch.channels_last if fastest == "channels_last" else torch.contiguous_format
        return fastest

    def captured(self, compiled: Callable[[Any], Any] = lambda loss_of: loss_of) -> Callable[[], Any]:
        """The whole step as one graph."""
        torch, network = self.torch, self.network()
        loss_of, opt, hosts = compiled(self.with_loss(network)), self.optimizer(network, True), self.host()
        x, y = self.on_device(hosts[0])

        def body() -> Any:
            loss = loss_of(x, y)
            loss.backward()
            opt.step()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                opt.zero_grad(set_to_none=True)
                body()
        torch.cuda.current_stream().wait_stream(side)
        opt.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = body()
        turn = itertools.cycle(hosts)

        def step() -> Any:
            images, labels = next(turn)
            x.copy_(images, non_blocking=True)
            y.copy_(labels, non_blocking=True)
            graph.replay()
            return loss

        return step

    def compiled(self, mode: str) -> Callable[[], Any]:
        network = self.network()
        loss_of = self.torch.compile(self.with_loss(network), mode=mode)
        return self._loop(loss_of, self.optimizer(network, True), self.torch.compiler.cudagraph_mark_step_begin)

    def torchsched(self) -> Callable[[], Any]:
        importlib.import_module("apex.contrib.torchsched")  # registers its backend
        return self.captured(lambda loss_of: self.torch.compile(loss_of, backend="torchsched"))

    def clock(self) -> Any:
        return HostClock() if self.where == "cpu" else TorchClock(self.torch)

    def rung(self, make: Callable[[], Callable[[], Any]], **about: Any) -> Rung:
        """Made and run three times, since compilers work at the first calls. Raises what torch raises."""
        cuda = self.torch.cuda if self.where != "cpu" else None
        if cuda:
            gc.collect()
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
        begin = time.perf_counter()
        step = make()
        for _ in range(3):
            step()
        clock = self.clock()
        clock.wait()
        ready = time.perf_counter() - begin
        return Rung(step, clock, ready, cuda.max_memory_allocated() - before if cuda else None, about)

    def eager_rungs(self) -> Iterator[tuple[str, Callable[[], Rung]]]:
        yield "B0 eager", lambda: self.rung(lambda: self.eager(False))
        yield "B1 tuned", lambda: self.rung(lambda: self.eager(True), memory_format=self.choose_format())
        yield "B2 graph", lambda: self.rung(self.captured)

    def compiled_rungs(self) -> Iterator[tuple[str, Callable[[], Rung]]]:
        yield "B3 reduce-overhead", lambda: self.rung(lambda: self.compiled("reduce-overhead"))
        yield "B4 max-autotune", lambda: self.rung(lambda: self.compiled("max-autotune"))
        if importlib.util.find_spec("apex"):
            yield "B5 torchsched", lambda: self.rung(self.torchsched)

    def agreement(self, ours: Sequence[float], rounding: float) -> dict[str, Any]:
        """Errors of the first losses against float64: ours may be twice torch's own."""
        exact = self.losses(len(ours), self.torch.float64)
        mine, its = _apart(ours, exact), _apart(self.losses(len(ours), self.torch.float32), exact)
        return {"steps": len(ours), "float64": exact, "error": mine, "error_of_torch": its, "agrees": mine <= max(2 * its, rounding)}


# --------------------------------------------------------------------------------------------------------------- measured
def interleaved(rungs: Mapping[str, Rung], effort: Effort, warm: set[str]) -> dict[str, list[float]]:
    """Seconds of a step, groups of all rungs in turn. `warm`: those that have been warmed up, to which all are added."""
    for name, rung in rungs.items():
        end = time.perf_counter() + effort.warm_up
        while name not in warm and time.perf_counter() < end:
            rung.clock.seconds(rung.step, effort.group)
        warm.add(name)
    samples: dict[str, list[float]] = {name: [] for name in rungs}
    end, count = time.perf_counter() + effort.seconds, 0
    while count < effort.groups or time.perf_counter() < end:
        for name, rung in rungs.items():
            samples[name].append(rung.clock.seconds(rung.step, effort.group))
        count += 1
    return samples


def compared(samples: Mapping[str, list[float]], entry: dict[str, Any]) -> None:
    """Times and their ratios into the entry. `fair`: the fastest of torch's tuned rungs against ours."""
    entry["step_ms"] = {name: spread(s) for name, s in samples.items()}
    ratios = {f"{slow} / {fast}": ratio(samples, slow, fast) for kinds in STEPS
              for slow in samples if slow.startswith(kinds[0]) for fast in samples if fast.startswith(kinds[1])}
    best, peers = next(name for name in BEST if name in samples), [name for name in samples if name[0] == "B" and not name.startswith("B0")]
    for peer in (name for name in samples if name[0] == "B"):
        ratios[f"{peer} / {best}"] = ratio(samples, peer, best)
    entry["ratios"], entry["minidl"] = ratios, best
    if peers:
        entry["fastest_torch"] = min(peers, key=lambda name: statistics.median(samples[name]))
        entry["fair"] = ratios[f"{entry['fastest_torch']} / {best}"]


def climbed(case: Case, device: Any, *, effort: Effort, costs: Callable[[Any, Any], Any] = measured_costs, torch_on: str | None = "cuda",
            compile_too: bool = True, tf32: bool = True, left: Callable[[], float] = lambda: math.inf,
            keep: Callable[[dict[str, Any]], None] = lambda entry: None) -> dict[str, Any]:
    """The record of one network. `keep` gets it whenever something is finished; `left`: seconds that may still be spent
    before another compiler is started; `torch_on`: None for minidl alone."""
    ours = Ours(case, device)
    rungs, about = our_rungs(ours, costs, effort, ROUNDING[tf32])
    entry: dict[str, Any] = {"batch": case.batch, "tf32": tf32, **about, "finished": False}
    warm: set[str] = set()

    def add(name: str, make: Callable[[], Rung]) -> None:
        try:
            rungs[name] = make()
        except Exception as error:  # a compiler that fails is no reason to measure nothing
            entry["left_out"][name] = said(error)

    def measure() -> None:
        compared(interleaved(rungs, effort, warm), entry)
        entry["host_us"] = {name: spread(rung.host_us(effort.single), 1.0) for name, rung in rungs.items()}
        entry["ready_s"] = {name: round(rung.ready_s, 3) for name, rung in rungs.items()}
        entry["peak_bytes"] = {name: rung.peak_bytes for name, rung in rungs.items()}
        entry["about"] = {name: rung.about for name, rung in rungs.items()}
        keep(entry)

    try:
        theirs = None
        if torch_on is None or importlib.util.find_spec("torch") is None:
            entry["left_out"]["torch"] = "not installed" if torch_on else "not asked for"
        else:
            theirs = Theirs(ours, torch_on, tf32)
            entry["correct"]["losses"] = theirs.agreement(ours.losses(min(COMPARED, effort.steps)), ROUNDING[tf32])
            for name, make in theirs.eager_rungs():
                add(name, make)
        measure()
        if theirs and compile_too:
            late = []
            for name, make in theirs.compiled_rungs():
                if left() > 0:
                    add(name, make)
                else:
                    late.append(name)
            entry["left_out"] |= dict.fromkeys(late, "no time was left")
            entry["finished"] = not late
            measure()
        else:
            entry["finished"] = True
            keep(entry)
    finally:
        for rung in rungs.values():
            rung.close()
    return entry


def give_back(device: Any) -> None:
    """Memory that allocators keep of a network that is done."""
    gc.collect()
    pool = getattr(device.xp, "get_default_memory_pool", None)
    if pool:
        pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def passed(entry: Mapping[str, Any]) -> bool:
    """Whether all that was checked of a network is right."""
    correct = entry["correct"]
    agree = correct.get("fused_agrees", True) and correct.get("losses", {}).get("agrees", True)
    return bool(correct["equal_bits"] and correct["finite"] and agree and not any(name.startswith("E") for name in entry["left_out"]))


def summary(networks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and worst of each ratio of medians over the networks that have it."""
    wanted: dict[str, list[float]] = {}
    for entry in networks.values():
        ratios = dict(entry.get("ratios", {}))
        if "fair" in entry:
            ratios["fair"] = entry["fair"]
        for name, value in ratios.items():
            wanted.setdefault(name, []).append(value["median"])
    return {name: {"geometric_mean": round(math.exp(statistics.fmean(map(math.log, values))), 4), "worst": min(values), "networks": len(values)}
            for name, values in wanted.items()}


def shown(label: str, entry: Mapping[str, Any]) -> str:
    """A network's table, as text."""
    correct = entry["correct"]
    lines = [f"\n{label}   {entry['tasks']} tasks, {entry.get('fused_tasks', 'not')} fused; equal bits: {correct['equal_bits']}"
             + (f"; losses agree with torch: {correct['losses']['agrees']}" if "losses" in correct else "")]
    for name, s in entry["step_ms"].items():
        peak, predicted = entry["peak_bytes"][name], entry["predicted_ms"].get(name)
        lines.append(f"  {name:20} {s['median']:9.3f} ms   p10 {s['p10']:9.3f}   p90 {s['p90']:9.3f}   n {s['n']:4}   host {entry['host_us'][name]['median']:9.1f} us"
                     f"   ready {entry['ready_s'][name]:7.1f} s   peak {f'{peak / 2**20:9.1f} MiB' if peak is not None else '-':>13}"
                     + (f"   predicted {predicted:9.3f}" if predicted is not None else ""))
    lines += [f"  {name:44} {r['median']:7.3f}x   p10 {r['p10']:7.3f}   p90 {r['p90']:7.3f}" for name, r in entry["ratios"].items()]
    lines += [f"  left out: {name}: {why}" for name, why in entry["left_out"].items()]
    return "\n".join(lines)


def described(device: Any) -> dict[str, Any]:
    """The machine with its GPU, and versions of what runs there."""
    found = {**machine(), "gpu": device.driver.describe()}
    for name in ("cudnn", "torch"):
        if importlib.util.find_spec(name):
            module = importlib.import_module(name)
            found["versions"][name] = module.backend_version() if name == "cudnn" else module.__version__
    return found


def climb(cases: Mapping[str, Case], device: Any, about: Mapping[str, Any], path: str | None, *, budget: float = math.inf, resume: bool = False,
          **options: Any) -> dict[str, Any]:
    """All networks, as far as the budget reaches; what a record at `path` holds of the same commit and arithmetic stays
    where `resume` is given, and what was not finished there comes last."""
    begin = time.perf_counter()
    tf32 = options.get("tf32", True)
    record: dict[str, Any] = {"machine": dict(about), "tf32": tf32, "networks": _earlier(path, about, tf32) if resume else {}, "failed": {}}
    todo = [label for label in cases if label not in record["networks"]]
    todo += [label for label in cases if label in record["networks"] and not record["networks"][label]["finished"]]

    def left() -> float:
        return budget - (time.perf_counter() - begin)

    def store() -> None:
        record["summary"] = summary(record["networks"])
        record["passed"] = not record["failed"] and all(map(passed, record["networks"].values()))
        save("ladder", record, path)

    def keep(entry: dict[str, Any]) -> None:
        record["networks"][label] = entry
        store()

    for label in todo:
        if left() <= 0:
            print(f"no time is left for {label}", file=sys.stderr)
            continue
        try:
            print(shown(label, climbed(cases[label], device, left=left, keep=keep, **options)), flush=True)
        except Exception as error:  # one network's failure is not the others'
            record["failed"][label] = said(error)
            store()
            print(f"{label} failed: {said(error)}", file=sys.stderr)
        give_back(device)
    return record


def _earlier(path: str | None, about: Mapping[str, Any], tf32: bool) -> dict[str, Any]:
    """The networks of a record that this run may go on with."""
    target = Path(path) if path else RESULTS / "ladder.json"
    if not target.exists():
        return {}
    record = json.loads(target.read_text())
    same = record["machine"].get("commit") == about.get("commit") and record["tf32"] == tf32
    return dict(record["networks"]) if same else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", metavar="cuda[:N]")
    parser.add_argument("--models", metavar="TEXT", default="", help="networks whose name contains this")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, per network")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="after which no network and no compiler is started")
    parser.add_argument("--strict", action="store_true", help="float32 without TF32, on both sides")
    parser.add_argument("--pairs", choices=["measured", "estimated"], default="measured", help="how much tasks slow each other down, for multi_region")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: few steps, times that mean little")
    parser.add_argument("--resume", action="store_true", help="go on with the record that is there")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    try:
        device = ml.device.get(arguments.device)
        if not device.captures:
            raise DeviceError(f"the ladder is for a GPU; {device.name} is none")
    except (DeviceError, ValueError) as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 2
    cases = {label: case for label, case in CASES.items() if arguments.models in label}
    if not cases:
        print(f"ladder: no network's name contains {arguments.models!r}; there are: {', '.join(CASES)}", file=sys.stderr)
        return 2
    device.tf32 = not arguments.strict
    record = climb(cases, device, described(device), arguments.out, budget=arguments.budget, resume=arguments.resume, tf32=not arguments.strict,
                   effort=QUICK if arguments.quick else Effort(seconds=arguments.seconds), compile_too=not arguments.no_compile,
                   costs=partial(measured_costs, estimated=arguments.pairs == "estimated"))
    for name, value in record.get("summary", {}).items():
        print(f"{name:44} {value['geometric_mean']:7.3f}x geometric mean   {value['worst']:7.3f}x worst   {value['networks']} networks")
    return 0 if record.get("passed") else 1


if __name__ == "__main__":
    sys.exit(main())
