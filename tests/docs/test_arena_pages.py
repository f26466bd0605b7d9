"""docs/arena.md and docs/instructors.md say what the arena does: their commands run, their files are there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from helpers import ROOT

from minidl import arena
from minidl.cli import main

PAGES = [ROOT / "docs" / name for name in ("arena.md", "instructors.md")]
COMMANDS = [command.partition("  #")[0] for page in PAGES for command in
            re.findall(r"^minidl .*$", page.read_text(), re.MULTILINE)]


def test_what_a_class_hands_in_is_graded(tmp_path, monkeypatch, capsys):
    """The command of the page for instructors, with its files."""
    monkeypatch.chdir(tmp_path)
    Path("handed_in").mkdir()
    Path("handed_in/ada.py").write_text("from minidl.schedulers.pipeline.zero_bubble import zb_h1 as order\n")
    assert main(["plan", "--ranks", "4", "--micro-batches", "8", "--save", "handed_in/grace.csv", "--json"]) == 0
    capsys.readouterr()
    command = next(c for c in COMMANDS if "handed_in" in c).replace("--html week3.html", "--json")
    assert main([*shlex.split(command)[1:], "--alone"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert [(e["rank"], e["entry"], e["period"]) for e in problem["entries"]] == [
        (1, "handed_in/ada.py:order", 27.0), (2, "handed_in/grace.csv", 33.0)]


def test_the_problem_of_the_page_is_read_and_all_bundled_ones_are_named(tmp_path):
    text = PAGES[0].read_text()
    (tmp_path / "own.json").write_text(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    (task,) = arena.read(str(tmp_path / "own.json"))
    assert task.bound == 48
    assert all(f"`{task.name}`" in text for task in arena.read("all"))
    keys = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert keys == set(arena.Task.__dataclass_fields__)


def test_every_chapter_and_exercise_has_its_week():
    weeks = [row for row in PAGES[1].read_text().splitlines() if re.match(r"\| \d \|", row)]
    assert len(weeks) == 6
    chapters = sorted(path.name for path in (ROOT / "docs" / "tutorial").glob("chapter*.py"))
    assert sorted(re.findall(r"tutorial/(chapter\w+\.py)", "".join(weeks))) == chapters
    for name in re.findall(r"`(exercise\d+\.\w+)`", "".join(weeks)):
        assert (ROOT / "docs" / "tutorial" / "exercises" / name).is_file()
    exercises = sorted(int(n) for row in weeks for n in row.split("|")[4].split(","))
    assert exercises == [*range(1, len(chapters) + 1)]
