"""BLEU of a network's own translations of test data: each token is the likeliest after those before it (greedy).

The network reads `source separator translation so far` padded to its length, as in training. Later tokens do not change
earlier predictions, so one recorded forward serves every step of the decoding.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data import IGNORED, Loader
from ..data.tokens import restored

Array = NDArray[Any]


def decoded(run: Callable[[Array], Array], x: Array, y: Array, end: int) -> list[list[int]]:
    """The tokens that follow the source and separator of each row of x (n, t), without the `end`; as many as fit. Only
    where the source ends is read from y. `run(x)`: logits (n, t, vocabulary)."""
    rows, length = np.arange(len(x)), x.shape[1]
    first = (y != IGNORED).argmax(axis=1)  # the separator's place
    x = np.where(np.arange(length) <= first[:, None], x, 0)
    at, writing = first.copy(), first < length - 1
    while writing.any():
        chosen = run(x)[rows, at].argmax(axis=1)
        writing &= chosen != end
        at += writing
        x[rows[writing], at[writing]] = chosen[writing]
        writing &= at < length - 1
    return [x[i, first[i] + 1 : at[i] + 1].tolist() for i in rows]


def bleu(run: Callable[[Array], Array], test: Loader) -> dict[str, float]:
    """The corpus BLEU of all test samples, 0 to 100, by sacrebleu with its usual tokens (13a); empty without that
    package, and where the data have no texts to compare with."""
    data = test.dataset
    if not data.references or not data.tokenizer or importlib.util.find_spec("sacrebleu") is None:
        return {}
    coder, written = restored(data.tokenizer), list[str]()
    for begin in range(0, data.samples, test.batch_size):
        x, y = data.rows(np.arange(begin, min(begin + test.batch_size, data.samples)))
        written += map(coder.decode, decoded(run, x, y, coder.token("end", "translation")))
    score = importlib.import_module("sacrebleu").corpus_bleu(written, [list(data.references)]).score
    return {"bleu": round(float(score), 4)}
