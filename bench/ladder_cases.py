"""The ladder's cases: networks with their batches, precisions, and measuring times."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

import minidl as ml
from minidl import models

BATCH = 32
CYCLE = 4  #: steps use this number of batches in turn


@dataclass(frozen=True)
class Case:
    """A network and its batch size."""

    model: str
    arguments: Mapping[str, Any]
    batch: int = BATCH

    def complete(self) -> dict[str, Any]:
        """All arguments, including the preset's."""
        given = dict(self.arguments)
        preset = given.pop("preset", None)
        return {**models.arguments(self.model),
                **(models.preset_arguments(self.model, preset) if preset else {}), **given}


def _cases() -> dict[str, Case]:
    """Both networks with small images first, then both at full size, then the sizes between."""
    order = [("m", 0.25, 32), ("d", 12, 32), ("m", 1.0, 224), ("d", 32, 224), ("m", 1.0, 32), ("d", 32, 32),
             ("m", 0.25, 224), ("d", 12, 224), ("m", 0.5, 32), ("m", 0.75, 32), ("d", 24, 32), ("m", 0.5, 224),
             ("m", 0.75, 224), ("d", 24, 224)]
    kinds = {"m": ("mobilenet_v3_large", "width", "a"), "d": ("densenet121", "growth", "k")}
    found = {}
    for kind, value, size in order:
        name, argument, letter = kinds[kind]
        case = Case(name, {argument: value, "image_size": size, "classes": 10 if size == 32 else 1000})
        found[f"{name} {letter}{value:g} {size}px b{BATCH}"] = case
    return found


CASES = _cases()  #: the networks of the targets
FIRST = tuple(CASES)[:2]  #: the networks on which compilers are tried first
#: steps that the host or a few launches bound, and one of long kernels
OTHERS = {"mlp 8px b64": Case("mlp", {}, 64), "lenet 28px b64": Case("lenet", {}, 64),
          "densenet121 k12 32px b4": Case("densenet121", {"growth": 12, "image_size": 32, "classes": 10}, 4),
          "resnet50 224px b32": Case("resnet50", {}),
          "bert small b8": Case("bert", {"preset": "small", "head": "masked", "dropout": 0.0}, 8),
          "gpt small b8": Case("gpt", {"preset": "small", "dropout": 0.0}, 8)}


def batches(case: Case, model: Any) -> list[tuple[Any, Any]]:
    """Random images (n, h, w, c) and labels (n,); for a network of tokens random tokens (n, t) without padding and, as
    labels (n * t,), the token that follows each."""
    rng, shape, classes = np.random.default_rng(0), model.input_shape, model.classes
    if model.input_dtype == "int64":
        rows = [rng.integers(1, classes, (case.batch, shape[0] + 1)) for _ in range(CYCLE)]
        return [(ids[:, :-1], ids[:, 1:].reshape(-1)) for ids in rows]
    return [(rng.standard_normal((case.batch, *shape), np.float32), rng.integers(0, classes, case.batch))
            for _ in range(CYCLE)]


@dataclass(frozen=True)
class Precision:
    """The arithmetic of both sides. `tf32`: products and convolutions of float32 may round their inputs for the tensor
    cores; `low`: the type of products in mixed precision; `rounding`: the relative error of a loss that is accepted as
    rounding."""

    name: str
    tf32: bool
    low: str | None
    rounding: float

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which our models are recorded."""
        return ml.autocast(self.low) if self.low else nullcontext()


PRECISIONS = {p.name: p for p in (Precision("tf32", True, None, 1e-3), Precision("bf16", True, "bfloat16", 4e-3),
                                  Precision("float32", False, None, 1e-4))}


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of rungs in turn, and seconds to warm up before; the most steps per group, the least
    number of groups; steps after which bits are compared; single steps whose host cost is measured."""

    seconds: float = 20.0
    warm_up: float = 0.3
    group: int = 20
    groups: int = 10
    steps: int = 50
    single: int = 30


QUICK = Effort(seconds=2.0, warm_up=0.2, group=5, groups=3, steps=10, single=5)
