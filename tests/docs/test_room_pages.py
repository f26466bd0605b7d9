"""The README.md of a room names each of its files once, nothing that is not there, and is short."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT

ROOMS = ("minidl/passes", "minidl/plans", "minidl/runtime", "minidl/devices", "schedulers/pipeline")
MOST = 60  #: lines of a page
OF_A_READER = {"ml", "plan", "draft", "device", "print"}  #: objects in expressions, no names of a room


def files(room: str) -> set[str]:
    """The files of a room that have more than a docstring."""
    return {str(path.relative_to(ROOT / room)) for path in (ROOT / room).rglob("*.py")
            if len(ast.parse(path.read_text()).body) > 1}


def words(path: Path) -> set[str]:
    return {*re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("room", ROOMS)
def test_a_page_names_each_file_once(room):
    text = (ROOT / room / "README.md").read_text()
    links = Counter(re.findall(r"\]\(([^)]+)\)", text))
    assert {*links} == files(room)
    assert links.most_common(1)[0][1] == 1
    assert len(text.splitlines()) <= MOST
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_page_names_exists(room):
    """Files and tests, and names of the room's code or of the road."""
    text = (ROOT / room / "README.md").read_text()
    known = set().union(*(words(ROOT / room / file) for file in files(room)), words(ROOT / "schedulers" / "planner.py"))
    for name in re.findall(r"`([^`\n]+)`", text):
        if name.startswith("python -m pytest"):
            assert all((ROOT / path).is_dir() for path in re.findall(r"tests/[\w/]+", name)), name
        elif "/" in name or name.endswith(".py"):
            assert (ROOT / room / name).exists() or (ROOT / name).exists(), name
        else:
            assert {*re.findall(r"[A-Za-z_]\w*", name)} - OF_A_READER <= known, name


@pytest.mark.parametrize("room", ROOMS)
def test_a_page_says_what_every_page_says(room):
    """What comes in and goes out, the order in which to read, three invariants, the tests of the room."""
    text = (ROOT / room / "README.md").read_text()
    assert "**In:**" in text
    assert "**Out:**" in text
    assert "## The order in which to read\n" in text
    invariants = re.search(r"^## Three invariants\n(.*?)^## Tests\n.*?`python -m pytest -q (tests/[\w/]+)`", text,
                           re.M | re.S)
    assert re.findall(r"^(\d)\. \*\*", invariants[1], re.M) == ["1", "2", "3"]
    assert invariants[2] == f"tests/{room.removeprefix('minidl/')}"


def test_contributing_links_every_page():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {room for room in ROOMS if f"]({room}/README.md)" in text} == {*ROOMS}
