"""A GPT in torch: its costs, an order that is found for them, and that order in torch's pipeline runtime on two ranks.

The costs are the times of the layers, of gloo's messages between the two ranks, and of an action of torch's runtime.
Both ranks measure at once, since cores that share caches and memory are slower when all of them compute.

`python docs/torch_gpt.py` prints for each order the predicted step beside the measured one, and the gain over torch's
own 1F1B. `--steps N`: measured steps of each order; `--svg FILE`: a picture of the best order.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import distributed, nn

import minidl as ml
from minidl.measuring.torch_stages import measure_stages, network_of
from minidl.pricing.cost import CostModel, Link
from minidl.schedulers import pipeline

RANKS, MICRO_BATCHES, WIDTH, BLOCKS, LENGTH, TOKENS = 2, 8, 192, 6, 64, 128
ORDERS = {"one_f_one_b": {}, "interleaved": {"chunks": 2}, "zb_h1": {}, "zb_auto": {}, "joint": {"chunks": 4}}
CAP = 6  #: the most live activations of a rank, in units of its whole part of the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.to_heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        heads = self.to_heads(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def loss_of(output: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def network() -> Any:
    """The layers, inputs and targets of a micro-batch, and the loss; `minidl profile` takes this function too."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.randint(TOKENS, (4, LENGTH + 1))
    layers = [nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, TOKENS)]
    return layers, text[:, :-1].contiguous(), text[:, 1:].contiguous(), loss_of


def plans(cost: CostModel) -> dict[str, Any]:
    """The plan of each order, by the costs of the layers and the link."""
    machine = ml.Machine(RANKS, activation_cap=CAP)
    return {name: ml.plan(pipeline.Pipeline(MICRO_BATCHES), name, cost, machine, **options)
            for name, options in ORDERS.items()}


def layers_of(plan: Any) -> list[int]:
    """The number of layers of each stage."""
    found: list[int] = plan.notes["joint"]["layers"] if "joint" in plan.notes else plan.cost.sizes["layers"]
    return found


def load() -> Callable[..., Any]:
    """The ten lines of docs/torch_schedules.md."""
    page = (Path(__file__).parent / "torch_schedules.md").read_text()
    scope: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0], scope)
    found: Callable[..., Any] = scope["load"]
    return found


