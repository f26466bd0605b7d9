"""The tests of all ops again, finite differences and torch included, with every kernel in its CUDA form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_ops.py", "test_vision_ops.py", "test_sequence_ops.py",
                                  "test_tensor.py", "test_optim.py", "test_masks.py", "test_torch_layers.py"])
def test_ops_pass_their_tests_on_cuda_forms(file):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "on_cuda_forms", "-p",
                           "no:cacheprovider", str(HERE / file)], env={**os.environ, "PYTHONPATH": str(HERE)},
                          cwd=HERE.parent, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
