"""docs/from_torch.md: its Python runs as it is written, and the names in its table exist."""

from __future__ import annotations

import re

import pytest
from helpers import ROOT, torch_or_skip

import minidl as ml
from minidl import nn, ops, optim

TEXT = (ROOT / "docs" / "from_torch.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")][2:]


def test_the_examples_run() -> None:
    torch_or_skip()
    assert len(BLOCKS) >= 5
    scope: dict[str, object] = {"__name__": "from_torch"}
    for block in BLOCKS:
        exec(block, scope)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_names_of_the_table_exist(row: list[str]) -> None:
    assert len(row) == 2, row
    for prefix, where in (("ml", ml), ("nn", nn), ("optim", optim), ("nn.functional", nn.functional)):
        for name in re.findall(rf"\b{prefix}\.(\w+)", row[1]):
            assert hasattr(where, name), f"{prefix}.{name}"
    if "the same" in row[1]:  # then what torch has is here, too
        first, *rest = re.findall(r"`([^`]+)`", row[0])
        home = {"torch": ml, "nn": nn, "optim": optim, "x": ml.Tensor}.get(first.partition(".")[0])
        for name in (first, *rest):
            bare = name.partition(".")[2] or name
            if home and (word := re.match(r"\w+$", re.sub(r"\(.*", "", bare))):
                assert hasattr(home, word[0]) or word[0] in ("to", "size", "cpu"), f"{name} is not in {home}"


def test_what_the_page_calls_absent_is_absent() -> None:
    absent = TEXT.partition("**Absent**")[2]
    for name in ("cumprod",):
        assert f"`{name}`" in absent
        assert not hasattr(ops, name)
        assert not hasattr(ml.Tensor, name)
