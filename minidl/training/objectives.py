"""Objectives: the tasks that networks are trained for. Each says its loss, how the data's batches become the step's
inputs, and how the network is judged on test data.

A network names its objective (`Module.objective`), a data set those that it serves (`Dataset.serves`); the trainer
knows neither shapes nor losses. A batch is always (x, y): the network reads x, and the loss compares y with its output.
This module knows no device, no ranks and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import nn
from ..data import IGNORED, DataError, Dataset, Loader, draws
from ..ops.loss import CrossEntropy
from .translation import bleu

Array = NDArray[Any]
Sums = NDArray[np.float64]
MASKED = 0.15  #: the share of tokens that are hidden, as in BERT


@dataclass(frozen=True)
class Objective:
    """`loss(output, y)`: a scalar, the mean over the batch. `inputs(data)`: the data set that yields (x, y) of a step.

    `score(output, y)`: sums over test samples, NumPy arrays in and float64 out, which may be added over batches; the
    first is how many predictions were made. `judge(sums, data)`: from their totals the metrics by name, of which `loss`
    is one. `metric`: the name of the one that matters; `largest`: whether more of it is better.
    `more(run, test)`: metrics for which the network runs again, `run(x)` gives its output for a batch of test data.
    `tokens`: whether the network's classes are the tokens of a vocabulary.
    """

    name: str
    loss: Callable[[Any, Any], Any]
    score: Callable[[Array, Array], Sums]
    judge: Callable[[Sums, Dataset], dict[str, float]]
    metric: str
    largest: bool = False
    tokens: bool = False
    inputs: Callable[[Dataset], Dataset] = lambda data: data
    more: Callable[[Callable[[Array], Array], Loader], dict[str, float]] = lambda run, test: {}

    def better(self, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
        """Whether these metrics are better than the old ones."""
        return old is None or ((new[self.metric] > old[self.metric]) if self.largest
                               else new[self.metric] < old[self.metric])

    def of(self, data: Dataset, model: str, others: Mapping[str, str]) -> Dataset:
        """The data set for this objective. `others`: the network's, see `Module`. Raises DataError for unfit data."""
        if self.name not in data.serves:
            hint = next((f", such as {model} with {others[name]}" for name in data.serves if name in others), "")
            raise DataError(f"{data.name} is for {' or '.join(data.serves)}, and {model} is trained for {self.name}; "
                            f"choose other data or another network{hint}")
        return self.inputs(data)


# ------------------------------------------------------------------------------------------------------------- classes
def _score(logits: Array, y: Array) -> Sums:
    """(predictions, sum of their cross-entropies, how many have their largest logit at the label) for logits (n,
    classes) or (n, t, vocabulary), and y (n,) or (n, t), of all that are not IGNORED."""
    counted = y.reshape(-1) != IGNORED
    logits, labels = logits.reshape(-1, logits.shape[-1])[counted].astype(np.float64), y.reshape(-1)[counted]
    top = logits.max(axis=1)
    with np.errstate(invalid="ignore"):  # whoever gets a loss that is not finite says so
        total = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    aim = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return np.array([len(labels), (total - aim).sum(), (logits.argmax(axis=1) == labels).sum()], np.float64)


def _means(metric: str) -> Callable[[Sums, Dataset], dict[str, float]]:
    """The loss and this metric, both means over all predictions."""
    return lambda sums, data: {"loss": float(sums[1] / sums[0]), metric: float(sums[2] / sums[0])}


# -------------------------------------------------------------------------------------------------------------- tokens
def _counted_loss(logits: Any, y: Any) -> Any:
    """Logits (n, classes) or (n, t, vocabulary) and labels (n,) or tokens (n, t): the mean over all that are not
    IGNORED; 0 if there are none, since a micro-batch of a step may have no other ones."""
    return CrossEntropy(0.0, IGNORED)(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def _perplexity(sums: Sums, data: Dataset) -> dict[str, float]:
    """Perplexity, and bits per byte if the data know how many bytes a token has."""
    loss = float(sums[1] / sums[0])
    found = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if data.bytes_per_token:
        found["bits_per_byte"] = loss / math.log(2) / data.bytes_per_token
    return found


def _masked(data: Dataset) -> Dataset:
    """The tokens of each sample with some of them hidden, which are y; other positions of y are IGNORED. Eight of ten
    hidden ones become the mask, one becomes a random token, and one stays (Devlin et al. 2019)."""
    assert data.mask is not None  # data that serve this objective have one
    length, mask = data.shape[0], data.mask
    hidden = max(1, round(MASKED * length))

    def rows(indices: NDArray[np.int64], numbers: draws.Draws) -> tuple[Array, Array]:
        tokens, _ = data.rows(indices)
        bits = draws.more(numbers, 3 * length).reshape(len(indices), 3, length)
        at = np.zeros(tokens.shape, bool)
        np.put_along_axis(at, np.argsort(bits[:, 0], axis=1, kind="stable")[:, :hidden], True, axis=1)
        chance = draws.uniform(bits[:, 1])
        any_token = (1 + bits[:, 2] % np.uint64(data.classes - 1)).astype(np.int64)  # 0 is padding
        x = np.where(at & (chance < 0.8), mask, np.where(at & (chance < 0.9), any_token, tokens))
        return x, np.where(at, tokens, IGNORED)

    return replace(data, rows=rows, random=True, uneven=False, bytes_per_token=None)


# -------------------------------------------------------------------------------------------------------------- values
def _value_score(output: Array, y: Array) -> Sums:
    apart = output.astype(np.float64) - y
    return np.array([apart.size, np.square(apart).sum(), np.abs(apart).sum()], np.float64)


OBJECTIVES = {objective.name: objective for objective in (
    Objective("classification", nn.cross_entropy, _score, _means("accuracy"), "accuracy", largest=True),
    Objective("next_token", _counted_loss, _score, _perplexity, "perplexity", tokens=True),
    Objective("masked_token", _counted_loss, _score, _perplexity, "perplexity", tokens=True, inputs=_masked),
    Objective("translation", _counted_loss, _score, _perplexity, "perplexity", tokens=True, more=bleu),
    Objective("regression", nn.mse, _value_score, _means("error"), "error"),
)}  # fmt: skip


#: an objective of networks -> another one that the same networks can be trained for, if the data are for that one
ALSO = {"next_token": "translation", "classification": "regression"}


def chosen(model: str, data: Dataset) -> Objective:
    """The objective of a network that is made for `model`, on these data."""
    also = ALSO.get(model, model)
    found = find(also if model not in data.serves and also in data.serves else model)
    return replace(found, loss=_counted_loss) if data.uneven and found.name == "classification" else found


def find(name: str) -> Objective:
    """The objective with this name. Raises ValueError for an unknown one."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
