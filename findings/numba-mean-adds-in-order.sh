#!/usr/bin/env bash
# numba 0.68.1, NumPy 2.4.6.
# One would guess: a compiled function has np.mean and np.sum as NumPy has them, to the last bits.
# What happens: NumPy adds float32 in pairs of blocks, numba adds one number after the other in float32, in np.sum and in
# np.mean. From 2^24 on a sum of ones does not grow any more: the mean of 2^25 ones is 0.5.
# Why it matters: losses and statistics over large arrays drift in compiled code, and tests with small arrays show
# nothing. np.sum(x, dtype=np.float64) or x.astype(np.float64) before the mean helps.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q numba==0.68.1 numpy==2.4.6
cat > seen.py <<'PY'
import sys

import numpy as np
from numba import njit


@njit
def mean(x):
    return np.mean(x)


@njit
def total(x):
    return np.sum(x)


@njit
def wide(x):
    return np.sum(x, dtype=np.float64)


ones = np.ones(1 << 25, np.float32)
draws = np.random.default_rng(0).random(1 << 25, dtype=np.float32)
seen = [float(np.mean(ones)), float(mean(ones)), float(np.sum(ones)), float(total(ones)), float(wide(ones))]
print("2^25 ones: mean {} in NumPy, {} compiled; sum {:.0f} in NumPy, {:.0f} compiled, {:.0f} in float64".format(*seen))
right = draws.astype(np.float64).mean()
off = [abs(float(f(draws)) - right) / right for f in (np.mean, mean)]
print("draws from 0 to 1: the mean is off by {:.0e} in NumPy, {:.0e} compiled".format(*off))
sys.exit(0 if seen == [1, 0.5, 1 << 25, 1 << 24, 1 << 25] and off[0] < 1e-7 < 1e-5 < off[1] else "this has changed")
PY
env/bin/python seen.py
