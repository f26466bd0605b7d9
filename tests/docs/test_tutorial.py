"""Every chapter of the tutorial runs; every exercise accepts a solution and rejects what it starts from."""

import ast
import os
import re
import runpy
import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT, need

from minidl.cli import main

TUTORIAL = ROOT / "docs" / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("chapter*.py"))
STARTS = sorted((TUTORIAL / "exercises").glob("exercise*"))


def plan(*lanes):
    """The CSV of a plan, given as "rank,lane: tasks in order"."""
    rows = [f"{name},{task}\n" for name, _, tasks in (lane.partition(": ") for lane in lanes) for task in tasks.split()]
    return "".join(["rank,lane,task\n", *rows])


SOLUTIONS = {
    1: """
import numpy as np
from chapter1_tape import emit

def tanh(x):
    y = np.tanh(x.value)
    return emit(y, (x, lambda dy: dy * (1 - y**2)))
""",
    2: """
def reverse_first_k(layers, k):
    order = []
    for l in reversed(range(layers)):
        order += [f"{l}W"] * (l >= k) + [f"{l}O"] * (l > 0)
    return order + [f"{l}W" for l in range(k)]
""",
    3: """
def edges(tasks):
    found, writer, readers = set(), {}, {}
    for name, reads, writes in tasks:
        for buffer in reads:
            if buffer in writer:
                found.add((writer[buffer], name))
            readers.setdefault(buffer, []).append(name)
        for buffer in writes:
            last = [writer[buffer]] if buffer in writer else []
            found |= {(earlier, name) for earlier in [*readers.get(buffer, ()), *last]}
            writer[buffer], readers[buffer] = name, []
    return {(earlier, later) for earlier, later in found if earlier != later}
""",
    4: plan("0,main: 1F0 2F0 3F0 4F0 4O0 3O0 2O0",
            "0,sub: 3W0 3U0 1W0 1U0"),
    5: """
from minidl import Kind, Lane, Schedule

def scheduler(graph):
    lowest = sorted({t.unit for t in graph if t.kind == Kind.W})[:2]
    late = [t.index for t in graph if t.kind in (Kind.W, Kind.U) and t.unit in lowest]
    chain = [t.index for t in graph if t.kind in (Kind.F, Kind.O)]
    sub = [t.index for t in graph if t.kind in (Kind.W, Kind.U) and t.unit not in lowest]
    return Schedule.of(graph, {Lane(0, "main"): chain + late, Lane(0, "sub"): sub})
""",
    6: plan("0,main: 0F0 0F1 0F2 0O0 0W0 0F3 0O1 0W1 0O2 0W2 0O3 0W3",
            "1,main: 1F0 1F1 1O0 1F2 1O1 1W0 1F3 1O2 1W1 1O3 1W2 1W3",
            "2,main: 2F0 2O0 2F1 2O1 2F2 2O2 2W0 2F3 2O3 2W1 2W2 2W3"),
    7: """
def partition(times, processors):
    def enough(period):
        used, load = 1, 0
        for time in times:
            if load + time > period:
                used, load = used + 1, 0
            load += time
        return used <= processors

    low, high = max(times), sum(times)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
""",
    8: """
def lower_bound(forward, output_grad, weight_grad, comm):
    circuits = [sum(forward[l:]) + sum(output_grad[l + 1:]) + weight_grad[l] + comm[l] for l in range(len(forward))]
    return max(sum(forward) + sum(output_grad[1:]) + sum(weight_grad), sum(comm), *circuits)
""",
    9: """
from minidl import Kind, Lane, Schedule
from minidl.passes.boundary import with_late

def scheduler(graph):
    tasks = [t for t in graph if t.kind in (Kind.W, Kind.U)]
    is_late = [t.index for unit in (5, 9, 13) for t in tasks if t.unit == unit]
    last = [t.index for t in tasks if t.unit == 1]
    main = [t.index for t in graph if t.kind in (Kind.F, Kind.O)]
    sub = [t.index for t in tasks if t.index not in is_late + last]
    return with_late(Schedule.of(graph, {Lane(0, "main"): main + last, Lane(0, "sub"): is_late + sub}), graph, is_late)
""",
    10: """
def capture(issues):
    edges, after, events = set(), {}, {}
    for what, stream, name in issues:
        now = after.setdefault(stream, set())
        if what == "launch":
            edges |= {(earlier, name) for earlier in now}
            after[stream] = {name}
        elif what == "record":
            events[name] = set(now)
        else:
            now |= events[name]
    return edges
""",
    11: plan("0,main: 0F0 0SF0>1 0F1 0SF1>1 1RO0>0 0B0 0F2 0SF2>1 1RO1>0 0B1 1RO2>0 0B2",
             "1,main: 0RF0>1 1F0 1B0 0RF1>1 1SO0>0 1F1 1B1 0RF2>1 1SO1>0 1F2 1B2 1SO2>0"),
    12: """
def keep(whole, output, again, limit):
    best = {0: (0, frozenset())}  # bytes that are kept so far -> the least time, and the blocks
    for b in range(len(whole)):
        found = {}
        for held, (time, kept) in best.items():
            if held + whole[b] <= limit:
                for size, more, own in ((whole[b], 0, {b}), (output[b], again[b], set())):
                    old = found.get(held + size, (float("inf"), None))
                    found[held + size] = min(old, (time + more, kept | own), key=lambda pair: pair[0])
        best = found
    return set(min(best.values(), key=lambda pair: pair[0])[1]) if best else None
""",
    13: """
def replay(weights, gradient, rate, log):
    versions = [weights]
    for version in log:
        versions.append(versions[-1] - rate * gradient(versions[version]))
    return versions
""",
}


