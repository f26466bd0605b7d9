"""What the README shows is what happens; its commands and links: test_docs.py."""

import re
import shlex
from pathlib import Path

from minidl.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "ooo.json").exists()
    assert "makespan" in capsys.readouterr().out


def test_the_two_commands_are_one_line_each_with_their_own_install():
    first, second = [block.strip() for block in blocks("sh")][:2]
    assert first == "pip install -e . && python -m minidl train"
    assert re.fullmatch(r'pip install -e "\.\[test\]" && python -m pytest -q', second)


def test_the_edited_plan_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (block,) = [block for block in blocks("sh") if "--save my_plan.csv" in block]
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    assert "equal bit for bit" in capsys.readouterr().out
