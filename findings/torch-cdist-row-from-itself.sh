#!/usr/bin/env bash
# torch 2.13.0.
# One would guess: torch.cdist(x, x) has zeros on its diagonal, and the distance of two rows does not depend on how many
# other rows there are.
# What happens: up to 25 rows differences are squared and summed; from 26 rows on the default computes |a|^2 + |b|^2 -
# 2 a b as a product of matrices. In float32 a row is then up to 0.1 away from itself here, and one more row changes the
# distances between the old ones.
# Why it matters: nearest neighbours, edges of a graph within a radius and tests for equal rows change with the size of
# the batch. compute_mode="donot_use_mm_for_euclid_dist" keeps the differences.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
cat > seen.py <<'PY'
import sys

import torch

x = torch.randn(26, 64, generator=torch.Generator().manual_seed(0)) * 10
seen = {}
for rows, mode in ((25, None), (26, None), (26, "donot_use_mm_for_euclid_dist")):
    d = torch.cdist(x[:rows], x[:rows], **({"compute_mode": mode} if mode else {}))
    own, moved = d.diagonal().max().item(), (d[:25, :25] - torch.cdist(x[:25], x[:25])).abs().max().item()
    print(f"{rows} rows, {mode or 'default'}: a row is up to {own:.4f} from itself; distances of the first 25 rows moved by "
          f"up to {moved:.4f}")
    seen[rows, mode] = own > 0.001, moved > 0.001
wanted = {(25, None): (False, False), (26, None): (True, True), (26, "donot_use_mm_for_euclid_dist"): (False, False)}
sys.exit(0 if seen == wanted else "this has changed")
PY
env/bin/python seen.py
