"""Do the tests notice a fault in the engine? Random mutations, each tested by the files of tests that execute its line.

    python tests/mutate_engine.py --coverage lines.json                   once: which file of tests executes which line
    python tests/mutate_engine.py --coverage lines.json --count 200 --seed 1 [--whole] [--minutes 25] [--save FILE]

A mutation changes one operator, comparison, constant or condition, or drops one statement that is a call (a wait, an
edge, a message). A copy of the tree that has it runs the default run's tests that execute the line until the first
failure: the mutated room's own files first, then the quick ones, as long as they take at most --seconds together. So
the figures of the default run are lower bounds. Control: a test that fails runs once more in the same copy without the
mutation; if it fails there too, it counts as passed. With --whole, a mutation that the default run does not notice
also runs the tests that only CI runs, in the same files. With --save, an interrupted run goes on where it stopped.

A mutation that no test notices may change nothing that a test could see (an equivalent mutant). Needs the package
`coverage`. A mutation is its seed and its number: `--only NUMBER` repeats one.

Coverage sees no compiled code: lines of kernels that numba compiles, and lines that only an import executes, are taken
as executed by every file that executes another line of the same module.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: rooms of the engine; the application around it is left out
ENGINE = ("minidl/core", "minidl/autograd", "minidl/ops", "minidl/nn", "minidl/optim", "minidl/passes",
          "minidl/fusion", "minidl/pricing", "minidl/measuring", "minidl/plans", "minidl/devices", "minidl/runtime",
          "kernels", "schedulers")
LATE = "it does not end"
DEFAULT, WHOLE = "not wide and not slow and not campaign and not sanitizer", "(wide or slow) and not campaign"
SWAPPED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Lt: "<=", ast.LtE: "<",
           ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
           ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and"}
PATIENCE = 5  #: times the expected seconds of a mutated run, after which it has hung, which its user would notice
COLLECTION = 60.0  #: seconds that a run may take besides its tests


@dataclass(frozen=True)
class Mutation:
    """In a file of the engine, at a line: the text from `start` to `end` (offsets in characters) becomes `after`."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str
    kind: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.before[:60]!r} -> {self.after[:60]!r}"


def mutations_of(path: Path) -> Iterator[Mutation]:
    """All mutations of a file. Messages of errors, annotations and docstrings stay as they are."""
    text = path.read_text()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def at(line: int, column: int) -> int:
        whole = text[begins[line - 1] : begins[line]] if line < len(begins) else ""
        return begins[line - 1] + len(whole.encode()[:column].decode())

    def made(node: ast.AST, start: int, end: int, after: str, kind: str) -> Mutation:
        return Mutation(str(path.relative_to(ROOT)), node.lineno, start, end, text[start:end], after, kind)

    def between(left: ast.AST, right: ast.AST, node: ast.AST, operator: ast.AST) -> Iterator[Mutation]:
        """The operator is in the text between its operands."""
        start, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        after = SWAPPED.get(type(operator))
        between = text[start:end]
        if after and "#" not in between and "\n" not in between:
            found = between.strip(" ()")
            if found:
                offset = between.index(found)
                yield made(node, start + offset, start + offset + len(found), after, type(operator).__name__)

    def visit(node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arguments)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.BinOp) and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield from between(node.left, node.right, node, node.op)
        elif isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0], node, node.ops[0])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node, node.op) if len(node.values) == 2 else ()
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = at(node.lineno, node.col_offset)
            yield made(node, start, start + len("not "), "", "Not")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            after = str(not node.value) if type(node.value) is bool else str(node.value + 1)
            yield made(node, at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), after,
                       "constant")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield made(node, at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), "pass",
                       "dropped call")
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from visit(ast.parse(text))


def all_mutations() -> list[Mutation]:
    found = [[ROOT / part] if part.endswith(".py") else (ROOT / part).rglob("*.py") for part in ENGINE]
    files = sorted({path for paths in found for path in paths if path.is_file()})
    return [mutation for path in files for mutation in mutations_of(path)]


