"""A pytest plugin: tests of ops run on CUDA's kernels, on the CPU. Used by `test_cuda_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_on_cpu import CudaOnCpu

import minidl as ml


@pytest.fixture(autouse=True)
def _cuda_forms() -> Iterator[None]:
    ml.set_default_device(CudaOnCpu())
    yield
    ml.set_default_device("cpu")