def microseconds(calls: Sequence[Callable[[], Any]], steps: int, meet: Callable[[], Any] = lambda: None) -> list[float]:
    """The time of each call, in turn, on free cores, measured as for a layer: nine of ten take longer. Before and after
    each the ranks meet."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(steps):
        for call, of_call in zip(calls, times, strict=True):
            meet()
            begin = perf_counter()
            call()
            meet()
            of_call.append(perf_counter() - begin)
    return [sorted(found)[steps // 10] * 1e6 for found in times]


def way(rank: int, data: Any, compute: Callable[[], Any], repeats: int = 100) -> float:
    """Microseconds of a message to rank 1, whose sender computes on, as in a step: a thread of gloo's that moves it
    waits for the sender's core. The mean without the longest tenth; the ranks share a clock."""
    stamps = []
    for _ in range(repeats):
        distributed.barrier()
        begin = perf_counter()
        call = distributed.irecv if rank else distributed.isend
        works = distributed.batch_isend_irecv([distributed.P2POp(call, data, 1 - rank)])
        if rank == 0:
            compute()
        for work in works:
            work.wait()
        stamps.append(perf_counter() if rank else begin)
    of_ranks: list[Any] = [None] * RANKS
    distributed.all_gather_object(of_ranks, stamps)
    return statistics.mean(sorted(b - a for a, b in zip(*of_ranks, strict=True))[: repeats * 9 // 10]) * 1e6


def probe(rank: int, folder: Path) -> None:
    """One rank: the costs of the layers; the times of one number and of a stage's message to the other rank; then the
    time that the runtime adds to an action, on a rank alone with a stage of one number."""
    net = network_of(network(), "cpu")
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'link'}", rank=rank, world_size=RANKS)

    distributed.barrier()
    measure_stages(net, [1] * len(net[0]), "sgd", 0.3, lambda done: None).save(folder / f"costs{rank}.json")
    x = net[1]
    hidden = torch.ones(*x.shape, WIDTH)
    ways = [way(rank, data, lambda: net[0][1](hidden).sum().backward()) for data in (torch.ones(1), hidden.clone())]
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{folder / f'alone{rank}'}", rank=0, world_size=1)
    grid = folder / f"grid{rank}"
    grid.write_text(",".join(f"0F{i},0B{i}" for i in range(MICRO_BATCHES)) + "\n")
    layer, one, mse = nn.Linear(1, 1), torch.ones(1, 1), nn.functional.mse_loss
    schedule = load()(str(grid), [layer], MICRO_BATCHES, mse, torch.device("cpu"))
    data = torch.ones(MICRO_BATCHES, 1)
    step, own = microseconds([lambda: schedule.step(data, target=data), lambda: mse(layer(one), one).backward()], 200)
    distributed.destroy_process_group()
    if rank == 0:
        print(*ways, max(step / MICRO_BATCHES - own, 0.0) / 2)


def worker(rank: int, folder: Path, steps: int) -> None:
    """One rank: runs the grids of the folder in turn, and checks the gradients of its stages."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    layers, x, y, loss = network()
    inputs, targets = torch.cat([x] * MICRO_BATCHES), torch.cat([y] * MICRO_BATCHES)
    calls: dict[str, Callable[[], Any]] = {}
    for file in sorted(folder.glob("*.csv")):
        name, *cuts = file.stem.split("-")
        ends = [0, *map(int, cuts)]
        modules = [nn.Sequential(*layers[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        schedule = load()(str(file), modules, MICRO_BATCHES, loss, torch.device("cpu"))
        mine = {stage.stage_index for stage in schedule._stages}
        own = [p for i in sorted(mine) for p in modules[i].parameters()]
        calls[name] = partial(schedule.step, *([inputs] if 0 in mine else []),
                              **({"target": targets} if len(modules) - 1 in mine else {}))
        for parameter in own:
            parameter.grad = None
        calls[name]()
        output = nn.Sequential(*layers)(x)  # all micro-batches are equal, so one of them has the mean gradient
        expected = torch.autograd.grad(loss(output, y), own)
        for parameter, other in zip(own, expected, strict=True):
            torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)
    for name, time in zip(calls, microseconds(list(calls.values()), steps, distributed.barrier), strict=True):
        if rank == 0:
            print(name, time / 1e3, flush=True)
    distributed.destroy_process_group()


def on_ranks(place: str, *options: str) -> str:
    """Runs this file once for each rank, and returns the text that rank 0 prints."""
    ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--folder", place, *options],
                              stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
             for rank in range(RANKS)]
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return texts[0]


def costs() -> CostModel:
    """Of the layers (the mean of both ranks), of the link, and of an action of torch's runtime, which sends nothing."""
    with tempfile.TemporaryDirectory() as place:
        empty, full, action = map(float, on_ranks(place).split())
        of_ranks = [CostModel.load(Path(place) / f"costs{rank}.json") for rank in range(RANKS)]
    nbytes = network()[1].numel() * WIDTH * 4
    kinds = {kind: [statistics.mean(times) for times in zip(*(cost.kinds[kind] for cost in of_ranks), strict=True)]
             for kind in of_ranks[0].kinds}
    return replace(of_ranks[0], kinds=kinds, launch=action,
                   link=Link(empty, nbytes / (full - empty) if full > empty else None))


def measured(made: dict[str, Any], steps: int) -> dict[str, float]:
    """The step of each order in torch's runtime, in milliseconds."""
    with tempfile.TemporaryDirectory() as place:
        for name, plan in made.items():
            sizes = layers_of(plan)
            ends = "-".join(str(sum(sizes[: i + 1])) for i in range(len(sizes)))
            (Path(place) / f"{name}-{ends}.csv").write_text(pipeline.for_torch(plan))
        text = on_ranks(place, "--steps", str(steps))
    return {name: float(time) for name, time in map(str.split, text.splitlines())}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="measured steps of each order (default 20)")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.rank is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[arguments.rank % len(cores)]})  # its threads take no other rank's core
        sys.setswitchinterval(1e-4)  # a message may wait for the interpreter's lock: 5 ms are as long as three tasks
        if arguments.steps is None:
            probe(arguments.rank, arguments.folder)
        else:
            worker(arguments.rank, arguments.folder, arguments.steps)
        return
    cost = costs()
    made = plans(replace(cost, launch=0.0))
    predicted = {name: pipeline.price(plan, replace(plan.cost, launch=cost.launch)).makespan / 1e3
                 for name, plan in made.items()}
    best = min(predicted, key=lambda name: predicted[name])
    times = measured(made, arguments.steps or 20)
    base = "one_f_one_b"  # torch's own Schedule1F1B, task for task
    print(f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, {os.cpu_count()} cores; gradients equal one process")
    way = cost.link.time(network()[1].numel() * WIDTH * 4)
    print(f"a message takes {way:.0f} us, {cost.link.latency:.0f} us if empty; the runtime adds "
          f"{cost.launch:.0f} us an action\n")
    print(f"{'order':14}{'predicted ms':>14}{'measured ms':>14}{'predicted gain':>16}{'measured gain':>15}")
    for name in made:
        print(f"{name:14}{predicted[name]:14.1f}{times[name]:14.1f}{predicted[base] / predicted[name]:15.2f}x"
              f"{times[base] / times[name]:14.2f}x")
    print(f"\nbest by prediction: {best}, {layers_of(made[best])} layers per stage")
    if arguments.svg:
        arguments.svg.write_text(made[best].timeline._repr_svg_())


if __name__ == "__main__":
    main()
