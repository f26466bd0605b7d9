"""Who may import whom, read off the sources; and that NumPy alone is enough to import everything."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"minidl": ROOT / "minidl", "minidl.kernels": ROOT / "kernels", "minidl.schedulers": ROOT / "schedulers",
           "minidl.models": ROOT / "models"}
LINKS = ("kernels", "schedulers", "models")

# data, and functions from data to data: they run nothing and know no device
PURE = {"tasks", "graph", "schedule", "program", "plans", "loops", "walk", "files", "passes.boundary",
        "passes.send_receive", "passes.messages", "passes.rewrite", "passes.synchronise", "pricing.carried",
        "pricing.circuits", "pricing.collectives", "pricing.contention", "pricing.corun", "pricing.cost",
        "pricing.crossing", "pricing.ranks", "pricing.simulation", "rank_grid", "runtime.memory", "views.timeline"}
ENGINE = {"tasks", "graph", "kernels", "runtime.device", "autograd.tape", "autograd.tensor", "autograd.precision"}
# what may be imported from our own package: a module, or a room with all that is in it; the longest name that
# fits is the rule
LAYERS: dict[str, set[str]] = {
    "kernels": {"kernels"},
    "loops": set(),
    "files": set(),
    "loading": set(),
    "hints": set(),
    "runtime.debug": set(),
    "runtime.streams": set(),
    "tasks": set(),
    "graph": {"tasks", "loops"},
    "walk": {"graph", "loops"},
    "schedule": {"tasks", "graph", "loops", "walk", "files", "views.draw"},
    **dict.fromkeys(PURE - {"loops", "files", "tasks", "graph", "walk", "schedule", "pricing.cost", "views.timeline"},
                    PURE),
    "pricing.cost": {*PURE, "pricing.measure", "pricing.measure_pairs"},  # when it is asked to
    "views.timeline": {*PURE, "views.report", "views.trace", "views.draw"},
    "schedulers": {*PURE, "schedulers", "loading", "views.report"},
    "runtime.lanes": {"kernels", "runtime.streams"},
    "runtime.native": {"kernels", "runtime.lanes", "runtime.streams", "runtime.native"},
    "runtime.device": {"graph", "kernels", "runtime.lanes", "runtime.native", "runtime.debug", "runtime.cuda"},
    "autograd.tape": ENGINE,
    "autograd.tensor": {*ENGINE, "autograd.op"},
    "autograd.op": ENGINE,
    "ops": {*ENGINE, "autograd.op", "ops", "autograd.random"},
    "nn": {*ENGINE, "autograd.op", "ops", "autograd.random", "nn", "hints"},
    "models": {"nn", "ops", "autograd.tensor", "models", "autograd.random", "loading", ""},
    "passes.fusion": {"tasks", "graph", "runtime.device", "kernels", "passes.fusion"},
    "runtime": {*PURE, "kernels", "autograd.tape", "autograd.tensor", "launcher", "runtime"},
}
# where a module outside the standard library may be imported from, and only when it is used
LAZY: dict[str, tuple[str, ...]] = {
    "numba": ("loops", "kernels", "schedulers", "cli", "data", "runtime.device", "runtime.native"),
    "llvmlite": ("kernels.direct", "runtime.native"),
    "mpi4py": ("runtime.comm", "cli"),
    "ml_dtypes": ("autograd.precision",),
    "cupy": ("runtime.device", "runtime.cuda", "kernels", "cli", "runtime.comm.nccl"),
    "cudnn": ("runtime.device", "runtime.cuda", "kernels", "cli"),
    "nvmath": ("runtime.device", "runtime.cuda", "kernels", "cli"),
}

#: imported by the device, where it is wanted; their functions are compiled by numba's decorators
COMPILED = ("minidl.kernels.direct", *(f"minidl.runtime.native.{name}" for name in (
    "calls", "code", "ends", "lanes", "machines", "stamps")))


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its import name."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package == "minidl" and parts[0] in LINKS:
                continue  # a link to a folder that is listed itself
            yield ".".join([package, *(p for p in parts if p != "__init__")]), path


MODULES = dict(modules())


def imports(name: str, path: Path) -> Iterator[tuple[str, bool, int]]:
    """(module imported, at import time?, line); what only type checkers see is left out."""
    def visit(node: ast.AST, now: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
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
        for child in ast.iter_child_nodes(node):
            yield from visit(child, now)

    yield from visit(ast.parse(path.read_text()), True)


def covers(rule: str, name: str) -> bool:
    return name == rule or name.startswith(rule + ".")


def within(name: str) -> str:
    """The name within our own package: `pricing.cost` of `minidl.pricing.cost`."""
    return name.partition(".")[2]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_layer_may(name):
    rules = [r for r in LAYERS if covers(r, within(name))]
    if not rules:
        return
    allowed = LAYERS[max(rules, key=len)]
    for target, _, line in imports(name, MODULES[name]):
        if covers("minidl", target):
            where = f"{MODULES[name].relative_to(ROOT)}, line {line}"
            assert any(covers(a, within(target)) for a in allowed), f"{where}: {name} imports {target}"


@pytest.mark.parametrize("name", MODULES)
def test_what_is_heavy_is_imported_where_it_is_used_and_nowhere_else(name):
    known = {"minidl", "numpy", *sys.stdlib_module_names, *(("numba", "llvmlite") if name in COMPILED else ())}
    for target, now, line in imports(name, MODULES[name]):
        top = target.partition(".")[0]
        where = f"{MODULES[name].relative_to(ROOT)}, line {line}"
        assert top not in LINKS, f"{where}: {top} is imported as minidl.{top}"
        assert top in known or not now, f"{where}: {top} is imported with the module; import it where it is used"
        if top in LAZY:
            assert any(covers(home, within(name)) for home in LAZY[top]), f"{where}: {top} is no business of {name}"


def test_schedulers_reach_no_device_no_ranks_and_no_clock():
    """Nor by way of anything that they import. Costs measure only when they are asked to."""
    forbidden = ("runtime", "autograd", "ops", "nn", "kernels", "optim", "pricing.measure",
                 "pricing.measure_pairs", "training")
    reached = {n for n in MODULES if covers("minidl.schedulers", n)}
    todo = sorted(reached)
    while todo:
        name = todo.pop()
        for target, now, line in imports(name, MODULES[name]):
            assert (target.partition(".")[0] not in ("time", "datetime", "threading", "socket")
                    or (within(name), target) == ("loading", "threading")), f"{name}, line {line}: {target}"  # its lock
            if (covers("minidl", target) and (now or covers("minidl.schedulers", name)) and target not in reached
                and target in MODULES):
                inner = within(target)
                assert inner in PURE or not any(covers(f, inner) for f in forbidden), f"{name}, line {line}: {target}"
                reached.add(target)
                todo.append(target)
    assert "minidl.graph" in reached


def test_no_modules_import_each_other_in_a_circle():
    """Those of their first lines: whichever module is imported first, it works."""
    edges = {name: {t for t, now, _ in imports(name, path) if now and t in MODULES and t != name}
             for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, f"imports in a circle: {' > '.join([*way[way.index(name):], name])}"
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, [*way, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


#: where our own is imported within a function: what is heavy stays away until it is used, and a command starts at once
# the last five: methods that lead to files, or to what is built on them
LATE = ("__main__", "cli", "runtime.device", "runtime.cuda.device", "training.rank_trainer",
        "pricing.cost", "schedule", "program", "views.timeline", "runtime.comm", "kernels.conv")


@pytest.mark.parametrize("name", [name for name in MODULES if not any(covers(late, within(name)) for late in LATE)])
def test_what_is_light_is_imported_first(name):
    late = [(target, line) for target, now, line in imports(name, MODULES[name])
            if not now and covers("minidl", target)]
    assert not late, f"{MODULES[name].relative_to(ROOT)}, line {late[0][1]}: {late[0][0]} is imported within a function"


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


def test_numpy_alone_is_enough_to_import_minidl():
    done = run("print(minidl.__version__)")
    assert done.returncode == 0, done.stderr


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


def test_importing_minidl_imports_no_more_than_it_must():
    done = run("""
print(sorted(m for m in sys.modules if m.startswith("minidl")))
""")
    assert done.stdout.strip() == "['minidl']", done.stderr


def test_unknown_names_are_told():
    import minidl

    with pytest.raises(AttributeError, match=r"module 'minidl' has no attribute 'Tenser'"):
        _ = minidl.Tenser
    assert set(minidl.__all__) <= set(dir(minidl))
    assert all(getattr(minidl, name) is not None for name in minidl.__all__)
