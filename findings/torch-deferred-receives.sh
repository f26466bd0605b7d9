#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: `defer_pp_recv=True` of a schedule's class.
# One would guess: receives move to later places in a rank's row, and gradients stay what they are.
# What happens: in ScheduleZBVZeroBubble, ScheduleInterleavedZeroBubble and ScheduleDualPipeV some receives move past
# others from the same rank. Messages have no tags, so the one sent first goes to the receive that is posted first; all
# have one shape, so an activation is taken for a gradient. There is no error, and gradients are wrong.
# Why it matters: whoever turns the option on trains on noise. Between two ranks, keep the sender's order.
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
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

rank = int(sys.argv[1])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=rank, world_size=2)
MICRO_BATCHES, WIDTH, STAGES = 4, 6, 4


def network():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]


seen = []
for name, mine in (("ScheduleInterleaved1F1B", (rank, rank + 2)), ("ScheduleInterleavedZeroBubble", (rank, rank + 2)),
                   ("ScheduleZBVZeroBubble", (rank, 3 - rank))):
    for deferred in (False, True):
        modules, alone = network(), network()
        torch.manual_seed(1)
        x, y = torch.randn(2, 2 * MICRO_BATCHES, WIDTH).unbind()
        for part, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
            for module in alone:
                part = module(part)
            (functional.mse_loss(part, target) / MICRO_BATCHES).backward()
        stages = [PipelineStage(modules[i], i, STAGES, torch.device("cpu")) for i in mine]
        schedule = getattr(schedules, name)(stages, MICRO_BATCHES, loss_fn=functional.mse_loss, defer_pp_recv=deferred)
        schedule.step(*([x] if 0 in mine else []), **({"target": y} if STAGES - 1 in mine else {}))
        worst = max(float((p.grad - q.grad).abs().max() / q.grad.abs().max())
                    for i in mine for p, q in zip(modules[i].parameters(), alone[i].parameters()))
        seen.append(worst < 1e-5)
        print(f"rank {rank}, {name}, defer_pp_recv={deferred}: gradients off by {worst:.1g} of the largest", flush=True)
distributed.barrier()
distributed.destroy_process_group()
sys.exit(0 if seen == [True, True, True, False, True, False] else "this has changed")
PY
env/bin/python seen.py 1 "$work" 2> errors &
other=$!
env/bin/python seen.py 0 "$work"
wait "$other" || { tail -n 1 errors; exit 1; }
