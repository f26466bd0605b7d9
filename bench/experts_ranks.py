"""Experts over ranks: minidl against torch over gloo, in the same processes in turns, with the same tokens and weights.

    mpiexec -n 2 python bench/experts_ranks.py [--rounds 20] [--scheduler buckets] [--scheduler-arg K=V]..
                                               [--out FILE.json]                          needs the extra `parity`

`moe_gpt` small (4 layers, 128 wide, 8 experts of 512, of which a token uses 2) on 8 rows of 128 tokens for each rank;
AdamW, with the balance loss, without dropout; one thread for each rank. Each rank has an equal share of the experts.
Rows travel by MPI here and by `all_to_all_single` there, which also sends the counts first; torch sums the other
gradients by one `all_reduce` of a flat tensor. A sample is the time of STEPS steps on the slowest rank. The losses of
both are means over the ranks, from equal weights on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests" / "helpers")]

from common import machine, ratio, save, spread

import minidl as ml
from minidl import models
from minidl.cli.values import pair
from minidl.runtime.comm.mpi import MPI
from minidl.training.job import Job
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded

ROWS, RATE, STEPS = 8, 1e-3, 3
ARGUMENTS = {"preset": "small", "dropout": 0.0}


class Torch:
    """Torch's rank, with the weights of a network of ours."""

    def __init__(self, model: Any, communicator: MPI, meeting: Path) -> None:
        import torch
        from torch_language import balance_of, twin

        torch.set_num_threads(1)
        self.torch, self.balance_of, self.size, rank = torch, balance_of, communicator.size, communicator.rank
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=self.size)
        given = {**models.arguments("moe_gpt"), **models.preset_arguments("moe_gpt", "small"), **ARGUMENTS}
        del given["preset"]
        self.network = twin("moe_gpt", {**given, "ranks": self.size})
        own = dict(self.network.named_parameters())
        values = model.state_dict()
        self.common = []
        for name, p in own.items():
            value = torch.from_numpy(values[name])
            if ".mlp.fc" in name:
                value = value.chunk(self.size)[rank]
            else:
                self.common.append(p)
            p.data.copy_(value)
        self.opt = torch.optim.AdamW(own.values(), lr=RATE, weight_decay=0.01, fused=True)
        self.experts = [p for name, p in own.items() if ".mlp.fc" in name]

    def step(self, x: Any, y: Any) -> float:
        """Returns the loss of this rank's rows."""
        torch = self.torch
        self.opt.zero_grad(set_to_none=True)
        logits = self.network(torch.from_numpy(x))
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.from_numpy(y).reshape(-1))
        (loss := loss + self.balance_of(self.network)).backward()
        grads = [p.grad for p in self.common]
        flat = torch.cat([g.reshape(-1) for g in grads])
        torch.distributed.all_reduce(flat)
        flat /= self.size
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))
        for p in self.experts:
            p.grad /= self.size
        self.opt.step()
        return float(loss.detach())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help=f"of {STEPS} steps each, after one that is not counted")
    parser.add_argument("--scheduler", default="buckets", help="barrier sums each small gradient by itself")
    parser.add_argument("--scheduler-arg", type=pair, action="append", default=[], metavar="K=V")
    parser.add_argument("--out", metavar="FILE.json", help="the record; default: bench/results/experts_ranks.json")
    options = parser.parse_args()
    comm = MPI()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    job = Job(model="moe_gpt", model_args=ARGUMENTS, data="pydoc", batch_size=ROWS * comm.size, optimizer="adamw",
              lr=RATE, parallel="data", scheduler=options.scheduler, scheduler_args=dict(options.scheduler_arg),
              experts_over="data")
    recorded = Recorded(job, comm.rank, comm.size)
    with tempfile.TemporaryDirectory() as folder:
        meeting = comm.gather(Path(folder) / "meeting")[0]
        theirs = Torch(recorded.model, comm, meeting)
        trainer = RankTrainer(recorded, ml.CostModel.analytic(), comm, (50.0, 1e-3))
        batches = Recorded(job, comm.rank, comm.size).train_data  # the same once more
        arms = {"minidl": trainer.step, "torch": lambda: lost.append(theirs.step(*next(batches)))}
        seconds, lost = {name: list[float]() for name in arms}, list[float]()
        for _ in range(options.rounds + 1):
            for name, step in arms.items():
                comm.gather(None)
                begin = perf_counter()
                for _ in range(STEPS):
                    step()
                seconds[name].append(max(comm.gather((perf_counter() - begin) / STEPS)))
        trainer.finish()
        losses = {"minidl": trainer.losses, "torch": np.mean(comm.gather(lost), axis=0).tolist()}
    counted = {name: values[1:] for name, values in seconds.items()}
    apart = float(np.abs(np.subtract(losses["minidl"], losses["torch"])).max())
    if comm.rank == 0:
        found = ratio(counted, "minidl", "torch")
        print(f"{comm.size} ranks: minidl {spread(counted['minidl'])['median']:.1f} ms, torch "
              f"{spread(counted['torch'])['median']:.1f} ms, ratio {found['median']:.2f} ({found['p10']:.2f} to "
              f"{found['p90']:.2f}); losses {losses['minidl'][0]:.4f} -> {losses['minidl'][-1]:.4f}, at most "
              f"{apart:.1e} apart")
        save("experts_ranks", {
            "machine": machine(), "ranks": comm.size, "scheduler": options.scheduler,
            "scheduler_args": dict(options.scheduler_arg), "rows": ROWS, "minidl_ms": spread(counted["minidl"]),
            "torch_ms": spread(counted["torch"]), "ratio": found,
            "ratio_of_least": round(min(counted["minidl"]) / min(counted["torch"]), 4), "losses": {
                name: [round(value, 6) for value in values] for name, values in losses.items()},
            "losses_apart": apart}, options.out)
    comm.gather(None)
    comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
