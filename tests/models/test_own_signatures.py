"""What a user's function, class or callable takes as a network or as data, by its signature."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import refusal, reported, run_json

OWN = """
import functools
import numpy as np
from minidl import nn

class Net(nn.Module):
    input_shape, classes = (3,), 2

    def __init__(self, width=4, *more, deep=2, **rest):
        assert not more
        assert not rest
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(deep)), nn.Linear(3, width), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)

class Maker:
    def __call__(self, width=4, **more): return Net(width)
    def bound(self, width=4): return Net(width)
    @classmethod
    def of_class(cls, width=4): return Net(width)
    @staticmethod
    def static(width=4): return Net(width)

def more(**more): return Net(**more)
def args(*args): return Net(*args)
def both(width=4, *args, deep=2, **more): return Net(width, *args, deep=deep, **more)
def keyed(*, width=4): return Net(width)
def placed(width=4, /): return Net(width)
def needs(width, *args): return Net(width)
def must_be_placed(width, /): return Net(width)
partial, partial_named = functools.partial(needs, 4), functools.partial(needs, width=4)
instance, bound, of_class, static = Maker(), Maker().bound, Maker.of_class, Maker.static
cached, function = functools.lru_cache(keyed), lambda width=4: Net(width)
compiled = dict

def points(**split): return np.ones((64, 3)), np.arange(64) % 2
def listed(*seed): return points()
def split_only(*, split, **more): return points()
given = functools.partial(lambda seed, n: points(), n=3)
"""
COMMAND = ["plan", "--costs", "analytic", "--batch-size", "4"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("name", "takes"), [
    ("Net", ["width", "deep"]), ("more", []), ("args", []), ("both", ["width", "deep"]), ("keyed", ["width"]),
    ("placed", []), ("partial", []), ("partial_named", ["width"]), ("instance", ["width"]), ("bound", ["width"]),
    ("of_class", ["width"]), ("static", ["width"]), ("cached", ["width"]), ("function", ["width"])])
def test_a_network_takes_what_has_a_name_and_a_default(name: str, takes: list[str], capsys: pytest.CaptureFixture[str]
                                                       ) -> None:
    command = [*COMMAND, "--model", f"own.py:{name}", "--data", "own.py:points"]
    plain = reported(capsys, *command)
    assert (reported(capsys, *command, *(word for key in takes for word in ("--model-arg", f"{key}=3"))) == plain
            ) == (not takes)
    assert "takes no argument 'other'; it takes " in refusal(capsys, *command, "--model-arg", "other=3")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("name", "says"), [
    ("needs", "its argument width has no default; give it one, as in width=64"),
    ("must_be_placed", "its argument width has no name for others; leave out the / after it"),
    ("compiled", "does not say its arguments; call it in a function of your own")])
def test_what_a_network_cannot_take_is_said(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"own.py:{name}: {says}" in refusal(capsys, *COMMAND, "--model", f"own.py:{name}")
    if name != "needs":
        assert f"own.py:{name}: {says}" in refusal(capsys, *COMMAND, "--model", "mlp", "--data", f"own.py:{name}")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["points", "listed", "split_only", "given"])
def test_data_get_what_they_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, *COMMAND, "--model", "own.py:Net", "--data", f"own.py:{name}")[0] == 0
