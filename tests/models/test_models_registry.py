"""Networks by name: what `create` accepts, and what it says about what it does not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from helpers import NETWORKS

from minidl import models
from minidl.models import registry
from minidl.models.registry import _MODELS


def test_mlp_by_name() -> None:
    network = models.create("mlp", layers=4, hidden=32, classes=7, image_size=5)
    assert [p.shape for p in network.parameters()] == [(32, 25), (32,), (32, 32), (32,), (32, 32), (32,), (7, 32), (7,)]
    assert (network.input_shape, network.classes) == ((5, 5, 1), 7)


def test_the_tests_know_every_network_of_the_package() -> None:
    own = [name for name in models.names() if _MODELS[name].build.__module__.startswith("minidl.")]
    assert tuple(own) == NETWORKS


def test_arguments_win_over_a_preset() -> None:
    tiny = models.create("mlp", preset="tiny")
    assert next(p.shape for p in models.create("mlp", preset="tiny", hidden=3).parameters()) == (3, 64)
    assert sum(p.size for p in tiny.parameters()) < 2000


@pytest.mark.parametrize("name", NETWORKS)
def test_every_model_says_what_it_takes(name: str) -> None:
    assert "tiny" in models.presets(name)
    network = models.create(name, preset="tiny")
    assert all(n > 0 for n in network.input_shape)
    assert network.classes > 0


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("mpl", {}, "unknown model 'mpl'; similar names: mlp"),
    ("mlp", {"depth": 3}, "takes no argument 'depth'; it takes classes, image_size, layers, hidden, features, preset"),
    ("mlp", {"classes": "ten"}, "classes must be an integer of at least 1, not 'ten'"),
    ("mlp", {"hidden": 0}, "hidden must be an integer of at least 1, not 0"),
    ("mlp", {"layers": 10**20}, "model mlp: layers must be at most 10,000, not 100000000000000000000"),
    ("revnet", {"blocks": 10_001}, "blocks must be at most 10,000, not 10001"),
    ("snn", {"steps": 10**20}, "steps must be at most 10,000"),
    ("mobilenet_v3_large", {"width": float("nan")}, "width must be at most 2,147,483,647, not nan"),
    ("mlp", {"preset": "huge"}, "no preset 'huge'; known: tiny"),
])
def test_one_clear_line(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.create(name, **arguments)


@pytest.mark.parametrize(("file", "module", "function", "anew"), [  # of the second definition
    ("own.py", "one", "net", True), ("cell.py", "one", "net", True), ("own.py", "two", "net", True),
    ("other.py", "two", "net", False), ("own.py", "one", "other", False)])
def test_a_cell_or_module_that_runs_again_registers_its_networks_anew(monkeypatch: pytest.MonkeyPatch, file: str,
                                                                      module: str, function: str, anew: bool) -> None:
    monkeypatch.setattr(registry, "_MODELS", {})

    def run(file: str, module: str, function: str, width: int) -> None:
        text = f"@model('net')\ndef {function}(width={width}):\n    pass"
        exec(compile(text, file, "exec"), {"__name__": module, "model": registry.model})

    run("own.py", "one", "net", 2)
    with nullcontext() if anew else pytest.raises(ValueError, match="model net is defined twice, the second time in"):
        run(file, module, function, 3)
    assert registry.arguments("net") == {"width": 3 if anew else 2}
