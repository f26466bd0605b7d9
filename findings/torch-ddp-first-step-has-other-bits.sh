#!/usr/bin/env bash
# torch 2.13.0, DistributedDataParallel over gloo.
# One would guess: with equal weights and equal data every step gives the same gradients, on the same ranks.
# What happens: after the first backward pass DDP lays its buckets out anew, in the order in which gradients came. With
# three ranks the sum of an element depends on its place in a bucket, so gradients of the first step differ in their last
# bits from those of all later steps. With two ranks they do not.
# Why it matters: a run that is resumed wraps its network again, so its first step has the bits of a first step: it does
# not repeat the run that was not interrupted, though weights, optimizer, data and random numbers are restored.
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
from torch.nn.parallel import DistributedDataParallel

rank, ranks = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}/meeting-{ranks}", rank=rank, world_size=ranks)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10))
torch.manual_seed(rank + 1)
x, y = torch.randn(64, 300), torch.randint(10, (64,))


def gradients(model):
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in network.parameters()]


def differ(some, others):
    return sum(not torch.equal(a, b) for a, b in zip(some, others))


model = DistributedDataParallel(network)
first, second, third = (gradients(model) for _ in range(3))
resumed = gradients(DistributedDataParallel(network))
seen = [differ(first, second), differ(second, third), differ(third, resumed), differ(first, resumed)]
if rank == 0:
    print(f"{ranks} ranks, {len(first)} gradients; other bits: {seen[0]} in step 2 than in step 1, {seen[1]} in step 3 than in "
          f"step 2, {seen[2]} in the first step of a new wrapper than in step 3, {seen[3]} than in step 1", flush=True)
distributed.barrier()
distributed.destroy_process_group()
right = seen == [0, 0, 0, 0] if ranks == 2 else seen[0] > 0 == seen[1] and seen[2] > 0 == seen[3]
sys.exit(0 if right else "this has changed")
PY
for ranks in 2 3; do
  others=()
  for rank in $(seq 1 $((ranks - 1))); do
    env/bin/python seen.py "$rank" "$ranks" "$work" 2> "errors $rank" &
    others+=($!)
  done
  env/bin/python seen.py 0 "$ranks" "$work"
  for other in "${others[@]}"; do
    wait "$other" || { tail -n 1 errors*; exit 1; }
  done
done
