"""A name of torch that is absent here says in one line what to write."""

from __future__ import annotations

import re

import pytest

import minidl as ml
import minidl.nn.functional as F
from minidl import nn, optim
from minidl.autograd.hints import absent

LAYER = nn.Linear(2, 2)
ROOMS = {"x": ml.ones(2), "model": LAYER, "opt": optim.SGD(LAYER.parameters(), 0.1), "torch": ml, "nn": nn, "F": F,
         "optim": optim}


def test_every_name_of_the_table_has_the_hint_of_its_row() -> None:
    assert len(absent()) > 400
    for name, text in absent().items():
        room, _, bare = name.rpartition(".")
        for home in [ROOMS[room]] if room else [ROOMS["x"], ml]:
            said = "; torch's has no counterpart here" if text.startswith("nothing") else f"; use {text}"
            with pytest.raises(AttributeError, match=re.escape(f" {bare!r}{said}")) as caught:
                getattr(home, bare)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("room", "name", "end"), [
    ("torch", "nanmean", "; use ml.where(x.isnan(), 0, x), whose sum a mean divides by (~x.isnan()).sum()"),
    ("x", "add_", "; use the name without the last underscore: nothing is changed in place"),
    ("nn", "Convd2", "; similar names: Conv2d, Conv1d"), ("optim", "SDG", "; similar names: SGD"),
    ("x", "nonsense", ""), ("model", "nonsense", ""), ("opt", "nonsense", ""), ("torch", "nonsense", ""),
    ("F", "nonsense", ""), ("nn", "__path_of_nothing__", "")])
def test_other_names(room: str, name: str, end: str) -> None:
    with pytest.raises(AttributeError, match=f" {name!r}{re.escape(end)}$"):
        getattr(ROOMS[room], name)
