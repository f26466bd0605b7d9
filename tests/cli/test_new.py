"""`minidl new`: what it writes works as it is, in an empty folder outside the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refusal, reported
from helpers import PATIENCE, ROOT

from minidl.cli import main
from minidl.cli.new import USES


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", sorted(USES.keys() - {"assignment"}))  # which tests/docs/test_course.py grades
def test_what_it_writes_passes_its_tests_and_can_be_used(kind, tmp_path, capsys):
    folder = tmp_path / "mine" / kind
    record = reported(capsys, "new", kind, str(folder))
    assert record["files"] == [str(folder / f"my_{kind}.py"), str(folder / f"test_my_{kind}.py")]
    python = Path(sys.executable).parent
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    env.pop("MINIDL_SKIPPED", None)
    use = record["use"]
    if use.startswith("minidl "):
        use = f"{sys.executable} -m {use}"
    for command in (f"{sys.executable} -m pytest -q -p no:cacheprovider", use.replace("--epochs 4", "--steps 3")):
        done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True,
                              timeout=PATIENCE, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if "pytest" in command:
            assert " passed" in done.stdout


@pytest.mark.parametrize("kind", USES)
def test_what_it_writes_is_as_tidy_as_the_rest(kind, tmp_path):
    pytest.importorskip("ruff", reason="ruff is not installed; install minidl[dev]")
    assert main(["new", kind, str(tmp_path / kind)]) == 0
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, str(tmp_path / kind)], capture_output=True, text=True, timeout=PATIENCE,
                          check=False)
    assert done.returncode == 0, done.stdout


def test_the_commands_that_it_says_can_be_typed(tmp_path, capsys):
    assert main(["new", "op", str(tmp_path / "my ops")]) == 0
    assert f"\ncd '{tmp_path}/my ops'\n" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "test_my_op.py").write_text("mine")
    assert "is there already; give another folder" in refusal(capsys, "new", "op", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["test_my_op.py"]
    assert "unknown kind 'nothing'" in refusal(capsys, "new", "nothing", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
