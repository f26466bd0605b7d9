"""Habits of language that make pages hard to read. The counts may only fall."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {"results.md", "composition.md"}  # by programs
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("minidl/*/README.md")), *sorted(ROOT.glob("schedulers/*/README.md")),
         *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in MADE)]
#: pattern -> how often it is there today; before anybody counted, there were 53 in all
HABITS = {
    r"\b(?:is|are|was|were|being)\s+(?:refused|told)\b(?!\s+by\b)": 0,  # by whom?
    r"\b(?:has|have|had|with|leaves?|gives?|gave)\s+the\s+(?:same\s+)?bits\b": 0,  # "is bit-identical to"
    r"\b(?:that|those)\s+of\b": 0,
    r"(?:,?\s+(?:too|otherwise))(?=[.;:)])": 0,
    r"(?:(?<=[.;:] )|(?<=\n)|^)Of\s": 0,  # "Of X, Y": begin with the subject
    r"(?:(?<=[.;] )|^|(?<=, ))[Ww]here\s+(?:the|a|it|they|there|no|that|this)\s": 0,  # "if"
}


#: the same in docstrings, comments and messages of the code, and four more
CODE = dict(zip(HABITS, (0, 0, 0, 0, 0, 1), strict=True)) | {
    r"\b[Rr]aises \w+ where\b": 0,  # "if"
    r"\b(?:None|[Ee]mpty|False|none|zeros) where\b": 0,  # "if"
    r"\bWhat\s(?![^.]*\?)": 0,  # "What it costs": name the thing
    r"\bstands? (?:twice|exactly|before|after|on rank)\b": 0,  # "appears", "comes", "is"
}
ROOMS = [path for room in ("minidl", "schedulers", "models", "kernels") for path in sorted((ROOT / room).rglob("*.py"))
         if not any(folder.is_symlink() for folder in path.parents)]


def words(path):
    """The strings and comments of a file, each as one line."""
    with open(path, "rb") as file:
        return [" ".join(token.string.split()) for token in tokenize.tokenize(file.readline)
                if token.type in (tokenize.STRING, tokenize.COMMENT)]


@pytest.fixture(scope="module")
def said():
    return {path: words(path) for path in ROOMS}


@pytest.mark.parametrize("habit", CODE)
def test_a_habit_does_not_spread_in_code(habit, said):
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path, texts in said.items() for text in texts
             for match in re.finditer(habit, text)]
    assert len(found) <= CODE[habit], len(found)


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_does_not_spread(habit):
    found = [f"{page.relative_to(ROOT)}: {' '.join(match[0].split())}" for page in PAGES
             for match in re.finditer(habit, re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)]
    assert len(found) <= HABITS[habit], found
