"""Arguments of a wrong type: a layer, a loss or a function says which argument it is, in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidl as ml
import minidl.nn.functional as F
from minidl import nn

LAYERS = [n for n in nn.__all__ if isinstance(getattr(nn, n), type) and issubclass(getattr(nn, n), nn.Module)
          and n not in ("Module", "ModuleDict", "ModuleList", "Sequential", "Identity")]
GIVEN = {"in_features": 4, "out_features": 4, "in_channels": 4, "out_channels": 4, "kernel_size": 2, "num_features": 4,
         "num_groups": 2, "num_channels": 4, "normalized_shape": 4, "num_embeddings": 5, "embedding_dim": 4,
         "embed_dim": 4, "num_heads": 2, "d_model": 4, "nhead": 2, "input_size": 4, "hidden_size": 4, "output_size": 2,
         "upscale_factor": 2, "padding": 1, "dim": 0, "unflattened_size": (2, 2), "batch_first": True, "size": 3,
         "width": 4, "hidden": 8, "experts": 4, "top_k": 2}
WRONG = ["3", 1.5, None, -1, True, (), (1, 2, 3, 4, 5), ["3"], {}, object(), np.zeros(3), float("nan")]


def arguments(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(nn, name)).parameters)


def refusal(act: Callable[[], Any]) -> str:
    """The line of the error; empty if there is none."""
    try:
        act()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_names_itself_and_the_argument(name: str) -> None:
    layer, known = getattr(nn, name), arguments(name)
    given = {n: v for n, v in GIVEN.items() if n in known}
    layer(**given)
    for argument, parameter in known.items():
        taken = str(parameter.annotation)
        for value in WRONG:
            must = (isinstance(value, str | dict) or type(value) is object) and taken not in ("str", "object")
            must |= "Size" in taken and "Sequence" not in taken and type(value) in (bool, int, float, tuple)
            line = refusal(lambda v=value, a=argument: layer(**given | {a: v}))
            assert line or not must, f"{argument}={value!r} is taken"
            assert not line or re.fullmatch(rf"{name}\b.*\b{argument}\b.*", line), f"{argument}={value!r}: {line}"


@pytest.mark.parametrize(("act", "says"), [
    (lambda: nn.Linear(3), "Linear: missing a required argument: 'out_features'"),
    (lambda: nn.Linear(3, 2, inplace=True), "Linear: got an unexpected keyword argument 'inplace'"),
    (lambda: nn.Conv2d(3, 4, (1, 2, 3)), r"Conv2d: kernel_size is \(1, 2, 3\); it must be a whole number >= 1, or"),
    (lambda: nn.Dropout(1.0), "Dropout: p is 1.0; it must be a number >= 0 and below 1"),
    (lambda: nn.LSTM(3, 4, bias="no"), "LSTM: bias is 'no'; it must be True or False"),
    (lambda: nn.Linear(3, 2)("x"), "Linear: x is 'x'; it must be a tensor"),
    (lambda: nn.MSELoss()(None, ml.zeros(2)), "MSELoss: x is None; it must be a tensor"),
    (lambda: F.cross_entropy("x", ml.zeros(2)), "cross_entropy: x is 'x'; it must be a tensor"),
    (lambda: nn.ReLU()("x"), "ReLU: x is 'x'; it must be a tensor"),
    (lambda: nn.ELU("1"), "ELU: alpha is '1'; it must be a number"),
    (lambda: nn.Softmax("1"), "Softmax: dim is '1'; it must be a whole number"),
    (lambda: F.softmax(ml.zeros(2), dim="1"), "softmax: axis is '1'; it must be a whole number"),
    (lambda: F.softmax("x", dim=0), "softmax: x is 'x'; it must be a tensor"),
    (lambda: F.relu(None), "relu: x is None; it must be a tensor"),
    (lambda: F.relu(), "relu: missing a required argument: 'x'"),
    (lambda: F.layer_norm(ml.zeros(2, 3), "3"), "layer_norm: normalized_shape is '3'; it must be"),
    (lambda: F.elu(ml.zeros(2), "1"), "elu: alpha is '1'; it must be a number"),
    (lambda: F.normalize(ml.zeros(2, 2), eps="1"), "normalize: eps is '1'"),
    (lambda: ml.zeros(2, 3).softmax("x"), "softmax: the axis is 'x'; it must be a whole number"),
    (lambda: ml.zeros(2, 3).sum(1.5), "sum: the axis is 1.5; it must be a whole number")])
def test_one_line_says_which(act: Any, says: str) -> None:
    with pytest.raises(TypeError if "Dropout" not in says else ValueError, match=f"^{says}"):
        act()


def test_a_network_of_ones_own_takes_what_it_likes() -> None:
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            self.width = width

    assert Net("wide").width == "wide"


def test_whole_numbers_of_numpy_are_sizes() -> None:
    layer = nn.Conv2d(np.int64(3), np.int32(4), np.int64(2), stride=(np.int64(1), 1))
    assert layer(ml.zeros(1, 4, 4, 3)).shape == (1, 3, 3, 4)


def test_types_of_numpy_are_types_of_a_layer() -> None:
    for dtype in (np.float64, np.dtype("float64")):
        assert nn.Linear(3, 2, dtype=dtype).weight.dtype == "float64"
    with pytest.raises(TypeError, match="Linear: dtype is <class 'numpy.int32'>; it must be float32 or float64"):
        nn.Linear(3, 2, dtype=np.int32)