def python(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=PATIENCE)


def number_of(path):
    return int("".join(c for c in path.stem.split("_")[0] if c.isdigit()))


@pytest.mark.few(1)
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_runs(chapter, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TUTORIAL)
    monkeypatch.delitem(sys.modules, "chapter1_tape", raising=False)
    runpy.run_path(str(chapter), run_name="__main__")
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.strip()


def test_every_chapter_has_an_exercise():
    assert {number_of(c) for c in CHAPTERS} == {number_of(s) for s in STARTS} == set(SOLUTIONS)
    for chapter in CHAPTERS:
        assert f"Exercise {number_of(chapter)}." in chapter.read_text()


@pytest.fixture
def grade(monkeypatch, capsys):
    """What grade.py says of a file for an exercise: (exit code, line)."""
    monkeypatch.delitem(sys.modules, "chapter1_tape", raising=False)
    main = runpy.run_path(str(TUTORIAL / "grade.py"))["main"]
    return lambda number, file: (main([str(number), str(file)]), capsys.readouterr().out)


@pytest.mark.few(1)
@pytest.mark.parametrize("start", STARTS, ids=lambda path: path.stem)
def test_an_exercise_can_be_solved_and_is_not_solved_yet(start, grade, tmp_path):
    number = number_of(start)
    solved = tmp_path / f"solution{start.suffix}"
    solved.write_text(SOLUTIONS[number])
    for file, code, verdict in ((start, 1, "not yet:"), (solved, 0, "right:")):
        found, said = grade(number, file)
        assert found == code, said
        assert said.startswith(verdict)


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "flags", "before"), [
    (4, "--model mlp --model-arg preset=tiny", 1), (6, "--ranks 3 --micro-batches 4 --activation-cap 3", 0)])
def test_the_command_line_checks_a_plan(number, flags, before, tmp_path):
    """The plan of exercise 6 is valid to begin with, only slow."""
    assert flags in next(c for c in CHAPTERS if number_of(c) == number).read_text()
    start, solved = TUTORIAL / "exercises" / f"exercise{number}.csv", tmp_path / "plan.csv"
    solved.write_text(SOLUTIONS[number])
    for plan, code in ((start, before), (solved, 0)):
        assert main(["check", str(plan), *flags.split()]) == code


@pytest.mark.few(1)
def test_a_file_that_is_no_python_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text("def tanh(x:\n    return x\n")
    done = python("-W", "error", TUTORIAL / "grade.py", "1", tmp_path / "mine.py")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"not yet: {tmp_path / 'mine.py'}, line 1: '(' was never closed: def tanh(x:\n"


