#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: `defer_pp_recv=True` of a schedule's class.
# One would guess: the option only moves receives to later places of a rank's row, so gradients stay what they are.
# Instead: on ScheduleZBVZeroBubble, ScheduleInterleavedZeroBubble and ScheduleDualPipeV it moves some receives past
# others of the same sender. Messages have no tags, the one sent first goes to the receive that is posted first, all
# have the same shape: an activation is taken for a gradient, no error is raised, and gradients are wrong.
# Why it matters: whoever turns the option on trains on noise; whoever reads such a grid must match sends and receives
# by what they are, and not by their order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/rank.py" <<'PYTHON'
import sys

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
MICRO_BATCHES, WIDTH, STAGES = 4, 6, 4


def network():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES)]


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
        print(name, f"defer_pp_recv={deferred}", "rank", rank, "wrong" if worst > 0.1 else "right", f"({worst:.1g})",
              flush=True)
distributed.barrier()
distributed.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
"$folder/venv/bin/python" "$folder/rank.py" 1 "$folder" > "$folder/one" 2> "$folder/errors" &
"$folder/venv/bin/python" "$folder/rank.py" 0 "$folder" > "$folder/zero" 2>> "$folder/errors"
wait
cat "$folder/zero" "$folder/one"
said=$(cat "$folder/zero" "$folder/one")
expect() {
    test "$(grep -c "$1" <<< "$said" || true)" = "$2" || { echo "changed: \"$1\" is there another number of times than $2"; exit 1; }
}
expect "defer_pp_recv=False rank . right" 6
expect "Interleaved1F1B defer_pp_recv=True rank . right" 2
expect "InterleavedZeroBubble defer_pp_recv=True rank . wrong" 2
expect "ZBVZeroBubble defer_pp_recv=True rank . wrong" 2
echo "as described: with defer_pp_recv=True, gradients of both zero-bubble schedules are wrong, without an error"
