"""How long ranks take to save a checkpoint: as one file, which rank 0 writes, and as a folder, whose parts all write.

    mpiexec -n 4 python bench/checkpoints.py [--model-arg K=V].. [--saves N] [--folder DIR] [--out FILE.json]

A GPT with AdamW takes one step in each layout, then its ranks save it both ways in turns, to the same disk. `gather_s`
is the time until the state can be written (for the file, rank 0 then has all of it), `save_s` the whole time. The ratio
is of pairs that follow each other: median, least, most. Both checkpoints hold the same bits.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save

import minidl as ml
from minidl import checkpoint
from minidl.cli.values import pair
from minidl.pricing.cost import Link
from minidl.runtime.comm.mpi import MPI
from minidl.training.job import Job
from minidl.training.keeper import Keeper
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded

GPT = {"width": 384, "layers": 6, "length": 16, "vocabulary": 8192}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"parallel": "data", "scheduler": "barrier"},
    "data, states shared": {"parallel": "data", "scheduler": "barrier", "shard": 1},
    "data, all shared": {"parallel": "data", "scheduler": "barrier", "shard": 3},
    "pipeline": {"parallel": "pipeline", "scheduler": "one_f_one_b"}}


def trainer_of(layout: str, args: Mapping[str, Any], communicator: MPI) -> Any:
    """A trainer after its first step."""
    own, size = LAYOUTS[layout], communicator.size
    data = own["parallel"] == "data"
    task = Job(model="gpt", model_args=args, data="pydoc", batch_size=size, optimizer="adamw",
               micro_batches=1 if data else size, **own)
    recorded, cost = Recorded(task, *((communicator.rank, size) if data else ())), ml.CostModel.analytic()
    trainer: Any = (RankTrainer(recorded, cost, communicator, (1.0, 1e-3)) if data else
                    PipelineTrainer(recorded, cost, communicator, Link(50.0, 1e3)))
    trainer.step()
    return trainer


def timed(trainer: Any, path: Path, step: int) -> tuple[float, float]:
    """Seconds until the state can be written, and until all ranks go on."""
    keeper, communicator = Keeper(path, schedules=False), trainer.communicator
    communicator.gather(None)
    begin = perf_counter()
    keeper.gather(trainer)
    ready = perf_counter()
    keeper.save(trainer, step)
    communicator.gather(None)
    return ready - begin, perf_counter() - begin


def measured(layout: str, args: Mapping[str, Any], saves: int, folder: Path, communicator: MPI) -> dict[str, Any]:
    """The row of a layout."""
    trainer = trainer_of(layout, args, communicator)
    paths = {"file": folder / "one" / "checkpoint.safetensors", "folder": folder / "many"}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    for step in range(1, saves + 2):
        for name, path in paths.items():
            found[name].append(timed(trainer, path, step))
    size = 0
    if communicator.rank == 0:
        one, many = (checkpoint.weights(path) for path in paths.values())
        assert all((many[name] == value).all() for name, value in one.items() if name in many), "other bits"
        size = paths["file"].stat().st_size
        for path in (paths["file"].parent, paths["folder"]):
            shutil.rmtree(path)
    trainer.finish()
    rows = {name: {"gather_s": round(median(gather for gather, _ in times[1:]), 4),
                   "save_s": round(median(whole for _, whole in times[1:]), 4)} for name, times in found.items()}
    ratios = [one / many for (_, one), (_, many) in zip(found["file"][1:], found["folder"][1:], strict=True)]
    return {"layout": layout, "bytes": size, **rows,
            "ratio": [round(value, 2) for value in (median(ratios), min(ratios), max(ratios))]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-arg", type=pair, action="append", default=[], metavar="K=V")
    parser.add_argument("--saves", type=int, default=5, help="how many are timed, after one that is not")
    parser.add_argument("--folder", metavar="DIR", help="where to save (default: a temporary folder)")
    parser.add_argument("--out", metavar="FILE.json", help="the record; default: bench/results/checkpoints.json")
    options = parser.parse_args()
    communicator = MPI()
    made = tempfile.mkdtemp(dir=options.folder) if communicator.rank == 0 else None
    folder = Path(communicator.gather(made)[0])
    args = GPT | dict(options.model_arg)
    rows = [measured(layout, args, options.saves, folder, communicator) for layout in LAYOUTS]
    if communicator.rank == 0:
        shutil.rmtree(folder)
        for row in rows:
            print(f"{row['layout']:22} {row['bytes'] >> 20:5} MiB: file {row['file']['save_s']:.3f} s "
                  f"({row['file']['gather_s']:.3f} to gather), folder {row['folder']['save_s']:.3f} s, "
                  f"{row['ratio'][0]:.2f}x ({row['ratio'][1]:.2f} to {row['ratio'][2]:.2f})")
        save("checkpoints", {"ranks": communicator.size, "model": "gpt", "model_args": args, "saves": options.saves,
                             "rows": rows, "machine": machine(), "complete": True}, options.out)
    communicator.gather(None)
    communicator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