@pytest.mark.parametrize("text", ["x = 1\0\n", "# coding: foo\n"])
def test_a_file_whose_error_has_no_line_is_named(text, grade, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    code, said = grade(1, tmp_path / "mine.py")
    assert (code, "None" in said) == (1, False)
    assert re.fullmatch(rf"not yet: {tmp_path / 'mine.py'}(, line [01])?: [a-z ]+(: foo)?\n", said)


TAPE = "from chapter1_tape import emit\ndef tanh(x): "
FAILS = {
    "raise KeyError('hm')": "KeyError: 'hm' (FILE, line 1)",
    "import sys; sys.exit(0)": "SystemExit: 0 (FILE, line 1)",
    "raise KeyboardInterrupt  # as in an endless loop": "KeyboardInterrupt:  (FILE, line 1)",
    "import no_such": "ModuleNotFoundError: No module named 'no_such' (FILE, line 1)",
    "def tanh(x): return x": "FILE imports nothing from chapter1_tape, whose `emit` makes an operation",
    f"{TAPE}return x.nope": "AttributeError: 'Tensor' object has no attribute 'nope' (FILE, line 2)",
    f"{TAPE}pass": "AttributeError: 'NoneType' object has no attribute 'value'"}


@pytest.mark.parametrize("text", FAILS)
def test_a_solution_that_fails_is_one_line(text, grade, tmp_path):
    """It was a traceback; one that ends the process was right, by its exit code."""
    (tmp_path / "mine.py").write_text(text)
    assert grade(1, tmp_path / "mine.py") == (1, f"not yet: {FAILS[text].replace('FILE', str(tmp_path / 'mine.py'))}\n")


@pytest.mark.slow
def test_grade_says_how_it_is_used():
    for arguments in ([], ["99", "file.py"], ["1", "missing.py"]):
        done = python(TUTORIAL / "grade.py", *arguments)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------ notebooks
@pytest.fixture(scope="module")
def notebooks():
    for name in ("jupytext", "nbformat", "nbclient"):
        need(name)
    sys.path.insert(0, str(TUTORIAL))
    try:
        import notebooks
    finally:
        sys.path.pop(0)
    return notebooks


@pytest.mark.few(4)
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_notebook_is_its_chapter(chapter, notebooks):
    """After a change to a chapter: python docs/tutorial/notebooks.py."""
    import nbformat

    stored = nbformat.read(notebooks.FOLDER / f"{chapter.stem}.ipynb", as_version=4)
    assert [(c.cell_type, c.source, c.metadata) for c in stored.cells] == [
        (c.cell_type, c.source, c.metadata) for c in notebooks.notebook(chapter).cells]
    slides = [c.metadata["slideshow"]["slide_type"] for c in stored.cells]
    assert slides[0] == "slide"
    assert slides.count("slide") == 1 + chapter.read_text().count(f"# {'-' * 117}\n") > 1
    first, *rest = (c.source for c in stored.cells if c.cell_type == "code")
    assert first.startswith(notebooks.START), "a notebook starts with one cell"
    assert not any(re.match("(import|from) ", source) for source in rest), "which has all imports"
    assert imports(chapter.read_text()) <= imports(first)
    code = "\n".join([first, *rest])
    for line in chapter.read_text().splitlines():
        if line and not line.startswith(("#", '"""', "if __name__")) and "    " not in line and "=" in line:
            assert line in code or line in stored.cells[0].source, line


def imports(code):
    """What a text imports for all of its lines."""
    return {ast.unparse(line) for line in ast.parse(code).body if isinstance(line, ast.Import | ast.ImportFrom)}


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS[:2], ids=lambda p: p.stem)  # test_a_chapter_runs runs the code of all
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_a_notebook_runs(chapter, notebooks):
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.read(notebooks.FOLDER / f"{chapter.stem}.ipynb", as_version=4)
    NotebookClient(found, timeout=PATIENCE, kernel_name="python3",
                   resources={"metadata": {"path": str(notebooks.FOLDER)}}).execute()
    assert any(output.get("text") for cell in found.cells for output in cell.get("outputs", [])), "it prints"
