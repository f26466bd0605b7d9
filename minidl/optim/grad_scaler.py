"""Loss scaling: the loss is multiplied so that float16 keeps small gradients, and the gradients are divided again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..autograd import tape as tapes
from ..autograd.recording import Watched
from ..autograd.tensor import Node, Tensor, host_storage, new
from ..core.graph import Role
from ..core.tasks import Kind


class GradScaler(Watched):
    """Dynamic loss scaling (Micikevicius et al. 2018), with the names and numbers of torch's GradScaler.

        opt = optim.SGD(model.parameters(), lr, scaler=scaler)
        loss.backward(scaler.scale)    # all gradients times the scale
        opt.step()                     # divided by it again

    If a gradient is not finite, the step changes only the scale, which is multiplied by `backoff_factor`. After
    `growth_interval` good steps it is multiplied by `growth_factor`. Kernels on buffers do all this, so a recorded step
    does it too, and the host never waits for the device. Several optimizers may share a scaler: the gradients of one
    backward are all divided by the scale that it read, and each step updates the scale.
    """

    def __init__(self, init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000) -> None:
        if not (np.isfinite(init_scale) and init_scale > 0 and growth_factor > 1 > backoff_factor > 0
                and growth_interval >= 1):
            raise ValueError(f"a loss scale of {init_scale} that grows by {growth_factor} after {growth_interval} "
                             f"steps and shrinks by {backoff_factor}; it must be above 0, grow by more than 1 after at "
                             f"least 1 and shrink by less than 1")
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._scale = Tensor(host_storage(np.full(1, init_scale, np.float32), Role.SCALAR, "loss scale"))
        self._good = Tensor(host_storage(np.zeros(1, np.int32), Role.SCALAR, "good steps"))
        #: the scale before the last step, and until when gradients are of that
        self._used: tuple[Any, Tensor] | None = None

    @property
    def scale(self) -> Tensor:
        """The scale of the next backward, a scalar."""
        return Tensor(self._scale.storage, ())

    def unscale(self, gradients: Sequence[Tensor]) -> Tensor:
        """Emits a task that divides the gradients by the scale, in place, and updates the scale. Returns a flag (1,)
        int32: 1 if one of them is not finite."""
        tape = tapes.current()
        flag = new("not finite", [1], "int32", Role.GRADIENT)
        now = tape, Node.latest
        with tape.task(tape.new_unit("loss scale"), Kind.U):
            if self._used is None or self._used[0] != now:
                self._used = now, tape.call("copy", [self._scale], [new("loss scale", [1], "float32", Role.GRADIENT)])
            tape.call("unscale", [*gradients, self._used[1]], [*gradients, flag])
            tape.call("scale_update", [self._scale, self._good, flag], [self._scale, self._good],
                      growth=self.growth_factor, backoff=self.backoff_factor, interval=self.growth_interval)
        return flag

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The states that a checkpoint must hold."""
        yield "scale", self._scale
        yield "good_steps", self._good
