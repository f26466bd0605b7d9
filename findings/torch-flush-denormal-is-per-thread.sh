#!/usr/bin/env bash
# torch 2.13.0 on x86, torch.optim.SGD and AdamW with fused=True, two threads.
# One would guess that a momentum without gradients decays to 0, and if not, that torch.set_flush_denormal(True) makes it
# so, since its page speaks of the CPU, not of a thread.
# What happens: 0.9 times the fourth smallest float32 is rounded to the fourth smallest, so after about 900 steps without
# a gradient a momentum stays at 5.6e-45 for ever. The switch holds for the thread that calls it, and for threads that
# are made later: if anything ran on two threads before, half of the momenta become 0 and the other half stay.
# Why it matters: processors without fast subnormal arithmetic take 20 times as long for an update of such rows (units
# that are dead, tokens that are rare), and which rows are slow depends on the number of threads and on what ran first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
cat > seen.py <<'PY'
import sys

import torch

SIZE = 1 << 17


def left(flush: bool) -> list[int]:
    """The values that two optimizers' momenta have after a step with a gradient and 1200 without."""
    torch.set_flush_denormal(flush)
    found = set()
    for make in (lambda p: torch.optim.SGD([p], 1e-3, momentum=0.9, fused=True),
                 lambda p: torch.optim.AdamW([p], 1e-3, fused=True)):
        p = torch.nn.Parameter(torch.ones(SIZE))
        optimizer = make(p)
        p.grad = torch.full((SIZE,), 1e-3)
        optimizer.step()
        p.grad = torch.zeros(SIZE)
        for _ in range(1200):
            optimizer.step()
        state = optimizer.state[p]
        values = state.get("momentum_buffer", state.get("exp_avg"))
        found.add(tuple(sorted((value, int((values.view(torch.int32) == bits).sum()))
                               for value, bits in (("0", 0), ("5.6e-45", 4)))))
    torch.set_flush_denormal(False)
    (only,) = found
    return [count for _, count in only]


torch.set_num_threads(2)
torch.ones(1 << 20).mul_(2)  # both threads have worked
plain, flushed = left(False), left(True)
print(f"of {SIZE} momenta, so many are 0 and 5.6e-45: {plain}; with set_flush_denormal(True) {flushed}")
sys.exit(0 if plain == [0, SIZE] and flushed == [SIZE // 2, SIZE // 2] else "this has changed")
PY
env/bin/python seen.py
