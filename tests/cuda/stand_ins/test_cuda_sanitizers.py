"""Launches of every kernel under AddressSanitizer, with undefined behaviour, and ThreadSanitizer.

The launches are those of the tests of CUDA kernels, which run for this once more, and of `cuda_small_launches`; a few
small ones of each kernel are kept: see `cuda_sanitizers`.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import pytest
from cuda_sanitizers import SANITIZERS, replay
from helpers import IMPORTABLE, ROOT

from minidl.kernels import cuda

TESTS = ROOT / "tests" / "cuda"
SOURCES = sorted(p.name for p in cuda.SOURCES.glob("*.cu"))

pytestmark = pytest.mark.sanitizer


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Of each (source, kernel, whether of several blocks) that is launched, those that were kept."""
    path = tmp_path_factory.mktemp("launches") / "launches"
    tests = [TESTS / "stand_ins" / "cuda_small_launches.py",
             *sorted(p for p in TESTS.rglob("test_cuda_*.py")
                     if re.search(r"import .*\b(run_kernel|agree|written)\b", p.read_text()))]
    environment = {k: v for k, v in os.environ.items() if k != "MINIDL_TEST_GPU"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-m",
                           "not gpu and not slow and not sanitizer", "-p", "cuda_sanitizers", "-p", "no:cacheprovider",
                           *tests], cwd=ROOT, capture_output=True, text=True,
                          env={**environment, "MINIDL_LAUNCHES": str(path),
                               "PYTHONPATH": IMPORTABLE})
    assert done.returncode < 2, done.stdout[-4000:] + done.stderr[-2000:]  # a test that fails does so in its own place
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_are_free_of_races_and_stay_in_their_memory(launches, source, sanitizer):
    replay([launch for kind, kept in launches.items() if kind[0] == source for launch in kept], sanitizer)


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_has_small_launches(launches, source):
    """Of one block, and of several if it is ever launched with several: what blocks share is seen by
    ThreadSanitizer."""
    assert set(cuda.kernels_of(source)) - {kind[1] for kind in launches} == set()
    assert [kind for kind, kept in launches.items() if kind[0] == source and not kept] == []
