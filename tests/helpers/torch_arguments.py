"""How every argument of torch's signatures is tried: a function is called with each of its arguments, by name and in
its place, at a value that matters, and either the results and gradients are torch's, or one clear line refuses it."""

from __future__ import annotations

import contextlib
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import minidl as ml

torch = pytest.importorskip("torch")


class Draws:
    """Inputs; each test file has its own, so that no file's depend on another."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def floats(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(np.float32)

    def shares(self, *shape: int) -> Any:
        return self.rng.uniform(0.1, 0.9, shape).astype(np.float32)

    def labels(self, *shape: int, classes: int = 4) -> Any:
        return self.rng.integers(0, classes, shape)


# ------------------------------------------------------------------------------------------------------------- torch's
def signatures(f: Any, overrides: bool = True) -> list[inspect.Signature]:
    """Torch's signatures of a function or class: by inspection, of its overloads, in its documentation, and (with
    `overrides`) as torch gives it to those who override it, which of a tensor's methods are rough."""
    target = f.__init__ if isinstance(f, type) else f
    found = [inspect.signature(g) for g in typing.get_overloads(target)] if hasattr(target, "__module__") else []
    with contextlib.suppress(ValueError):
        found.append(inspect.signature(target))
    for text in re.findall(rf"^\s*(?:\.\. function:: )?{f.__name__}(\(.*?\))(?: ->|\n)", f.__doc__ or "", re.M | re.S):
        with contextlib.suppress(SyntaxError, NameError):
            space: dict[str, Any] = {}
            exec(f"def f{' '.join(text.split())}: pass", {"torch": torch}, space)
            found.append(inspect.signature(space["f"]))
    if overrides and f in (known := torch.overrides.get_testing_overrides()):
        found.append(inspect.signature(known[f]))
    return [s for s in found if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in s.parameters.values())]


def parameters(found: list[inspect.Signature]) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    """(the name of an argument, the parameters of a signature that has it)."""
    seen = set()
    for s in found:
        known = [p for p in s.parameters.values() if p.name != "self"]
        for p in known:
            if p.name not in seen and not p.name.startswith("_"):
                seen.add(p.name)
                yield p.name, known


# --------------------------------------------------------------------------------------------------------------- cases
@dataclass(frozen=True)
class Case:
    """Torch's inputs of a function or layer by name. `x`: the inputs of a layer's forward pass. `last`: channels come
    last here, so that arrays of three axes and more are turned. `drawn`: elements are dropped by chance, so that only
    their values are compared."""

    given: Mapping[str, Any] = field(default_factory=dict)
    x: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False
    drawn: bool = False


def equal(a: Any, b: Any, drawn: bool) -> bool:
    """Whether two lists of results have the same types, and are equal to the rounding of float32."""
    if drawn:
        a, b = [[np.unique(part.round(5)) for part in parts[:1]] for parts in (a, b)]
    return len(a) == len(b) and all(
        np.shape(x) == np.shape(y) and x.dtype == y.dtype and np.allclose(x, y, rtol=2e-4, atol=2e-5, equal_nan=True)
        for x, y in zip(a, b, strict=True))


def turned(a: Any, last: bool, back: bool = False) -> Any:
    """An array with its channels last, or back."""
    if not last or not isinstance(a, np.ndarray) or a.ndim < 3:
        return a
    return np.moveaxis(a, *((-1, 1) if back else (1, -1)))


def arrays_of(value: Any) -> list[Any]:
    """The arrays of a result, tuples and lists in order."""
    if isinstance(value, tuple | list):
        return [a for part in value for a in arrays_of(part)]
    return [] if value is None else [value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)]


def mapped(value: Any, make: Callable[[Any], Any]) -> Any:
    """The value with each array replaced, in tuples too."""
    if isinstance(value, tuple):
        return tuple(mapped(part, make) for part in value)
    return make(value) if isinstance(value, np.ndarray) else value


def leaf(tensor: Any) -> Any:
    return tensor.requires_grad_() if "float" in str(tensor.dtype) else tensor


def outcome(run: Callable[[], Any], leaves: list[Any]) -> list[Any]:
    """All outputs, and the gradients of the sum of their squares toward the leaves."""
    outputs = arrays_of(found := run())
    parts = [part for part in ([found] if not isinstance(found, tuple | list) else _flat(found)) if part is not None]
    total = sum((part * part).sum() for part in parts if "float" in str(part.dtype))
    if leaves and not isinstance(total, int):
        total.backward()
    return [*outputs, *(a for t in leaves if "float" in str(t.dtype) for a in arrays_of(t.grad))]


def _flat(value: Any) -> list[Any]:
    return [p for part in value for p in (_flat(part) if isinstance(part, tuple | list) else [part])]


