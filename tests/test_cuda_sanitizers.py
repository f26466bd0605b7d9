"""Launches of every kernel under AddressSanitizer, with undefined behaviour, and ThreadSanitizer.

The launches are those of the tests of CUDA kernels, which run for this once more and have a few small ones of each kernel
kept: see `cuda_sanitizers`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_sanitizers import SANITIZERS, replay

from minidl.kernels import cuda

HERE = Path(__file__).parent
SOURCES = sorted(p.name for p in cuda.SOURCES.glob("*.cu"))
NOT_KERNELS = {"test_cuda_sources.py", "test_cuda_stand_in.py", "test_cuda_sanitizers.py"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Of each (source, kernel, whether of several blocks) that its tests launch, those that were kept."""
    path = tmp_path_factory.mktemp("launches") / "launches"  # a test that fails does so in its own place
    tests = sorted(p for p in HERE.glob("test_cuda_*.py") if p.name not in NOT_KERNELS)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not gpu", "-p", "cuda_sanitizers", "-p", "no:cacheprovider", *tests],
                          cwd=HERE.parent, capture_output=True, text=True,
                          env={**os.environ, "MINIDL_LAUNCHES": str(path), "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])})
    assert done.returncode < 2, done.stdout[-4000:] + done.stderr[-2000:]
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_are_free_of_races_and_stay_in_their_memory(launches, source, sanitizer):
    replay([launch for kind, kept in launches.items() if kind[0] == source for launch in kept], sanitizer)


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_has_small_launches(launches, source):
    """Of one block, and of several if it is ever launched with several: what blocks share is seen by ThreadSanitizer."""
    assert set(cuda.kernels_of(source)) - {kind[1] for kind in launches} == set()
    assert [kind for kind, kept in launches.items() if kind[0] == source and not kept] == []
