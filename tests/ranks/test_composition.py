"""Features combine: each pair on a small network leaves the bits of one process, or is refused in one line.

    PYTHONPATH=tests/helpers python tests/ranks/test_composition.py

writes docs/composition.md, which these tests compare with.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from rank_runs import alone, check, equal, on_ranks

from minidl.core import schedule
from minidl.core.placement import Refused

DOC = Path(__file__).resolve().parents[2] / "docs" / "composition.md"
FEATURES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "clipping by the global norm": {"clip": 0.05},
    "loss scaling": {"scaled": True},
    "tied weights": {"tied": True},
    "batch norm": {"norm": True},
    "dropout": {"drop": True},
    "dithered gradients": {"dither": 2.0},
    "recompute": {"recompute": (0,)},  # of all layers but this, up to what stages send
    "offload": {"offload": "all"},
    "weight versions (pipedream)": {"scheduler": "pipedream", "every": 1},
    "averaged weights (layerpipe2)": {"scheduler": "layerpipe2", "every": 1, "options": {"history": "average"}},
    "layers in parts (layerpipe)": {"scheduler": "layerpipe", "every": 1, "options": {"chunks": 2}},
    "two directions (chimera)": {"scheduler": "chimera", "groups": 2},
    "interleaved stages": {"scheduler": "interleaved"},
    "pairs as one action (dualpipe_v)": {"scheduler": "dualpipe_v"},
    "slices (seq1f1b)": {"scheduler": "seq1f1b", "slices": 2},
    "late updates (priority)": {"scheduler": "priority", "ranks": 1, "replicas": 2},
    "a plan from a file": {"saved": True},
    "messages earlier (overlap)": {"options": {"overlap": 100}},
    "weight gradients in groups (priority)": {"scheduler": "priority", "ranks": 1, "replicas": 2,
                                              "options": {"group_weights": 3}},
    "tasks in parts (split)": {"split": 2},
    "shards over replicas": {"replicas": 2, "shard": "3,prefetch=0,keep=none"},
    "experts over ranks": {"network": "experts", "experts_over": "data", "scheduler": "barrier", "ranks": 1,
                           "replicas": 2},
}
ALL_ALIKE = FEATURES["late updates (priority)"], FEATURES["experts over ranks"]  # ranks that are

PAIRS = list(itertools.combinations(FEATURES, 2))


def outcome(one: str, other: str) -> str:
    """"equal bits", or why the pair is refused; "" if it makes no sense."""
    first, second = FEATURES[one], FEATURES[other]
    if any(name in first and first[name] != value for name, value in second.items()):
        return ""
    if "every" in first and "overlap" in second.get("options", ()):
        return ""  # the order says which weights are read
    if any(each in (first, second) for each in ALL_ALIKE) and "overlap" in (first | second).get("options", ()):
        return ""  # its collectives begin as early as they can
    settings = first | second
    try:
        found = on_ranks(settings)
    except Refused as error:
        return str(error)
    except schedule.ScheduleError as error:  # what a file says is checked, not planned
        return error.message
    return "equal bits" if equal(found, alone(settings, found.log), settings) else "other bits"


def read() -> dict[tuple[str, str], str]:
    """The page's outcomes."""
    text = DOC.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    names = [row[0].split(". ", 1)[1] for row in rows[2:]]
    return {(one, other): {"yes": "equal bits", "-": ""}.get(cell) or reasons.get(cell, "")
            for one, row in zip(names, rows[2:], strict=True)
            for other, cell in zip(names, row[1:], strict=True) if cell}


@pytest.mark.few(1)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_pair_is_as_the_page_says(one: str, other: str) -> None:
    assert outcome(one, other) == read()[one, other]


def test_nearly_all_pairs_run() -> None:
    found = [*filter(None, read().values())]
    assert "other bits" not in found
    assert found.count("equal bits") >= 0.95 * len(found)
    assert counted(found) in DOC.read_text()


@pytest.mark.parametrize("other", ["tasks in parts (split)", "shards over replicas"])
def test_parts_and_shards_combine_with_all_that_is_not_stale(other: str) -> None:
    beside = {name for name in FEATURES if "(priority)" in name and "shard" in FEATURES[other]}  # the next step
    assert {one for (one, with_), what in read().items() if with_ == other and what not in ("", "equal bits")} == {
        one for one in FEATURES if "every" in FEATURES[one]} | beside


@pytest.mark.parametrize("kept", [(0,), "all"])
def test_what_a_slice_computes_again_is_there_for_the_slices_after_it(kept: Any) -> None:
    """The backward pass of the last slice comes first, and reads what earlier slices have made."""
    settings = FEATURES["slices (seq1f1b)"] | {"recompute": kept}
    check(settings)


def counted(found: list[str]) -> str:
    run = found.count("equal bits")
    return f"Of the {len(found)} pairs that make sense, {run} run: {100 * run / len(found):.1f} %."


def page() -> str:
    names, reasons, rows, every = list(FEATURES), list[str](), [], list[str]()
    for i, one in enumerate(names):
        cells = []
        for j, other in enumerate(names):
            found = outcome(one, other) if j > i else None
            print(one, "x", other, ":", found, flush=True)
            every += [found] if found else []
            if found and found != "equal bits" and found not in reasons:
                reasons.append(found)
            cells.append("" if found is None else "-" if not found else "yes" if found == "equal bits"
                         else str(reasons.index(found) + 1))
        rows.append(f"| {i + 1}. {one} | " + " | ".join(cells) + " |")
    columns = " | ".join(str(i + 1) for i in range(len(names)))
    return "\n".join([
        "# Which features combine", "",
        "Every pair trains a small network on two ranks of a pipeline (with replicas, two times two; late updates and",
        "experts: on two data-parallel ranks). *yes*: the parameters are bit-identical to one process; if weights are",
        "stale, that process replays the run's log of weight versions. *-*: both choose the order, or one leaves the",
        "other nothing to do. A number: minidl refuses the pair, for the reason below.", counted(every),
        "`tests/ranks/test_composition.py` makes this page, and compares each pair with it.", "",
        f"| | {columns} |", "|" + "---|" * (len(names) + 1), *rows, "",
        *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1)), ""])


if __name__ == "__main__":
    DOC.write_text(page())
