"""Who may import whom, read off the sources; and that NumPy alone is enough to import everything."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT

FOLDERS = {"minidl": ROOT / "minidl", "minidl.kernels": ROOT / "kernels", "minidl.schedulers": ROOT / "schedulers",
           "minidl.models": ROOT / "models"}
LINKS = ("kernels", "schedulers", "models")

#: the rooms from the ground up: each may import itself and the rooms named here, which all come before it. So there are
#: no circles between rooms, whether a module is imported with its importer or when it is first used
ROOMS: dict[str, set[str]] = {
    "kernels": set(),
    "system": set(),
    "core": {"system"},
    "pricing": {"core", "system"},
    "passes": {"core", "pricing"},
    "plans": {"core", "passes", "pricing", "system"},
    "schedulers": {"core", "passes", "plans", "pricing", "system"},
    "views": {"core", "passes", "plans", "pricing", "schedulers"},
    "arena": {"core", "plans", "pricing", "schedulers", "system"},
    "devices": {"core", "kernels", "system"},
    "fusion": {"core", "kernels"},
    "autograd": {"core", "devices", "kernels", "system"},
    "ops": {"autograd", "core", "kernels"},
    "nn": {"autograd", "core", "ops"},
    "models": {"autograd", "nn", "ops", "system"},
    "optim": {"autograd", "core", "devices"},
    "data": {"autograd", "system"},
    "runtime": {"autograd", "core", "devices", "kernels", "plans", "system"},
    "measuring": {"autograd", "core", "devices", "kernels", "passes", "plans", "pricing", "runtime"},
    "testing": {"autograd", "core", "devices", "kernels", "nn", "ops", "optim", "passes", "runtime", "schedulers"},
    "training": {"autograd", "core", "data", "devices", "fusion", "measuring", "models", "nn", "ops", "optim", "passes",
                 "plans", "pricing", "runtime", "schedulers", "system"},
    "cli": {"arena", "autograd", "core", "data", "devices", "kernels", "measuring", "models", "optim", "passes",
            "plans", "pricing", "runtime", "schedulers", "system", "testing", "training", "views"},
    "__main__": {"cli", "system"},
}
#: rooms that neither run nor measure anything: a plan is made, proved and priced without a device
PURE = ("core", "system", "pricing", "passes", "plans", "schedulers", "views")
# where a module outside the standard library may be imported from, and only when it is used
LAZY: dict[str, tuple[str, ...]] = {
    "numba": ("core.columns", "kernels", "schedulers", "cli", "data", "devices.device", "devices.native"),
    "llvmlite": ("kernels.hints", "kernels.vectors", "kernels.tile_code", "kernels.winograd", "devices.native"),
    "mpi4py": ("runtime.comm", "cli"),
    "ml_dtypes": ("autograd.op",),
    "torch": ("measuring.torch_stages",),
    "cupy": ("devices.device", "devices.cuda", "kernels", "cli", "runtime.comm.nccl"),
    "cudnn": ("devices.device", "devices.cuda", "kernels", "cli"),
    "nvmath": ("devices.device", "devices.cuda", "kernels", "cli"),
}

#: imported by the device, where it is wanted; their functions are compiled by numba's decorators
COMPILED = (*(f"minidl.kernels.{name}" for name in ("direct", "small", "tile_code", "tiles", "vectors", "winograd")),
            *(f"minidl.devices.native.{name}" for name in ("calls", "code", "lanes", "machines", "stamps")))


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its import name."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package == "minidl" and parts[0] in LINKS:
                continue  # a link to a folder that is listed itself
            yield ".".join([package, *(p for p in parts if p != "__init__")]), path


MODULES = dict(modules())


@cache
def imports(name: str, path: Path) -> list[tuple[str, bool, int]]:
    """(module imported, at import time?, line); what only type checkers see is left out."""
    def visit(node: ast.AST, now: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            now = False
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, now, node.lineno
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in MODULES else base), now, node.lineno
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):  # expressions import nothing
            for child in getattr(node, field, ()):
                yield from visit(child, now)

    return list(visit(ast.parse(path.read_text()), True))


def covers(rule: str, name: str) -> bool:
    return name == rule or name.startswith(rule + ".")


def within(name: str) -> str:
    """The name within our own package: `pricing.cost` of `minidl.pricing.cost`."""
    return name.partition(".")[2]


def room_of(name: str) -> str:
    return within(name).partition(".")[0]


def test_the_rooms_have_no_circles():
    below: set[str] = set()
    for room, may in ROOMS.items():
        assert may <= below, f"{room} may import {sorted(may - below)}, which the table has after it"
        below.add(room)
    assert below == {room_of(name) for name in MODULES} - {""}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_that_it_may(room):
    """The table has no room that is not imported, so a reader can trust it."""
    found = set()
    for name in (n for n in MODULES if room_of(n) == room):
        for target, _, line in imports(name, MODULES[name]):
            other = room_of(target)
            if covers("minidl", target) and other not in ("", room):
                assert other in ROOMS[room], f"{MODULES[name].relative_to(ROOT)}, line {line}: {name} imports {target}"
                found.add(other)
    assert found == ROOMS[room]


def test_what_is_pure_reaches_no_device():
    for room in PURE:
        assert set(PURE) >= ROOMS[room]


def test_what_is_heavy_is_imported_where_it_is_used_and_nowhere_else():
    for name, path in MODULES.items():
        known = {"minidl", "numpy", *sys.stdlib_module_names, *(("numba", "llvmlite") if name in COMPILED else ())}
        for target, now, line in imports(name, path):
            top = target.partition(".")[0]
            where = f"{path.relative_to(ROOT)}, line {line}"
            assert top not in LINKS, f"{where}: {top} is imported as minidl.{top}"
            assert top in known or not now, f"{where}: {top} is imported with the module; import it where it is used"
            if top in LAZY:
                assert any(covers(home, within(name)) for home in LAZY[top]), f"{where}: {top} is no business of {name}"


def test_schedulers_know_no_clock_and_no_threads():
    """Nor do the rooms that they import, but for the lock around a user's module and the waiting for a file."""
    for name, path in MODULES.items():
        if room_of(name) in PURE and room_of(name) != "system":
            for target, _, line in imports(name, path):
                top = target.partition(".")[0]
                assert top not in ("time", "datetime", "threading", "socket"), f"{name}, line {line}: {target}"


