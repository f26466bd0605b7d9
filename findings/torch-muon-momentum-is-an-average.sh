#!/usr/bin/env bash
# torch 2.13.0, torch.optim.Muon: the momentum, and the type in which directions are computed.
# One would guess, from the page of the optimizer (B = mu B + g) and from SGD: the buffer is mu times itself plus the
# gradient, and parameters in float64 have updates in float64.
# What happens: the buffer is an average, B = mu B + (1 - mu) g, so after the first step it is a twentieth of what the page
# says (mu = 0.95). The Newton-Schulz steps run in bfloat16 on a CPU, too, whatever the parameters are: two updates in
# float64 from gradients that differ by 1e-6 are equal in all bits.
# Why it matters: who writes Muon by the page gets other directions with nesterov=True, where g and mu B are added, and who
# checks it against torch in float64 finds differences of a percent that no tolerance of float64 explains.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
cat > seen.py <<'PY'
import sys

import torch


def stepped(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer and the update after one step from zero."""
    p = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = torch.optim.Muon([p], lr=1.0, momentum=0.95, weight_decay=0.0)
    p.grad = gradient.clone()
    optimizer.step()
    return optimizer.state[p]["momentum_buffer"], p.detach().clone()


torch.manual_seed(0)
g = torch.randn(4, 6, dtype=torch.float64)
buffer, update = stepped(g)
_, near = stepped(g * (1 + 1e-6 * torch.rand_like(g)))
share = (buffer / g).mean().item()
print(f"the buffer after one step is {share:.3f} of the gradient; the page says 1")
print(f"updates in {update.dtype} of two gradients that are 1e-6 apart: {'equal bits' if update.equal(near) else 'differ'}")
sys.exit(0 if abs(share - 0.05) < 1e-6 and update.equal(near) else "this has changed")
PY
env/bin/python seen.py
