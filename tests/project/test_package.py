"""What is shipped has one version and finds its parts; `.ci/package` builds and installs it."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT

import minidl


def shell(*argv, cwd, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True, timeout=2 * PATIENCE,
                          env={**clean, **environment})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def fresh_python(folder):
    """An environment with the libraries of this one but without minidl."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    here = next(p for p in sys.path if p.endswith("site-packages"))
    names = [n for n in os.listdir(here) if "minidl" not in n.lower()]
    for name in names:
        (site / name).symlink_to(Path(here) / name)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_python_in_the_folder_that_the_clone_lies_in_finds_the_package(tmp_path):
    """Not the clone itself, as a package without content."""
    (tmp_path / "minidl").symlink_to(ROOT)
    python = fresh_python(tmp_path / "venv")
    code = ("import minidl, minidl.kernels.linear; minidl.seed(0); print(minidl.__file__, "
            "minidl.kernels.linear.__file__)")
    found = shell(python, "-c", code, cwd=tmp_path).split()
    assert [Path(path).resolve() for path in found] == [ROOT / "minidl" / "__init__.py", ROOT / "kernels" / "linear.py"]
    assert "resnet50" in shell(python, "-m", "minidl", "models", cwd=tmp_path)


def test_the_version_has_one_place():
    """Setup reads it, and the changelog begins with it."""
    version = minidl.__version__
    assert f'"{version}"' not in (ROOT / "setup.py").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_scripts_and_tests_that_ci_names_exist():
    """Also those that pre-commit runs."""
    for path in (".github/workflows/ci.yml", ".pre-commit-config.yaml", ".ci/run"):
        text = (ROOT / path).read_text()
        for name in re.findall(r"(?<![\w/])(?:tests|\.ci)/[\w./]+", text):
            assert (ROOT / name).exists(), f"{path}: {name}"
        for script in re.findall(r"(?:run: |\" )(\.ci/\w+)$", text, re.MULTILINE):
            assert os.access(ROOT / script, os.X_OK), f"{path}: {script}"