# ------------------------------------------------------------------------------------------------------------- coverage
def measure(out: Path) -> None:
    """Which files of the default run's tests execute each line of the engine, as {file: {line: [file of tests]}}; and
    for each file of tests its seconds. Prints the share of lines that are executed, by module."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        rooms = ",".join(str(ROOT / room) for room in ("minidl", "kernels", "schedulers", "models"))
        settings.write_text(f"[run]\nsource = {rooms}\ncore = ctrace\nparallel = true\ndata_file = {folder}/data\n"
                            "[report]\nexclude_also =\n    if TYPE_CHECKING\n    @njit\n    @kernel\n")
        (Path(folder) / "contexts.py").write_text(
            "import coverage, os\n"
            f"found = coverage.Coverage(config_file={str(settings)!r}, check_preimported=True)\n"
            "def pytest_configure(config): found.start()\n"
            "def pytest_runtest_logstart(nodeid, location): found.switch_context(nodeid.partition('::')[0])\n"
            "def pytest_unconfigure(config): found.stop(); found.save()\n"
            "def pytest_runtest_logreport(report):\n"
            "    if 'PYTEST_XDIST_WORKER' in os.environ:\n"
            f"        with open({folder + '/seconds'!r}, 'a') as file:\n"
            "            print(report.duration, report.nodeid, file=file)\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "contexts"]
        subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": folder})
        import coverage

        joined = coverage.Coverage(config_file=str(settings))
        joined.combine()
        joined.report(sort="cover")
        data = joined.get_data()
        lines = {str(Path(file).relative_to(ROOT)): {line: [name for name in names if name]
                                                     for line, names in data.contexts_by_lineno(file).items()}
                 for file in data.measured_files()}
        seconds: dict[str, float] = defaultdict(float)
        for line in (Path(folder) / "seconds").read_text().splitlines():
            taken, _, name = line.partition(" ")
            seconds[name.partition("::")[0]] += float(taken)
    out.write_text(json.dumps({"lines": lines, "seconds": seconds}))


def files_for(mutation: Mutation, known: dict[str, Any]) -> list[str]:
    """The files of tests that execute the line, in the order in which they shall run."""
    found = known["lines"].get(mutation.path, {})
    names = found.get(str(mutation.line)) or [name for each in found.values() for name in each]
    rooms = {*Path(mutation.path).parts, Path(mutation.path).stem}
    return sorted(set(names), key=lambda name: (Path(name).parts[1] not in rooms, known["seconds"].get(name, 1.0)))


# -------------------------------------------------------------------------------------------------------------- one run
def first_failure(tree: Path, arguments: list[str], seconds: float, cache: Path) -> str:
    """The id of the first test that fails in this tree, LATE, or nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *arguments]
    # also of what the tests start; numba's cache knows a file by its time, but not the files that it calls
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=environment, start_new_session=True) as run:
        try:
            said, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return LATE
    if run.returncode in (0, 5):
        return ""
    failed = [line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else said.strip()[-200:] or f"exit {run.returncode}"


def warm(tree: Path, mutation: Mutation) -> Path:
    """A folder for numba's cache without what the mutation may change: compiled functions of other files may call
    those of a mutated kernel, so that everything is compiled again."""
    if not mutation.path.startswith("kernels") and "njit" not in (ROOT / mutation.path).read_text():
        return tree / ".numba"
    shutil.rmtree(tree / ".numba-mutated", ignore_errors=True)
    return tree / ".numba-mutated"


def mutated(tree: Path, mutation: Mutation, known: dict[str, Any], whole: bool, most: float) -> dict[str, object]:
    path, begin = tree / mutation.path, time.monotonic()
    text, times = path.read_text(), path.stat()
    files, taken = files_for(mutation, known), 0.0
    chosen: list[str] = []
    for name in files:
        taken += known["seconds"].get(name, 1.0)
        if taken <= most or not chosen:
            chosen.append(name)

    def run(arguments: list[str], seconds: float) -> str:
        """The first test that fails with the mutation, and not without it."""
        passed: list[str] = []
        while True:
            path.write_text(text[: mutation.start] + mutation.after + text[mutation.end :])
            try:
                found = first_failure(tree, [*arguments, *(f"--deselect={name}" for name in passed)],
                                      COLLECTION + PATIENCE * seconds, warm(tree, mutation))
            finally:
                path.write_text(text)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            one = found if "::" in found else found if found in chosen else ""
            if not one or not first_failure(tree, [one, "-m", ""], COLLECTION + PATIENCE * seconds, tree / ".numba"):
                return found
            passed.append(one)

    default = run([*chosen, "-m", DEFAULT], min(taken, most))
    ci = run([*chosen, "-m", WHOLE], most) if whole and not default else ""
    return {"mutation": str(mutation), "files": len(chosen), "of": len(files), "default": default,
            "ci": "" if ci == LATE else ci, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coverage", type=Path, required=True,
                        help="file of lines and the files of tests that execute them")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--whole", action="store_true", help="also the tests that only CI runs")
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests for each mutation")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--save", type=Path, help="a line of JSON for each mutation; these are not repeated")
    told = parser.parse_args()
    if not told.count and told.only is None:
        measure(told.coverage)
        return 0
    known = json.loads(told.coverage.read_text())
    executed = [m for m in all_mutations() if files_for(m, known)]
    chosen = random.Random(told.seed).sample(executed, max(told.count, (told.only or 0) + 1))
    done = [json.loads(line) for line in told.save.read_text().splitlines()] if told.save and told.save.exists() else []
    print(f"seed {told.seed}: {len(chosen)} of {len(executed)} mutations in lines that a test executes", flush=True)
    end = time.monotonic() + 60 * told.minutes
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for number, mutation in enumerate(chosen):
            if any(d["number"] == number and d["seed"] == told.seed for d in done) or told.only not in (None, number):
                continue
            if time.monotonic() > end:
                break
            found = {"seed": told.seed, "number": number,
                     **mutated(tree, mutation, known, told.whole, told.seconds)}
            done.append(found)
            by = found["default"] or (f"CI alone: {found['ci']}" if found["ci"] else "nobody")
            print(f"{number}: {mutation}\n    {found['files']} of {found['of']} files, {found['seconds']} s: {by}",
                  flush=True)
            if told.save:
                with told.save.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    count = Counter("default" if d["default"] else "ci" if d["ci"] else "unseen" for d in done)
    print(f"{len(done)} mutations: the default run notices {count['default']}, "
          + (f"CI alone {count['ci']}, " if told.whole else "") + f"nobody {count['unseen']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
