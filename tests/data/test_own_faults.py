"""Functions, networks and tokenizers of a user's own that are wrong: each is one line that says what, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import one_line, refusal, run

from minidl import data
from minidl.data.dataset import DataError

DATA = """
import numpy as np
from minidl import data
X, Y = np.zeros((16, 3)), np.arange(16) % 2

def ok(): return X, Y
def lists(): return X.tolist(), Y.tolist()
def one(): return X
def none(): return iter([])
def samples_alone(): return iter([(X[0], 1), (X[1], 0)])
def shapes(): return iter([(X, Y), (X[:, :2], Y)])
def negative(): return X, -Y
def large(): return X, Y + 10**12
def fails(): return {}["key"]
def ends(): raise SystemExit(3)
def made(**changes):
    fields = {"name": "mine", "samples": 16, "shape": (3,), "classes": 2, "rows": lambda i: (X[i], Y[i])} | changes
    return data.Dataset(**fields)
def wide(): return made()
def samples(): return made(samples=16.5)
def shape(): return made(shape=3)
def serves(): return made(serves="classification")
def labels(): return made(rows=lambda i: (X[i], Y[i] + 7))
def fractions(): return made(rows=lambda i: (X[i], Y[i] / 2))
"""


@pytest.mark.parametrize(("name", "says"), [
    ("lists", "returned tuple of list and list; it must return"), ("one", "returned ndarray; it must return"),
    ("samples_alone", "a batch is (x, y), arrays with a row for each sample"),
    ("none", "it gives no batches"), ("shapes", "batch 1 has x (16, 2) and y (16,), batch 0 (16, 3) and (16,)"),
    ("negative", "sample 1 has label -1; labels are whole numbers from 0 on"),
    ("large", "a label is 1000000000001; the largest that a network is made for is 1048575"),
    ("fails", "own.py:fails: KeyError: 'key' (own.py, line 14)"),
    ("ends", "own.py:ends: SystemExit: 3 (own.py, line 15)"), ("samples", "the samples of its Dataset are 16.5"),
    ("shape", "the shape of its Dataset is 3"), ("serves", "its Dataset serves 'classification'; it must be a tuple"),
    ("labels", "sample 0 has label 7; with 2 classes it must be 0 to 1"),
    ("fractions", "y of its rows is float64 (4,); it must be one whole number for each sample"),
])
def test_data_of_ones_own_that_are_wrong(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "own.py").write_text(DATA)
    with pytest.raises(DataError) as caught:
        next(data.load(f"{tmp_path}/own.py:{name}", batch_size=4, split="train"))
    assert says in str(caught.value) or says.replace("sample 1", "sample 0") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_of_a_dataset_have_the_networks_type(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DATA)
    assert next(data.load(f"{tmp_path}/own.py:wide", batch_size=4))[0].dtype == "float32"


NETWORKS = """
from minidl import nn
class Base(nn.Module):
    input_shape, classes = (3,), 2
    def __init__(self): self.layer = nn.Linear(3, 2)
class Nothing(Base):
    def forward(self, x): self.layer(x)
class Pair(Base):
    def forward(self, x): return self.layer(x), x
class Missing(Base):
    def forward(self, x): return self.lyer(x)
class Shapes(Base):
    def forward(self, x): return self.layer(x.reshape(-1, 6))
class Fails(Base):
    def forward(self, x): raise RuntimeError("two\\nlines")
class Silent(Base):
    def forward(self, x): raise ValueError
class Uncalled(Base):
    def forward(self, x): return self.layer()
class Judged(Base):
    def forward(self, x): return self.layer(x) if self.training else self.lyer(x)
class Sizes(Base):
    def __init__(self): self.layer = nn.Linear("3", 2)
"""


@pytest.mark.parametrize(("name", "says"), [
    ("Nothing", "net.py, line 7: forward of Nothing returned nothing, not a tensor"),
    ("Pair", "net.py, line 9: forward of Pair returned a tuple, not a tensor"),
    ("Missing", "net.py, line 11: AttributeError: a Missing has no 'lyer'"),
    ("Shapes", "net.py, line 13: linear in shapes/layer: input (2, 6) does not fit weight (2, 3)"),
    ("Fails", "net.py, line 15: RuntimeError: two lines"),
    ("Silent", "net.py, line 17: ValueError"),
    ("Uncalled", "net.py, line 19: Linear: missing a required argument: 'x'; its forward takes (x)"),
    ("Judged", "net.py, line 21: AttributeError: a Judged has no 'lyer'"),
])
def test_networks_of_ones_own_that_are_wrong(tmp_path: Path, monkeypatch: Any, capsys: Any, name: str,
                                             says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(DATA)
    Path("net.py").write_text(NETWORKS)
    code, _, err = run(capsys, "train", "--model", f"net.py:{name}", "--data", "own.py:ok", "--costs", "analytic",
                       "--batch-size", "4", "--steps", "1")
    assert code == 2
    assert says in err
    if name != "Judged":
        assert says in one_line(err)


def test_info_names_the_line_of_a_network_that_fails(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORKS)
    for name, says in {"Fails": "net.py, line 15: RuntimeError: two lines",
                       "Sizes": "net.py, line 23: Linear: in_features is '3'; it must be a whole number >= 1"}.items():
        code, _, err = run(capsys, "info", "--model", f"net.py:{name}")
        assert (code, one_line(err)) == (2, f"minidl: {says}\n")


@pytest.mark.parametrize("size", ["1000000000", "1048577", "9" * 5000])
def test_a_tokenizer_that_is_too_large_is_one_line(capsys: Any, size: str) -> None:
    assert "is too large; it can have 1048576" in refusal(capsys, "train", "--model", "gpt", "--model-arg",
                                                          "preset=tiny", "--tokenizer", size, "--steps", "1")


@pytest.mark.parametrize(("text", "says"), [
    ("a;b;label\n1;2;0\n", "its columns are separated by semicolons; save it with commas"),
    ("a\tb\tlabel\n1\t2\t0\n", "its columns are separated by tabs"),
    ("# mine\na,b,label\n1,2,0\n", "line 1: is a comment; the first line must name the columns"),
    ("a,b,label\n1,2,0\n # the rest\n3,4,1\n", "line 3: is a comment; the first line must name the columns"),
])
def test_a_table_with_other_marks_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        data.load(tmp_path / "t.csv", batch_size=1)


FLAT = """
from minidl import nn
class Flat(nn.Module):
    input_shape, classes = (64,), 10
    def __init__(self): self.layer = nn.Linear(64, 10)
    def forward(self, x): return self.layer(x)
class Wide(Flat):
    input_shape = (8, 8, 1)
    def forward(self, x): return self.layer(x.flatten(1).double())
"""


@pytest.mark.parametrize(("name", "says"), [
    ("Flat", "set input_shape = (8, 8, 1) and flatten in forward: x = x.flatten(1)"),
    ("Wide", "types differ: float64, float32, float32; they must have one type; x.astype('float32') changes the type"),
])
def test_habits_of_networks_get_what_to_write(tmp_path: Path, monkeypatch: Any, capsys: Any, name: str,
                                              says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flat.py").write_text(FLAT)
    assert says in refusal(capsys, "train", "--model", f"flat.py:{name}", "--costs", "analytic", "--steps", "1")


def test_a_flag_without_a_value_says_so(capsys: Any) -> None:
    assert "argument --standardize: takes no value, and got 'yes'" in refusal(capsys, "train", "--standardize=yes")
