"""The rungs of torch: eager, tuned, as one CUDA graph, and by its compilers."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable
from typing import Any

from ladder_minidl import Ours
from ladder_rungs import HostClock, Rung, TorchClock

from minidl import nn

EAGER = ("B0 eager", "B1 tuned", "B2 graph")
Steps = tuple[Callable[[], Any], Callable[[], Any]]  #: a step on the next batch, and one on a batch on the device
COMPILED = ("B3 reduce-overhead", "B4 max-autotune", "B5 torchsched")


def missing() -> str | None:
    """Why torch is missing; None if it is installed."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def twins(model: Any) -> str:
    """The module with torch's twin of one of our models."""
    return "torch_language" if model.input_dtype == "int64" else "torch_twins"


class Prefetched:
    """Batches on the device, one after another: the next one is copied on a stream of its own while the step of the
    last one runs, as `minidl.devices.cuda.device.Feed` does. Without a GPU it is copied at once."""

    def __init__(self, torch: Any, hosts: list[tuple[Any, Any]], where: str) -> None:
        self.torch, self.turn, self.at = torch, itertools.cycle(hosts), 0
        self.slots = [tuple(torch.empty_like(array, device=where) for array in hosts[0]) for _ in range(2)]
        self.stream = torch.cuda.Stream() if where != "cpu" else None
        self.ready = [torch.cuda.Event() for _ in self.slots] if self.stream else []
        self._copy(0)

    def _copy(self, slot: int) -> None:
        if self.stream is None:
            for place, array in zip(self.slots[slot], next(self.turn), strict=True):
                place.copy_(array)
            return
        self.stream.wait_stream(self.torch.cuda.current_stream())  # the step before the last one has used the slot
        with self.torch.cuda.stream(self.stream):
            for place, array in zip(self.slots[slot], next(self.turn), strict=True):
                place.copy_(array, non_blocking=True)
            self.ready[slot].record()

    def __call__(self) -> tuple[Any, Any]:
        slot, self.at = self.at, 1 - self.at
        if self.stream:
            self.torch.cuda.current_stream().wait_event(self.ready[slot])
        self._copy(self.at)
        images, labels = self.slots[slot]
        return images, labels


