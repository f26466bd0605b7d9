"""Text from a network that predicts the next token, or that translates. It knows no files but the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import models, nn
from ..autograd import random
from ..autograd.tape import no_grad
from ..data.tokens import Tokenizer, restored
from . import checkpoint
from .checkpoint import CheckpointError


@dataclass(frozen=True)
class Writer:
    """A network and the tokenizer with which it was trained. `translates`: whether on translations."""

    model: nn.Module
    tokenizer: Tokenizer
    translates: bool = False

    @classmethod
    def load(cls, path: str | Path) -> Writer:
        """From a checkpoint of a run. Raises CheckpointError for one that is not of a network that predicts the next
        token, or whose network has not as many tokens as its tokenizer."""
        about = checkpoint.peek(path).about
        if "job" not in about or "tokenizer" not in about:
            raise CheckpointError(f"{path} has no tokenizer; only a network that `train` has trained on running text "
                                  f"or translations can write")
        try:
            job = json.loads(about["job"])
            model = models.create(str(job["model"]), **job["model_args"])
            tokenizer, objective = restored(about["tokenizer"]), str(job["objective"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: its network cannot be made again: {str(error)[:200]}") from error
        if objective not in ("next_token", "translation"):
            raise CheckpointError(f"{path} is of {job['model']}, which was trained for {objective}; only a network "
                                  f"that predicts the next token can write")
        if tokenizer.vocabulary > model.classes:
            raise CheckpointError(f"{path}: its tokenizer has {tokenizer.vocabulary} tokens, and its network knows "
                                  f"{model.classes}")
        checkpoint.load(path, model.astype("float64" if job.get("dtype") == "float64" else "float32"))
        return cls(model.eval(), tokenizer, objective == "translation")

    def tokens(self, prompt: str, count: int, *, temperature: float = 1.0, top: int | None = None,
               seed: int = 0) -> Iterator[int]:
        """`count` tokens that follow the prompt, or at most so many of its translation; each is drawn from the
        network's probabilities: with `temperature` below 1 rather the likely ones, at 0 always the likeliest; with
        `top` only among so many likeliest. Raises ValueError for an empty prompt."""
        ids = self.tokenizer.encode(prompt.encode(errors="surrogateescape")).astype(np.int64).tolist()
        if not ids:
            raise ValueError("the prompt is empty; give at least one character")
        generator = random.generator("text", seed=seed)
        length = self.model.input_shape[0]
        if self.translates:
            ids = [*ids[: length // 2], self.tokenizer.token("separator", "translation")]
        for _ in range(count):
            with no_grad():
                logits = self.model(np.array([ids[-length:]])).numpy()[0, -1].astype(np.float64)
            chosen = _drawn(logits, temperature, top, generator)
            if self.translates and chosen == self.tokenizer.special.get("end"):
                return
            ids.append(chosen)
            yield chosen


def _drawn(logits: Any, temperature: float, top: int | None, generator: np.random.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    if top is not None and top < len(logits):
        logits = np.where(logits >= np.partition(logits, -top)[-top], logits, -np.inf)
    total = np.cumsum(np.exp((logits - logits.max()) / temperature))
    return int(np.searchsorted(total, generator.random() * total[-1], side="right"))
