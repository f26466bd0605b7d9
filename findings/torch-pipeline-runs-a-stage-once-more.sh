#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining.
# One would guess: a step of four micro-batches runs each stage four times, so a batch norm counts four batches.
# What happens: a stage that was made without example inputs runs once more, for real and in training mode, before the
# first step, and again when `step` follows `eval`; later stages run on memory that nobody has written. Gradients are
# right, `num_batches_tracked` is 5, running statistics are wrong (on later stages anything, up to inf and nan).
# Why it matters: the network trains as it should, and fails when it is evaluated. With input_args and output_args there
# is no such run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy==2.4.6
cat > seen.py <<'PY'
import sys

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

rank = int(sys.argv[1])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=rank, world_size=2)
MICRO_BATCHES, SAMPLES, WIDTH = 4, 8, 3


def network():
    torch.manual_seed(0)
    return [nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]


alone = network()
x, y = torch.randn(2, MICRO_BATCHES * SAMPLES, WIDTH).unbind()
for part, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
    for module in alone:
        part = module(part)
    (functional.mse_loss(part, target) / MICRO_BATCHES).backward()
examples = {"input_args": torch.empty(SAMPLES, WIDTH, requires_grad=rank > 0),
            "output_args": torch.empty(SAMPLES, WIDTH, requires_grad=True)}
seen = []
for given in ({}, examples):
    mine, other = network()[rank], alone[rank]
    schedule = ScheduleGPipe(PipelineStage(mine, rank, 2, torch.device("cpu"), **given), MICRO_BATCHES,
                             loss_fn=functional.mse_loss)
    schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank else {}))
    seen.append((int(mine[0].num_batches_tracked), torch.allclose(mine[0].running_var, other[0].running_var),
                 all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in zip(mine.parameters(), other.parameters()))))
    print(f"rank {rank}, {'with' if given else 'without'} examples: {seen[-1][0]} batches tracked, running variance "
          f"{mine[0].running_var.tolist()} instead of {other[0].running_var.tolist()}, gradients "
          f"{'right' if seen[-1][2] else 'wrong'}", flush=True)
distributed.barrier()
distributed.destroy_process_group()
sys.exit(0 if seen == [(5, False, True), (4, True, True)] else "this has changed")
PY
env/bin/python seen.py 1 "$work" 2> errors &
other=$!
env/bin/python seen.py 0 "$work"
wait "$other" || { tail -n 1 errors; exit 1; }