class Theirs:
    """The torch side of one network: copies with the weights of our model, on `where` (cuda, or cpu to try it out).
    `memory_format`: the faster one of an earlier run."""

    def __init__(self, ours: Ours, where: str, memory_format: str | None = None) -> None:
        import torch

        self.torch, self.ours, self.where, self.precision = torch, ours, where, ours.precision
        self.model, self.memory_format = ours.model(), memory_format
        self.twins = importlib.import_module(twins(self.model))
        self.format = torch.contiguous_format if memory_format is None else getattr(torch, FORMATS[memory_format])
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision.tf32

    # ------------------------------------------------------------------------------------------------- what is trained
    def network(self, dtype: Any = None, dropout: bool = True) -> Any:
        case, torch = self.ours.case, self.torch
        twin = self.twins.twin(case.model, case.complete())
        network = self.twins.load(twin, self.model).to(self.where, dtype or torch.float32).to(memory_format=self.format)
        rates = [layer.p for layer in self.model.modules() if isinstance(layer, nn.Dropout) and layer.p]
        if rates and dropout:
            network.classifier[2] = torch.nn.Dropout(rates[0])
        return network

    def with_loss(self, network: Any, low: str | None) -> Any:
        """The network with its loss as one function, so that compilers see all of it. `low`: the type of products in
        mixed precision."""
        torch, where = self.torch, self.where

        class WithLoss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, x: Any, y: Any) -> Any:
                if low is None:
                    return self.loss(x, y)
                with torch.autocast(where, getattr(torch, low), cache_enabled=False):  # every weight is used once
                    return self.loss(x, y)

            def loss(self, x: Any, y: Any) -> Any:
                return torch.nn.functional.cross_entropy(self.network(x).flatten(0, -2), y)

        return WithLoss()

    def optimizer(self, network: Any, fused: bool) -> Any:
        return self.torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=fused or None)

    def host(self, dtype: Any = None) -> list[tuple[Any, Any]]:
        """The batches as torch tensors, pinned if there is a GPU."""
        found = []
        for x, y in self.ours.batches:
            inputs, labels = self.inputs(x, dtype or self.torch.float32), self.torch.from_numpy(y)
            found.append((inputs.pin_memory(), labels.pin_memory()) if self.where != "cpu" else (inputs, labels))
        return found

    def inputs(self, x: Any, dtype: Any) -> Any:
        """Tokens as they are; images in the type and memory format of the network."""
        if self.model.input_dtype == "int64":
            return self.torch.from_numpy(x)
        return self.twins.images(x).to(dtype).contiguous(memory_format=self.format)

    def on_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = batch
        return x.to(self.where, non_blocking=True), y.to(self.where, non_blocking=True)

    def losses(self, steps: int, exact: bool) -> list[float]:
        """The losses of the first steps without dropout, in the chosen precision or in float64."""
        dtype = self.torch.float64 if exact else self.torch.float32
        network = self.network(dtype, dropout=False)
        self.torch.backends.cudnn.benchmark = False  # float64 has slow algorithms, and this is not timed
        opt, found = self.optimizer(network, False), []
        loss_of = self.with_loss(network, None if exact else self.precision.low)
        for batch in itertools.islice(itertools.cycle(self.host(dtype)), steps):
            opt.zero_grad()
            loss = loss_of(*self.on_device(batch))
            loss.backward()
            opt.step()
            found.append(float(loss.detach()))
        return found

    # ------------------------------------------------------------------------------------------------------------ steps
    def eager(self, fused: bool) -> Steps:
        network = self.network()
        return self._loop(self.with_loss(network, self.precision.low), self.optimizer(network, fused))

    def _loop(self, loss_of: Any, opt: Any, before: Callable[[], None] = lambda: None) -> Steps:
        hosts = self.host()
        batches, resident = Prefetched(self.torch, hosts, self.where), self.on_device(hosts[0])

        def step(batch: tuple[Any, Any]) -> Any:
            before()
            opt.zero_grad(set_to_none=True)
            loss = loss_of(*batch)
            loss.backward()
            opt.step()
            return loss

        return lambda: step(batches()), lambda: step(resident)

    def tuned(self) -> Steps:
        """A step that uses channels last if eager steps are faster with it."""
        self.choose_format()
        return self.eager(True)

    def choose_format(self) -> None:
        """Once for all later rungs; tokens have no format."""
        if self.memory_format is None and self.model.input_dtype != "int64":
            seconds = {}
            for name, attribute in FORMATS.items():
                self.format = getattr(self.torch, attribute)
                step, _ = self.eager(True)
                self.clock().seconds(step, 5)
                seconds[name] = min(self.clock().seconds(step, 10) for _ in range(3))
            self.memory_format = min(seconds, key=seconds.__getitem__)
            self.format = getattr(self.torch, FORMATS[self.memory_format])

    def captured(self, compiled: Callable[[Any], Any] = lambda loss_of: loss_of) -> Steps:
        """The whole step as one graph."""
        self.choose_format()
        torch, network = self.torch, self.network()
        loss_of = compiled(self.with_loss(network, self.precision.low))
        opt, hosts = self.optimizer(network, True), self.host()
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
        batches = Prefetched(torch, hosts, self.where)

        def step() -> Any:
            images, labels = batches()
            x.copy_(images, non_blocking=True)
            y.copy_(labels, non_blocking=True)
            graph.replay()
            return loss

        return step, graph.replay

    def compiled(self, mode: str) -> Steps:
        # otherwise earlier networks count as recompilations of this one, whose number is limited
        self.torch.compiler.reset()
        network = self.network()
        loss_of = self.torch.compile(self.with_loss(network, self.precision.low), mode=mode)
        return self._loop(loss_of, self.optimizer(network, True), self.torch.compiler.cudagraph_mark_step_begin)

    def torchsched(self) -> Steps:
        if importlib.util.find_spec("apex") is None:
            raise ImportError("apex is not installed")
        importlib.import_module("apex.contrib.torchsched")  # registers its backend
        self.torch.compiler.reset()
        return self.captured(lambda loss_of: self.torch.compile(loss_of, backend="torchsched"))

    # ------------------------------------------------------------------------------------------------------------ rungs
    def clock(self) -> Any:
        return HostClock() if self.where == "cpu" else TorchClock(self.torch)

    def rung(self, name: str) -> Rung:
        """A rung after three steps, since compilers work in the first calls. Raises torch's errors."""
        make = {"B0 eager": lambda: self.eager(False), "B1 tuned": self.tuned, "B2 graph": self.captured,
                "B3 reduce-overhead": lambda: self.compiled("reduce-overhead"),
                "B4 max-autotune": lambda: self.compiled("max-autotune"), "B5 torchsched": self.torchsched}[name]
        self.torch.backends.cudnn.benchmark = True
        cuda = self.torch.cuda if self.where != "cpu" else None
        if cuda:
            gc.collect()
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
        begin = time.perf_counter()
        step, resident = make()
        for _ in range(3):
            step()
            resident()
        clock = self.clock()
        clock.wait()
        about = {"memory_format": self.memory_format or "contiguous"}
        return Rung(step, clock, time.perf_counter() - begin,
                    cuda.max_memory_allocated() - before if cuda else None, about, resident=resident)


FORMATS = {"contiguous": "contiguous_format", "channels_last": "channels_last"}
