"""What is shipped works away from the tree: wheel, sdist and archive, with the embedded data."""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT

import minidl

COMMAND = ["-m", "minidl", "train", "--model", "mlp", "--steps", "2", "--costs", "analytic", "--json"]


def shell(*argv, cwd, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True, timeout=2 * PATIENCE,
                          env={**clean, **environment})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def trains(python, cwd, **environment):
    record = json.loads(shell(python, *COMMAND, cwd=cwd, **environment))
    assert (record["data"], record["steps"]) == ("digits", 2)


def fresh_python(folder):
    """An environment with the libraries of this one but without minidl."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    here = next(p for p in sys.path if p.endswith("site-packages"))
    names = [n for n in os.listdir(here) if "minidl" not in n.lower()]
    for name in names:
        (site / name).symlink_to(Path(here) / name)
    return folder / "bin" / "python"


def test_top_level_folders_are_links_inside_the_package():
    for name in ("kernels", "schedulers", "models"):
        assert (ROOT / "minidl" / name).resolve() == (ROOT / name).resolve()


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


@pytest.mark.slow
def test_wheel_and_sdist_work_outside_the_tree(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    archive = tmp_path / "archive.tar"
    shell("git", "archive", "-o", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as tar:
        tar.extraction_filter = lambda member, path: member  # as the argument `filter`, which 3.11.2 has not
        tar.extractall(source)
    trains(sys.executable, source)  # the archive as it is
    script = ("import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + "
              "sys.argv[1])(sys.argv[2]))")
    shell(sys.executable, "-m", "pip", "install", "-q", "--target", tmp_path / "tools", "setuptools>=77", cwd=tmp_path)
    for kind in ("wheel", "sdist"):
        built = tmp_path / kind
        built.mkdir()
        shell(sys.executable, "-c", script, kind, built, cwd=source, PYTHONPATH=str(tmp_path / "tools"))
        (package,) = built.iterdir()
        python = fresh_python(tmp_path / f"venv-{kind}")
        site = next((tmp_path / f"venv-{kind}").glob("lib/python*/site-packages"))
        shell(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, package, cwd=tmp_path)
        names = {p.name for p in site.iterdir()}
        assert not names & {"kernels", "schedulers", "models"}, "nothing generic in site-packages"
        trains(python, tmp_path)
        # the command of that name
        assert "densenet121" in shell(python, site / "bin" / "minidl", "models", cwd=tmp_path)
