"""One rank of torch's pipeline runtime whose replicas are sharded by FSDP, over grids that say when stages are whole.

`python torch_shards.py RANK FOLDER`: two replicas of two ranks. For each `STAGES-MICRO_BATCHES-NAME.csv` of the folder,
prints a line of JSON: the name, and the largest difference of a gradient from one process's, relative to its largest.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional
from torch_ranks import SAMPLES, WIDTH, alone, network, of_grids, print_each

REPLICAS, RANKS = 2, 2


def difference(rank: int, file: Path, stages: int, micro_batches: int) -> float:
    """Of this rank's gradients in the second of two steps."""
    mesh = distributed.init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("replicas", "ranks"))
    replica, place = divmod(rank, RANKS)
    modules, references = network(stages), [network(stages) for _ in range(REPLICAS)]
    x, y = torch.randn(2, REPLICAS, SAMPLES * micro_batches, WIDTH).unbind()
    for reference, samples, targets in zip(references, x, y, strict=True):
        alone(reference, samples, targets, micro_batches)
    row = file.read_text().splitlines()[place]
    mine = sorted({int(stage) for stage in re.findall(r"(\d+)[FIWB]\d", row)})
    parts = [PipelineStage(fully_shard(modules[i], mesh=mesh["replicas"], reshard_after_forward=False), i, stages,
                           torch.device("cpu"), group=mesh["ranks"].get_group()) for i in mine]
    schedule = _PipelineScheduleRuntime(parts, micro_batches, loss_fn=functional.mse_loss)
    schedule._load_csv(str(file), "compute_comms")
    found = 0.0
    for step in range(2):
        schedule.step(*([x[replica]] if 0 in mine else []), **({"target": y[replica]} if stages - 1 in mine else {}))
        for i in mine:
            for own, *others in zip(modules[i].parameters(), *(r[i].parameters() for r in references), strict=True):
                wanted = torch.stack([other.grad for other in others]).mean(0)
                found = max(found, float((own.grad.full_tensor() - wanted).abs().max() / wanted.abs().max())) * step
                own.grad = None
    return found


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    print_each(of_grids(folder, partial(difference, rank)), rank, REPLICAS * RANKS, folder)
