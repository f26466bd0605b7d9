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
COMPILED = ("B3 reduce-overhead", "B4 max-autotune", "B5 torchsched")


def missing() -> str | None:
    """Why torch is missing; None if it is installed."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


class Theirs:
    """The torch side of one network: copies with the weights of our model, on `where` (cuda, or cpu to try it out).
    `memory_format`: the faster one of an earlier run."""

    def __init__(self, ours: Ours, where: str, memory_format: str | None = None) -> None:
        import torch
        import torch_twins

        self.torch, self.twins, self.ours, self.where, self.precision = torch, torch_twins, ours, where, ours.precision
        self.model, self.memory_format = ours.model(), memory_format
        self.format = torch.contiguous_format if memory_format is None else getattr(torch, FORMATS[memory_format])
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision.tf32

    # ------------------------------------------------------------------------------------------------- what is trained
    def network(self, dtype: Any = None, dropout: bool = True) -> Any:
        case, torch = self.ours.case, self.torch
        twin = self.twins.twin(case.model, case.complete())
        network = self.twins.load(twin, self.model).to(self.where, dtype or torch.float32).to(memory_format=self.format)
        rates = [layer.rate for layer in self.model.modules() if isinstance(layer, nn.Dropout)]
        if rates and dropout:
            network.classifier[2] = torch.nn.Dropout(rates[0])
        return network

    def with_loss(self, network: Any) -> Any:
        """The network with its loss, in the chosen precision, as one function, so that compilers see all of it."""
        torch, where, low = self.torch, self.where, self.precision.low

        class WithLoss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, x: Any, y: Any) -> Any:
                if low is None:
                    return torch.nn.functional.cross_entropy(self.network(x), y)
                with torch.autocast(where, getattr(torch, low), cache_enabled=False):  # every weight is used once
                    return torch.nn.functional.cross_entropy(self.network(x), y)

        return WithLoss()

    def optimizer(self, network: Any, fused: bool) -> Any:
        return self.torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=fused or None)

    def host(self, dtype: Any = None) -> list[tuple[Any, Any]]:
        """The batches as torch tensors, pinned if there is a GPU."""
        found = []
        for x, y in self.ours.batches:
            images = self.twins.images(x).to(dtype or self.torch.float32).contiguous(memory_format=self.format)
            labels = self.torch.from_numpy(y)
            found.append((images.pin_memory(), labels.pin_memory()) if self.where != "cpu" else (images, labels))
        return found

    def on_device(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = batch
        return x.to(self.where, non_blocking=True), y.to(self.where, non_blocking=True)

    def losses(self, steps: int, exact: bool) -> list[float]:
        """The losses of the first steps without dropout, in the chosen precision or in float64."""
        dtype = self.torch.float64 if exact else self.torch.float32
        network = self.network(dtype, dropout=False)
        self.torch.backends.cudnn.benchmark = False  # float64 has slow algorithms, and this is not timed
        opt, found = self.optimizer(network, False), []
        loss_of = ((lambda x, y: self.torch.nn.functional.cross_entropy(network(x), y)) if exact
                   else self.with_loss(network))
        for batch in itertools.islice(itertools.cycle(self.host(dtype)), steps):
            opt.zero_grad()
            loss = loss_of(*self.on_device(batch))
            loss.backward()
            opt.step()
            found.append(float(loss.detach()))
        return found

    # ------------------------------------------------------------------------------------------------------------ steps
    def eager(self, fused: bool) -> Callable[[], Any]:
        network = self.network()
        return self._loop(self.with_loss(network), self.optimizer(network, fused))

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

    def tuned(self) -> Callable[[], Any]:
        """A step that uses channels last if eager steps are faster with it."""
        if self.memory_format is None:
            seconds = {}
            for name, attribute in FORMATS.items():
                self.format = getattr(self.torch, attribute)
                step = self.eager(True)
                self.clock().seconds(step, 5)
                seconds[name] = min(self.clock().seconds(step, 10) for _ in range(3))
            self.memory_format = min(seconds, key=seconds.__getitem__)
            self.format = getattr(self.torch, FORMATS[self.memory_format])
        return self.eager(True)

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
        # otherwise earlier networks count as recompilations of this one, whose number is limited
        self.torch.compiler.reset()
        network = self.network()
        loss_of = self.torch.compile(self.with_loss(network), mode=mode)
        return self._loop(loss_of, self.optimizer(network, True), self.torch.compiler.cudagraph_mark_step_begin)

    def torchsched(self) -> Callable[[], Any]:
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
        step = make()
        for _ in range(3):
            step()
        clock = self.clock()
        clock.wait()
        about = {"memory_format": self.memory_format or "contiguous"}
        return Rung(step, clock, time.perf_counter() - begin,
                    cuda.max_memory_allocated() - before if cuda else None, about)


FORMATS = {"contiguous": "contiguous_format", "channels_last": "channels_last"}
