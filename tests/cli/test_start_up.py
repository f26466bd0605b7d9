"""A command imports only the rooms that it uses, so that it starts at once."""

from __future__ import annotations

import gc

import pytest
from helpers import python

from minidl.cli import main
from minidl.cli.flags import FLAGS
from minidl.fusion import RULES
from minidl.training.job import MOMENTUM

PROGRAM = {"__main__", "system", "system.interrupts", "system.launcher", "system.process", "cli",
           "cli.parser", "cli.flags", "cli.values", "cli.show", "cli.machine"}
#: rooms that hold networks, devices and training runs: plans of given times need none of them
HEAVY = ("autograd", "ops", "nn", "optim", "kernels", "models", "data", "training", "devices", "runtime",
         "measuring", "testing")


def imported(*argv: str) -> set[str]:
    """The modules that a command imports, as Python lists them."""
    done = python("-X", "importtime", "-m", "minidl", *argv)
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "minidl.system.interrupts" in lines, done.stderr
    return set(lines)


def own(modules: set[str]) -> set[str]:
    return {name.removeprefix("minidl.") for name in modules if name.startswith("minidl.")}


def within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


GRID = ("simulate", "--ranks", "2", "--micro-batches", "2", "--scheduler", "gpipe")


def test_a_grid_is_printed_where_its_letters_are_unknown() -> None:
    assert "\n1/main  ????1F0 " in python("-m", "minidl", *GRID, PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize(("closed", "argv", "code"), [
    ([1], GRID, 0), ([0, 1, 2], GRID, 0), ([2], ("train", "--model", "mlp", "--steps", "2", "--costs", "analytic"), 0),
    ([2], ("train", "--model", "nix"), 2)])
def test_nothing_is_printed_where_a_stream_is_closed(closed: list[int], argv: tuple[str, ...], code: int) -> None:
    """These were internal errors."""
    closing = (f"import os, sys\nfor stream in {closed}: os.close(stream)\n"
               "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    done = python("-c", closing, "-m", "minidl", *argv)
    assert (done.returncode, done.stderr, "internal error" in done.stdout) == (code, "", False)
    assert not done.stdout or 1 not in closed


@pytest.mark.parametrize("argv", [["--help"], ["trian"], ["--hlep"], []])
def test_help_and_a_mistyped_verb_need_no_part_of_the_engine(argv: list[str]) -> None:
    found = imported(*argv)
    assert own(found) <= PROGRAM
    assert "numpy" not in found


@pytest.mark.few(1)
@pytest.mark.parametrize("argv", [
    ["schedulers"], ["simulate", "--ranks", "4", "--micro-batches", "8", "--scheduler", "zb_h1"],
    ["simulate", "--parallel", "data", "--scheduler", "priority", "--forward", "1,1", "--output-grad", "1,1",
     "--weight-grad", "1,1", "--comm", "1,1"],
])
def test_listing_and_pricing_policies_need_no_network_no_device_and_no_trainer(argv: list[str]) -> None:
    found = imported(*argv)
    assert not [name for name in own(found) - PROGRAM if within(name, HEAVY)]
    assert not {name for name in found if name.partition(".")[0] in ("numba", "rich", "mpi4py", "threadpoolctl")}


def test_a_training_imports_nothing_for_a_terminal_or_the_web() -> None:
    """Ranks on few cores would import such modules one after the other."""
    found = imported("train", "--model", "mlp", "--batch-size", "256", "--steps", "1", "--costs", "analytic", "--json")
    assert "minidl.training.loop" in found
    assert not {"rich", "urllib.request", "http.client", "ssl"} & found


def test_a_list_of_policies_draws_nothing() -> None:
    assert not own(imported("schedulers")) & {"core.draw", "views.page"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_garbage_is_collected_once_the_verb_begins(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program disables it until then: objects that are imported stay."""
    seen: list[bool] = []
    monkeypatch.setattr("minidl.cli.launcher.size", lambda: ranks)
    for function in ("_train_on_ranks", "training.train"):
        monkeypatch.setattr(f"minidl.cli.{function}", lambda told: seen.append(gc.isenabled()))
    gc.disable()
    try:
        main(["train"])
    finally:
        gc.enable()
    assert seen == [True]


def test_the_default_of_a_flag_is_one_of_its_choices():
    for name, flag in FLAGS.items():
        choices = flag.options.get("choices")
        if choices is not None:
            assert flag.options.get("default") in (None, *choices), name
            assert list(choices), name


def test_the_help_of_a_flag_has_the_names_that_it_accepts():
    assert ", ".join(RULES) in FLAGS["--fusion"].options["help"]
    momenta = ", ".join(f"{value:g} for {of}" for of, value in MOMENTUM.items())
    assert momenta in FLAGS["--momentum"].options["help"]
