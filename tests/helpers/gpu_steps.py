"""A small training run, to be compared on devices, under executors and in orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidl as ml
from minidl import data, models, nn, optim, schedulers
from minidl.autograd.tape import Tape, use
from minidl.runtime.executors import SequentialExecutor

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda model: optim.SGD(model.parameters(), 0.1, momentum=0.9),
    "adamw": lambda model: optim.AdamW(model.parameters(), 0.01),
    "muon": lambda model: optim.Muon(nn.hidden_matrices(model)[0], 0.01, others=nn.hidden_matrices(model)[1])}


class Run:
    """A network on a device and its recorded step: same weights, same batches, wherever it runs."""

    def __init__(self, device: Any, model: str = "mlp", optimizer: str = "sgd", **arguments: Any) -> None:
        with use(Tape(device)):
            ml.seed(5)
            self.model = models.create(model, **(arguments or ({"hidden": 24} if model == "mlp" else {})))
            size, _, channels = self.model.input_shape
            self.batches = data.load("digits", batch_size=16, seed=5, image_size=size, channels=channels, classes=10)
            self.opt = OPTIMIZERS[optimizer](self.model)
            self.graph = ml.record(self.step, *next(self.batches))
        self.device = device

    def step(self, x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(self.model(x), y)
        loss.backward()
        self.opt.step()
        return loss

    def executor(self, kind: Any, schedule: Any = schedulers.multi_stream, **more: Any) -> Any:
        """An executor of this kind; `schedule(graph)` is its order."""
        return (SequentialExecutor(self.graph, self.device) if kind is SequentialExecutor
                else kind(self.graph, schedule(self.graph), device=self.device, **more))

    def train(self, run: Any, steps: int = 5) -> tuple[list[float], list[Any]]:
        """Losses, and the parameters at the end."""
        losses = []
        for n in range(steps):
            self.opt.lr = 0.1 / (n + 1)  # set while earlier steps may still run
            losses.append(run(*next(self.batches)))
        return [float(loss) for loss in losses], [p.numpy() for p in self.model.parameters()]


def trained(device: Any, kind: Any = SequentialExecutor, schedule: Any = schedulers.multi_stream, steps: int = 5,
            **arguments: Any) -> tuple[list[float], list[Any]]:
    """What a run leaves."""
    run = Run(device, **arguments)
    return run.train(run.executor(kind, schedule), steps)


def equal(a: Any, b: Any) -> bool:
    return a[0] == b[0] and all((p == q).all() for p, q in zip(a[1], b[1], strict=True))
