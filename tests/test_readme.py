"""What the README shows is what happens."""

import re
import shlex
from pathlib import Path

import pytest

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


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("minidl ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_two_commands_are_one_line_each_with_their_own_install():
    first, second = [block.strip() for block in blocks("sh")][:2]
    assert first == "pip install -e . && python -m minidl train"
    assert re.fullmatch(r'pip install -e "\.\[test\]" && python -m pytest -q', second)


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