def test_no_files_import_each_other_in_a_ring():
    """Also by imports within functions: each file can be read after those that it imports."""
    TopologicalSorter({name: {t for t, *_ in imports(name, path) if t in MODULES and t != name}
                       for name, path in MODULES.items()}).prepare()  # an error has the ring


#: where our own is imported within a function: what is heavy stays away until it is used, and a command starts at once
# the last five but the kernels: methods that lead to files, or to what is built on them
LATE = ("__main__", "cli", "devices.device", "devices.cuda.device", "training.same",
        "core.schedule", "core.timeline", "pricing.cost", "plans.program", "runtime.comm", "kernels.conv",
        "kernels.linear")


def test_what_is_light_is_imported_first():
    late = [f"{path.relative_to(ROOT)}, line {line}: {target} is imported within a function"
            for name, path in MODULES.items() if not any(covers(late, within(name)) for late in LATE)
            for target, now, line in imports(name, path) if not now and covers("minidl", target)]
    assert not late


def test_the_links_lead_to_the_folders():
    for link in LINKS:
        assert (ROOT / "minidl" / link).resolve() == ROOT / link


BLOCKED = """
import importlib, pkgutil, sys

class Block:
    allowed = {"numpy", "minidl", *sys.stdlib_module_names}

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in self.allowed and not name.startswith("_"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
import minidl
heavy = {"numba", "mpi4py", "cupy", "torch", "threadpoolctl", "rich", "matplotlib"}
assert set(m.partition(".")[0] for m in sys.modules) & heavy == set()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"COMPILED = {COMPILED}{BLOCKED}{code}"], cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_numpy_alone_is_enough_to_import_minidl_which_imports_no_more_than_it_must():
    done = run("""
print(sorted(m for m in sys.modules if m.startswith("minidl")), minidl.__version__)
""")
    assert done.stdout.startswith("['minidl'] "), done.stderr


def test_numpy_alone_is_enough_to_import_every_module_and_every_name():
    done = run("""
for info in pkgutil.walk_packages(minidl.__path__, "minidl."):
    if not info.name.endswith("__main__") and info.name not in COMPILED:
        importlib.import_module(info.name)
for name in minidl.__all__:
    getattr(minidl, name)
graph = minidl.GraphBuilder()
graph.task(0, minidl.Kind.F)
graph = graph.build()
schedule = minidl.Schedule.of(graph, {minidl.Lane(0): [0]}).validate(graph)
print(minidl.simulate(graph, schedule, minidl.CostModel.given(1, 1, 1)).makespan)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1.0"


def test_unknown_names_are_told():
    import minidl

    with pytest.raises(AttributeError, match=r"module 'minidl' has no attribute 'Tenser'"):
        _ = minidl.Tenser
    assert all(getattr(minidl, name) is not None for name in minidl.__all__)


def test_editors_and_checkers_see_the_names_that_there_are():
    """The stub says for each name where it is from, and `dir` lists no other."""
    import minidl

    assert {name for name in dir(minidl) if name[0] != "_"} == {*minidl.__all__, *minidl._METHODS}
    stub = ast.parse((ROOT / "minidl" / "__init__.pyi").read_text()).body
    found = {name.name: f"minidl.{node.module or name.name}" for node in stub if isinstance(node, ast.ImportFrom)
             and node.level for name in node.names}
    assert found.keys() == set(minidl.__all__)
    for name, module in found.items():
        here = importlib.import_module(module)
        assert getattr(minidl, name) is getattr(here, name, here)
    [listed] = [node.value for node in stub if ast.unparse(node).startswith("__all__")]
    assert ast.literal_eval(listed) == minidl.__all__
    assert tuple(target.id for target in stub[-1].targets) == minidl._METHODS


@pytest.mark.slow
def test_checkers_know_the_types_of_a_user_s_program(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text("""import minidl as ml
from minidl import schedulers
x = ml.ones(3)
graph = ml.record(lambda x: x * 2, x)
run = ml.StreamExecutor(graph, schedulers.multi_stream(graph, streams=2), trace=True)
run.timeline.save("a.json")
ml.plan(ml.Pipeline(8), lambda a, b: a.micro_batch < b.micro_batch, machine=ml.Machine(ranks=2))
reveal_type((graph, run, 2 / x, 2 ** x, abs(x), x == 1, next(iter(x)), int(x[0]), {x: 1}))
""")
    done = subprocess.run([sys.executable, "-m", "mypy", tmp_path / "program.py"], cwd=ROOT, capture_output=True,
                          text=True, timeout=PATIENCE, check=False,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    types = done.stdout.splitlines()[0].partition('"')[2].replace("minidl.autograd.tensor.", "")
    assert types == ("tuple[minidl.core.graph.TaskGraph, minidl.runtime.runtime.StreamExecutor, Tensor, Tensor, "
                     "Tensor, Tensor, Tensor, int, dict[Tensor, int]]\""), done.stdout
