"""Do the tests notice a fault in the engine? Random mutations, each tested by the tests that execute its line.

    python tests/mutate_engine.py --coverage lines.json                   once: which test executes which line
    python tests/mutate_engine.py --coverage lines.json --count 200 --seed 1 [--whole] [--minutes 25] [--save FILE]

A mutation changes one operator, comparison, constant or condition, or drops one statement that is a call (a wait, an
edge, a message). A copy of the tree that has it (lines.tree beside lines.json, kept for numba's cache) runs the default
run's tests until the first failure: those that execute the line, then the others of the mutated room, and of their
files, which may share what one of them made; the room's own first, then the quick ones, as long as they take at most
--seconds together. So the figures of the default run are lower bounds. Control: a test that fails runs once more in the
same copy without the mutation; if it fails there too, it counts as passed. With --whole, a mutation that the default
run does not notice also runs the tests that only CI runs, in the files of those tests. With --save, an interrupted run
goes on where it stopped.

A mutation that no test notices may change nothing that a test could see (an equivalent mutant). Needs the package
`coverage`. A mutation is its seed and its number: `--only NUMBER ...` runs these.

Coverage sees no compiled code: lines of kernels that numba compiles, and lines that only an import executes, are taken
as executed by every test that executes another line of the same module.
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
PATIENCE = 5  #: times the seconds of a mutated run's longest test, after which it has hung, which its user would notice
SILENCE = 40.0  #: seconds without a result that a run may take besides: it collects tests and compiles kernels


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
    """The default run's tests, their seconds, and which of them execute each line of the engine, as {file: {line:
    [number of the test]}}. Prints the share of lines that are executed, by module."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        rooms = ",".join(str(ROOT / room) for room in ("minidl", "kernels", "schedulers", "models"))
        settings.write_text(f"[run]\nsource = {rooms}\ncore = ctrace\nparallel = true\ndata_file = {folder}/data\n"
                            "[report]\nexclude_also =\n    if TYPE_CHECKING\n    @njit\n    @kernel\n")
        (Path(folder) / "contexts.py").write_text(
            "import coverage, os\n"
            f"found = coverage.Coverage(config_file={str(settings)!r}, check_preimported=True)\n"
            "def pytest_configure(config): found.start()\n"
            "def pytest_runtest_logstart(nodeid, location): found.switch_context(nodeid)\n"
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
        seconds: dict[str, float] = defaultdict(float)
        for line in (Path(folder) / "seconds").read_text().splitlines():
            taken, _, name = line.partition(" ")
            seconds[name] += float(taken)
        number = {name: i for i, name in enumerate(seconds)}
        lines = {str(Path(file).relative_to(ROOT)): {line: [number[name] for name in names if name in number]
                                                     for line, names in data.contexts_by_lineno(file).items()}
                 for file in data.measured_files()}
    out.write_text(json.dumps({"lines": lines, "seconds": seconds}))


def tests_for(mutation: Mutation, known: dict[str, Any]) -> list[str]:
    """The tests that execute the line, then the others of the room, which may execute it compiled, and of their files,
    in the order in which they shall run."""
    names, found = [*known["seconds"]], known["lines"].get(mutation.path, {})
    executing = {names[i] for i in found.get(str(mutation.line)) or {i for each in found.values() for i in each}}
    files = {name.partition("::")[0] for name in executing}
    rooms = {*Path(mutation.path).parts, Path(mutation.path).stem}
    return sorted((name for name in names if name.partition("::")[0] in files or Path(name).parts[1] in rooms),
                  key=lambda name: (name not in executing, Path(name).parts[1] not in rooms, known["seconds"][name]))


# -------------------------------------------------------------------------------------------------------------- one run
def first_failure(tree: Path, arguments: list[str], patience: float, cache: Path) -> str:
    """The id of the first test that fails in this tree, LATE if none ended for `patience` seconds, or nothing."""
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no", *arguments]
    # also of what the tests start; numba's cache knows a file by its time, but not the files that it calls
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    with (tempfile.TemporaryFile("w+") as output,
          subprocess.Popen(command, cwd=tree, stdout=output, stderr=subprocess.STDOUT, env=environment,
                           start_new_session=True) as run):
        size, silent = 0, 0.0
        while run.poll() is None:
            time.sleep(0.1)
            silent += 0.1  # not by the clock: the run may have been stopped for a while
            if (now := os.fstat(output.fileno()).st_size) > size:
                size, silent = now, 0.0
            elif silent > patience:
                os.killpg(run.pid, signal.SIGKILL)
                return LATE
        output.seek(0)
        said = output.read()
    if run.returncode in (0, 5):
        return ""
    failed = [line.split(" ", 1)[1].partition(" - ")[0] for line in said.splitlines()
              if line.startswith(("FAILED ", "ERROR "))]
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
    tests, taken = tests_for(mutation, known), 0.0
    chosen: list[str] = []
    for name in tests:
        taken += known["seconds"][name]
        if taken <= most or not chosen:
            chosen.append(name)
    patience = SILENCE + PATIENCE * max(known["seconds"][name] for name in chosen)
    files = sorted({name.partition("::")[0] for name in chosen})

    def run(arguments: list[str]) -> str:
        """The first test that fails with the mutation, and not without it."""
        passed: list[str] = []
        while True:
            path.write_text(text[: mutation.start] + mutation.after + text[mutation.end :])
            try:
                found = first_failure(tree, [*arguments, *(f"--deselect={name}" for name in passed)],
                                      patience, warm(tree, mutation))
            finally:
                path.write_text(text)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if "::" not in found or not first_failure(tree, [found, "-m", ""], patience, tree / ".numba"):
                return found
            passed.append(found)

    default = run([*chosen, "-m", DEFAULT])
    ci = run([*files, "-m", WHOLE]) if whole and not default else ""
    return {"mutation": str(mutation), "tests": len(chosen), "of": len(tests), "default": default,
            "ci": "" if ci == LATE else ci, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coverage", type=Path, required=True,
                        help="file of lines and the tests that execute them")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", default=[])
    parser.add_argument("--whole", action="store_true", help="also the tests that only CI runs")
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests for each mutation")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--save", type=Path, help="a line of JSON for each mutation; these are not repeated")
    told = parser.parse_args()
    if not told.count and not told.only:
        measure(told.coverage)
        return 0
    known = json.loads(told.coverage.read_text())
    executed = [m for m in all_mutations() if any(known["lines"].get(m.path, {}).values())]
    chosen = random.Random(told.seed).sample(executed, max([told.count, *(n + 1 for n in told.only)]))
    done = [json.loads(line) for line in told.save.read_text().splitlines()] if told.save and told.save.exists() else []
    print(f"seed {told.seed}: {len(chosen)} of {len(executed)} mutations of modules that a test executes", flush=True)
    end = time.monotonic() + 60 * told.minutes
    tree = told.coverage.resolve().with_suffix(".tree")
    shutil.copytree(ROOT, tree, symlinks=True, dirs_exist_ok=True, ignore=lambda folder, names: {
        name for name in names
        if name in (".git", "__pycache__") or (tree / Path(folder).relative_to(ROOT) / name).is_symlink()})
    for number, mutation in enumerate(chosen):
        if any(d["number"] == number and d["seed"] == told.seed for d in done) or number not in (told.only or [number]):
            continue
        if time.monotonic() > end:
            break
        found = {"seed": told.seed, "number": number, **mutated(tree, mutation, known, told.whole, told.seconds)}
        done.append(found)
        by = found["default"] or (f"CI alone: {found['ci']}" if found["ci"] else "nobody")
        print(f"{number}: {mutation}\n    {found['tests']} of {found['of']} tests, {found['seconds']} s: {by}",
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
