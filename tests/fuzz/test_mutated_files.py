"""A campaign of mutated files of every format, short here and long behind `campaign`; and that the campaign sees what
it looks for."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import deadline
from mutations import MEMORY, SPARE, Campaign, Format, campaign, measured, quiet, watched

import minidl as ml
from minidl.cli.parser import parse
from minidl.core.schedule import ScheduleError
from minidl.core.torch_trace import load_torch
from minidl.pricing.cost import CostError, CostModel
from minidl.schedulers import pipeline
from minidl.system import files

SEED = 20261124
CASES = int(os.environ.get("MINIDL_MUTATED_FILES", 2500))  #: of each seed of the campaign


@pytest.mark.parametrize("cases", [70, pytest.param(350, marks=pytest.mark.slow)])
def test_mutated_files(tmp_path: Path, cases: int) -> None:
    print(f"seed {SEED}")
    ended = campaign(tmp_path, SEED, cases)
    count = Counter(how for (_, how), n in ended.outcomes.items() for _ in range(n))
    assert sum(count.values()) == cases
    assert count["refused"] > cases * 3 // 7, "what is mutated is mostly no file any more"
    assert count["read"] > cases // 35, "and sometimes one still"


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_many_mutated_files(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    ended = campaign(tmp_path, seed, CASES)
    print(dict(ended.outcomes))


# -------------------------------------------------------------------------------------------- it sees what it looks for
class Broken(Campaign):
    """A campaign over one format, whose reader does what none may."""

    def __init__(self, folder: Path, act: Any) -> None:
        self.folder, self.outcomes = folder / "case", Counter()
        self.formats = {"x": Format("x", b"0", [], lambda rng, content: content, {}, 16 << 20, act)}


@pytest.mark.wide
def test_the_campaign_notices_what_must_not_be(tmp_path: Path) -> None:
    def hog(path: Path) -> None:
        # more than pages of libraries may hide
        np.ones((40 << 20) + sum(end - begin for begin, end in libraries()), np.uint8)

    def line(path: Path) -> None:
        raise ValueError("one\ntwo")

    acts = {
        "os.system": lambda path: os.system("true"), "subprocess.Popen": lambda path: subprocess.run(["true"]),
        "open to write": lambda path: path.write_text("other"), "os.remove": lambda path: path.unlink(),
        "os.rename": lambda path: path.rename("y"), "pickle.find_class": lambda path: pickle.loads(pickle.dumps(Path)),
        "bytes of memory": hog, "AssertionError": line, "KeyError": lambda path: {}["x"],
    }
    for says, act in acts.items():
        with pytest.raises(AssertionError, match=f"seed 1, case 0 .*{says}"):
            Broken(tmp_path, act).case(1, 0)
    assert quiet(["models"])[0] == 0
    Broken(tmp_path, lambda path: path.read_bytes()).case(1, 0)
    cache = {"__name__": "numba.core.caching", "pickle": pickle, "code": pickle.dumps(Path)}
    Broken(tmp_path, lambda path: exec("pickle.loads(code)", cache)).case(1, 0)  # a kernel that is used first


def libraries() -> list[tuple[int, int]]:
    """Where those lie that this process has loaded."""
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    return [(int(begin, 16), int(end, 16))
            for begin, end in (row[0].split("-") for row in rows if ".so" in row[-1] and row[1][0] == "r")]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is asked of Python, not of the system")
@pytest.mark.parametrize("leave", ["garbage", "free memory"])
def test_what_leaves_memory_meanwhile_hides_nothing(leave: str) -> None:
    size = 64 << 20  # beside it, what pages of libraries may hide is small
    for _ in range(2 if leave == "free memory" else 0):
        np.ones(31 << 20, np.uint8)  # the allocator keeps the second
    held: list[Any] = [np.ones(2 * size, np.uint8)] if leave == "garbage" else []
    held.append(held)
    del held
    with measured() as took:
        _ = [[] for _ in range(100_000)]  # enough for a collection
        parts = [np.ones(size // 4, np.uint8) for _ in range(4)]
    del parts
    assert took.bytes > 0.9 * size


def test_nothing_is_watched_outside(tmp_path: Path) -> None:
    with watched() as seen:
        (tmp_path / "a").read_bytes() if (tmp_path / "a").exists() else None
    (tmp_path / "a").write_text("x")
    assert not seen


# --------------------------------------------------------------------------------------- memory of files that are large
SIZE = 1 << 20
HEAD = "rank,lane,task\n"


def of(unit: str, size: int = SIZE) -> str:
    return unit * (size // len(unit.encode()) + 1)


LARGE = {
    "plan": {
        "rows": HEAD + of("0,m,0F0\n"), "lanes": HEAD + "".join(f"{i % 999},{i:x},0F0\n" for i in range(SIZE // 10)),
        "cells": HEAD + of(","), "a row of a grid": of("0F0,"), "rows of a grid": of("0F0\n"),
        "empty lines": HEAD + of("\n"), "an action": HEAD + "0,m,(" + of("0F0;") + "0F0)\n",
        "an action of a grid": "(" + of("0F0;") + "0F0)\n", "a letter of four bytes": of("0F0,") + "\U0001f600",
        "quotes": HEAD + of('"0","m","0F0"\n'), "a line with a quote": '"0F0",' + of("0F0,"),
        "carriage returns": HEAD + of("0,m,0F0\r"), "a cell": HEAD + "0,m," + of("x"), "blanks": of(" , "),
    },
    "costs": {
        "lists": '{"link":{},"kinds":{"F":[' + of("[],") + "0]}}", "tables": '{"link":{},"x":[' + of("{},") + "0]}",
        "zeros": '{"link":{},"kinds":{"F":[' + of("0,") + "0]}}",
        "tasks": '{"link":{},"tasks":{' + ",".join(f'"{i}F0":1' for i in range(SIZE // 12)) + "}}",
        "brackets": "[" * SIZE, "braces": '{"a":' * (SIZE // 5),
        "texts": '{"link":{},"x":[' + of('"\U0001f600",') + "0]}",
        "groups": '{"link":{},"corun":{"groups":{' + ",".join(f'"{i}":""' for i in range(SIZE // 10)) + "}}}",
        "slowdowns": '{"link":{},"corun":{"slowdown":{' + ",".join(f'"{i}":{{}}' for i in range(SIZE // 10)) + "}}}",
    },
    "config": {
        "keys": "".join(f"a{i}=1\n" for i in range(900)), "tables": "".join(f"[a{i}]\n" for i in range(900)),
        "a dotted key": ".".join(["a"] * 4000) + "=1\n", "lists": "x=[" + of("[],", 8000) + "]",
        "brackets": "x=" + "[" * 8000, "inline tables": "x=[" + of("{},", 8000) + "]", "a number": "x=" + "9" * 8000,
        "tables in a list": of("[[a]]\n", 8000), "an escaped text": 'x="' + of("\\u00e9", 8000) + '"',
    },
    "trace": {
        "lists": '{"minidl":{},"traceEvents":[' + of("[],") + "0]}", "brackets": "[" * SIZE,
        "events": '{"minidl":{"unit":"us"},"traceEvents":[' + of('{"ph":"X","args":{"record":0,"correlation":1}},')
                  + '{"ph":"M"}]}',
        "marks": "[" + of('{"ph":"X","ts":1},'), "pairs": "[" + of('{"ph":"B","ts":1},{"ph":"E","ts":2},'),
    },
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in LARGE.items() for name in cases])
def test_reading_takes_no_more_memory_than_is_stated(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "file"
    path.write_text(LARGE[kind][name])
    size = path.stat().st_size
    assert size <= files.LARGEST[kind]
    read = {"plan": lambda: pipeline.read_schedule(files.read_text(path, "plan")),
            "costs": lambda: CostModel.load(path), "config": lambda: parse(["plan", "--config", str(path)]),
            "trace": lambda: load_torch([path])}
    line = ""
    with deadline(120), measured() as took:
        try:
            read[kind]()
        except (ScheduleError, CostError, ValueError) as error:
            line = str(error)
    assert "\n" not in line
    assert len(line) < 1500
    assert (took.bytes <= MEMORY[kind] * size
            + SPARE // (1 if name in ("lanes", "rows of a grid", "a dotted key") else 16))


def test_a_trace_that_unpacks_to_much_is_refused_before_it_does(tmp_path: Path, monkeypatch: Any) -> None:
    import gzip

    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    monkeypatch.setitem(files.LARGEST, "trace", 1 << 20)
    with measured() as took, pytest.raises(ValueError, match="larger than 1 MiB"):
        ml.Timeline.load(path)
    assert took.bytes < 16 << 20
