"""The tests of all ops again, finite differences and torch included, with every kernel in its CUDA form."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("file", ["ops/test_ops.py", "ops/test_vision_ops.py", "ops/test_sequence_ops.py",
                                  "autograd/test_tensor.py", "optim/test_optim.py", "ops/test_masks.py",
                                  "ops/test_by_index.py", "ops/test_experts.py", "nn/test_torch_layers.py"])
def test_ops_pass_their_tests_on_cuda_forms(file):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "on_cuda_forms", "-p",
                           "no:cacheprovider", str(ROOT / "tests" / file)], cwd=ROOT, capture_output=True, text=True,
                          timeout=2 * PATIENCE, env={**os.environ, "PYTHONPATH": IMPORTABLE})
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
