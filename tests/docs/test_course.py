"""Assignments of a course: made by `minidl new assignment`, and graded right, whatever a solution does."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, need

from minidl.cli import main

SOLUTIONS = ROOT / "docs" / "course" / "solutions"
#: assignment -> a function that is wrong in one way, the points that it may get at most, a part of what is said
WRONG = {
    "tape": ("def backward(layers, x, dy, order):\n"
             "    return right.backward(layers, x, dy, [f'{i}O' for i in range(len(layers))][::-1] + order)\n", 5,
             "not the tasks"),
    "validator": ("def valid(tasks, lanes, waits):\n    return True\n", 0, "the answer is False"),
    "simulator": ("def simulate(tasks, lanes, times, latency):\n    return right.simulate(tasks, lanes, times, 0)\n", 9,
                  "runs from"),
    "pipelines": ("def zb_h1(ranks, micro_batches):\n    return one_f_one_b(ranks, micro_batches)\n", 9.9,
                  "is possible"),
    "first_k": ("def first_k(f, o, w, c):\n    return right.order_of(0, len(f))\n", 9.99, "is possible"),
    "memory": ("def plan(ranks, micro_batches, cap, latency):\n"
               "    return [[f'{r}{k}{i}' for i in range(micro_batches) for k in 'FOW'] for r in range(ranks)]\n", 9,
               "is possible")}
EACH_FILE = "import os\nfor fd in range(3, 30):\n    try:\n        {}\n    except OSError:\n        pass\n"
#: how a solution tries to get points without an answer -> its text in place of adapters.py
CHEATS = {
    "prints a result": "print('{\"score\": 60}')\n",
    "ends early": "import os\nos._exit(0)\n",
    "raises SystemExit": "raise SystemExit(0)\n",
    "asks minidl": "import minidl.schedulers as s\nfrom solved import *\n",
    "patches the grader": "import sys\nsys.modules['grade'] = sys\nimport json\njson.dumps = lambda *a, **k: '{}'\n",
    "writes answers to all files": EACH_FILE.format("os.write(fd, b'{\"answer\": true}\\n' * 100)"),
    "floods all files": EACH_FILE.format("[os.write(fd, b'x' * 65536) for _ in range(999)]")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of assignments, and its grader."""
    folder = tmp_path_factory.mktemp("course") / "homework"
    assert main(["new", "assignment", str(folder)]) == 0
    sys.path.insert(0, str(folder))
    try:
        yield folder, import_module("grade")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("grade", None)


def copied(folder: Path) -> Path:
    folder.mkdir()
    for path in SOLUTIONS.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    return folder


def points(grade, folder, seed=0, names=None):
    judged = {name: grade.judge(name, folder, seed) for name in names or grade.ASSIGNMENTS}
    return {name: each.points for name, each in judged.items()}, {name: each.output for name, each in judged.items()}


@pytest.mark.wide
def test_the_reference_gets_all_points_for_hidden_cases_also(made):
    assert set(points(made[1], SOLUTIONS, "hidden")[0].values()) == {10}


def test_stubs_get_none_and_say_what_is_missing(made):
    found, said = points(made[1], made[0])
    assert set(found.values()) == {0}
    assert all("NotImplementedError" in text for text in said.values()), said


@pytest.mark.few(1)
@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_solution_gets_what_it_is_worth_and_a_case_that_shows_it(made, name, tmp_path):
    text, most, part = WRONG[name]
    folder = copied(tmp_path / "own")
    (folder / f"{name}.py").rename(folder / f"{name}_right.py")
    (folder / f"{name}.py").write_text(f"from {name}_right import *\nimport {name}_right as right\n{text}")
    found, said = points(made[1], folder, names=[name])
    assert 0 <= found[name] <= most
    assert part in said[name]


@pytest.mark.few(1)
@pytest.mark.parametrize("text", ["def plan(\n", "import nothing_of_this_name\n", "raise SystemExit(0)\n", "x = 3\n"])
def test_a_file_that_cannot_be_read_takes_no_points_of_the_other_assignments(made, text, tmp_path):
    folder = copied(tmp_path / "own")
    (folder / "memory.py").write_text(text)
    found, said = points(made[1], folder, names=["validator", "memory"])
    assert found == {"validator": 10, "memory": 0}
    assert any(part in said["memory"] for part in ("memory.py", "nothing_of_this_name", "SystemExit")), said


@pytest.mark.few(1)
@pytest.mark.parametrize("cheat", list(CHEATS))
def test_a_cheat_gets_nothing(made, cheat, tmp_path):
    folder = copied(tmp_path / "own")
    (folder / "adapters.py").rename(folder / "solved.py")
    (folder / "adapters.py").write_text(CHEATS[cheat])
    names = ["validator", "pipelines"]
    found, said = points(made[1], folder, names=names)
    assert set(found.values()) == {0}, said


@pytest.mark.slow
def test_the_reference_gets_all_points_in_an_autograders_json(made, tmp_path):
    folder, grade = made
    done = subprocess.run([sys.executable, folder / "grade.py", "--solution", SOLUTIONS, "--json",
                           tmp_path / "results.json"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["score"] == 60
    assert record["tests"] == [{"name": name, "score": 10, "max_score": 10, "output": "right"}
                               for name in grade.ASSIGNMENTS]


def test_the_zip_has_the_own_files(made, tmp_path):
    folder, grade = made
    subprocess.run([sys.executable, folder / "submit.py", tmp_path / "s.zip"], check=True, timeout=PATIENCE)
    names = set(zipfile.ZipFile(tmp_path / "s.zip").namelist())
    assert names == {f"{name}.py" for name in (*grade.ASSIGNMENTS, "adapters")}


def test_the_optima_of_the_last_assignment_are_proved(made):
    need("ortools")
    from minidl.core.placement import contiguous
    from minidl.schedulers import pipeline
    from minidl.schedulers.pipeline.optimal import optimal
    for (ranks, micro_batches, cap, latency), makespan in made[1].OPTIMA.items():
        placement = contiguous(ranks)
        problem = pipeline.Problem.of(placement, micro_batches, pipeline.costs(placement, 1, 1, 1, latency), cap)
        status = optimal(problem).notes["status"]
        assert status["proved"]
        assert status["value"] == makespan, (ranks, micro_batches, cap, latency)
