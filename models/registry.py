"""Networks by name, for the command line and the benchmarks.

A network is registered as one function whose parameters, all with defaults, are its arguments:

    @model(tiny={"width": 4})
    def lenet(classes=10, width=6): ...

A preset is a named set of arguments; arguments that are given override it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import getfile
from numbers import Integral
from typing import Any

from .. import nn
from ..system.loading import by_name, function_of, needs_function, users_code


@dataclass(frozen=True)
class _Entry:
    build: Callable[..., nn.Module]
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)


_MODELS: dict[str, _Entry] = {}
#: the largest values of arguments that count modules or tasks, which are built one by one
MOST = {"layers": 10_000, "blocks": 10_000, "steps": 10_000}
_TEXT = {"sgd": 0.1, "adam": 0.001, "adamw": 0.001, "nadamw": 0.001, "rmsprop": 0.001, "muon": 0.001}
#: learning rates by optimizer at which the networks here learn the digits, or text; "" is for all others
RATES = {"": {"sgd": 0.05, "adam": 0.003, "adamw": 0.003, "nadamw": 0.003, "rmsprop": 0.002, "muon": 0.003},
         "mobilenet_v3_large": {"sgd": 0.1}, "ffnn": {"sgd": 0.02}, "lenet": {"rmsprop": 0.001},
         **dict.fromkeys((
             "gpt", "gpt2_medium", "gpt3_medium", "moe_gpt", "bert", "bert_base", "bert_large", "rnn"), _TEXT)}


def model(name: str = "", **presets: dict[str, Any]) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Registers a function that builds a network, under `name` or its own name, with its presets. A cell or module that
    runs again registers it anew."""

    def register(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        key = name or build.__name__
        known = _MODELS[key].build if key in _MODELS else build
        if known.__name__ != build.__name__ or (
                known.__module__ != build.__module__ and getfile(known) != getfile(build)):
            raise ValueError(f"model {key} is defined twice, the second time in {getfile(build)}; give it another "
                             f"name: @model('NAME')")
        _MODELS[key] = _Entry(build, presets)
        return build

    return register


def names() -> list[str]:
    """The names of all networks, in the order in which they were defined."""
    return list(_MODELS)


def arguments(name: str) -> dict[str, Any]:
    """The arguments that a network takes, with their defaults; `*more` and `**more` take nothing. Raises ValueError for
    an unknown name."""
    build = _entry(name).build
    try:
        parameters = by_name(build)
    except ValueError as error:
        raise ValueError(f"model {name}: {error}") from None
    for key, p in parameters.items():
        if p.default is p.empty:
            raise ValueError(f"model {name}: its argument {key} has no default; give it one, as in {key}=64")
    return {key: p.default for key, p in parameters.items()}


def learning_rate(name: str, optimizer: str) -> float:
    """The default learning rate of a network, also of one's own, by the optimizer's name."""
    return (RATES[""] | RATES.get(name, {}))[optimizer]


def presets(name: str) -> list[str]:
    """The presets of a network. Raises ValueError for an unknown name."""
    return list(_entry(name).presets)


def preset_arguments(name: str, preset: str) -> dict[str, Any]:
    """The arguments that a preset sets. Raises ValueError for an unknown name or preset."""
    known = _entry(name).presets
    if preset not in known:
        raise ValueError(f"model {name} has no preset {preset!r}; known: {', '.join(known) or 'none'}")
    return dict(known[preset])


def create(name: str, *, preset: str | None = None, **given: Any) -> nn.Module:
    """Builds the network `name`; the result has `input_shape` (without the batch) and `classes`.

    `file.py:function` and `package.module:function` are names as well. Raises ValueError for an unknown name, preset or
    argument, and for a value of the wrong type.
    """
    known, base = arguments(name), {} if preset is None else preset_arguments(name, preset)
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"model {name} takes no argument {key!r}; it takes {', '.join([*known, 'preset'])}")
        wanted = type(known[key])
        if wanted is float and type(value) is int:
            given = {**given, key: float(value)}
        elif type(value) is not wanted or (wanted is int and value < 1):
            expected = _KINDS.get(wanted, f"of type {wanted.__name__}")
            raise ValueError(f"model {name}: {key} must be {expected}, not {repr(value)[:40]}")
        if ":" not in name and wanted in (int, float) and not value <= (most := MOST.get(key, 2**31 - 1)):
            raise ValueError(f"model {name}: {key} must be at most {most:,}, not {repr(value)[:40]}")
    return _built(name, {**base, **given})


def _built(name: str, given: dict[str, Any]) -> nn.Module:
    """The network. Raises ValueError if a function of one's own fails, or returns no network."""
    try:
        with users_code():
            made = _entry(name).build(**given)
    except Exception as error:
        if ":" not in name or isinstance(error, ValueError):  # its message is clear
            raise
        raise ValueError(f"model {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"model {name} is a {type(made).__name__}; its function must return an nn.Module")
    shape = made.input_shape
    if not isinstance(shape, tuple) or not all(isinstance(size, Integral) and size > 0 for size in shape):
        raise ValueError(f"model {name}: input_shape is {shape!r:.60}; it must be a tuple of whole numbers "
                         f"above 0, such as (28, 28, 1), or (64,)")
    if not isinstance(made.classes, Integral) or made.classes < 0:
        raise ValueError(f"model {name}: classes is {made.classes!r:.60}; it must be a whole number above 0")
    if not shape or not made.classes:
        missing = " and ".join(key for key in ("input_shape", "classes") if not getattr(made, key))
        raise ValueError(f"model {name} lacks {missing}; set on its class: input_shape = (28, 28, 1), the shape of one "
                         f"sample, and classes = 10")
    return made


_KINDS = {int: "an integer of at least 1", bool: "True or False", float: "a number"}


def _entry(name: str) -> _Entry:
    if ":" in name:
        return _Entry(function_of(name))
    needs_function(name)
    if name not in _MODELS:
        near = get_close_matches(name, _MODELS, n=3, cutoff=0.4)
        hint = f"similar names: {', '.join(near)}" if near else f"known: {', '.join(_MODELS)}"
        raise ValueError(f"unknown model {name!r}; {hint}")
    return _MODELS[name]
