#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: the table of Schedule1F1B, which its visualizer draws (get_schedule_ops).
# One would guess: the row of each rank has the forwards and backwards of micro-batches 0 to m - 1, as GPipe's has.
# What happens: the last rank counts its forwards from 1. It has F1 to Fm and no F0, so the backward of micro-batch 0 comes
# before any forward of it, and micro-batch m does not exist. The other rows are right, and training does not use the table.
# Why it matters: a tool that takes orders from the table (a simulator, a picture, a file for another runtime) finds a
# missing forward and a backward without one, in torch's plainest pipeline. Take 1 from the last rank's forwards.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
cat > seen.py <<'PY'
import sys

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

STAGES, MICRO_BATCHES = 4, 8
seen = {}
for name in ("GPipe", "1F1B"):
    rows = [[str(action) for action in row if action is not None] for row in get_schedule_ops(name, STAGES, MICRO_BATCHES)]
    print(f"{name}, last rank: {' '.join(rows[-1])}")
    seen[name] = [sorted(int(action.split("F")[1]) for action in row if action[1:2] == "F") for row in rows]
usual = list(range(MICRO_BATCHES))
wanted = {"GPipe": [usual] * STAGES, "1F1B": [usual] * (STAGES - 1) + [[number + 1 for number in usual]]}
sys.exit(0 if seen == wanted else "this has changed")
PY
env/bin/python seen.py
