"""docs/scale.md tells the truth: each number is what the command beside it says."""

from __future__ import annotations

import json
import re

import pytest
from helpers import ROOT

from minidl.cli import main

SHOWN = re.findall(r"^- (.*)\n  `python -m minidl (simulate [^`]+)` gives (\w+) (\d+)$",
                   (ROOT / "docs" / "scale.md").read_text(), re.MULTILINE)


def test_the_page_has_numbers_for_each_size() -> None:
    assert len(SHOWN) >= 15
    assert all(any(words.startswith(size) for words, *_ in SHOWN) for size in ("64 ", "1,024 ", "16,384 "))


@pytest.mark.parametrize(("words", "command", "key", "number"), SHOWN, ids=[words for words, *_ in SHOWN])
def test_a_number_is_what_the_command_says(words: str, command: str, key: str, number: str, capsys: object) -> None:
    assert main([*command.split(), "--json"]) == 0
    assert round(json.loads(capsys.readouterr().out)[key]) == int(number)  # type: ignore[attr-defined]
