"""Mistakes of a newcomer on the command line: each is one line that says what to do. Every case was a riddle, a
traceback, or was taken without a word."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from minidl.cli import main

OWN = '''
import numpy as np
from minidl import nn

class Net(nn.Module):
    input_shape, classes = (2,), 3
    def __init__(self, outputs=3):
        self.layer = nn.Linear(2, outputs)
    def forward(self, x):
        y = self.layer(x)
        return y * 2 if looks and y.sum() > 0 else y

looks = False
def net(): return Net()
def needs(width): return Net()
def number(): return 3
def bare(): return nn.Linear(2, 3)
def fails(): raise RuntimeError("no such thing")
def five(): return Net(5)
def looking():
    global looks
    looks = True
    return Net()
def points(split, seed): return np.zeros((100, 2)), np.zeros(100, int)
def values(split, seed): return np.zeros((100, 2)), np.zeros(100)
def one_argument(graph): return None
'''
NET = "--model own.py:net --data own.py:points --steps 1"
CASES = [
    ("train --model own.py", "own.py: name its function as well: own.py:FUNCTION"),
    ("train --model mlp --data own.py", "own.py: name its function as well: own.py:FUNCTION"),
    (f"train {NET} --scheduler own.py", "own.py: name its function as well: own.py:FUNCTION"),
    ("train --model own.py:nett", "own.py has no function nett; it has Net, net, needs, number,"),
    ("train --model own.py:needs", "its argument width has no default; give it one, as in width=64"),
    ("train --model own.py:number", "own.py:number is a int; its function must return an nn.Module"),
    ("train --model own.py:bare", "lacks input_shape and classes; set on its class: input_shape ="),
    ("train --model own.py:fails", "own.py, line 18: RuntimeError: no such thing"),
    ("train --model own.py:five --data own.py:points", "gives (64, 5) for a batch of 64; expected (64, 3)"),
    ("train --model own.py:looking --data own.py:points", "for item(), numpy() or `if`: return it from the step "
                                                          "instead, or choose with where"),
    ("train --model own.py:net --data own.py:values", "has 1 number to predict for each sample, and own.py:net "
                                                      "gives 3; if y are classes, make them whole numbers"),
    (f"train {NET} --scheduler own.py:one_argument", "a scheduler is a function of (graph, cost, machine)"),
    (f"train {NET} --scheduler none.csv", "none.csv: No such file"),
    (f"train {NET} --parallel tensor", "unknown parallel 'tensor'; known: none, data, pipeline"),
    (f"train {NET} --lr-schedule step", "known: constant, cosine"),
    (f"train {NET} --lr fast", "'fast' must be a number"),
    (f"train {NET} --checkpoint own.py", "cannot save to own.py: it is a file, and a folder is needed"),
    (f"train {NET} --tensorboard own.py", "own.py: a folder is needed, and this is a file"),
    ("new op own.py", "own.py: a folder is needed, and this is a file"),
    ("train own.py:net", "unrecognized arguments: own.py:net; a network is named with --model"),
    ("compare --model mlp --schedulers in_order, --steps 1", "in_order,: a name between the commas is empty"),
    ("simulate", "give --model NAME (see `minidl models`); or --ranks P for a pipeline on given times")]


@pytest.mark.parametrize(("command", "says"), CASES)
def test_a_mistake_is_one_line_that_says_what_to_do(command: str, says: str, tmp_path: Path, monkeypatch: Any,
                                                    capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    if "--tensorboard" in command:
        pytest.importorskip("tensorboard")
    assert main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("flags", "says"), [
    ("--model lenet", "is it the plan of another network, or of another number of micro-batches?"),
    ("--ranks 2", "micro-batches are 0..0 (--micro-batches)")])
def test_a_plan_of_something_else_says_so(flags: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    made = "--model mlp --costs analytic" if "model" in flags else "--ranks 2 --micro-batches 4 --scheduler zb_h1"
    assert main(shlex.split(f"plan {made} --save plan.csv")) == 0
    capsys.readouterr()
    assert main(shlex.split(f"check plan.csv {flags}")) == 1
    assert says in capsys.readouterr().out


def test_without_a_verb_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "usage: minidl" in capsys.readouterr().out
