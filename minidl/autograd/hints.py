"""Names of torch that are absent here, and text to write instead. They are in absent.md, as in docs/from_torch.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NoReturn


@cache
def absent() -> dict[str, str]:
    """A name, such as `nn.Fold` or `x.to`, or `nanmean` for a function of tensors -> the text of its row."""
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", Path(__file__).with_name("absent.md").read_text(), re.MULTILINE)
    return {name: text.replace("`", "") for names, text in rows for name in re.findall("`(.+?)`", names)}


def hint(room: str, name: str, known: Sequence[str] = ()) -> str:
    """The end of the error for a name that torch's `room` may have: what to write instead, or names spelt alike."""
    if name.startswith("_"):
        return ""
    text = absent().get(f"{room}.{name}") or (room in ("x", "torch") and absent().get(name))
    if not text and name.endswith("_"):
        text = "the name without the last underscore: nothing is changed in place"
    if text:
        reason = text.removeprefix("nothing")
        return f"; use {text}" if reason == text else f"; torch's has no counterpart here{reason}"
    near = get_close_matches(name, known, 3, 0.6)
    return f"; similar names: {', '.join(near)}" if near else ""


def missing(module: str, room: str, known: Sequence[str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module with these names, which torch calls `room`."""

    def raise_for(name: str) -> NoReturn:
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint(room, name, known)}")

    return raise_for
