"""One rank of torch's pipeline runtime on stages with batch norm, beside one process without a pipeline.

`python torch_norms.py RANK FOLDER`: for stages without examples, with them, and after `get_ready` of
docs/torch_schedules.md, prints a line of JSON: which, `num_batches_tracked` after one step, whether the running
statistics and the gradients are those of one process, `num_batches_tracked` after an `eval` and another step, and the
ratio of the gradient after two steps without `zero_grad`, with `scale_grads` and without.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe
from torch.nn import functional
from torch_ranks import PAGE, alone, print_each

MICRO_BATCHES, SAMPLES, WIDTH = 4, 8, 3


def get_ready() -> Any:
    """The function of the page."""
    scope: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(def get_ready.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0], scope)
    return scope["get_ready"]


def network() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]


def seen(how: str, rank: int) -> list[Any]:
    modules, reference = network(), network()
    x, y = (5 + 2 * torch.randn(2, MICRO_BATCHES * SAMPLES, WIDTH)).unbind()
    alone(reference, x, y, MICRO_BATCHES)
    some = torch.empty(SAMPLES, WIDTH)
    examples = {"input_args": some.clone().requires_grad_(rank > 0), "output_args": some.requires_grad_()}

    def made(**more: Any) -> Any:
        stage = PipelineStage(modules[rank], rank, 2, torch.device("cpu"), **(examples if how == "examples" else {}))
        return ScheduleGPipe(stage, MICRO_BATCHES, **more)

    step: tuple[list[Any], dict[str, Any]] = ([x], {}) if rank == 0 else ([], {"target": y})
    schedule, mine = made(loss_fn=functional.mse_loss), modules[rank]
    if how == "get_ready":
        get_ready()(schedule, [mine], *step[0], **step[1])
    schedule.step(*step[0], **step[1])
    norm, other, weight = mine[0], reference[rank][0], mine[1].weight  # type: ignore[index]
    found = [how, int(norm.num_batches_tracked), all(map(torch.equal, norm.buffers(), other.buffers())), all(
        torch.equal(a.grad, b.grad) for a, b in zip(mine.parameters(), reference[rank].parameters(), strict=True))]
    mine.eval()
    with torch.no_grad():
        schedule.eval(*step[0], **step[1])
    mine.train()
    if how == "get_ready":
        get_ready()(schedule, [mine], *step[0], **step[1])
    mine.zero_grad()
    schedule.step(*step[0], **step[1])
    found.append(int(norm.num_batches_tracked))
    once = weight.grad.clone()
    schedule.step(*step[0], **step[1])
    found.append(round(float((weight.grad / once).median()), 4))
    mine.zero_grad()
    schedule = made(loss_fn=lambda a, b: functional.mse_loss(a, b) / MICRO_BATCHES, scale_grads=False)
    for _ in range(2):
        schedule.step(*step[0], **step[1])
    return [*found, round(float((weight.grad / once).median()), 4)]


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    print_each((seen(how, rank) for how in ("nothing", "examples", "get_ready")), rank, 2, folder)
