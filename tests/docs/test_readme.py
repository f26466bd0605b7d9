"""What the README shows is what happens; its commands and links: test_docs.py."""

import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location

from helpers import ROOT

from minidl.cli import main

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def load(path, name):
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "ooo.json").exists()
    assert "makespan" in capsys.readouterr().out


def test_the_two_commands_are_one_line_each_with_their_own_install():
    first, second = [block.strip() for block in blocks("sh")][:2]
    assert first == "pip install -e . && python docs/race.py"
    assert re.fullmatch(r'pip install -e "\.\[test\]" && python -m pytest -q', second)


def test_the_first_command_races_two_orders_and_names_a_page(tmp_path, monkeypatch, capsys):
    """It prints what it has measured, which this test does not judge; the order that wins is predicted to."""
    race = load(ROOT / "docs" / "race.py", "race")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race, "SECONDS", 0.0005)
    monkeypatch.setattr(race, "ROUNDS", 2)
    assert race.main() == 0
    *_, verdict, last = capsys.readouterr().out.splitlines()
    predicted = re.fullmatch(r"ZB-H1 is \d+\.\d\dx as fast as GPipe on this machine \(predicted (\d\.\d\d)x\), and the "
                             r"weights are equal bit for bit\.", verdict)
    assert float(predicted[1]) > 1.2
    assert last == "Open race.html in a browser to see both steps, task by task."
    text = (tmp_path / "race.html").read_text()
    assert "gpipe" in text
    assert "zb_h1" in text


def test_the_edited_plan_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (block,) = [block for block in blocks("sh") if "--save my_plan.csv" in block]
    monkeypatch.chdir(tmp_path)
    for line in block.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
    assert "equal bit for bit" in capsys.readouterr().out
