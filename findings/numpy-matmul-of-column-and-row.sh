#!/usr/bin/env bash
# NumPy 2.4.6, wheels of PyPI with OpenBLAS 0.3.31.
# One would guess: a @ b and np.dot(a, b) take equally long for two matrices, since both call the BLAS library.
# What happens: if the inner length is 1 (a column times a row), np.matmul and @ take 5 to 7 times as long as np.dot and
# 4 times as long as the broadcast product a * b: (512, 1) by (1, 784) in float32, on an Intel and on an AMD processor.
# With an inner length of 2 matmul does twice the work in a tenth of the time, as fast as dot.
# Why it matters: it is the weight gradient of a dense layer at batch size 1, dy.T @ x, and each rank-one update.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q numpy==2.4.6
cat > seen.py <<'PY'
import sys
import time

import numpy as np


def least(call):
    """Microseconds of a call, the least of 30 rounds."""
    times = []
    for _ in range(30):
        begin = time.thread_time()
        for _ in range(20):
            call()
        times.append((time.thread_time() - begin) / 20e-6)
    return min(times)


rng, out = np.random.default_rng(0), np.empty((512, 784), np.float32)
ratios = {}
for inner in (1, 2):
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((512, inner), (inner, 784)))
    matmul, dot = least(lambda: np.matmul(a, b, out=out)), least(lambda: np.dot(a, b, out=out))
    print(f"(512, {inner}) by ({inner}, 784): matmul {matmul:.0f} us, dot {dot:.0f} us, {matmul / dot:.1f} times as long")
    ratios[inner] = matmul / dot
sys.exit(0 if ratios[1] > 2 and ratios[2] < 1.5 else "this has changed")
PY
OPENBLAS_NUM_THREADS=1 env/bin/python seen.py
