"""What tests on a GPU that is not there share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_ranks
import cuda_runtime
import pytest

from minidl.cli import main
from minidl.devices.cuda import device as devices
from minidl.runtime.comm import nccl


@pytest.fixture
def device() -> Callable[..., Any]:
    """Makes CUDA devices whose order of running is drawn from a seed."""
    return cuda_runtime.device


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The same, found as `cuda`, or as the GPU of this number."""
    def make(seed: int = 0, number: int = 0) -> Any:
        found = cuda_runtime.device(seed)
        monkeypatch.setitem(devices._devices, number, found)
        return found

    return make


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of choices of kernels, in which nothing has been chosen."""
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "choices.sqlite"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The record that a command of minidl prints."""
    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[Any]]:
    """Makes as many GPUs as there are ranks, each with its order."""

    def make(ranks: int, seed: int) -> list[Any]:
        found = [cuda_ranks.made(100 * seed + r, f"cuda:{r}") for r in range(ranks)]
        for r, device in enumerate(found):
            monkeypatch.setitem(devices._devices, r, device)
        return found

    return make


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """NCCL between loop-back ranks."""
    found = cuda_ranks.Nccl()
    monkeypatch.setattr(nccl, "library", lambda: found)
    yield found
    assert not found.left, "something was sent and not received"
