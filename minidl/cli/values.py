"""The values of flags: how each is read from its text, and the names that a flag may have.

The room that knows the names for a flag is imported only for a command that uses them:
`minidl --help` loads no part of the engine.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any


def nearest(word: str, known: Sequence[str]) -> str:
    """`similar names: a, b`; without any, or if there are few, all known names."""
    near = difflib.get_close_matches(word, known, 3, 0.4) if len(known) > 4 else []
    return f"similar names: {', '.join(near)}" if near else f"known: {', '.join(known)}"


class Names:
    """Names that a room knows, such as `training.job:OPTIMIZERS`. The room is imported when they are first used."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __iter__(self) -> Iterator[str]:
        module, _, name = self.where.partition(":")
        return iter(getattr(import_module(f"minidl.{module}"), name))


MOMENTUM, RULES, STORED = Names("training.job:MOMENTUM"), Names("fusion:RULES"), Names("data.catalogue:STORED")


def size(text: str) -> int:
    """`2GiB`, `300kB`, `4096` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size; write 4096, 300MB or 2GiB")
    value = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    if not 1 <= value < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be at least 1 byte, and fewer than 4 EiB")
    return int(value)


def sizes(text: str) -> int | list[int]:
    """`2GiB`, or a list such as `300MB,1GB`, in bytes."""
    found = [size(word) for word in text.split(",")]
    return found if len(found) > 1 else found[0]


def topology(text: str) -> dict[str, Any]:
    """`nodes=128,inside=2:300GB,across=10:50GB,rails=8,fill=pipeline`: of links the latency in microseconds and, unless
    it is unlimited, the bandwidth per second."""
    from ..pricing.topology import FILLS

    found: dict[str, Any] = {}
    for word in text.split(","):
        name, sign, value = word.strip().partition("=")
        if not sign or name not in ("nodes", "inside", "across", "rails", "fill") or name in found:
            raise argparse.ArgumentTypeError(f"{word[:40]!r} is no part of a topology; write each of nodes=N, "
                                             f"inside=LATENCY:BANDWIDTH, across=.., rails=N, "
                                             f"fill={'|'.join(FILLS)} once, with commas")
        if name in ("inside", "across"):
            latency, sign, rate = value.partition(":")
            found[name] = number(0)(latency), size(rate) if sign else None
        elif name == "fill" and value not in FILLS:
            raise argparse.ArgumentTypeError(f"fill={value[:40]!r}; {nearest(value, FILLS)}")
        else:
            found[name] = value if name == "fill" else whole(1, 1 << 20)(value)
    if "nodes" not in found:
        raise argparse.ArgumentTypeError("the number of nodes is missing, as in nodes=4")
    return found


def pair(text: str) -> tuple[str, Any]:
    """`key=value`; the value is read as a Python literal if it is one, or true or false as in TOML, else as text."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    try:
        return key.strip(), ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return key.strip(), value


def parts_of(text: str) -> int | str:
    """The number of parts of each task; `none`: 1; or `auto`."""
    return text if text == "auto" else 1 if text == "none" else whole(2, 1023)(text)


def shards_of(text: str) -> int | str:
    """The arrays that ranks share out: a level, or a level with its arguments."""
    from ..core.machine import PlanError
    from ..passes.shard import Shards

    try:
        told = str(Shards.of(text))
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return int(told) if told.isdecimal() else told


def whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """An integer from `least` to `most`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text, re.ASCII) or int(text[:20]) < least:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a whole number of at least {least}")
        if len(text) > 20 or int(text) > most:
            raise argparse.ArgumentTypeError(f"{text[:40]} is too large; it must be at most {most}")
        return int(text)

    return read


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A finite number of at least `least`, and at most `most`."""
    bounds = f"finite number of at least {least:g}" if most == math.inf else f"number from {least:g} to {most:g}"

    def read(text: str) -> float:
        value = math.nan
        with suppress(ValueError):
            value = float(text)
        if not least <= value <= most or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a {bounds}")
        return value

    return read


def path(text: str) -> str:
    """The name of a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def command(text: str) -> str:
    """Words as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("the command is empty")
    return text


def every(text: str) -> dict[str, float]:
    """`500` steps, or `10min`."""
    if text.endswith("min"):
        return {"seconds": 60 * number(1e-6)(text.removesuffix("min"))}
    return {"steps": whole(1)(text)}


def patience(text: str) -> tuple[float, str]:
    """`SECONDS[,DIR]`: the folder is `standstill` if it is left out."""
    seconds, sign, folder = text.partition(",")
    return number(0.01)(seconds), path(folder) if sign else "standstill"


def slow_rank(text: str) -> tuple[int, float]:
    """`RANK=FACTOR`: how many times slower a rank is."""
    rank, sign, factor = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not of the form RANK=FACTOR, as in 0=4")
    return whole(0)(rank), number(0)(factor)


def numbers(text: str) -> float | list[float]:
    """`1.5`, or `1,2,2` for one number per stage or layer."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number or numbers with commas") from None
    return values if len(values) > 1 else values[0]


def rules(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names of fusion rules with commas."""
    names = tuple(RULES) if text == "all" else () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in RULES:
            raise argparse.ArgumentTypeError(f"{name!r} is not a fusion rule; {nearest(name, ['all', 'none', *RULES])}")
    return names