@dataclass(frozen=True)
class Call:
    """A call of torch's function: `given` by name, of which the arguments `places` come by place."""

    given: Mapping[str, Any]
    places: tuple[str, ...]

    def split(self, make: Callable[[str, Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        made = {name: make(name, value) for name, value in self.given.items()}
        return [made[name] for name in self.places], {k: v for k, v in made.items() if k not in self.places}


def calls(known: list[inspect.Parameter], given: Mapping[str, Any], name: str) -> Iterator[Call]:
    """The call with the argument by its name, and in its place after torch's defaults."""
    must = tuple(p.name for p in known if p.default is p.empty and p.name in given)
    yield Call(given, tuple(n for n in must if n != name) if known and must[:1] != (name,) else must)
    before = [p for p in known[: [p.name for p in known].index(name) + 1] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if before and before[-1].name == name and all(p.name in given or p.default is not p.empty for p in before):
        yield Call({**{p.name: p.default for p in before}, **given}, tuple(p.name for p in before))


def of_function(torchs: Any, ours: Any, case: Case, call: Call,
                learns_at_all: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Torch's results of a call, and ours."""
    learns = "target" not in case.given

    def run(f: Any, tensor: Callable[[Any], Any], turn: bool) -> list[Any]:
        leaves: list[Any] = []

        def make(name: str, value: Any) -> Any:
            def one(a: Any) -> Any:
                t = tensor(np.ascontiguousarray(turned(a, turn and case.last)))
                if name in case.given and (name == "input" or learns):
                    leaves.append(leaf(t))
                return t

            return mapped(value, one)

        args, named = call.split(make)
        found = outcome(lambda: f(*args, **named), leaves if learns_at_all else [])
        return [turned(a, turn and case.last, back=True) for a in found]

    return lambda: run(torchs, torch.tensor, False), lambda: run(ours, ml.array, True)


RIDDLE = re.compile(r"unsupported operand|object is not|not supported between|' object|has no attribute|list index|"
                    r"cannot unpack|must be real number|could not be broadcast|NoneType|truth value|invalid literal")


def clear(error: BaseException, words: set[str]) -> bool:
    """Whether an error is one line that names the function or the argument, and no riddle."""
    line = str(error).lower().replace("_", "")
    return (isinstance(error, TypeError | ValueError | IndexError | NotImplementedError | AttributeError)
            and "\n" not in line and not RIDDLE.search(str(error))
            and ("positional argument" in line or any(w.lower().replace("_", "") in line for w in words)))


def results(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:  # compared below
            return error


def wrong(theirs: Any, mine: Any, drawn: bool, words: set[str]) -> str:
    """What is wrong with our result; empty if it is torch's, or a clear refusal."""
    if isinstance(mine, Exception):
        return "" if clear(mine, words) else f"a riddle: {type(mine).__name__}: {mine}"
    if isinstance(theirs, Exception):
        if "positional argument" in str(theirs):
            return ""  # ours may come by place as well
        return f"taken, and torch refuses it: {str(theirs)[:100]}"
    return "" if equal(theirs, mine, drawn) else f"other results than torch's: {mine[0]} instead of {theirs[0]}"


@dataclass(frozen=True)
class Tables:
    """`matters`: an argument -> values that matter; `"function argument"` for one function or layer. `beside`: an
    argument -> others beside which alone its values matter. `same`: arguments that change no result here. `also`: an
    argument or a function -> other words by which a refusal may name it."""

    matters: Mapping[str, list[Any]]
    beside: Mapping[str, Mapping[str, Any]]
    same: set[str]
    also: Mapping[str, tuple[str, ...]]

    def values(self, where: str, name: str) -> list[Any]:
        key = f"{where} {name}" if f"{where} {name}" in self.matters else name
        assert key in self.matters, f"torch's {where} has an argument {name}: give values that matter for it"
        return self.matters[key]


def check(where: str, name: str, known: list[inspect.Parameter], given: Mapping[str, Any],
          runs: Callable[[Call], tuple[Any, Any]], drawn: bool, tables: Tables) -> list[str]:
    """The faults of one argument."""
    found, values = [], tables.values(where, name)
    matters = not values or name in tables.same
    names = {p.name for p in known}
    for value in values:
        beside = tables.beside.get(f"{where} {name}", tables.beside.get(name, {}))
        more = {k: v for k, v in beside.items() if k in names}
        plain, with_it = {**given, **more}, {**given, **more, name: value}
        if where in ("interpolate", "Upsample") and name == "scale_factor":
            plain = dict(given)
        before = results(runs(next(calls(known, plain, next(iter(plain), name))))[0])
        for call in calls(known, with_it, name):
            theirs_of, mine_of = runs(call)
            theirs = results(theirs_of)
            said = f"{where}({', '.join(call.places)}; {name}={str(value)[:40]!r})"
            if name == "inplace":
                mine = results(mine_of)
                matters = True
                if not isinstance(mine, Exception):
                    found.append(f"{said}: taken without effect")
                continue
            failed = isinstance(before, Exception) or isinstance(theirs, Exception)
            matters = matters or failed or name == "dtype" or not equal(before, theirs, drawn)
            words = {where, name, *tables.also.get(name, ()), *tables.also.get(where, ())}
            if fault := wrong(theirs, results(mine_of), drawn, words):
                found.append(f"{said}: {fault}")
    return found if matters else [*found, f"{where}: no value of {name} here matters to torch"]
