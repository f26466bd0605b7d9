"""docs/your_own.md, as a reader follows it: from an empty folder, outside the clone."""

from __future__ import annotations

import re
import shlex

from helpers import ROOT

from minidl.cli import main

PAGE = ROOT / "docs" / "your_own.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_page_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = {}
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
            continue
        for line in text.splitlines():
            assert main(shlex.split(line)[1:]) == 0, line
            printed[line] = capsys.readouterr().out
    compared = [out for line, out in printed.items() if " compare " in line]
    assert len(compared) == 3
    assert all("equal bit for bit" in out for out in compared)
    assert "</html>" in (tmp_path / "plan.html").read_text()
    (accuracy,) = re.findall(r"accuracy (\d+)", next(iter(printed.values())))
    assert int(accuracy) > 80
