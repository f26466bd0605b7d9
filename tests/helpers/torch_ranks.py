"""One rank of torch's pipeline runtime over grids that were written here, beside one process without a pipeline.

`python torch_ranks.py RANK RANKS FOLDER`: for each `NAME.csv` of the folder, whose name begins with its numbers of
stages and micro-batches, prints a line of JSON: the name, and whether all gradients have the bits of one process. The
code of docs/torch_schedules.md loads the grid.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

PAGE = (Path(__file__).parents[2] / "docs" / "torch_schedules.md").read_text()
WIDTH, SAMPLES = 6, 2  #: of a layer; of a micro-batch


def loader() -> Any:
    """The function of the page."""
    scope: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0], scope)
    return scope["load"]


def network(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]


def alone(modules: Sequence[nn.Module], x: Any, y: Any, micro_batches: int) -> None:
    """The gradients of one process that adds up those of its micro-batches."""
    for part, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        for module in modules:
            part = module(part)
        functional.mse_loss(part, target).backward()
    for module in modules:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(micro_batches)


def equal(file: Path, stages: int, micro_batches: int) -> bool:
    """Whether this rank's gradients have the bits of one process, in the first step and in the second."""
    modules, reference = network(stages), network(stages)
    x, y = torch.randn(2, SAMPLES * micro_batches, WIDTH).unbind()
    alone(reference, x, y, micro_batches)
    schedule = loader()(str(file), modules, micro_batches, functional.mse_loss, torch.device("cpu"))
    mine = {stage.stage_index for stage in schedule._stages}
    same = True
    for _ in range(2):
        schedule.step(*([x] if 0 in mine else []), **({"target": y} if stages - 1 in mine else {}))
        for i in mine:
            for own, other in zip(modules[i].parameters(), reference[i].parameters(), strict=True):
                same &= own.grad is not None and torch.equal(own.grad, other.grad)
                own.grad = None
    return same


def print_each(results: Iterable[Any], rank: int, ranks: int, folder: Path) -> None:
    """Meets the other ranks, and prints each result as a line of JSON."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    for result in results:
        print(json.dumps(result), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def of_grids(folder: Path, judged: Callable[[Path, int, int], Any]) -> Iterator[Any]:
    """The name of each grid, and what is said of the file and its numbers of stages and micro-batches."""
    for path in sorted(folder.glob("*.csv")):
        stages, micro_batches, *_ = path.name.split("-")
        yield path.stem, judged(path, int(stages), int(micro_batches))


if __name__ == "__main__":
    folder = Path(sys.argv[3])
    print_each(of_grids(folder, equal), int(sys.argv[1]), int(sys.argv[2]), folder)
